"""Reading answers of terminus-2's JSON protocol.

    {"analysis": "...", "plan": "...", "commands": [{"keystrokes": "ls\\n", "duration": 0.1}], "task_complete": false}

An answer is read as terminus-2 reads it, so that a model trained for that meets the same: text around the object, a
missing duration and the like are warned of and borne; a missing brace at the end is added, and an object that
something else hides is looked for, which is warned of too; what is left is a `MalformedAnswer` that says what is
wrong. An answer that was cut off gets no brace: half a command must not be run.
https://github.com/laude-institute/harbor/tree/main/src/harbor/agents/terminus_2
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from rollcage.rollout.sandbox.keys import key

REQUIRED = ("analysis", "plan", "commands")
DURATION_SEC = 1.0
"""How long keystrokes are waited for that say nothing else."""

SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "analysis": {"type": "string"},
        "plan": {"type": "string"},
        "commands": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"keystrokes": {"type": "string"}, "duration": {"type": "number"}},
                "required": ["keystrokes", "duration"],
                "additionalProperties": False,
            },
        },
        "task_complete": {"type": "boolean"},
    },
    "required": list(REQUIRED),
    "additionalProperties": False,
}
"""The protocol for an engine that holds answers to it: only what is read without a warning."""

CANDIDATES = 100
"""Places at which a hidden object is looked for."""
LOOKED_AT = 1 << 22
"""Characters that may be read in that search."""

_MARK = re.compile(r'\\.|["{}]', re.DOTALL)
_OPENING = re.compile(r'\{\s*"')
_FIX = "AUTO-CORRECTED: {} - please fix this in future responses"


@dataclass(frozen=True)
class Keystrokes:
    """What to type at once, and how many seconds (at least 0; infinite: as many as allowed) to wait then."""

    keys: str
    seconds: float = DURATION_SEC


@dataclass(frozen=True)
class Answer:
    """What an answer asks for. `done`: the task is said to be complete. `warnings` are for the policy."""

    commands: tuple[Keystrokes, ...] = ()
    done: bool = False
    warnings: tuple[str, ...] = ()


class MalformedAnswer(ValueError):
    """No action can be read in an answer; the message says why. `warnings` as in `Answer`."""

    def __init__(self, message: str, warnings: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.warnings = tuple(warnings)


def parse_json(text: str, *, cut: bool = False) -> Answer:
    """What an answer asks for; `cut`: it was cut off at the token limit. Raises `MalformedAnswer`."""
    found = _find(text)
    try:
        if found.end is None:
            raise MalformedAnswer(f"No valid JSON found in response: {found.why}", found.warnings(text))
        return _read(text[found.start : found.end], found.warnings(text))
    except MalformedAnswer as problem:
        if mended := _mended(text, found, cut):
            return mended
        raise problem


@dataclass(frozen=True)
class _Found:
    """Where the first object of a text stands; `end` None: it has none, because of `why`. `open`: its braces that
    are not closed."""

    start: int
    end: int | None = None
    open: int = 0
    why: str = ""

    def warnings(self, text: str) -> list[str]:
        before = text[: self.start].strip() and "Extra text detected before JSON object"
        after = self.end is not None and text[self.end :].strip() and "Extra text detected after JSON object"
        return [warning for warning in (before, after) if warning]


def _find(text: str) -> _Found:
    """The first object, by its braces outside of strings."""
    start, depth, quoted = 0, 0, False
    for mark in _MARK.finditer(text):
        if mark[0] == '"':
            quoted = not quoted
        elif quoted or mark[0][0] == "\\":
            continue
        elif mark[0] == "{":
            start = start if depth else mark.start()
            depth += 1
        elif depth:
            depth -= 1
            if not depth:
                return _Found(start, mark.end())
    if not depth:
        return _Found(0, why="it holds no JSON object")
    if quoted:
        return _Found(start, why="a string of the object is not closed")
    return _Found(start, open=depth, why=f"{depth} of the object's braces are not closed")


def _mended(text: str, found: _Found, cut: bool) -> Answer | None:
    """The answer that was meant, where that is plain."""
    if found.open and not cut:
        body = text[found.start :].rstrip().removesuffix("```").rstrip()
        how = _FIX.format("Fixed incomplete JSON by adding missing closing brace")
        try:
            return _read(body + "}" * found.open, [how, *found.warnings(text)])
        except MalformedAnswer:
            pass  # something else is wrong with it, too
    how = _FIX.format("Extracted JSON from mixed content")
    for candidate in _hidden(text):
        try:
            return _read(candidate, [how])
        except MalformedAnswer:
            continue
    return None


def _hidden(text: str) -> Iterator[str]:
    """The objects that stand anywhere in a text, as far as it can be looked through in good time."""
    decoder = json.JSONDecoder()
    left = LOOKED_AT
    for _, opening in zip(range(CANDIDATES), _OPENING.finditer(text), strict=False):
        start = opening.start()
        try:
            _, end = decoder.raw_decode(text, start)
            yield text[start:end]
        except json.JSONDecodeError as error:
            end = error.pos
        except (ValueError, RecursionError):
            return  # no number, and no nesting, of the protocol
        left -= end - start
        if left < 0:
            return


def _read(text: str, warnings: Sequence[str]) -> Answer:
    """The answer that an object is. Raises `MalformedAnswer`."""
    warnings = list(warnings)
    data = _decoded(text, warnings)
    if missing := [name for name in REQUIRED if name not in data]:
        raise MalformedAnswer(f"Missing required fields: {', '.join(missing)}", warnings)
    for name in ("analysis", "plan"):
        if not isinstance(data[name], str):
            warnings.append(f"Field '{name}' should be a string")
    if not isinstance(data["commands"], list):
        raise MalformedAnswer("Field 'commands' must be an array", warnings)
    order = [name for name in data if name in REQUIRED]
    if order != list(REQUIRED):
        warnings.append(
            f"Fields appear in wrong order. Found: {' → '.join(order)}, expected: {' → '.join(REQUIRED)}"
        )
    done = data.get("task_complete")
    if isinstance(done, str):
        done = done.lower() in ("true", "1", "yes")
    elif not isinstance(done, bool | None):
        warnings.append("Field 'task_complete' should be a boolean or string")
    try:
        commands = _commands(data["commands"], warnings)
    except MalformedAnswer as problem:
        if not done:
            raise
        return Answer((), True, (*warnings, str(problem)))
    return Answer(commands, bool(done), tuple(warnings))


def _decoded(text: str, warnings: list[str]) -> dict[str, Any]:
    twice: dict[str, None] = {}

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            twice.update((name, None) for name in made if counts[name] > 1)
        return made

    try:
        data = json.loads(text, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - 40) : error.pos + 40]
        raise MalformedAnswer(f"Invalid JSON: {error}; near {near!r}", warnings) from error
    except RecursionError as error:
        raise MalformedAnswer("Invalid JSON: it is nested too deeply", warnings) from error
    except ValueError as error:
        raise MalformedAnswer(f"Invalid JSON: a number is too long ({error})", warnings) from error
    warnings += [f"Field '{name}' is there more than once, the last one counts" for name in list(twice)[:10]]
    assert isinstance(data, dict), "the text begins with a brace"
    return data


def keystrokes(given: Mapping[str, Any]) -> Keystrokes:
    """Keystrokes as another program has recorded them: `keystrokes` and, where it is there, `duration`. Raises
    `ValueError`."""
    keys, seconds = given.get("keystrokes"), _seconds(given.get("duration", DURATION_SEC))
    if not isinstance(keys, str) or seconds is None:
        raise ValueError("`keystrokes` are a text, and their `duration` is a number of seconds")
    return Keystrokes(keys, seconds)


def _commands(items: list[Any], warnings: list[str]) -> tuple[Keystrokes, ...]:
    commands = []
    for number, item in enumerate(items, 1):
        if not isinstance(item, dict):
            raise MalformedAnswer(f"Command {number} must be an object", warnings)
        if "keystrokes" not in item:
            raise MalformedAnswer(f"Command {number} missing required 'keystrokes' field", warnings)
        keys = item["keystrokes"]
        if not isinstance(keys, str):
            raise MalformedAnswer(f"Command {number} 'keystrokes' must be a string", warnings)
        seconds = _seconds(item["duration"]) if "duration" in item else None
        if seconds is None:
            wrong = "Invalid duration value" if "duration" in item else "Missing duration field"
            warnings.append(f"Command {number}: {wrong}, using default {DURATION_SEC}")
        if unknown := [name for name in item if name not in ("keystrokes", "duration")]:
            warnings.append(f"Command {number}: Unknown fields: {', '.join(unknown)}")
        if keys and number < len(items):
            warnings += runs_on(number, keys)
        commands.append(Keystrokes(keys, DURATION_SEC if seconds is None else seconds))
    return tuple(commands)


def is_key(keys: str) -> bool:
    """Keystrokes that are as a whole the name of a key, in tmux's terms (`C-c`, `Up`), are that key."""
    return len(keys) > 1 and key(keys) is not None


def runs_on(number: int, keys: str) -> list[str]:
    """A warning where keystrokes with others behind them do not end their line."""
    if keys.endswith("\n") or is_key(keys):
        return []
    return [
        f"Command {number} should end with newline when followed by another command. "
        "Otherwise the two are typed into one line."
    ]


def _seconds(value: Any) -> float | None:
    """None for what is no length of time, as NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return None
    return inf if value > 1e9 else max(0.0, float(value))
