"""What a run holds of a rollout's talk with its policy, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from rollcage.rollout.arrow import Location, identities, journalled, read_numbered
from rollcage.rollout.outcome import Evidence, PolicyError
from rollcage.rollout.policies.base import Completion
from rollcage.rollout.rows import attempt_from_row
from rollcage.rollout.schema import KEY, ROLLOUTS
from rollcage.rollout.trajectory import Attempt, Message, Trajectory, Turn

ENDED_IN_COMPLETE = ("context_overflow", "agent_timeout")
"""Error classes of an agent's that end it while it waits for an answer: a replay meets them at the same turn."""


Place = tuple[str, str, int, int]
"""Agent, task, draw and sample."""


class NoRecording(Exception):
    """The run does not hold what is asked for."""


@dataclass(frozen=True)
class Recording:
    """One recorded rollout, by turns."""

    attempt: Attempt

    @cached_property
    def trajectory(self) -> Trajectory:
        return self.attempt.trajectory or Trajectory()

    @property
    def turns(self) -> list[Turn]:
        return self.trajectory.turns

    @cached_property
    def _answers(self) -> dict[int, int]:
        """The place of each turn's answer among the messages."""
        places = enumerate(self.trajectory.messages)
        return {
            message.turn: place
            for place, message in places
            if message.role == "assistant" and message.turn is not None
        }

    @property
    def was_done(self) -> bool:
        """The agent asked for no more than it was answered."""
        return self.attempt.reward_valid and self.attempt.error_class not in ENDED_IN_COMPLETE

    def asked(self, index: int) -> list[Message] | None:
        """What the agent said between the last answer and this turn's; None where the recording does not have it."""
        here = self._answers.get(index)
        before = -1 if index == 0 else self._answers.get(index - 1)
        if here is None or before is None:
            return None
        return self.trajectory.messages[before + 1 : here]

    def completion(self, turn: Turn) -> Completion:
        """The answer as it was given. Log-probabilities are the float32 that a run holds."""
        made = Completion(
            text=turn.text,
            finish_reason=turn.finish_reason,
            policy=turn.policy,
            version=turn.policy_version,
            version_end=turn.policy_version_end,
            queue_seconds=turn.queue_seconds,
            generate_seconds=turn.generate_seconds,
            prompt_tokens=turn.prompt_tokens,
            completion_tokens=turn.completion_tokens,
            cached_tokens=turn.cached_tokens,
            cost_usd=turn.cost_usd,
            structured=turn.structured,
        )
        if turn.segment is not None:
            segment, end = self.trajectory.segments[turn.segment], end_of(turn)
            made.prompt_ids = segment.ids[: turn.prompt_len]
            made.ids = segment.ids[turn.prompt_len : end]
            made.logprobs = segment.logprobs[turn.prompt_len : end]
        place = self._answers.get(turn.index)
        if place is not None:
            answer = self.trajectory.messages[place]
            made.reasoning, made.tool_calls, made.blocks = answer.reasoning, answer.tool_calls, answer.blocks
        return made

    def end(self) -> PolicyError:
        """What a question meets that was not asked, or not answered, in the recording."""
        attempt = self.attempt
        said = f"the recording ends after {len(self.turns)} turns"
        if attempt.error_class in ENDED_IN_COMPLETE:
            evidence = attempt.evidence or Evidence()
            return PolicyError(attempt.error_class, f"{said}, as then: {evidence.message}", evidence)
        if attempt.error_class is not None:
            said += f" with {attempt.error_class}"
        return PolicyError("policy_error", said, Evidence(said, "recording"))


class Recordings:
    """The rollouts of a run by agent, task, draw and sample, each read when it is asked for. Of a run that has not
    ended: those that it holds now."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._location = Location.of(run)
        self._places: dict[Place, tuple[int, int]] = {}
        """Ordinal of the batch, and row in it: files may be merged meanwhile."""
        self._journalled: dict[Place, pa.RecordBatch] = {}
        for batch in journalled(self._location, "rollouts"):  # first: rows move from there into shards
            for row, (_, *key) in enumerate(identities(batch, "rollouts")):
                self._journalled[tuple(key)] = batch.slice(row, 1)
        for number, batch in read_numbered(self._location, "rollouts", KEY):
            for row, (_, *key) in enumerate(identities(batch, "rollouts")):
                self._places[tuple(key)] = (number, row)
        self.agents = sorted({agent for agent, *_ in (*self._places, *self._journalled)})

    def agent(self, label: str | None) -> str:
        """The agent of this label; None: the only one. Raises `NoRecording` where it has no rollout here, or none is
        named of several."""
        agents = ", ".join(self.agents)
        if not self.agents:
            raise NoRecording(f"{self._run} holds no rollout")
        if label is None and len(self.agents) > 1:
            raise NoRecording(f"{self._run} has several agents: name one of {agents}")
        if label is not None and label not in self.agents:
            raise NoRecording(f"{self._run} has no rollout by {label}: name one of {agents}")
        return self.agents[0] if label is None else label

    def find(self, agent: str | None, task: str, sample: int, draw: int = 0) -> Attempt:
        """One rollout. Raises `NoRecording` where there is none."""
        agent = self.agent(agent)
        key = (agent, task, draw, sample)
        if key in self._places:
            number, row = self._places[key]
            _, whole = next(read_numbered(self._location, "rollouts", ROLLOUTS.names, number))
            batch = whole.slice(row, 1)
        elif key in self._journalled:
            batch = self._journalled[key]
        else:
            which = f"draw {draw}, sample {sample}" if draw else f"sample {sample}"
            raise NoRecording(f"{self._run} holds no rollout of {task}, {which}, by {agent}")
        return attempt_from_row(batch.to_pylist()[0])


def end_of(turn: Turn) -> int:
    """How long its segment was behind a turn."""
    return turn.prompt_len + turn.completion_len
