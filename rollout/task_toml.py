"""TOML with line numbers: every wrong value is a `Problem` that says where, what and what to write instead.

A key that `toml_lines` finds no line for, one inside an inline table, gets the line of the nearest key above it. What
a table is asked for is noted, so that a key that nothing asks for and that looks like a known one can be told.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from rollcage.rollout.task_model import Problem
from rollcage.rollout.toml_lines import KeyPath, key_lines

MAX_BYTES = 1 << 20
"""Nobody writes a task.toml of a megabyte; a file past it is something else under that name."""

LIKENESS = 0.75
"""`timeout` and `timeout_sec` are as alike as this (`difflib`)."""

LONGEST_SEC = 1e9
"""Thirty years, in which nothing is waited for; far from where a clock or a shell's arithmetic overflows."""
LARGEST_COUNT = 10**9

VARIABLE_BYTES = (128 << 10) - 1
"""Linux' MAX_ARG_STRLEN, without the NUL at its end: with a longer variable no program can be started."""

_SHELL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ANY_NAME = re.compile(r"[^\s=\x00-\x1f\x7f]+")


def read_text(path: Path, problems: list[Problem], max_bytes: int = MAX_BYTES) -> str | None:
    """The file's text, without a byte order mark, lines ended by `\\n`; None (and a problem) where it has none."""
    file = str(path)
    try:
        with path.open("rb") as stream:
            raw = stream.read(max_bytes + 1)
    except FileNotFoundError:
        problems.append(Problem(file, None, "is missing", "write it, or give the path of a task"))
        return None
    except IsADirectoryError:
        problems.append(Problem(file, None, "is a directory", "a file belongs here"))
        return None
    except OSError as error:
        problems.append(Problem(file, None, f"cannot be read: {error.strerror}", "make it readable"))
        return None
    if len(raw) > max_bytes:
        problems.append(
            Problem(
                file, None, f"is larger than {max_bytes:,} bytes", "is it the right file? make it shorter"
            )
        )
        return None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        problems.append(
            Problem(file, line, f"is not UTF-8: byte 0x{raw[error.start]:02x}", "save the file as UTF-8")
        )
        return None
    return text.replace("\r\n", "\n")


def read_toml(path: Path, problems: list[Problem]) -> Table | None:
    """The file's root table; None (and a problem) where it cannot be read as TOML."""
    text = read_text(path, problems)
    if text is None:
        return None
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"at line (\d+)", str(error))
        line = int(where[1]) if where else text.count("\n") + 1
        problems.append(Problem(str(path), line, f"does not parse: {error}", "correct the TOML syntax"))
        return None
    except RecursionError:
        problems.append(Problem(str(path), None, "is nested too deep", "is it the right file?"))
        return None
    return Table(values, (), _Document(str(path), key_lines(text), problems))


@dataclass(frozen=True)
class _Document:
    """`asked`: by a table's path, without numbers, the keys that it was asked for. `tables`: those that were read."""

    file: str
    lines: dict[KeyPath, int]
    problems: list[Problem]
    asked: dict[KeyPath, set[str]] = field(default_factory=dict)
    tables: dict[KeyPath, Mapping[str, Any]] = field(default_factory=dict)


class _Asked(Mapping[str, Any]):
    """The values of a table, which note what they are asked for."""

    def __init__(self, values: Mapping[str, Any], asked: set[str]) -> None:
        self._values, self._asked = values, asked

    def __getitem__(self, key: str) -> Any:
        self._asked.add(key)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


