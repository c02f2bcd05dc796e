"""The protocol between an agent and what generates its tokens.

A `Policy` serves many rollouts; a `PolicySession` is one rollout's conversation with it. An agent hands the
session the messages that are new, and gets a `Completion`; the session keeps the exact token sequence.

Errors are `PolicyError`s: `context_overflow` and `token_limit` are the agent's, `policy_unavailable`,
`policy_timeout`, `policy_error` and `rate_limited` the server's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from rollcage.rollout.trajectory import Message, Segment


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


@dataclass
class Completion:
    """One answer. `ids` and `logprobs` have one length; both are empty where the policy has no tokens.

    `prompt_ids` are the ids that the engine saw. `finish_reason` is `stop` or `length`. `policy` and `version`
    say who answered.
    """

    text: str
    finish_reason: str
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy: str = ""
    version: int = 0
    queue_seconds: float = 0.0
    generate_seconds: float = 0.0
    cached_tokens: int = 0


class PolicySession(Protocol):
    """One rollout's conversation."""

    @property
    def segments(self) -> list[Segment]:
        """The exact token record so far; empty without tokens."""
        ...

    async def complete(
        self, new_messages: list[Message], sampling: Sampling
    ) -> tuple[Completion, int | None]:
        """Append `new_messages`, generate the assistant's answer, append it, and return it with the index of
        the segment that holds its tokens (None without tokens). Raises `PolicyError`."""
        ...

    async def close(self) -> None:
        """Let go of whatever the server keeps for this session. Never raises."""
        ...


class Policy(Protocol):
    """Serves sessions. `name` goes into every attempt's record."""

    name: str

    def session(self, session_id: str, *, task: str, sample: int) -> PolicySession:
        """Open a session; `session_id` is the attempt's id and routes to one replica."""
        ...
