"""Rewards as verifiers really write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcage.rollout.outcome import VerifierError
from rollcage.rollout.task import Environment, Step, Task
from rollcage.rollout.trajectory import Reward
from rollcage.verifier.reward import REWARD_BYTES, below_min_reward, combine_steps, read_reward


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"1.0\n", 1.0),
        (b" 1", 1.0),
        (b"1", 1.0),
        (b"0", 0.0),
        (b"-0.5", -0.5),
        (b"+.5", 0.5),
        (b"1.", 1.0),
        (b"1e-3\r\n", 0.001),
        (b"\n\t0.25\n\n", 0.25),
        (b"1e308", 1e308),
        (b"1e-400", 0.0),
    ],
)
def test_a_number_in_reward_txt_is_the_reward(text: bytes, value: float) -> None:
    reward = read_reward(text, None)
    assert (reward.value, reward.values, reward.source) == (value, {"reward": value}, "reward.txt")


@pytest.mark.parametrize(
    "text",
    [
        b"", b"\n", b"nan", b"NaN", b"inf", b"-inf", b"Infinity", b"1e309", b"-1e309", b"True", b"true",
        b"0x1", b"1_000", b"1,5", "١".encode(), "１".encode(), b"1 1", b"1.0\n1.0", b"passed", b"1.0.0",
        b"\xff\xfe1", b"\xef\xbb\xbf1", b"1\x00", b"1e", b".", b"-", b"1" * 400, b"1" * (REWARD_BYTES + 1),
        "\u00a01".encode(),
    ],
)  # fmt: skip
def test_anything_else_in_reward_txt_is_malformed_and_never_0(text: bytes) -> None:
    with pytest.raises(VerifierError) as caught:
        read_reward(text, None)
    assert caught.value.error_class == "reward_malformed"
    assert "reward.txt" in str(caught.value)


def test_no_file_at_all_is_missing() -> None:
    with pytest.raises(VerifierError) as caught:
        read_reward(None, None)
    assert caught.value.error_class == "reward_missing"


@pytest.mark.parametrize(
    ("text", "value", "values"),
    [
        (b"1", 1.0, {"reward": 1.0}),
        (b"0.5\n", 0.5, {"reward": 0.5}),
        (b'{"reward": 1}', 1.0, {"reward": 1.0}),
        (b'{"score": 0.25}', 0.25, {"score": 0.25}),
        (b'{"correctness": 0, "reward": 1.0}', 1.0, {"correctness": 0.0, "reward": 1.0}),
        (b'{"reward": true, "built": false}', 1.0, {"reward": 1.0, "built": False}),
    ],
)
def test_reward_json_keeps_every_key(text: bytes, value: float, values: dict[str, float]) -> None:
    reward = read_reward(None, text)
    assert (reward.value, reward.values, reward.source) == (value, values, "reward.json")
    assert all(type(number) is float for number in reward.values.values())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b"{}", "no keys"),
        (b'{"reward": 1, "reward": 0}', "twice"),
        (b'{"a": {"b": 1, "b": 2}}', "twice"),
        (b'{"reward": {"value": 1}}', "an object"),
        (b'{"reward": [1]}', "a list"),
        (b"[1]", "a list"),
        (b'{"reward": "1"}', "a string"),
        (b'{"reward": null}', "null"),
        (b'{"reward": 1, "why": "all passed"}', "'why'"),
        (b'{"reward": NaN}', "NaN"),
        (b'{"reward": -Infinity}', "Infinity"),
        (b'{"reward": 1e309}', "finite"),
        (b'{"reward": 1' + b"0" * 400 + b"}", "finite"),
        (b'{"reward": 1' + b"0" * 5000 + b"}", "not JSON"),
        (b'{"reward": 1', "not JSON"),
        (b"1.0 1.0", "not JSON"),
        (b'{"reward": 1_000}', "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 500_000, "not JSON"),
        (b" " * (REWARD_BYTES + 1), "bytes long"),
    ],
)
def test_any_other_reward_json_is_malformed_and_says_why(text: bytes, says: str) -> None:
    with pytest.raises(VerifierError) as caught:
        read_reward(b"1.0", text)
    assert caught.value.error_class == "reward_malformed"
    assert says in str(caught.value)
    assert caught.value.evidence.size() < 1000


def test_with_both_files_there_json_wins() -> None:
    assert read_reward(b"0", b'{"reward": 1}').value == 1.0


def test_the_jobs_reward_key_chooses_among_many_keys() -> None:
    both = b'{"tests": 0.5, "style": 0.25}'
    assert read_reward(None, both, reward_key="style").value == 0.25
    assert read_reward(None, b'{"tests": 0.5, "reward": 1}', reward_key="tests").value == 1.0
    assert read_reward(None, b'{"tests": 0.5}', reward_key="other").value == 0.5
    for key in (None, "speed"):
        with pytest.raises(VerifierError, match=r"tests, style") as caught:
            read_reward(None, both, reward_key=key)
        assert caught.value.error_class == "reward_malformed"


def make_task(*floors: float | dict[str, float] | None, strategy: str = "mean") -> Task:
    steps = tuple(
        Step(name, "do it", Path("tests"), None, min_reward=floor)
        for name, floor in zip(("one", "two", "three", "four"), floors, strict=False)
    )
    return Task("t", Path("t"), "0" * 64, Environment(None, "image"), steps, strategy)


def combine(task: Task, *rewards: Reward) -> Reward:
    return combine_steps(task, list(zip(task.steps, rewards, strict=False)))


def test_a_task_of_one_step_keeps_its_reward() -> None:
    reward = Reward(0.5, {"reward": 0.5}, test_ids=("a",))
    assert combine(make_task(None), reward) is reward


def test_mean_is_taken_key_by_key_over_the_steps_that_ran() -> None:
    combined = combine(
        make_task(None, 0.5, None),
        Reward(1.0, {"reward": 1.0, "speed": 4.0}, test_ids=("a",)),
        Reward(0.0, {"reward": 0.0}, test_ids=("b",)),
    )
    assert combined.value == 0.5
    assert combined.values == {"reward": 0.5, "speed": 2.0}
    assert combined.steps == (("one", 1.0), ("two", 0.0))
    assert combined.skipped_steps == ("three",)
    assert combined.test_ids == ("a", "b")


def test_all_steps_passed_is_exactly_1() -> None:
    assert combine(make_task(None, None, None), *[Reward(1.0, {"reward": 1.0})] * 3).value == 1.0


def test_final_is_the_last_step_that_ran() -> None:
    task = make_task(None, None, strategy="final")
    combined = combine(task, Reward(1.0, {"reward": 1.0}), Reward(0.25, {"reward": 0.25}))
    assert (combined.value, combined.skipped_steps) == (0.25, ())
    assert combined.steps == (("one", 1.0), ("two", 0.25))


def test_the_steps_after_a_floor_that_was_missed_are_listed_as_skipped() -> None:
    task = make_task(None, 0.5, 0.5, None)
    rewards = [Reward(1.0, {"reward": 1.0}), Reward(0.5, {"reward": 0.5}), Reward(0.0, {"reward": 0.0})]
    floors = [
        below_min_reward(reward, step.min_reward) for step, reward in zip(task.steps, rewards, strict=False)
    ]
    assert floors[:2] == [None, None]
    assert floors[2] is not None
    assert combine(task, *rewards).skipped_steps == ("four",)


def test_no_reward_cannot_be_combined() -> None:
    with pytest.raises(ValueError, match="no reward"):
        combine(make_task(None))


def test_min_reward_as_a_number_and_as_a_table() -> None:
    reward = Reward(0.5, {"reward": 0.5, "safety": 1.0})
    assert below_min_reward(reward, None) is None
    assert below_min_reward(reward, 0.5) is None
    assert "0.5, below min_reward 0.75" in str(below_min_reward(reward, 0.75))
    assert below_min_reward(reward, {"reward": 0.5, "safety": 1.0}) is None
    assert "safety is 1" in str(below_min_reward(reward, {"safety": 2.0}))
    assert "speed is not in the reward" in str(below_min_reward(reward, {"speed": 0.0}))
