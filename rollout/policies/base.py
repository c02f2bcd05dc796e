"""The protocol between an agent and what generates its tokens.

A `Policy` serves many rollouts; a `PolicySession` is one rollout's conversation with it. An agent hands the
session the messages that are new, and gets a `Completion`; the session keeps the exact token sequence.

Errors are `PolicyError`s: `context_overflow` and `token_limit` are the agent's, `policy_unavailable`,
`policy_timeout`, `policy_error`, `policy_refused` and `rate_limited` the server's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rollcage.rollout.trajectory import Message, Segment, ToolCall


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, in vLLM's terms. `seed` comes from (job, task, sample) where a job sets one."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 1024
    stop: tuple[str, ...] = ()
    seed: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Further fields of the engine's own sampling parameters, by name."""


@dataclass(frozen=True)
class Tool:
    """A tool that the policy may call. `parameters` is a JSON schema of type object."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Structure:
    """The form that an engine is asked to hold an answer to: exactly one of a JSON schema and a grammar (EBNF, as
    xgrammar takes it)."""

    json_schema: Mapping[str, Any] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        if (self.json_schema is None) == (self.grammar is None):
            raise ValueError("a structure is either a JSON schema or a grammar")


@dataclass
class Completion:
    """One answer. `ids` and `logprobs` have one length; both are empty where the policy has no tokens.

    `text` is the answer as an agent reads it, without `reasoning` and `tool_calls` where the policy tells them
    apart. `prompt_ids` are the ids that the engine saw. `finish_reason` is `stop`, `length`, `tool_calls` or
    `refusal`. `policy` and `version` say who answered, `version_end` who ended the answer. `prompt_tokens`,
    `completion_tokens` and `cached_tokens` (part of the prompt's) are the engine's own count; `cost_usd` is None
    where the policy has no prices. `structured`: it was held to a `Structure`. `blocks`: see `Message`.
    """

    text: str
    finish_reason: str
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy: str = ""
    version: int = 0
    version_end: int | None = None
    """None: `version`."""
    queue_seconds: float = 0.0
    generate_seconds: float = 0.0
    prompt_tokens: int | None = None
    """None: as many as there are ids; likewise `completion_tokens`."""
    completion_tokens: int | None = None
    cached_tokens: int = 0
    cost_usd: float | None = None
    structured: bool = False
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    blocks: str = ""


class PolicySession(Protocol):
    """One rollout's conversation."""

    @property
    def segments(self) -> list[Segment]:
        """The exact token record so far; empty without tokens."""
        ...

    async def complete(
        self,
        new_messages: list[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> tuple[Completion, int | None]:
        """Append `new_messages`, generate the assistant's answer, append it, and return it with the index of
        the segment that holds its tokens (None without tokens). `tools` are the same at every call. A policy that
        cannot hold an answer to `structure` answers without, and says so in `Completion.structured`. Where this
        raises nothing has been appended. Raises `PolicyError`."""
        ...

    def restart(self) -> None:
        """Forget the conversation, keep its segments: the next messages begin another, in a new segment."""
        ...

    async def close(self) -> None:
        """Let go of whatever the server keeps for this session. Never raises."""
        ...


@runtime_checkable
class MeasuresTokens(Protocol):
    """What a session may offer beside `PolicySession`, for those who must stay within its context."""

    @property
    def max_model_len(self) -> int | None:
        """Tokens that prompt and answer may have together; None where that is not known."""
        ...

    def count_tokens(self, text: str) -> int | None:
        """Tokens of a text inside a message; None where there is no tokenizer."""
        ...


@runtime_checkable
class KeepsNotes(Protocol):
    """What a session may offer beside `PolicySession`: something to be kept in the attempt's record."""

    @property
    def notes(self) -> Mapping[str, Any]:
        """JSON values for `Attempt.extra`, by name."""
        ...


class Policy(Protocol):
    """Serves sessions. `name` goes into every attempt's record."""

    name: str

    def session(self, session_id: str, *, task: str, sample: int) -> PolicySession:
        """Open a session; `session_id` is the attempt's id and routes to one replica."""
        ...


def notes_of(session: PolicySession) -> dict[str, Any]:
    """What is kept of a session in the attempt's `extra`: its notes, and how long its context was."""
    notes = dict(session.notes) if isinstance(session, KeepsNotes) else {}
    if isinstance(session, MeasuresTokens) and session.max_model_len is not None:
        notes["max_model_len"] = session.max_model_len
    return notes
