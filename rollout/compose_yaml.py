"""YAML as compose reads it, with the line of every value.

Anchors, aliases and `<<` merges are resolved. Values stay text until somebody asks for a kind, because compose
replaces variables first: `cpus: ${CPUS}` is a number. So `22:22` is no number of base 60 and `yes` is no boolean.
A wrong value is a `Problem` that names file, line and key.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import yaml

from rollcage.rollout.compose_variables import Lookup, VariableError, interpolate
from rollcage.rollout.task_model import Problem

MOST_VALUES = 20_000
"""Aliases can stand for each other: a file of 1 KiB may else become more values than there is memory."""

MOST_DEEP = 40

MOST_MIB = 1 << 30
"""As task.toml's `memory_mb`. An engine counts bytes in 63 bits."""

MOST_SECONDS = 1e9
"""As task.toml's times. Compose counts nanoseconds in 63 bits."""

_NULLS = frozenset({"", "~", "null", "Null", "NULL"})
_TAGS = frozenset(f"tag:yaml.org,2002:{kind}" for kind in
                  ("str", "int", "float", "bool", "null", "map", "seq", "merge", "timestamp", "value"))  # fmt: skip
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h|d|w)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0,
            "w": 604800.0}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Node:
    """One value: a text (None: null), a list or a table, and its line, from 1."""

    value: str | tuple[Node, ...] | dict[str, Node] | None
    line: int


@dataclass
class Document:
    """A file that is being read. With `lenient`, what a variable without a value makes wrong is no problem: it
    may get one."""

    file: str
    problems: list[Problem]
    lookup: Lookup = field(default_factory=lambda: Lookup({}))
    lenient: bool = False


