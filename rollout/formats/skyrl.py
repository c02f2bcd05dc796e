"""SkyRL's `GeneratorOutput` (`skyrl.train.generators.base`), as a plain dictionary: lists, no tensors.

Step-wise, a row is a turn: what the engine saw, what it returned, mask 1, and token rewards that are 0 but for the
last token of the rollout's last row. For `generator.step_wise_trajectories=true`.

Merged, a row is a segment, which is what SkyRL's `merge_stepwise_output` makes of the same turns; rewards are one
number a row, 0 but for a rollout's last. Where no rollout has a second segment, it is also what SkyRL takes without
`step_wise_trajectories`, a row a trajectory.

A `TrajectoryID`'s instance is the group, its repetition the sample: advantages are by group. Of a row whose answer was
cut, the stop reason is `length`, otherwise `stop`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from rollcage.rollout.formats.base import (
    IDS,
    LOGPROBS,
    REWARD,
    Format,
    Row,
    about,
    fit_rollouts,
    group_id,
    reward_of,
)
from rollcage.rollout.formats.sequences import by_segment, by_turn
from rollcage.rollout.trajectory import Attempt

NEEDS = (REWARD, IDS, LOGPROBS)
CHECKED = "skyrl 0.4.0"


@dataclass(frozen=True)
class TrajectoryID:
    """SkyRL's, field by field, so that its package need not be there."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        """As SkyRL compares them."""
        return f"{self.instance_id}_{self.repetition_id}"


def generator_output(table: pa.Table, *, step_wise: bool = True) -> Row:
    """The `GeneratorOutput` of a table of `schema.ROLLOUTS`, a feed's group for instance. Raises `Unfit` where a
    rollout has no token ids, no log-probabilities or no valid reward."""
    return _output(fit_rollouts(table, NEEDS), step_wise)


def from_line(row: Mapping[str, Any]) -> Row:
    """A `GeneratorOutput` out of a line of an exported file, with `TrajectoryID`s as SkyRL's code wants them."""
    return {**row, "trajectory_ids": [TrajectoryID(**one) for one in row["trajectory_ids"]]}


def _output(rollouts: Sequence[Attempt], step_wise: bool) -> Row:
    output: Row = {
        "prompt_token_ids": [],
        "response_ids": [],
        "rewards": [],
        "loss_masks": [],
        "stop_reasons": [],
        "rollout_logprobs": [],
        "trajectory_ids": [],
        "is_last_step": [],
        "trajectory_generation_times": [],
        "env_metrics": [],
    }
    for rollout in rollouts:
        sequences = by_turn(rollout) if step_wise else by_segment(rollout)
        facts = about(rollout)
        for sequence in sequences:
            last = sequence is sequences[-1]
            reward = reward_of(rollout) if last else 0.0
            row = {
                "prompt_token_ids": sequence.prompt_ids,
                "response_ids": sequence.response_ids,
                "rewards": [*[0.0] * (len(sequence.response_ids) - 1), reward] if step_wise else reward,
                "loss_masks": sequence.loss_mask,
                "stop_reasons": sequence.finish_reason,
                "rollout_logprobs": sequence.logprobs,
                "trajectory_ids": TrajectoryID(group_id(rollout), rollout.sample),
                "is_last_step": last,
                "trajectory_generation_times": rollout.phases.get("agent", 0.0),
                "env_metrics": facts,
            }
            for name, value in row.items():
                output[name].append(value)
    return output | {"rollout_metrics": _metrics(rollouts), "rollout_expert_indices": None}


def _metrics(rollouts: Sequence[Attempt]) -> dict[str, float]:
    """Numbers that SkyRL logs; it sums or averages them over batches by their names (`avg`)."""
    turns = [rollout.trajectory.turns for rollout in rollouts if rollout.trajectory]
    return {
        "generate/avg_num_turns": sum(map(len, turns)) / max(1, len(turns)),
        "generate/num_truncated_turns": sum(turn.finish_reason == "length" for one in turns for turn in one),
        "environment/num_passed": sum(rollout.outcome.value == "passed" for rollout in rollouts),
        "environment/num_rollouts": len(rollouts),
    }


def _rows(rollouts: Sequence[Attempt], step_wise: bool) -> Iterator[Row]:
    output = _output(rollouts, step_wise)
    yield output | {"trajectory_ids": [asdict(one) for one in output["trajectory_ids"]]}


def _step_wise(rollouts: list[Attempt], _tools: object) -> Iterable[Row]:
    return _rows(rollouts, True)


def _merged(rollouts: list[Attempt], _tools: object) -> Iterable[Row]:
    return _rows(rollouts, False)


STEP_WISE = Format(
    "skyrl",
    "SkyRL's GeneratorOutput, step-wise: a line a group, a row a turn",
    "jsonl",
    NEEDS,
    CHECKED,
    _step_wise,
)
MERGED = Format(
    "skyrl-merged", "the same, a row a segment (merge_stepwise_output)", "jsonl", NEEDS, CHECKED, _merged
)
