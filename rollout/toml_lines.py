"""On which line of a TOML file each key stands: `tomllib` gives a line for a syntax error only.

The text is scanned for headers and keys. It is only used on text that `tomllib` has read, so it need not understand
everything. A key inside an inline table has no line of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

KeyPath = tuple[str | int, ...]
"""Keys from the root down, with the number (from 0) of an array's element behind the array's name."""

_HEADER = re.compile(r"^\s*(\[\[?)([^\[\]]+)\]\]?\s*(#.*)?$")
_KEY = re.compile(
    r"^\s*((?:[\w-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[\w-]+|\"[^\"]*\"|'[^']*'))*)\s*=\s*(.*)$"
)
_PART = re.compile(r"\"([^\"]*)\"|'([^']*)'|([\w-]+)")


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line (from 1) of each header and key; elements of an array of tables are counted from 0."""
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    prefix: KeyPath = ()
    closing = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if closing:
            closing = "" if closing in line else closing
            continue
        if header := _HEADER.match(line):
            prefix = _absolute(header[2], counts)
            if header[1] == "[[":
                counts[prefix] = counts.get(prefix, -1) + 1
                prefix = (*prefix, counts[prefix])
            lines.setdefault(prefix, number)
        elif key := _KEY.match(line):
            lines.setdefault((*prefix, *_parts(key[1])), number)
            closing = _opened(key[2])
    return lines


def _parts(dotted: str) -> KeyPath:
    return tuple(match[1] or match[2] or match[3] or "" for match in _PART.finditer(dotted))


def _absolute(dotted: str, counts: Mapping[KeyPath, int]) -> KeyPath:
    """The header's path, with the index of the latest element behind every array of tables on its way."""
    path: KeyPath = ()
    parts = _parts(dotted)
    for place, part in enumerate(parts, start=1):
        path = (*path, part)
        if path in counts and place < len(parts):
            path = (*path, counts[path])
    return path


def _opened(value: str) -> str:
    """The delimiter of a multi-line string that this value opens and does not close."""
    for quote in ('"""', "'''"):
        if value.startswith(quote) and quote not in value[3:]:
            return quote
    return ""
