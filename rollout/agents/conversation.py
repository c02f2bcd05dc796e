"""An agent's talk with its policy: asking so that the trajectory holds it, and the limits that every agent has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.outcome import AgentStopped
from rollcage.rollout.policies.base import Completion, Structure, Tool
from rollcage.rollout.trajectory import Message, Turn


@dataclass(frozen=True)
class Limits:
    """What an agent may use. `turns`: answers in a step (`turn_limit`). `tokens`: sampled tokens in an attempt
    (`token_limit`; None: no limit). `malformed`: answers in a row without an action that can be read
    (`malformed_actions`)."""

    turns: int = 30
    tokens: int | None = None
    malformed: int = 3

    def __post_init__(self) -> None:
        if min(self.turns, self.malformed, 1 if self.tokens is None else self.tokens) < 1:
            raise ValueError("max_turns, max_tokens and max_malformed must be above 0")


class Conversation:
    """One step's talk. What is asked and what is answered is in the trajectory at once."""

    def __init__(self, context: AgentContext, limits: Limits) -> None:
        self._context = context
        self._limits = limits
        self._turns = 0
        self._malformed = 0

    async def ask(
        self,
        new: list[Message],
        *,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> tuple[Turn, Completion]:
        """The policy's answer to `new`, as a turn of the trajectory. The agent's clock stands still but for the
        engine's own time. Raises `AgentStopped` at a limit, and `PolicyError`."""
        context, limits = self._context, self._limits
        assert context.session is not None, "the rollout opens a session for agents that need a policy"
        if self._turns >= limits.turns:
            raise AgentStopped("turn_limit", f"the agent was not done after {limits.turns} turns")
        self._turns += 1
        trajectory, sampling = context.trajectory, context.sampling
        if limits.tokens is not None:
            left = limits.tokens - trajectory.completion_tokens
            if left <= 0:
                raise AgentStopped("token_limit", f"the agent used its {limits.tokens} tokens")
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, left))
        trajectory.messages += new
        with context.clock.held():
            made, segment = await context.session.complete(new, sampling, tools=tools, structure=structure)
        context.clock.charge(made.generate_seconds)
        turn = turn_of(len(trajectory.turns), made, segment)
        trajectory.turns.append(turn)
        answer = Message(
            "assistant",
            made.text,
            turn.index,
            tool_calls=made.tool_calls,
            reasoning=made.reasoning,
            blocks=made.blocks,
        )
        trajectory.messages.append(answer)
        context.emit(made.text)
        return turn, made

    def malformed(self, turn: Turn, problem: str) -> None:
        """The answer held no action that could be read, because of `problem`. Raises `AgentStopped` where that has
        happened too often in a row."""
        turn.malformed = True
        self._malformed += 1
        if self._malformed >= self._limits.malformed:
            said = f"{self._malformed} answers in a row held no action that could be read; of the last, {problem}"
            raise AgentStopped("malformed_actions", said)

    def well_formed(self) -> None:
        """The answer held an action."""
        self._malformed = 0


def turn_of(index: int, made: Completion, segment: int | None) -> Turn:
    """The turn that a completion is."""
    return Turn(
        index=index,
        text=made.text,
        finish_reason=made.finish_reason,
        segment=segment,
        prompt_len=len(made.prompt_ids),
        completion_len=len(made.ids),
        policy=made.policy,
        policy_version=made.version,
        policy_version_end=made.version if made.version_end is None else made.version_end,
        queue_seconds=made.queue_seconds,
        generate_seconds=made.generate_seconds,
        prompt_tokens=len(made.prompt_ids) if made.prompt_tokens is None else made.prompt_tokens,
        completion_tokens=len(made.ids) if made.completion_tokens is None else made.completion_tokens,
        cached_tokens=made.cached_tokens,
        cost_usd=made.cost_usd,
        structured=made.structured,
    )
