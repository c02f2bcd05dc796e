"""Checking an agent's options against what its `__init__` says that it takes.

Only annotations of what JSON and YAML have values for are looked at; whatever else an agent takes it checks itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

_NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
_PLAIN = (int, float, bool, str, NoneType)
_HOLDERS = (Union, UnionType, Sequence, Mapping, list, dict)
_KINDS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text",
    "none_required": "null",
    "list_type": "a list",
    "is_instance_of": "a list",
    "sequence_str": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
}
"""By pydantic's names of errors."""


class BadOption(ValueError):
    """An agent cannot be made with an option. `option`: its name; None where the message does not say which it is."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class NoSuchOption(BadOption):
    """The agent has none of this name, or is not given one that it must have."""


def check_options(factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raises `NoSuchOption` where there is none of its name and where one is missing, and `BadOption`, with what it is
    instead, where it is not of its annotation's kind. No text is taken for a number, no word for true."""
    _check_names(factory, options)
    try:
        hints = get_type_hints(getattr(factory, "__init__") if isinstance(factory, type) else factory)  # noqa: B009
    except (AttributeError, NameError, TypeError):  # names that only a type checker knows
        return
    for name, value in options.items():
        hint = hints.get(name)
        if hint is None or not _is_plain(hint):
            continue
        try:
            TypeAdapter(hint).validate_python(value, strict=True)
        except ValidationError as error:
            raise BadOption(_said(name, hint, error), name) from error


def _check_names(factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    try:
        parameters = signature(factory).parameters
    except (TypeError, ValueError):  # some that are written in C have none
        return
    named = {name: each for name, each in parameters.items() if each.kind in _NAMED}
    if not any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
        for name in options:
            if name not in named:
                near = get_close_matches(name, named, n=1)
                meant = f" (did you mean {near[0]!r}?)" if near else ""
                there = ", ".join(named) or "none at all"
                raise NoSuchOption(f"there is no {name!r}{meant}; there is {there}", name)
    for name, each in named.items():
        if each.default is Parameter.empty and name not in options:
            raise NoSuchOption(f"{name!r} is missing", name)


def option_named(options: Mapping[str, Any], message: str) -> str | None:
    """The option that an agent's own message speaks of first; None where it names none of those that are given."""
    known = "|".join(map(re.escape, options))
    found = re.search(rf"\b({known})\b", message) if known else None
    return None if found is None else found[1]


def _is_plain(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is None:
        return hint in _PLAIN
    return origin is Literal or (origin in _HOLDERS and all(map(_is_plain, get_args(hint))))


def _said(name: str, hint: Any, error: ValidationError) -> str:
    found = error.errors()
    first, one_of = found[0], get_origin(hint) in (Union, UnionType)
    if one_of and len(found) > 1:
        kinds, place = [_kind(each) for each in found], ""
    else:
        kinds = [_kind(first)]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    if one_of and NoneType in get_args(hint) and not place:
        kinds.append("null")
    return f"{name}{place} must be {' or '.join(dict.fromkeys(kinds))}, not {repr(first['input'])[:80]}"


def _kind(error: ErrorDetails) -> str:
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    return _KINDS.get(error["type"], error["msg"])
