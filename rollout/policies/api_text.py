"""Text of a JSON answer, made one that UTF-8 can carry."""

from __future__ import annotations


def whole(text: str) -> str:
    """`text` with the two halves of a surrogate pair as the one character that they are, for a server may send them
    apart, and U+FFFD for a half that is alone: no request, and no Arrow file, takes it."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
