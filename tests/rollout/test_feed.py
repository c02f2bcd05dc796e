"""What a trainer reads from a run: whole groups of valid rollouts, quickly and with little."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollcage.rollout.arrow import Journal, Location, NoRun
from rollcage.rollout.feed import read_groups
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.rows import rollouts_batch
from rollcage.rollout.trajectory import Attempt, Reward, Segment, Trajectory


def a_rollout(
    task: str, sample: int, outcome: Outcome = Outcome.PASSED, agent: str = "bash", size: int = 3
) -> tuple[Attempt, int, int]:
    invalid = outcome is Outcome.INVALID
    attempt = Attempt(
        f"{agent}-{task}-{sample}", "demo", task, "d", sample, 0, agent, "model", "host", outcome,
        error_class="network_pool" if invalid else None,
        reward=None if invalid else Reward(float(outcome is Outcome.PASSED)),
        trajectory=Trajectory(segments=[Segment([sample], [1], [-0.5])]),
    )  # fmt: skip
    return attempt, 1, size


def a_run(path: Path) -> Location:
    run = Location(path)
    run.write_json("job.json", {})
    return run


def samples(run: Location, group: str = "complete") -> list[tuple[str, str, list[int]]]:
    return [
        (table["agent"][0].as_py(), table["task"][0].as_py(), table["sample"].to_pylist())
        for table in read_groups(run, group)  # type: ignore[arg-type]
    ]


def test_only_whole_valid_groups_are_read(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    whole = [a_rollout("whole", 0), a_rollout("whole", 1, Outcome.FAILED), a_rollout("whole", 2)]
    broken = [a_rollout("broken", 0), a_rollout("broken", 1, Outcome.INVALID), a_rollout("broken", 2)]
    lost = [a_rollout("lost", sample, Outcome.INVALID) for sample in range(3)]
    run.write_shard("rollouts", [rollouts_batch(whole), rollouts_batch(broken), rollouts_batch(lost)])
    assert samples(run) == [("bash", "whole", [0, 1, 2])]
    assert samples(run, "any") == [("bash", "whole", [0, 1, 2]), ("bash", "broken", [0, 2])]
    [group] = read_groups(run)
    assert group["reward"].to_pylist() == [1.0, 0.0, 1.0]
    assert group["segments"][2].as_py() == [{"ids": [2], "loss_mask": [1], "logprobs": [-0.5]}]


def test_a_group_in_pieces_and_in_the_journal_is_put_together_in_order(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    run.write_shard("rollouts", [rollouts_batch([a_rollout("a", 2), a_rollout("b", 0)])])
    run.write_shard("rollouts", [rollouts_batch([a_rollout("b", 1), a_rollout("b", 2), a_rollout("a", 0)])])
    assert run.journal
    journal = Journal(run.journal, "rollouts")
    journal.append([rollouts_batch([a_rollout("a", 1)])])
    journal.close()
    assert samples(run) == [("bash", "b", [0, 1, 2]), ("bash", "a", [0, 1, 2])]


def test_the_same_task_by_two_agents_is_two_groups(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    rows = [a_rollout("a", sample, agent=agent) for sample in range(3) for agent in ("bash", "oracle")]
    run.write_shard("rollouts", [rollouts_batch(rows)])
    assert samples(run) == [("bash", "a", [0, 1, 2]), ("oracle", "a", [0, 1, 2])]


def test_what_is_no_run_or_no_kind_of_group_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRun):
        next(read_groups(tmp_path))
    with pytest.raises(ValueError, match="'complete' or 'any'"):
        next(read_groups(a_run(tmp_path), "all"))  # type: ignore[arg-type]


def test_each_draw_of_a_task_is_a_group_of_its_own(tmp_path: Path) -> None:
    run = a_run(tmp_path)
    for draw in range(2):
        rows = [a_rollout("a", sample) for sample in range(3)]
        run.write_shard("rollouts", [rollouts_batch([(replace(one, draw=draw), 1, 3) for one, _, _ in rows])])
    assert [group["draw"].to_pylist() for group in read_groups(run)] == [[0] * 3, [1] * 3]
