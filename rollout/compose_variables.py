"""Variables in a docker-compose.yaml, replaced as compose does it.

`$VAR`, `${VAR}`, `${VAR:-default}`, `${VAR-default}`, `${VAR:?message}`, `${VAR?message}`, `${VAR:+other}`,
`${VAR+other}`, each of which may hold more of them; `$$` is a dollar. A form with a colon takes an empty value for
none. https://docs.docker.com/reference/compose-file/interpolation/
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_OPERATORS = (":-", ":?", ":+", "-", "?", "+")

MOST_NESTED = 20
"""Variables in the defaults of variables."""

MOST_CHARACTERS = 1 << 20
"""Variables can stand for each other: a few lines may else become more text than there is memory."""


class VariableError(ValueError):
    """The text is not what compose takes, and what to do about that."""

    def __init__(self, said: str, remedy: str = "write $$ for a dollar") -> None:
        super().__init__(said)
        self.remedy = remedy


@dataclass
class Lookup:
    """What variables stand for. `missing` collects those that were asked for without a default and are not set;
    `asked` all that were asked for."""

    values: Mapping[str, str]
    missing: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)

    def get(self, name: str) -> str | None:
        self.asked.add(name)
        return self.values.get(name)


def interpolate(text: str, lookup: Lookup, depth: int = 0) -> str:
    """The text with its variables replaced; one that is not set is empty. Raises `VariableError`. `depth`: in how
    many others it stands."""
    if depth > MOST_NESTED:
        raise VariableError(f"nests variables more than {MOST_NESTED} deep", "write the default itself")
    return _replaced(text, lambda name, operator, rest: _value(lookup, name, operator, rest, depth + 1))


def rename_variables(text: str, values: Mapping[str, str], depth: int = 0) -> str:
    """The text with these variables filled in, and everything else of it as it was, `$$` too. What compose
    cannot read is left to it."""

    def known(name: str, operator: str, rest: str) -> str:
        if name in values:
            return values[name].replace("$", "$$")
        inside = rename_variables(rest, values, depth + 1) if depth < MOST_NESTED else rest
        return "${" + name + operator + inside + "}"

    try:
        return _replaced(text, known, dollar="$$")
    except VariableError:
        return text


def _value(lookup: Lookup, name: str, operator: str, rest: str, depth: int) -> str:
    value = lookup.get(name)
    there = value is not None and (value != "" or not operator.startswith(":"))
    if operator.endswith("+"):
        return interpolate(rest, lookup, depth) if there else ""
    if there:
        return value or ""
    if operator.endswith("-"):
        return interpolate(rest, lookup, depth)
    lookup.missing.add(name)
    return ""


def _replaced(text: str, replace: Callable[[str, str, str], str], dollar: str = "$") -> str:
    result, at = "", 0
    while (found := text.find("$", at)) >= 0:
        if len(result) > MOST_CHARACTERS:
            raise VariableError("becomes more than a MiB of text", "let fewer variables stand for each other")
        result += text[at:found]
        at = found + 1
        if text.startswith("$", at):
            result, at = result + dollar, at + 1
        elif name := _NAME.match(text, at):
            result, at = result + replace(name[0], "", ""), name.end()
        elif text.startswith("{", at):
            end = _closing(text, at)
            result, at = result + _braced(text[at + 1 : end], replace), end + 1
        else:
            raise VariableError(f"holds a $ that begins no variable: {text[found : found + 20]!r}")
    return result + text[at:]


def _braced(inside: str, replace: Callable[[str, str, str], str]) -> str:
    name = _NAME.match(inside)
    rest = inside[name.end() :] if name else ""
    operator = next((sign for sign in _OPERATORS if rest.startswith(sign)), "")
    if name is None or (rest and not operator):
        raise VariableError(f"holds ${{{inside[:60]}}}, which names no variable")
    return replace(name[0], operator, rest[len(operator) :])


def _closing(text: str, at: int) -> int:
    """Where the brace at `at` is closed, past those of variables inside."""
    depth = 0
    while at < len(text):
        if text.startswith("{", at):
            depth += 1
        elif text.startswith("}", at):
            depth -= 1
            if depth == 0:
                return at
        at += 1
    raise VariableError("holds a ${ that is never closed")
