"""JSON that a model wrote: whatever it is, it must not end more than the model's own turn."""

from __future__ import annotations

import json
from typing import Any

DEPTH = 100
"""Levels that are read. Python's parser gives up near 1,000; what walks the value later, a template say, before."""


def read_json(text: str) -> Any:
    """The value. Raises `ValueError`, also where it is nested too deeply or a number is too long."""
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    level = [value]
    for _ in range(DEPTH):
        inner = [part for part in level if isinstance(part, dict | list)]
        if not inner:
            return value
        level = [each for part in inner for each in (part.values() if isinstance(part, dict) else part)]
    raise ValueError("it is nested too deeply")