@dataclass(frozen=True)
class Table:
    """One table. A getter gives its default, and notes a problem, where the value has the wrong type or range."""

    values: Mapping[str, Any]
    path: KeyPath
    document: _Document = field(repr=False)

    def __post_init__(self) -> None:
        document = self.document
        asked = document.asked.setdefault(_kind(self.path), set())
        document.tables[self.path] = self.values
        object.__setattr__(self, "values", _Asked(self.values, asked))

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def near_misses(self) -> list[Problem]:
        """Of all tables of this one's file, once they have been read: keys that nothing asked for and that look like
        one that is known. Others are ignored, as Harbor ignores them."""
        document, found = self.document, []
        for path, values in document.tables.items():
            known = document.asked[_kind(path)]
            for key in sorted(set(values) - known):
                meant = get_close_matches(key.lower(), sorted(known - set(values)), n=1, cutoff=LIKENESS)
                if meant:
                    line = document.lines.get((*path, key)) or document.lines.get(path)
                    name, remedy = dotted_name((*path, key)), f"did you mean {meant[0]}?"
                    found.append(Problem(document.file, line, f"{name} is not known and ignored", remedy))
        return sorted(found, key=lambda problem: problem.line or 0)

    def problem(
        self, key: str | None, message: str, remedy: str, error_class: str = "task_malformed"
    ) -> None:
        """Note that `key` (None: the table itself) is wrong. The message is put behind the key's name."""
        path = self.path if key is None else (*self.path, key)
        where = path
        while where and where not in self.document.lines:
            where = where[:-1]
        line = self.document.lines.get(where)
        name = dotted_name(path)
        self.document.problems.append(
            Problem(self.document.file, line, f"{name} {message}".strip(), remedy, error_class)
        )

    def _wrong(self, key: str, wanted: str, remedy: str) -> None:
        self.problem(key, f"must be {wanted}, not {_shown(self.values[key])}", remedy)

    def number(
        self,
        key: str,
        default: float | None,
        *,
        above: float | None = None,
        least: float | None = None,
        most: float | None = None,
    ) -> float | None:
        """A finite number, greater than `above`, at least `least`, at most `most`."""
        if key not in self.values:
            return default
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            self._wrong(key, "a number", f"write a number, without quotes: {key} = {_number_in(value)}")
            return default
        if not math.isfinite(value):
            self._wrong(key, "a finite number", "write a number, or leave the key out")
            return default
        if above is not None and not value > above:
            self._wrong(key, f"greater than {above:g}", "write a larger number, or leave the key out")
            return default
        if least is not None and not value >= least:
            self._wrong(key, f"at least {least:g}", "write a larger number, or leave the key out")
            return default
        if most is not None and not value <= most:
            self._wrong(key, f"at most {most:,.15g}", "write a smaller number, or leave the key out")
            return default
        return float(value)

    def seconds(self, key: str, default: float) -> float:
        """A time greater than zero."""
        value = self.number(key, default, above=0, most=LONGEST_SEC)
        return default if value is None else value

    def count(
        self, key: str, default: int | None, *, least: int = 0, most: int = LARGEST_COUNT
    ) -> int | None:
        """A whole number."""
        value = self.number(key, None, least=least, most=most)
        if value is None:
            return default
        if value != int(value):
            self._wrong(key, "a whole number", f"write {key} = {math.ceil(value)}")
            return default
        return int(value)

    def text(self, key: str, default: str | None = None) -> str | None:
        """A string that is not empty."""
        if key not in self.values:
            return default
        value = self.values[key]
        if not isinstance(value, str):
            self._wrong(key, "a string", f'write {key} = "..."')
            return default
        if not value.strip() or "\0" in value:
            self._wrong(key, "a string that is not empty", "write something, or leave the key out")
            return default
        return value

    def choice(self, key: str, known: tuple[str, ...], default: str | None) -> str | None:
        """One of `known`."""
        value = self.text(key, default)
        if value is not None and value not in known:
            self._wrong(key, "one of " + ", ".join(f'"{name}"' for name in known), "write one of these")
            return default
        return value

    def flag(self, key: str) -> bool | None:
        """true or false; None where it is not there."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            self._wrong(key, "true or false", f"write {key} = true or {key} = false, without quotes")
            return None
        return value

    def user(self, key: str = "user") -> str | int | None:
        """A user's name or id."""
        value = self.values.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 0:
                self._wrong(key, "a user's name or id", "write an id from 0 up")
                return None
            return value
        return self.text(key)

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self._wrong(key, "a list of strings", f'write {key} = ["...", "..."]')
            return ()
        return tuple(value)

    def mapping(self, key: str, *, shell: bool = False) -> dict[str, str]:
        """A table of environment variables: names to strings. `shell`: a shell sets them, which takes no name but
        those of its own variables; others are set by the engine, which takes what the kernel does."""
        table = self.table(key)
        mapping: dict[str, str] = {}
        for name, value in table.values.items():
            if not (_SHELL_NAME if shell else _ANY_NAME).fullmatch(name):
                table.problem(name, "is not a variable's name", "use letters, digits and _")
            elif not isinstance(value, str):
                table._wrong(name, "a string", f'write {name} = "{str(value).lower()}"')
            elif "\0" in value:
                table.problem(name, "holds a NUL character", "write a value without")
            elif len(f"{name}={value}".encode()) > VARIABLE_BYTES:
                remedy = "put it into a file of the task"
                table.problem(name, f"is longer than the {VARIABLE_BYTES:,} bytes that Linux takes", remedy)
            else:
                mapping[name] = value
        return mapping

    def table(self, key: str) -> Table:
        """The table below `key`; an empty one where there is none."""
        value = self.values.get(key, {})
        if not isinstance(value, dict):
            self._wrong(key, "a table", f"write a section [{dotted_name((*self.path, key), bare=True)}]")
            value = {}
        return Table(value, (*self.path, key), self.document)

    def tables(self, key: str) -> list[Table]:
        """The tables of an array of tables."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            name = dotted_name((*self.path, key), bare=True)
            self._wrong(key, "an array of tables", f"write each under a header [[{name}]]")
            return []
        return [Table(item, (*self.path, key, index), self.document) for index, item in enumerate(value)]


def _kind(path: KeyPath) -> KeyPath:
    """The path without the numbers of an array's elements."""
    return tuple(part for part in path if isinstance(part, str))


def dotted_name(path: KeyPath, *, bare: bool = False) -> str:
    """`[verifier.environment].cpus`, `steps[0].agent.user`; `bare` without the brackets of a section."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    if bare or len(path) < 2 or any(isinstance(part, int) for part in path):
        return text
    section, _, key = text.rpartition(".")
    return f"[{section}].{key}"


def _shown(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _number_in(value: Any) -> str:
    number = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value.strip())
    return str(value).strip() if number else "..."