def parse_yaml(text: str, file: str, problems: list[Problem]) -> Node | None:
    """The file's root; None, and a problem, where it cannot be read."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        return None if root is None else _Builder(file, problems).build(root, 0)
    except _ShapeError as error:
        problems.append(Problem(file, error.line, error.said, error.remedy, error.error_class))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or str(error)
        line = mark.line + 1 if mark is not None else None
        problems.append(Problem(file, line, f"does not parse: {said}", "correct the YAML syntax"))
    except RecursionError:
        problems.append(Problem(file, None, "is nested too deep", "is it the right file?"))
    return None


class _ShapeError(Exception):
    def __init__(self, line: int, said: str, remedy: str, error_class: str = "task_malformed") -> None:
        super().__init__(said)
        self.line, self.said, self.remedy, self.error_class = line, said, remedy, error_class


class _Builder:
    def __init__(self, file: str, problems: list[Problem]) -> None:
        self.file, self.problems, self.count = file, problems, 0

    def build(self, node: yaml.Node, depth: int) -> Node:
        line = node.start_mark.line + 1
        self.count += 1
        if depth > MOST_DEEP or self.count > MOST_VALUES:
            raise _ShapeError(line, "is nested too deep, or stands for too much", "write fewer aliases")
        if node.tag not in _TAGS:
            remedy = "write the value without a tag"
            raise _ShapeError(line, f"has the tag {node.tag}, which is not done", remedy, "unsupported")
        if isinstance(node, yaml.ScalarNode):
            plain_null = node.style is None and node.value in _NULLS
            return Node(None if plain_null else str(node.value), line)
        if isinstance(node, yaml.SequenceNode):
            return Node(tuple(self.build(item, depth + 1) for item in node.value), line)
        assert isinstance(node, yaml.MappingNode)
        return Node(self._table(node, depth), line)

    def _table(self, node: yaml.MappingNode, depth: int) -> dict[str, Node]:
        table: dict[str, Node] = {}
        merged: list[yaml.Node] = []
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                raise _ShapeError(line, "has a key that is no text", "write the key as text")
            if key.value == "<<" and key.style is None:
                merged += value.value if isinstance(value, yaml.SequenceNode) else [value]
                continue
            if key.value in table:
                raise _ShapeError(line, f"{key.value} is there twice", "leave one of them out")
            built = self.build(value, depth + 1)
            table[key.value] = Node(built.value, line)
        for source in merged:
            if not isinstance(source, yaml.MappingNode):
                said = "<< merges what is no table"
                raise _ShapeError(source.start_mark.line + 1, said, "give it a table")
            self.count += 1
            if depth > MOST_DEEP:
                raise _ShapeError(source.start_mark.line + 1, "merges itself", "write fewer aliases")
            for name, value in self._table(source, depth + 1).items():
                table.setdefault(name, value)
        return table


@dataclass(frozen=True)
class Place:
    """One value and where it stands. A getter gives None (or nothing), and notes a problem, for a wrong value."""

    node: Node
    path: KeyPath
    document: Document = field(repr=False)

    @property
    def line(self) -> int:
        return self.node.line

    @property
    def name(self) -> str:
        """`services.web.volumes[0]`."""
        text = ""
        for part in self.path:
            text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
        return text

    @property
    def is_null(self) -> bool:
        return self.node.value is None

    @property
    def is_text(self) -> bool:
        return isinstance(self.node.value, str)

    @property
    def is_list(self) -> bool:
        return isinstance(self.node.value, tuple)

    @property
    def is_table(self) -> bool:
        return isinstance(self.node.value, dict)

    def problem(
        self, message: str, remedy: str, error_class: str = "task_malformed", *, whatever_it_is: bool = False
    ) -> None:
        """Note that this value is wrong, or `whatever_it_is` its very key. The message is put behind its name."""
        document = self.document
        if document.lenient and not whatever_it_is and self._is_unsure():
            return
        said = f"{self.name} {message}".strip()
        document.problems.append(Problem(document.file, self.line, said, remedy, error_class))

    def unsupported(self, message: str, remedy: str) -> None:
        """Note that rollcage does not do this."""
        self.problem(message, remedy, "unsupported")

    def text(self) -> str | None:
        """A text with its variables replaced; numbers and booleans are text too."""
        if not isinstance(self.node.value, str):
            if not self.is_null:
                self.problem("must be a text", "write one value")
            return None
        try:
            text = interpolate(self.node.value, self.document.lookup)
            text.encode()
        except VariableError as error:
            self.problem(str(error), error.remedy)
            return None
        except UnicodeEncodeError:
            self.problem("holds half of a surrogate pair", "write the character itself")
            return None
        if "\0" in text:
            self.problem("holds a NUL", "take it out: no program can be given one")
            return None
        return text

    def items(self) -> Iterator[Place]:
        """The items of a list."""
        if not isinstance(self.node.value, tuple):
            if not self.is_null:
                self.problem("must be a list", "write its items below each other, with - before each")
            return
        for index, node in enumerate(self.node.value):
            yield Place(node, (*self.path, index), self.document)

    def table(self) -> dict[str, Place]:
        """The values of a table by key. `x-` keys mean nothing and are left out."""
        if not isinstance(self.node.value, dict):
            if not self.is_null:
                self.problem("must be a table", "write key: value lines below it")
            return {}
        return {
            key: Place(node, (*self.path, key), self.document)
            for key, node in self.node.value.items()
            if not key.startswith("x-")
        }

    def get(self, key: str) -> Place | None:
        """The value below `key`; None where there is none, or null."""
        node = self.node.value.get(key) if isinstance(self.node.value, dict) else None
        if node is None or node.value is None:
            return None
        return Place(node, (*self.path, key), self.document)

    def texts(self) -> list[str]:
        """A list of texts; one text is a list of one."""
        if self.is_text:
            return [text] if (text := self.text()) is not None else []
        return [text for item in self.items() if (text := item.text()) is not None]

    def flag(self) -> bool:
        """true or false, as YAML 1.2 has them."""
        text = (self.text() or "false").lower()
        if text not in ("true", "false"):
            self.problem(f"must be true or false, not {text}", "write true or false")
        return text == "true"

    def number(self) -> float | None:
        """A finite number of at least 0; None for an empty text, which a variable may leave."""
        text = self.text()
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or value < 0:
            self.problem(f"must be a number, not {text[:60]}", "write a number")
            return None
        return value

    def seconds(self) -> float | None:
        """A duration such as `1m30s`."""
        text = self.text()
        if text is None:
            return None
        parts = _DURATION.findall(text)
        if not parts or _DURATION.sub("", text).strip():
            self.problem(f"must be a time such as 10s or 1m30s, not {text[:60]}", "write it with its unit")
            return None
        seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
        if seconds > MOST_SECONDS:
            self.problem(f"must be at most {MOST_SECONDS:,.0f} s", "write a shorter time")
            return None
        return seconds

    def mebibytes(self) -> int | None:
        """A size such as `512m`, rounded up to whole MiB; None for an empty text, and 0 (no limit)."""
        text = self.text()
        if not text:
            return None
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            self.problem(f"must be a size such as 512m or 2g, not {text[:60]}", "write it with its unit")
            return None
        mebibytes = float(match[1]) * _BYTES[match[2].lower()] / (1 << 20)
        if mebibytes > MOST_MIB:
            self.problem(f"must be at most {MOST_MIB:,} MiB", "write a smaller size")
            return None
        return math.ceil(mebibytes) or None

    def pairs(self) -> dict[str, str | None]:
        """A table of names to values, or a list of `NAME=value`; None where there is no value."""
        pairs: dict[str, str | None] = {}
        if isinstance(self.node.value, dict):
            for key, node in self.node.value.items():
                pairs[key] = Place(node, (*self.path, key), self.document).text()
            return pairs
        for text in [self.text() or ""] if self.is_text else self.texts():
            key, equals, value = text.partition("=")
            pairs[key] = value if equals else None
        return pairs

    def _is_unsure(self) -> bool:
        """Whether a variable without a value is in this very text."""
        if not isinstance(self.node.value, str):
            return False
        own = Lookup(self.document.lookup.values)
        try:
            interpolate(self.node.value, own)
        except VariableError:
            return False
        return bool(own.missing)


def texts_of(node: Node) -> Iterator[tuple[str, int]]:
    """Every text below a value, with its line."""
    if isinstance(node.value, str):
        yield node.value, node.line
    elif isinstance(node.value, tuple):
        for item in node.value:
            yield from texts_of(item)
    elif isinstance(node.value, Mapping):
        for item in node.value.values():
            yield from texts_of(item)
