"""Sessions on an engine that takes token ids and returns token ids.

A `TokenEngine` is a vLLM engine in this process (`vllm.py`), replicas of it behind Ray (`cluster/policies.py`), or a
server that takes ids over HTTP (`openai.py`). `TokenPolicy` serves sessions on one; `TokenSession` keeps the
conversation's exact tokens and makes each prompt of them.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from rollcage.rollout.outcome import PolicyError, Stale
from rollcage.rollout.policies.base import Completion, Sampling, Structure, Tool
from rollcage.rollout.tokens import ChatRenderer, RunningTokens, Tokenizer
from rollcage.rollout.trajectory import Message, Segment, ToolCall


@dataclass(frozen=True)
class Parsed:
    """An answer taken apart by the engine's own parsers for reasoning and tool calls."""

    text: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> Message:
        """As a message of the conversation."""
        return Message("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning)


@dataclass(frozen=True)
class Generation:
    """What an engine returned for one prompt. `ids` and `logprobs` have one length.

    `queue_seconds`: from the engine's receipt of the request until it was first scheduled;
    `generate_seconds`: from then to the last token. `finish_reason` is `stop` or `length`. The answer was begun by
    weights of `version` and ended by `version_end` (None: the same). `parsed` is None where the engine has no parsers.
    `structured`: it was held to the structure that was asked for.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    queue_seconds: float
    generate_seconds: float
    cached_tokens: int = 0
    version: int = 0
    version_end: int | None = None
    parsed: Parsed | None = None
    structured: bool = False


class TokenEngine(Protocol):
    """Generates tokens for token prompts. Errors are `PolicyError`s."""

    tokenizer: Tokenizer
    max_model_len: int

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> Generation:
        """Requests of one `session_id` go to one replica where there are several. `tools` are for the parsers: the
        prompt has them already."""
        ...

    async def release(self, session_id: str) -> None:
        """The session is over. Never raises."""
        ...


@runtime_checkable
class TellsVersion(Protocol):
    """What an engine may offer beside `TokenEngine`, where its weights may be replaced."""

    async def current_version(self) -> int:
        """Of the weights that a conversation which begins now is answered by: no newer than those. Raises
        `PolicyError`."""
        ...


class TokenSession:
    """One rollout's conversation with a `TokenEngine`. `max_staleness`: versions that its first turn may be behind the
    engine's current one, where the engine tells it; None: any number."""

    def __init__(
        self,
        session_id: str,
        engine: TokenEngine,
        renderer: ChatRenderer,
        policy: str,
        max_staleness: int | None = None,
    ) -> None:
        self._id = session_id
        self._policy = policy
        self._engine = engine
        self._renderer = renderer
        self._max_staleness = max_staleness
        self._began_with: int | None = None
        self._tokens = RunningTokens(renderer)
        self._requests = 0

    @property
    def segments(self) -> list[Segment]:
        return self._tokens.segments

    @property
    def max_model_len(self) -> int:
        """See `MeasuresTokens`."""
        return self._engine.max_model_len

    def count_tokens(self, text: str) -> int:
        """See `MeasuresTokens`."""
        return len(self._renderer.encode(self._renderer.harmless(Message("tool", text))))

    async def complete(
        self,
        new_messages: list[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> tuple[Completion, int | None]:
        """See `PolicySession`. `max_tokens` is cut to the room left in the context; an answer that fills it
        ends with `finish_reason` `length`, and the next one with `context_overflow`. A seed is moved on with
        every turn: with one and the same, a model answers what it answered before. Raises `Stale` before a turn, and
        behind one, where the weights have moved on too far."""
        prompt = self._tokens.prompt(new_messages, tools)
        room = require_room(len(prompt.ids), self._engine.max_model_len)
        await self._require_fresh()
        self._requests += 1
        made = await self._engine.generate(
            prompt.ids,
            replace(
                sampling,
                max_tokens=min(sampling.max_tokens, room),
                seed=None if sampling.seed is None else sampling.seed + self._requests,
            ),
            request_id=f"{self._id}-{self._requests}-{uuid.uuid4().hex[:8]}",
            session_id=self._id,
            tools=tools,
            structure=structure,
        )
        self._began_with = made.version if self._began_with is None else self._began_with
        await self._require_fresh(made)
        answer = None if made.parsed is None else made.parsed.message()
        text = self._tokens.append(prompt, made.ids, made.logprobs, answer)
        parsed = made.parsed or Parsed(text)
        completion = Completion(
            text=parsed.text,
            finish_reason="tool_calls"
            if parsed.tool_calls and made.finish_reason == "stop"
            else made.finish_reason,
            prompt_ids=prompt.ids,
            ids=made.ids,
            logprobs=made.logprobs,
            policy=self._policy,
            version=made.version,
            version_end=made.version_end,
            queue_seconds=made.queue_seconds,
            generate_seconds=made.generate_seconds,
            cached_tokens=made.cached_tokens,
            structured=made.structured,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
        )
        return completion, len(self.segments) - 1

    def restart(self) -> None:
        """See `PolicySession`."""
        self._tokens.restart()

    async def close(self) -> None:
        await self._engine.release(self._id)

    async def _require_fresh(self, made: Generation | None = None) -> None:
        """Raise `Stale` where the rollout's first turn is too far behind. `made`: what came back just now."""
        began, most = self._began_with, self._max_staleness
        if began is None or most is None:
            return
        current = began if made is None else max(made.version, made.version_end or 0)
        if isinstance(self._engine, TellsVersion):
            current = max(current, await self._engine.current_version())
        if current - began > most:
            said = f"the rollout began with version {began} of policy {self._policy}, which is at version {current} now"
            raise Stale("stale", f"{said}: more than max_staleness {most}")


class TokenPolicy:
    """Serves sessions on `engine`, which has been started. `template_kwargs` go to its chat template. `max_staleness`:
    see `TokenSession`."""

    def __init__(
        self,
        engine: TokenEngine,
        *,
        name: str = "vllm",
        template_kwargs: Mapping[str, Any] | None = None,
        max_staleness: int | None = None,
    ) -> None:
        self.name = name
        self._max_staleness = max_staleness
        self._engine = engine
        self._renderer = ChatRenderer(engine.tokenizer, template_kwargs)

    def session(self, session_id: str, *, task: str, sample: int) -> TokenSession:
        """See `Policy`."""
        return TokenSession(session_id, self._engine, self._renderer, self.name, self._max_staleness)


def require_room(prompt_tokens: int, max_model_len: int) -> int:
    """Tokens left for an answer, at least 1. Raises `PolicyError` (`context_overflow`) where there are none."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise PolicyError(
            "context_overflow",
            f"the prompt has {prompt_tokens} tokens, and the model's context of {max_model_len} no room left",
        )
    return room
