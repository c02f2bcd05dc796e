"""What the formats share: what a format is, what it needs of a rollout, and the columns that name a rollout in all.

A rollout is an `Attempt` as `rows.attempt_from_row` makes it: the last attempt, with its trajectory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal

import pyarrow as pa

from rollcage.rollout.rows import attempt_from_row
from rollcage.rollout.trajectory import Attempt

Row = dict[str, Any]


class Unfit(ValueError):
    """A rollout, or several, can't be said in a format; the message says how many and why."""


@dataclass(frozen=True)
class Need:
    """What a format needs of a rollout. `missing` says why a rollout does not have it, or None where it does."""

    name: str
    missing: Callable[[Attempt], str | None]


@dataclass(frozen=True)
class Format:
    """One format. `rows` makes the rows of a group's rollouts, which are all fit, given the tools of each agent
    (`conversations.Tools`).

    `file`: `jsonl` is a row a line; `json` is a directory with a file a row, named by the row's `_file`, which is taken
    out; `parquet` has no `rows`, the table is written as it is. `checked` names what its rows are checked against.
    """

    name: str
    meaning: str
    file: Literal["jsonl", "json", "parquet"]
    needs: tuple[Need, ...]
    checked: str
    rows: Callable[[list[Attempt], Mapping[str, Sequence[Row]]], Iterable[Row]] = lambda _rollouts, _tools: ()
    tools: bool = False
    """Whether rows hold the tools of the rollout's agent."""

    def unfit(self, rollout: Attempt) -> str | None:
        """Why the rollout can't be said in this format; None where it can."""
        return next((why for need in self.needs if (why := need.missing(rollout))), None)


def rollouts_of(table: pa.Table) -> Iterator[Attempt]:
    """The rollouts of a table of `schema.ROLLOUTS` one after the other, each made when it is asked for."""
    for index in range(table.num_rows):
        yield attempt_from_row(table.slice(index, 1).to_pylist()[0])


def fit_rollouts(table: pa.Table, needs: Iterable[Need]) -> list[Attempt]:
    """The rollouts of a group's table. Raises `Unfit` where one does not have what is needed."""
    rollouts = list(rollouts_of(table))
    for rollout in rollouts:
        for need in needs:
            if why := need.missing(rollout):
                raise Unfit(f"rollout {rollout_id(rollout)}: {why}")
    return rollouts


def group_id(rollout: Attempt) -> str:
    """Names the rollout's group: what advantages are computed over."""
    return f"{rollout.job}/{rollout.agent}/{rollout.task}/{rollout.draw}"


def rollout_id(rollout: Attempt) -> str:
    """Names the rollout."""
    return f"{group_id(rollout)}/{rollout.sample}"


def reward_of(rollout: Attempt) -> float:
    """The rollout's reward. Only for rollouts that have one (`REWARD`)."""
    assert rollout.reward is not None, "who needs a reward has asked for one"
    return float(rollout.reward.value)


def about(rollout: Attempt) -> Row:
    """What every format says of a rollout beside its trajectory: JSON values."""
    trajectory = rollout.trajectory
    turns = trajectory.turns if trajectory else []
    versions = [version for turn in turns for version in (turn.policy_version, turn.policy_version_end)]
    return {
        "group": group_id(rollout),
        "job": rollout.job,
        "agent": rollout.agent,
        "task": rollout.task,
        "task_digest": rollout.task_digest,
        "draw": rollout.draw,
        "sample": rollout.sample,
        "attempt_id": rollout.attempt_id,
        "policy": rollout.policy,
        "policy_version_min": min(versions, default=None),
        "policy_version_max": max(versions, default=None),
        "outcome": rollout.outcome.value,
        "error_class": rollout.error_class,
        "reward": None if rollout.reward is None else _finite(rollout.reward.value),
        "reward_values": {}
        if rollout.reward is None
        else {name: _finite(value) for name, value in rollout.reward.values.items()},
        "turn_count": len(turns),
        "truncated_turns": sum(turn.finish_reason == "length" for turn in turns),
        "malformed_turns": sum(turn.malformed for turn in turns),
        "segment_count": len(trajectory.segments) if trajectory else 0,
        "prompt_tokens": trajectory.prompt_tokens if trajectory else 0,
        "completion_tokens": trajectory.completion_tokens if trajectory else 0,
        "agent_seconds": rollout.phases.get("agent"),
    }


def _finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return float(value) if isfinite(value) else None


def _no_ids(rollout: Attempt) -> str | None:
    turns = rollout.trajectory.turns if rollout.trajectory else []
    without = sum(turn.segment is None for turn in turns)
    if without:
        return f"{'its' if without == len(turns) else 'some'} answers have no token ids: the policy gave text only"
    return None if any(turn.completion_len for turn in turns) else "no token was sampled"


def _no_logprobs(rollout: Attempt) -> str | None:
    segments = rollout.trajectory.segments if rollout.trajectory else []
    sampled = (
        logprob
        for segment in segments
        for logprob, mask in zip(segment.logprobs, segment.loss_mask, strict=True)
        if mask
    )
    return None if all(map(isfinite, sampled)) else "not every sampled token has a finite log-probability"


def _no_reward(rollout: Attempt) -> str | None:
    if rollout.reward is None or not rollout.reward_valid:
        return f"no valid reward: {rollout.outcome.value} ({rollout.error_class})"
    return None if isfinite(rollout.reward.value) else f"its reward is {rollout.reward.value}"


def _several_segments(rollout: Attempt) -> str | None:
    count = len(rollout.trajectory.segments) if rollout.trajectory else 0
    return (
        None if count <= 1 else "several segments: its conversation was summed up, or the template rewrote it"
    )


IDS = Need("token ids", _no_ids)
LOGPROBS = Need("finite log-probabilities", _no_logprobs)
REWARD = Need("a valid reward", _no_reward)
ONE_SEGMENT = Need("one segment", _several_segments)
