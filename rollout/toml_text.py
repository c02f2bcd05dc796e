"""TOML out of plain values: what `tomllib` reads back as it was."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def toml_text(values: Mapping[str, Any]) -> str:
    """`values` as a document; the tables of its first level become sections. None is left out.

    Raises `TypeError` for what TOML has no form for.
    """
    plain = [f"{_key(key)} = {_value(item)}" for key, item in values.items() if _is_plain(item)]
    sections = ["\n".join(plain)] if plain else []
    for key, item in values.items():
        if isinstance(item, Mapping):
            rows = [f"{_key(name)} = {_value(cell)}" for name, cell in item.items() if cell is not None]
            if rows:
                sections.append("\n".join([f"[{_key(key)}]", *rows]))
    return "\n\n".join(sections) + "\n"


def _is_plain(value: Any) -> bool:
    return value is not None and not isinstance(value, Mapping)


def _key(key: Any) -> str:
    text = str(key)
    return text if _BARE_KEY.fullmatch(text) else _string(text)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, but for DEL, which TOML wants escaped too.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, date | time):
        return _string(value.isoformat())
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(item) for item in value if item is not None) + "]"
    raise TypeError(f"TOML has no form for {type(value).__name__}")
