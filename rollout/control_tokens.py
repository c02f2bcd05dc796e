"""Keeping the text of control tokens from becoming control tokens.

Inside a text that is data, the text of a control token is split in two by a lone surrogate, which no valid text
holds; what lies between surrogates is then tokenized on its own. It reads the same and controls nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

SPLIT = "\udfff"
"""Inside a text to be encoded: tokenize what is before and what is behind on their own."""

_SURROGATES = re.compile("[\ud800-\udfff]")


class ControlTexts:
    """The texts of some control tokens, each of at least two characters."""

    def __init__(self, texts: Collection[str]) -> None:
        either = "|".join(map(re.escape, sorted(texts)))
        # Looks ahead and takes one character, so that each is found though it overlap another.
        self._begins = re.compile(f"(?=(?:{either}))." if either else r"(?!)", re.DOTALL)
        self._starts = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._sizes = range(1, max(map(len, texts), default=1))

    def split(self, text: str) -> str:
        """`text` with each control token split behind its first character, and lone surrogates replaced. A part of
        one at the end is split from what a template may join to it."""
        text = self._begins.sub(lambda found: f"{found[0]}{SPLIT}", _SURROGATES.sub("\ufffd", text))
        begun = any(text[-size:] in self._starts for size in self._sizes)
        return text + SPLIT if begun else text

    def split_all(self, value: Any) -> Any:
        """A JSON value with every text in it split."""
        if isinstance(value, str):
            return self.split(value)
        if isinstance(value, Mapping):
            return {self.split(str(key)): self.split_all(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.split_all(each) for each in value]
        return value

    def last(self, text: str) -> int | None:
        """Where the last whole control token of a text begins."""
        return max((found.start() for found in self._begins.finditer(text)), default=None)
