"""Files of answers: what a scripted policy says.

    tokens: true              # make byte-level token ids (default: none)
    max_model_len: 8192       # with tokens: a prompt that leaves no room overflows (default: nothing does)
    tasks:
      "rollcage/hello-*":     # a task's name, or a pattern of names (fnmatch); the first that matches serves
        - "```bash\\necho hello > /app/hello.txt\\nsubmit\\n```"
      "rollcage/count":
        samples:              # by sample; those that are not listed get `turns`, or else the default
          0: ["first answer", "second answer"]
        turns: ["..."]
    default: ["```bash\\nsubmit\\n```"]

A turn is a text; or `{text, reasoning, tool_calls, finish_reason, seconds}`, of which each may be left out, to answer
after some seconds; or `{error, message, seconds}` to fail with an error class that a policy can fail with. When a
script is used up, its last turn is repeated.

    - reasoning: "I look first."
      tool_calls:
        - {name: bash, arguments: {command: "ls"}}     # arguments: a mapping, or the text that stands for one
    - {text: "I will not.", finish_reason: refusal}    # else `stop`, or `tool_calls` where there are some
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml
from yaml.reader import ReaderError

from rollcage.rollout.outcome import BY_NAME, PolicyError

FINISH_REASONS = ("stop", "length", "tool_calls", "refusal")

MAX_SECONDS = 1e9
"""Some 30 years: whoever waits longer wants an answer that never comes."""

KINDS = {str: "a text", int: "a whole number", bool: "true or false", int | float: "a number"}

_SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Answer:
    """One turn: after `seconds`, answer `text`, or fail with `error` where there is one. `tool_calls`: name and
    arguments of each."""

    text: str = ""
    seconds: float = 0.0
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str], ...] = ()
    finish_reason: str = "stop"
    error: str | None = None
    message: str = ""

    @property
    def whole(self) -> str:
        """The answer as a model writes it that marks what it thinks and calls in its text, as Qwen's do."""
        thought = f"<think>\n{self.reasoning}\n</think>\n" if self.reasoning else ""
        calls = (
            f'\n<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'
            for name, arguments in self.tool_calls
        )
        return thought + self.text + "".join(calls)


