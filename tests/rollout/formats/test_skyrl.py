"""SkyRL's own code takes what is written for it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from rollcage.rollout.feed import Feed
from rollcage.rollout.formats import Unfit, skyrl

STAND_INS = (
    "skyrl.backends", "skyrl.train.config", "skyrl.train.dataset", "skyrl.train.utils.utils",
    "skyrl.train.generators.skyrl_gym_generator", "skyrl.train.generators.skyrl_vlm_generator",
    "torch", "ray", "transformers", "torchdata", "skyrl_gym",
)  # fmt: skip

VALIDATE = """
from skyrl.train.generators.base import TrajectoryID
from skyrl.train.generators.utils import concatenate_generator_outputs, merge_stepwise_output
from skyrl.train.utils.trainer_utils import validate_generator_output
for output in given.values():
    output["trajectory_ids"] = [TrajectoryID(**one) for one in output["trajectory_ids"]]
validate_generator_output(len(given["turns"]["response_ids"]), given["turns"], step_wise=True)
validate_generator_output(len(given["merged"]["response_ids"]), given["merged"], step_wise=True)
validate_generator_output(2, given["plain"], step_wise=False)
refused = []
broken = given["turns"] | {"is_last_step": [not one for one in given["turns"]["is_last_step"]]}
try:
    validate_generator_output(len(broken["response_ids"]), broken, step_wise=True)
except AssertionError as error:
    refused.append(str(error))
merged = merge_stepwise_output(given["turns"])
both = concatenate_generator_outputs([given["turns"], given["turns"] | {"trajectory_ids": [
    TrajectoryID("another", one.repetition_id) for one in given["turns"]["trajectory_ids"]]}], step_wise=True)
names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs", "is_last_step", "stop_reasons")
result = {name: merged[name] for name in names} | {
    "ids": [one.to_string() for one in merged["trajectory_ids"]], "rewards": [sum(one) for one in merged["rewards"]],
    "both": len(both["response_ids"]), "metrics": both["rollout_metrics"], "refused": refused,
}
"""


def as_json(output: dict[str, Any]) -> dict[str, Any]:
    return output | {"trajectory_ids": [asdict(one) for one in output["trajectory_ids"]]}


def test_skyrl_takes_turns_and_merges_them_to_what_we_merge(table: Any, shapes: Any, in_package: Any) -> None:
    rollouts = table(
        shapes.attempt(shapes.summed_up()),
        shapes.attempt(shapes.text_turns(), sample=1, reward=0.0),
        shapes.attempt(shapes.tool_turns(), sample=2, reward=0.5),
    )
    turns = skyrl.generator_output(rollouts)
    merged = skyrl.generator_output(rollouts, step_wise=False)
    plain = skyrl.generator_output(rollouts.slice(1), step_wise=False)
    given = {"turns": as_json(turns), "merged": as_json(merged), "plain": as_json(plain)}

    theirs = in_package("skyrl", VALIDATE, given, STAND_INS)

    for name in (
        "prompt_token_ids",
        "response_ids",
        "loss_masks",
        "rollout_logprobs",
        "is_last_step",
        "rewards",
    ):
        assert theirs[name] == merged[name], name
    assert theirs["stop_reasons"] == merged["stop_reasons"]
    assert theirs["ids"] == [one.to_string() for one in merged["trajectory_ids"]]
    assert theirs["both"] == 16
    assert theirs["metrics"]["generate/avg_num_turns"] == pytest.approx(8 / 3)
    assert theirs["metrics"]["environment/num_passed"] == 2
    assert len(theirs["refused"]) == 1, "its validation can fail"


def test_a_turns_prompt_is_what_the_engine_saw_and_the_mask_is_exact(table: Any, shapes: Any) -> None:
    rollouts = table(shapes.attempt(shapes.text_turns(), sample=3, draw=2, reward=0.25))

    turns = skyrl.generator_output(rollouts)
    assert turns["prompt_token_ids"] == [
        [10, 11, 12, 13, 14, 15],
        [10, 11, 12, 13, 14, 15, 1010, 1011, 18, 19, 20],
    ]
    assert turns["response_ids"] == [[1010, 1011], [1010, 1011, 1012]]
    assert turns["loss_masks"] == [[1, 1], [1, 1, 1]]
    assert turns["rewards"] == [[0.0, 0.0], [0.0, 0.0, 0.25]]
    assert turns["is_last_step"] == [False, True]
    assert {one.to_string() for one in turns["trajectory_ids"]} == {"demo/bash/count-lines/2_3"}

    (mask,) = skyrl.generator_output(rollouts, step_wise=False)["loss_masks"]
    assert mask == [1, 1, 0, 0, 0, 1, 1, 1]


def test_an_answer_that_was_cut_says_so_and_one_without_a_token_is_no_row(table: Any, shapes: Any) -> None:
    trajectory = shapes.text_turns()
    trajectory.turns[0].finish_reason = "length"
    trajectory.turns[1].completion_len = 0
    segment = trajectory.segments[0]
    segment.ids, segment.loss_mask, segment.logprobs = (
        one[:-3] for one in (segment.ids, segment.loss_mask, segment.logprobs)
    )
    turns = skyrl.generator_output(table(shapes.attempt(trajectory)))
    assert turns["stop_reasons"] == ["length"]
    assert turns["is_last_step"] == [True]
    assert turns["rewards"] == [[0.0, 1.0]]


def test_a_feeds_group_is_taken_as_it_comes(write_run: Any, shapes: Any) -> None:
    run = write_run(
        [shapes.attempt(shapes.text_turns(), sample=n, reward=float(n)) for n in (0, 1)],
        [shapes.attempt(shapes.tool_turns(), "calls")],
    )
    with Feed(run, follow=False) as feed:
        outputs = [skyrl.generator_output(group.table) for group in feed]
    assert [[one.repetition_id for one in output["trajectory_ids"]] for output in outputs] == [
        [0, 0, 1, 1],
        [0, 0],
    ]


@pytest.mark.parametrize(
    ("reward", "ids", "why"),
    [(1.0, False, "token ids"), (None, True, "no valid reward: invalid .image_build.")],
)
def test_a_rollout_that_cannot_be_trained_on_is_refused_by_name(
    table: Any, shapes: Any, reward: float | None, ids: bool, why: str
) -> None:
    trajectory = shapes.text_turns() if ids else shapes.without_ids(shapes.text_turns())
    with pytest.raises(Unfit, match=rf"demo/bash/count-lines/0/0: .*{why}"):
        skyrl.generator_output(table(shapes.attempt(trajectory, reward=reward)))
