"""Words of a run as HTML: whatever comes from a run goes through `text` on its way into the report's page."""

from __future__ import annotations

import re
from html import escape
from typing import Any
from urllib.parse import quote

_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def text(value: object) -> str:
    """Text of a run for HTML: escaped, and what would not be seen, or would reorder what is, made visible."""
    return escape(_UNSEEN.sub(_shown, str(value)))


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\N{REPLACEMENT CHARACTER}"


def link(row: dict[str, Any]) -> str:
    """Where the page shows a rollout: a fragment that its script understands."""
    parts = (row["task"], row["agent"], row.get("draw", 0), row["sample"])
    return escape("#rollout/" + "/".join(quote(str(part), safe="", errors="replace") for part in parts))


def many(number: int, one: str, several: str = "") -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


def nothing(said: str) -> str:
    """What stands where there is nothing to show."""
    return f'<p class="note">{said}</p>'
