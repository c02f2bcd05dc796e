"""Where a setting comes from: the YAML file with its lines, options and overrides of the command line, and what
is said about a setting that is wrong.

Problems name the file and line, or the `--set`, in which the setting stands. Relative paths start at the folder
of the file that says them, on the command line at the working directory.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollcage.cluster.errors import InputError

Where = tuple[Any, ...]
"""The way to a setting: keys of mappings and places in lists."""

MAX_NODES = 100_000
"""A job's file has some dozens of settings. Anchors that double and redouble end here."""


class ConfigError(InputError, ValueError):
    """The job's configuration cannot be used. The message has one line for each problem."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass
class Source:
    """Settings as plain data, and the place of each. `origins` maps ways to `file:line` or `--set a.b=c`."""

    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[Where, str] = field(default_factory=dict)

    def place(self, where: Where) -> str:
        """The place of a setting, or of the nearest one around it."""
        for length in range(len(where), -1, -1):
            if (origin := self.origins.get(where[:length])) is not None:
                return origin
        return "the job"

    def problem(self, where: Where, message: str, remedy: str) -> str:
        """One line of a `ConfigError`."""
        setting = ".".join(map(str, where))
        return f"{self.place(where)}: {setting + ': ' if setting else ''}{message} ({remedy})"

    def put(self, where: Where, value: Any, origin: str) -> None:
        """Set one value, making the mappings on the way. Raises `ConfigError` where the way cannot be gone."""
        at: Any = self.data
        for depth, key in enumerate(where):
            last = depth == len(where) - 1
            if isinstance(at, list):
                key = self._index(at, key, origin)
                where = (*where[:depth], key, *where[depth + 1 :])
            elif not isinstance(at, dict):
                there = ".".join(map(str, where[:depth]))
                raise ConfigError(
                    [f"{origin}: {there} is {at!r} and has no {key!r} (set {there} as a whole)"]
                )
            if last:
                at[key] = value
            else:
                at = at[key] if isinstance(at, list) else at.setdefault(key, {})
        for known in [known for known in self.origins if known[: len(where)] == where]:
            del self.origins[known]
        self.origins[where] = origin

    def _index(self, items: list[Any], key: str | int, origin: str) -> int:
        """A place in a list, given as a number or as the `label` or `name` of the item there."""
        for index, item in enumerate(items):
            names: list[Any] = [item] if isinstance(item, str) else []
            if isinstance(item, dict):
                names = [item.get("label"), item.get("name")]
            if key == index or key == str(index) or key in names:
                return index
        raise ConfigError(
            [f"{origin}: nothing here is called {key!r} (give a place from 0 to {len(items) - 1})"]
        )


def read_yaml(path: Path) -> Source:
    """The file's settings with their lines. Raises `ConfigError` where it is no YAML mapping."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            [f"{path}: cannot be read: {said} (name the YAML file of a job; give tasks with --tasks)"]
        ) from error
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError([f"{path}: a job is a mapping of settings (see `rollcage config schema`)"])
        source = Source(origins={(): str(path)})
        repeated: list[str] = []
        _note_lines(loader, node, (), str(path), source.origins, repeated, ())
        if repeated:
            raise ConfigError(repeated)
        source.data = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f":{mark.line + 1}"
        raise ConfigError([f"{path}{line}: this is not YAML: {error.problem} (mend this line)"]) from error
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: this is not YAML: {error} (mend the file)"]) from error
    finally:
        loader.dispose()
    return source


def _note_lines(
    loader: yaml.SafeLoader,
    node: yaml.Node,
    where: Where,
    file: str,
    origins: dict[Where, str],
    repeated: list[str],
    inside: tuple[int, ...],
) -> None:
    if id(node) in inside or len(origins) > MAX_NODES:
        raise ConfigError([f"{file}:{node.start_mark.line + 1}: these anchors never end (write it out)"])
    inside = (*inside, id(node))
    children: list[tuple[Any, yaml.Node, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        for key_node, value in node.value:
            key = loader.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # the loader's own error is better
            if (*where, key) in origins and key_node.tag != "tag:yaml.org,2002:merge":
                line = key_node.start_mark.line + 1
                repeated.append(
                    f"{file}:{line}: {key!r} was set before, at {origins[*where, key]} (keep one of them)"
                )
            children.append((key, key_node, value))
            origins[*where, key] = f"{file}:{key_node.start_mark.line + 1}"
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            children.append((index, value, value))
            origins[*where, index] = f"{file}:{value.start_mark.line + 1}"
    for key, _, value in children:
        _note_lines(loader, value, (*where, key), file, origins, repeated, inside)


def parse_override(text: str) -> tuple[Where, Any]:
    """`a.b=c` as a way and a value; the value is read as YAML. Raises `ConfigError`."""
    way, equals, value = text.partition("=")
    keys = tuple(key.strip() for key in way.split("."))
    if not equals or not all(keys):
        raise ConfigError([f"--set {text}: this is no override (write --set key.key=value)"])
    try:
        return keys, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(
            [f"--set {text}: the value is not YAML (quote it: --set '{way}=\"...\"')"]
        ) from error


def resolve_paths(value: Any, where: Where, base: Path, patterns: Iterable[tuple[str, ...]]) -> Any:
    """The same settings, with paths made absolute at `base` wherever the way to them matches a pattern.

    `*` in a pattern is any one key. A pattern that ends in `?` names a setting that may also be no path: it is
    taken for one where it is written like one (`./`, `../`, `/`, `~`) or such a file is there.
    """
    if isinstance(value, dict):
        return {key: resolve_paths(item, (*where, key), base, patterns) for key, item in value.items()}
    if isinstance(value, list):
        return [resolve_paths(item, (*where, place), base, patterns) for place, item in enumerate(value)]
    if not isinstance(value, str) or "\n" in value or "://" in value or not value:
        return value
    for pattern in patterns:
        doubtful = pattern[-1] == "?"
        keys = pattern[:-1] if doubtful else pattern
        if len(keys) != len(where) or not all(a in ("*", b) for a, b in zip(keys, where, strict=True)):
            continue
        path = os.path.normpath(base / Path(value).expanduser())
        looks = value.startswith(("./", "../", "/", "~"))
        there = ("." in value or "/" in value) and os.path.exists(path)
        return path if looks or there or not doubtful else value
    return value


def line_of(problem: str) -> int:
    """The line that a problem stands in, for sorting; 0 where it stands in none."""
    line = problem.partition(": ")[0].rpartition(":")[2]
    return int(line) if line.isdecimal() else 0


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """A remedy for a wrong name: the nearest known one, else `otherwise`, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name.lower(), names, n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise or "known: " + ", ".join(names)


def shown(value: Any) -> str:
    """A wrong value as a message shows it: short, as JSON where it is plain data."""
    if isinstance(value, Mapping | list | tuple) and len(value) > 3:
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'} of {len(value)}"
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
