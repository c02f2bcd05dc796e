"""The key of a model server, as an environment variable holds it."""

from __future__ import annotations

from collections.abc import Mapping


def api_key(variable: str, environ: Mapping[str, str]) -> str | None:
    """None where the variable is not set, or empty. Raises `ValueError`, without the value, for what no HTTP header can
    carry: the line break of a file that was read into it, say."""
    key = environ.get(variable) or None
    if key is not None and not all("!" <= letter <= "~" for letter in key):
        raise ValueError(
            f"the variable {variable} holds white space or a letter that no key has: set it to the key alone"
        )
    return key
