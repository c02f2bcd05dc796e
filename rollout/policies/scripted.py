"""Answers from a file, for tests, demos and simulation.

    tokens: true              # make byte-level token ids (default: none)
    tasks:
      "rollcage/hello-*":     # a task's name, or a pattern of names (fnmatch); the first that matches serves
        - "```bash\\necho hello > /app/hello.txt\\nsubmit\\n```"
      "rollcage/count":
        samples:              # by sample; those that are not listed get `turns`, or else the default
          0: ["first answer", "second answer"]
        turns: ["..."]
    default: ["```bash\\nsubmit\\n```"]

A turn is a text, or `{text, seconds}` to answer after some seconds, or `{error, message, seconds}` to fail with
an error class that a policy can fail with. When a script is used up, its last turn is repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import yaml

from rollcage.rollout.outcome import BY_NAME, PolicyError
from rollcage.rollout.policies.base import Completion, Sampling, Structure, Tool
from rollcage.rollout.tokens import ChatRenderer, RunningTokens
from rollcage.rollout.trajectory import Message, Segment


@dataclass(frozen=True)
class Answer:
    """One turn: after `seconds`, answer `text`, or fail with `error` where there is one."""

    text: str = ""
    seconds: float = 0.0
    error: str | None = None
    message: str = ""


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


class ScriptedPolicy:
    """Serves sessions from the file `path`. Raises `ValueError` with file and line where it is not as it must
    be."""

    def __init__(self, path: Path | str, *, name: str = "scripted") -> None:
        self.name = name
        self._scripts = read_scripts(Path(path))
        self._renderer = ChatRenderer(ByteTokenizer()) if self._scripts.tokens else None

    def session(self, session_id: str, *, task: str, sample: int) -> ScriptedSession:
        """See `Policy`."""
        return ScriptedSession(self.name, self._scripts.turns(task, sample), self._renderer)


class ScriptedSession:
    """One rollout's answers, in their order."""

    def __init__(self, policy: str, turns: Sequence[Answer], renderer: ChatRenderer | None) -> None:
        self._policy = policy
        self._turns = turns
        self._next = 0
        self._tokens = RunningTokens(renderer) if renderer else None

    @property
    def segments(self) -> list[Segment]:
        return self._tokens.segments if self._tokens else []

    def restart(self) -> None:
        """See `PolicySession`."""
        if self._tokens is not None:
            self._tokens.restart()

    async def complete(
        self,
        new_messages: list[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> tuple[Completion, int | None]:
        """See `PolicySession`. With tokens, an answer is cut at `max_tokens` as an engine would cut it."""
        answer = self._turns[min(self._next, len(self._turns) - 1)]
        self._next += 1
        await asyncio.sleep(answer.seconds)
        if answer.error is not None:
            raise PolicyError(answer.error, answer.message or f"the script says {answer.error}")
        if self._tokens is None:
            made = Completion(answer.text, "stop", policy=self._policy, generate_seconds=answer.seconds)
            return made, None
        prompt = self._tokens.prompt(new_messages, tools)
        whole = [*answer.text.encode(), ByteTokenizer.END]
        ids = whole[: sampling.max_tokens]
        logprobs = [0.0] * len(ids)
        text = self._tokens.append(prompt, ids, logprobs)
        reason = "stop" if len(ids) == len(whole) else "length"
        completion = Completion(
            text,
            reason,
            prompt_ids=prompt.ids,
            ids=ids,
            logprobs=logprobs,
            policy=self._policy,
            generate_seconds=answer.seconds,
        )
        return completion, len(self.segments) - 1

    async def close(self) -> None:
        """Nothing is kept."""


class ByteTokenizer:
    """Bytes as tokens (ids 0 to 255), two control tokens, ChatML's template: what `tokens.Tokenizer` asks for,
    with no model and no transformers behind it."""

    START, END = 256, 257
    added_tokens_decoder: Mapping[int, Any] = {
        START: SimpleNamespace(content="<|im_start|>", special=True),
        END: SimpleNamespace(content="<|im_end|>", special=True),
    }
    chat_template: Any = "<|im_start|>{role}\n{content}<|im_end|>\n"

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> str:
        turns = (f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in conversation)
        return "".join(turns) + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self._encode(text))

    def _encode(self, text: str) -> Iterator[int]:
        control = {token.content: number for number, token in self.added_tokens_decoder.items()}
        for number, part in enumerate(text.split("<|im_")):
            mark = next((mark for mark in control if number and f"<|im_{part}".startswith(mark)), "")
            if mark:
                yield control[mark]
            yield from (f"<|im_{part}"[len(mark) :] if number else part).encode()

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        control = {} if skip_special_tokens else self.added_tokens_decoder
        parts = (
            bytes([number]) if number < 256 else control[number].content.encode() if control else b""
            for number in token_ids
        )
        return b"".join(parts).decode("utf-8", "replace")


def read_scripts(path: Path) -> Scripts:
    """Read and check a file of scripts. Raises `ValueError` that names file and line."""
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise ValueError(f"{path}: the file of answers cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ValueError(f"{path}{line}: this is no YAML: {error.problem}") from error
    return _Reader(path).scripts(root)


class _Reader:
    """Walks the YAML's nodes, which know their lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._scalars = yaml.SafeLoader("")

    def scripts(self, root: yaml.Node | None) -> Scripts:
        if root is None:
            raise ValueError(f"{self._path}: the file is empty")
        top = self._mapping(root, {"tasks", "default", "tokens"}, "the file")
        tasks = self._items(top["tasks"], "`tasks`") if "tasks" in top else ()
        tokens = self._scalar(top["tokens"], bool, "`tokens`") if "tokens" in top else False
        if "default" not in top and not tasks:
            raise self._wrong(root, "there are neither `tasks` nor a `default`")
        return Scripts(
            tasks=tuple((self._scalar(name, str, "a task"), self._script(node)) for name, node in tasks),
            default=self._turns(top["default"]) if "default" in top else None,
            tokens=tokens,
        )

    def _script(self, node: yaml.Node) -> Script:
        if not isinstance(node, yaml.MappingNode):
            return Script(self._turns(node))
        keys = self._mapping(node, {"turns", "samples"}, "a task")
        samples = self._items(keys["samples"], "`samples`") if "samples" in keys else ()
        return Script(
            turns=self._turns(keys["turns"]) if "turns" in keys else None,
            samples={self._scalar(key, int, "a sample"): self._turns(turns) for key, turns in samples},
        )

    def _turns(self, node: yaml.Node) -> tuple[Answer, ...]:
        if not isinstance(node, yaml.SequenceNode) or not node.value:
            raise self._wrong(node, "turns are a list with at least one answer")
        return tuple(self._answer(turn) for turn in node.value)

    def _answer(self, node: yaml.Node) -> Answer:
        if not isinstance(node, yaml.MappingNode):
            return Answer(self._scalar(node, str, "an answer"))
        keys = self._mapping(node, {"text", "seconds", "error", "message"}, "an answer")
        if ("text" in keys) == ("error" in keys):
            raise self._wrong(node, "an answer has either a `text` or an `error`")
        seconds = float(self._scalar(keys["seconds"], int | float, "`seconds`")) if "seconds" in keys else 0.0
        if not 0 <= seconds < float("inf"):
            raise self._wrong(keys["seconds"], "`seconds` is a length of time")
        if "text" in keys:
            return Answer(self._scalar(keys["text"], str, "`text`"), seconds)
        error = self._scalar(keys["error"], str, "`error`")
        row = BY_NAME.get(error)
        if row is None or row.domain not in PolicyError.domains:
            raise self._wrong(keys["error"], f"{error!r} is no error class of a policy")
        message = self._scalar(keys["message"], str, "`message`") if "message" in keys else ""
        return Answer(seconds=seconds, error=error, message=message)

    def _mapping(self, node: yaml.Node, known: set[str], what: str) -> dict[str, yaml.Node]:
        found: dict[str, yaml.Node] = {}
        for key, value in self._items(node, what):
            name = self._scalar(key, str, "a key")
            if name not in known:
                raise self._wrong(key, f"{what} has no key {name!r}; known: {', '.join(sorted(known))}")
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
        value = self._scalars.construct_object(node) if isinstance(node, yaml.ScalarNode) else None
        wrong_bool = isinstance(value, bool) and kind is not bool
        if value is None or wrong_bool or not isinstance(value, kind):
            raise self._wrong(node, f"{what} must be {getattr(kind, '__name__', 'a number')}")
        return value

    def _wrong(self, node: yaml.Node, message: str) -> ValueError:
        return ValueError(f"{self._path}:{node.start_mark.line + 1}: {message}")