@dataclass(frozen=True)
class Script:
    """The turns of one task; `samples` has those of single samples."""

    turns: tuple[Answer, ...] | None = None
    samples: Mapping[int, tuple[Answer, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Scripts:
    """A whole file."""

    tasks: tuple[tuple[str, Script], ...]
    default: tuple[Answer, ...] | None
    tokens: bool
    max_model_len: int | None = None

    def turns(self, task: str, sample: int) -> tuple[Answer, ...]:
        """The turns of a rollout. Raises `ValueError` where the file has none for it."""
        script = next(
            (script for name, script in self.tasks if task == name or fnmatchcase(task, name)), None
        )
        turns = None
        if script is not None:
            turns = script.samples.get(sample, script.turns)
        turns = self.default if turns is None else turns
        if turns is None:
            raise ValueError(f"the script has no answers for {task}, sample {sample}, and no default")
        return turns


def read_scripts(path: Path) -> Scripts:
    """Read and check a file of scripts. Raises `ValueError` that names file and line."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"{path}: the file of answers cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: the file of answers is no UTF-8 text (save it as UTF-8)") from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        said = (
            f"the character {chr(error.character)!r} is none of YAML's (write it escaped, in double quotes)"
        )
        raise ValueError(f"{path}:{line}: {said}") from error
    except yaml.MarkedYAMLError as error:
        place = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{place}: this is no YAML: {error.problem}") from error
    except RecursionError as error:
        raise ValueError(f"{path}: this is nested too deeply") from error
    return _Reader(path).scripts(root)


_SAYS = {"text", "reasoning", "tool_calls"}
_ANSWER_KEYS = {*_SAYS, "finish_reason", "seconds", "error", "message"}


class _Reader:
    """Walks the YAML's nodes, which know their lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scalars = yaml.SafeLoader("")

    def scripts(self, root: yaml.Node | None) -> Scripts:
        if root is None:
            raise ValueError(f"{self._path}: the file is empty")
        top = self._mapping(root, {"tasks", "default", "tokens", "max_model_len"}, "the file")
        tasks = self._items(top["tasks"], "`tasks`") if "tasks" in top else ()
        tokens = self._scalar(top["tokens"], bool, "`tokens`") if "tokens" in top else False
        most = None
        if "max_model_len" in top:
            most = self._scalar(top["max_model_len"], int, "`max_model_len`")
            if most < 1 or not tokens:
                raise self._wrong(
                    top["max_model_len"], "`max_model_len` is above 0 and goes with `tokens: true`"
                )
        if "default" not in top and not tasks:
            raise self._wrong(root, "there are neither `tasks` nor a `default`")
        scripts = self._once(tasks, str, "a task")
        return Scripts(
            tasks=tuple((name, self._script(node)) for name, node in scripts.items()),
            default=self._turns(top["default"]) if "default" in top else None,
            tokens=tokens,
            max_model_len=most,
        )

    def _script(self, node: yaml.Node) -> Script:
        if not isinstance(node, yaml.MappingNode):
            return Script(self._turns(node))
        keys = self._mapping(node, {"turns", "samples"}, "a task")
        if not keys:
            raise self._wrong(node, "a task has `turns`, `samples` or both")
        samples = self._once(
            self._items(keys["samples"], "`samples`") if "samples" in keys else (), int, "a sample"
        )
        if wrong := [number for number in samples if number < 0]:
            raise self._wrong(keys["samples"], f"samples are counted from 0, and {wrong[0]} is none")
        return Script(
            turns=self._turns(keys["turns"]) if "turns" in keys else None,
            samples={number: self._turns(turns) for number, turns in samples.items()},
        )

    def _turns(self, node: yaml.Node) -> tuple[Answer, ...]:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            raise self._wrong(node, "turns are a list with at least one answer")
        return tuple(self._answer(turn) for turn in node.value)

    def _answer(self, node: yaml.Node) -> Answer:
        if not isinstance(node, yaml.MappingNode):
            return Answer(self._scalar(node, str, "an answer"))
        keys = self._mapping(node, _ANSWER_KEYS, "an answer")
        said = _SAYS & set(keys)
        if bool(said) == ("error" in keys):
            raise self._wrong(
                node, "an answer has either a `text`, `reasoning` or `tool_calls`, or an `error`"
            )
        if idle := ({"message"} if said else {"finish_reason"}) & set(keys):
            other = "an `error`" if said else "an answer"
            raise self._wrong(keys[min(idle)], f"`{min(idle)}` goes with {other} alone")
        seconds = self._scalar(keys["seconds"], int | float, "`seconds`") if "seconds" in keys else 0.0
        if not 0 <= seconds <= MAX_SECONDS:
            raise self._wrong(keys["seconds"], "`seconds` is a length of time, 1e9 at most")
        if said:
            calls = tuple(self._calls(keys["tool_calls"])) if "tool_calls" in keys else ()
            return Answer(
                text=self._scalar(keys["text"], str, "`text`") if "text" in keys else "",
                seconds=float(seconds),
                reasoning=self._scalar(keys["reasoning"], str, "`reasoning`") if "reasoning" in keys else "",
                tool_calls=calls,
                finish_reason=self._finish_reason(keys, "tool_calls" if calls else "stop"),
            )
        error = self._scalar(keys["error"], str, "`error`")
        row = BY_NAME.get(error)
        if row is None or row.domain not in PolicyError.domains:
            raise self._wrong(keys["error"], f"{error!r} is no error class of a policy")
        message = self._scalar(keys["message"], str, "`message`") if "message" in keys else ""
        return Answer(seconds=float(seconds), error=error, message=message)

    def _finish_reason(self, keys: Mapping[str, yaml.Node], default: str) -> str:
        if "finish_reason" not in keys:
            return default
        reason = self._scalar(keys["finish_reason"], str, "`finish_reason`")
        if reason not in FINISH_REASONS:
            known = ", ".join(FINISH_REASONS)
            raise self._wrong(keys["finish_reason"], f"no answer ends by {reason!r}; known: {known}")
        return str(reason)

    def _calls(self, node: yaml.Node) -> Iterator[tuple[str, str]]:
        """Name and arguments of each call. Arguments that are a text need be no JSON: a policy's are not always."""
        if not isinstance(node, yaml.SequenceNode):
            raise self._wrong(node, "`tool_calls` is a list of calls")
        for call in node.value:
            keys = self._mapping(call, {"name", "arguments"}, "a call")
            if len(keys) != 2:
                raise self._wrong(call, "a call has a `name` and `arguments`")
            yield self._scalar(keys["name"], str, "`name`"), self._arguments(keys["arguments"])

    def _arguments(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.MappingNode):
            return str(self._scalar(node, str, "`arguments`"))
        try:
            return json.dumps(self._scalars.construct_document(node), allow_nan=False)
        except yaml.MarkedYAMLError as error:
            raise self._wrong(node, f"these arguments cannot be JSON: {error.problem}") from error
        except (TypeError, ValueError, RecursionError) as error:
            raise self._wrong(node, f"these arguments cannot be JSON: {error}") from error

    def _mapping(self, node: yaml.Node, known: set[str], what: str) -> dict[str, yaml.Node]:
        items = self._items(node, what)
        found = self._once(items, str, "a key")
        for (key, _), name in zip(items, found, strict=True):
            if name not in known:
                raise self._wrong(key, f"{what} has no key {name!r}; known: {', '.join(sorted(known))}")
        return found

    def _once(
        self, items: Sequence[tuple[yaml.Node, yaml.Node]], kind: Any, what: str
    ) -> dict[Any, yaml.Node]:
        """A mapping's values by key: YAML itself lets one be there twice, and keeps the last."""
        found: dict[Any, yaml.Node] = {}
        for key, value in items:
            name = self._scalar(key, kind, what)
            if name in found:
                raise self._wrong(key, f"{name!r} is there twice")
            found[name] = value
        return found

    def _items(self, node: yaml.Node, what: str) -> Sequence[tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self._wrong(node, f"{what} must be a mapping")
        items: list[tuple[yaml.Node, yaml.Node]] = node.value
        return items

    def _scalar(self, node: yaml.Node, kind: Any, what: str) -> Any:
        value = None
        if isinstance(node, yaml.ScalarNode):
            try:
                value = self._scalars.construct_object(node)
            except yaml.MarkedYAMLError as error:
                raise self._wrong(node, f"{what} cannot be read: {error.problem}") from error
            except ValueError as error:  # a date that is none, a number that is too long
                raise self._wrong(node, f"{what} cannot be read: {error}") from error
        wrong_bool = isinstance(value, bool) and kind is not bool
        if value is None or wrong_bool or not isinstance(value, kind):
            raise self._wrong(node, f"{what} must be {KINDS[kind]}")
        if isinstance(value, str) and _SURROGATES.search(value):
            raise self._wrong(node, f"{what} holds half of a surrogate pair, which is no text")
        return value

    def _wrong(self, node: yaml.Node, message: str) -> ValueError:
        return ValueError(f"{self._path}:{node.start_mark.line + 1}: {message}")
