"""An agent's talk with its policy: asking so that the trajectory holds it, and the limits that every agent has.

With `Summaries`, a conversation that comes near the end of the context is summed up by the policy (a turn whose
purpose is `summary`), the session forgets it, and the next question is the step's opening with the summary behind it.
Nothing else changes for the agent. A context that the summary does not fit either has overflowed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.observation import token_counter
from rollcage.rollout.agents.summaries import MESSAGE_TOKENS, NOT_RUN, Summaries, asking
from rollcage.rollout.outcome import AgentStopped, PolicyError
from rollcage.rollout.policies.base import Completion, MeasuresTokens, Sampling, Structure, Tool
from rollcage.rollout.trajectory import Message, Turn


@dataclass(frozen=True)
class Limits:
    """What an agent may use. `turns`: answers in a step (`turn_limit`; summaries are not counted). `tokens`: sampled
    tokens in an attempt (`token_limit`; None: no limit). `malformed`: answers in a row without an action that can be
    read (`malformed_actions`)."""

    turns: int = 30
    tokens: int | None = None
    malformed: int = 3

    def __post_init__(self) -> None:
        if min(self.turns, self.malformed, 1 if self.tokens is None else self.tokens) < 1:
            raise ValueError("max_turns, max_tokens and max_malformed must be above 0")


class Conversation:
    """One step's talk. What is asked and what is answered is in the trajectory at once."""

    def __init__(self, context: AgentContext, limits: Limits, summaries: Summaries | None = None) -> None:
        self._context = context
        self._limits = limits
        self._summaries = summaries
        self._turns = 0
        self._malformed = 0
        self._drop_unanswered()
        self.count_tokens = token_counter(context.session)

    async def ask(
        self,
        new: list[Message],
        *,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> tuple[Turn, Completion]:
        """The policy's answer to `new`, as a turn of the trajectory. The agent's clock stands still but for the
        engine's own time.

        Raises `AgentStopped` at a limit, and (`malformed_actions`) where the policy refused to answer, which it
        would do again; and `PolicyError`: `context_overflow` where the conversation does not fit, summed up or not.
        """
        if self._turns >= self._limits.turns:
            raise AgentStopped("turn_limit", f"the agent was not done after {self._limits.turns} turns")
        self._turns += 1
        if self._summaries is not None and self._is_long(new, self._summaries):
            new = await self._sum_up(new, tools, self._summaries)
        try:
            return await self._complete(new, tools, structure)
        except PolicyError as error:
            if error.error_class != "context_overflow" or self._summaries is None or not self.begun:
                raise
            trajectory = self._context.trajectory
            trajectory.messages = trajectory.messages[: len(trajectory.messages) - len(new)]
            new = await self._sum_up(new, tools, self._summaries)
            return await self._complete(new, tools, structure)

    @property
    def begun(self) -> bool:
        """Whether the session holds a conversation that the next question goes on with, of an earlier step, too. One
        that was only just summed up is begun anew, and cannot be summed up again."""
        turns = self._context.trajectory.turns
        return bool(turns) and turns[-1].purpose != "summary"

    def malformed(self, turn: Turn, problem: str) -> None:
        """The answer held no action that could be read, because of `problem`. Raises `AgentStopped` where that has
        happened too often in a row; it is the limit of tokens where that has cut the answer."""
        turn.malformed = True
        self._malformed += 1
        if self._malformed >= self._limits.malformed:
            if turn.finish_reason == "length":
                self._tokens_left()
            said = f"{self._malformed} answers in a row held no action that could be read; of the last, {problem}"
            raise AgentStopped("malformed_actions", said)

    def well_formed(self) -> None:
        """The answer held an action."""
        self._malformed = 0

    async def _complete(
        self,
        new: list[Message],
        tools: Sequence[Tool],
        structure: Structure | None,
        purpose: str = "act",
    ) -> tuple[Turn, Completion]:
        context = self._context
        assert context.session is not None, "the rollout opens a session for agents that need a policy"
        sampling = self._sampling(new, tools, purpose)
        trajectory = context.trajectory
        trajectory.messages += new
        with context.clock.held():
            made, segment = await context.session.complete(new, sampling, tools=tools, structure=structure)
        context.clock.charge(made.generate_seconds)
        turn = turn_of(len(trajectory.turns), made, segment)
        turn.purpose = purpose
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
        if made.finish_reason == "refusal":
            turn.malformed = True
            if purpose == "summary":
                context.session.restart()
            said = f"the policy refused to answer: {made.text.strip()[:500] or 'it said nothing'}"
            raise AgentStopped("malformed_actions", said)
        return turn, made

    def _sampling(self, new: list[Message], tools: Sequence[Tool], purpose: str) -> Sampling:
        """The job's, with no more tokens than the limit leaves, and the context where a summary is to fit behind
        the answer."""
        sampling, left = self._context.sampling, self._tokens_left()
        if left is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, left))
        most = self._max_model_len
        if self._summaries is not None and most is not None:
            kept = self._summaries.room(most, self.count_tokens) if purpose == "act" else 0
            room = max(1, most - kept - self._prompt_tokens(new, tools))
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return sampling

    def _tokens_left(self) -> int | None:
        """Tokens that may still be sampled, at least 1; None without a limit. Raises `AgentStopped` where there are
        none."""
        limit = self._limits.tokens
        if limit is None:
            return None
        left = limit - self._context.trajectory.completion_tokens
        if left <= 0:
            raise AgentStopped("token_limit", f"the agent used its {limit} tokens")
        return left

    def _drop_unanswered(self) -> None:
        """What was asked when the step before ended has no answer, and is not in the session's conversation."""
        messages = self._context.trajectory.messages
        while messages and messages[-1].role != "assistant":
            messages.pop()

    def _is_long(self, new: list[Message], summaries: Summaries) -> bool:
        most = self._max_model_len
        return most is not None and self.begun and self._prompt_tokens(new) > summaries.at * most

    async def _sum_up(self, new: list[Message], tools: Sequence[Tool], summaries: Summaries) -> list[Message]:
        """Have the policy sum the conversation up and forget it. Returns the messages to go on with. Of `new`, which
        it has not seen, it is shown what there is room for."""
        session, most = self._context.session, self._max_model_len
        assert session is not None
        room = None
        if most is not None:
            answer = min(self._context.sampling.max_tokens, summaries.answer_tokens(most))
            used = self._prompt_tokens([replace(message, content="") for message in new])
            room = max(0, most - used - answer - self.count_tokens(summaries.request) - MESSAGE_TOKENS)
        questions = asking(summaries.request, new, room, self.count_tokens)
        turn, made = await self._complete(questions, tools, None, purpose="summary")
        if made.tool_calls and not made.text.strip():
            turn, made = await self._in_words(turn, made, tools, summaries)
        session.restart()
        opening = await summaries.reopening(made.text, made.tool_calls)
        return [replace(message, turn=turn.index) for message in opening]

    async def _in_words(
        self, turn: Turn, made: Completion, tools: Sequence[Tool], summaries: Summaries
    ) -> tuple[Turn, Completion]:
        """What came in the place of a summary was calls alone: none is run, and it is asked for once more, where the
        context has room for that."""
        told = [Message("tool", NOT_RUN, turn.index, tool_call_id=call.id) for call in made.tool_calls]
        told.append(Message("user", summaries.request, turn.index))
        try:
            return await self._complete(told, tools, None, purpose="summary")
        except PolicyError as error:
            if error.error_class != "context_overflow":
                raise
            messages = self._context.trajectory.messages
            del messages[len(messages) - len(told) :]
            return turn, made

    @property
    def _max_model_len(self) -> int | None:
        session = self._context.session
        return session.max_model_len if isinstance(session, MeasuresTokens) else None

    def _prompt_tokens(self, new: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
        """Tokens that the prompt with `new` will have, about: what the policy counted, and what is new."""
        tokens = sum(self.count_tokens(message.content) + MESSAGE_TOKENS for message in new)
        if self.begun:
            last = self._context.trajectory.turns[-1]
            return last.prompt_tokens + last.completion_tokens + tokens
        schemas = [[tool.name, tool.description, dict(tool.parameters)] for tool in tools]
        return tokens + (self.count_tokens(json.dumps(schemas)) if schemas else 0)


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
