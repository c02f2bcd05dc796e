"""Two runs, paired by task."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from simulated import an_attempt, write

from rollcage.metrics.comparison import NotComparable, compare, render
from rollcage.metrics.statistics import pass_at_k
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.trajectory import Attempt, Trajectory

OUTCOMES = {"p": (Outcome.PASSED, None), "f": (Outcome.FAILED, None), "i": (Outcome.INVALID, "network_pool")}


def a_run(run: Path, tasks: dict[str, str], agent: str = "bash", chance: random.Random | None = None) -> Path:
    """Tasks with a letter for each sample: p(assed), f(ailed), i(nvalid); in any order, where `chance` says so."""
    rows: list[tuple[Attempt, int, int]] = []
    for task, samples in tasks.items():
        for sample, end in enumerate(samples):
            attempt = an_attempt(task, sample, *OUTCOMES[end], agent=agent)
            rows.append((replace(attempt, trajectory=Trajectory()), 1, len(samples)))
    if chance:
        chance.shuffle(rows)
    return write(run, [attempt for attempt, _, _ in rows], rows)


def shown(comparison: dict[str, Any]) -> str:
    console = Console(width=150, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(comparison))
    return capture.get()


A = {"one": "pfff", "two": "ppff", "three": "ffff", "gone": "pppp"}
B = {"one": "pppf", "two": "ppff", "three": "pfff", "new": "ffff"}


def test_a_difference_is_that_of_the_tasks_that_both_have(tmp_path: Path) -> None:
    found = compare(a_run(tmp_path / "a", A), a_run(tmp_path / "b", B))
    assert (found["tasks"], found["only_a"], found["only_b"], found["changed"]) == (3, ["gone"], ["new"], [])
    first, second, *_, last = found["pass_at_k"]
    assert [first[name] for name in ("k", "tasks", "a", "b")] == [
        1,
        3,
        pytest.approx(0.25),
        pytest.approx(0.5),
    ]
    assert first["difference"] == pytest.approx(0.25)
    # By hand: differences 1/2, 0, 1/4; of the four flips of those that differ, two are as far from 0 as 3/4.
    assert (first["p"], first["exact"]) == (0.5, True)
    assert 0 <= first["low"] < 0.25 < first["high"] <= 0.5
    assert second["a"] == pytest.approx((pass_at_k(4, 1, 2) + pass_at_k(4, 2, 2)) / 3)
    assert (last["k"], last["a"], last["b"]) == (4, pytest.approx(2 / 3), pytest.approx(1.0))
    assert [entry["difference"] for entry in found["by_task"]] == [0.5, 0.25, 0.0]
    assert found["difference_worst"] == found["difference_best"] == pytest.approx(0.25)
    json.dumps(found)
    text = shown(found)
    for part in ("25.0%", "50.0%", "+25.0", "0.500", "Only in A: gone", "Only in B: new", "1/4", "3/4"):
        assert part in text, text


def test_invalid_rollouts_are_in_no_pair_and_bound_the_difference(tmp_path: Path) -> None:
    found = compare(
        a_run(tmp_path / "a", {"t": "pfi", "u": "iii"}), a_run(tmp_path / "b", {"t": "pii", "u": "ppp"})
    )
    [first] = found["pass_at_k"][:1]
    assert (first["tasks"], first["a"], first["b"], first["low"]) == (1, 0.5, 1.0, None)
    # t: A is 1/3 to 2/3 and B 1/3 to 1; u: A is 0 to 1 and B 1.
    assert found["difference_worst"] == pytest.approx((-1 / 3 + 0) / 2)
    assert found["difference_best"] == pytest.approx((2 / 3 + 1) / 2)
    assert "differs by -16.7 to +83.3 points" in shown(found)


@settings(deadline=None, max_examples=8)
@given(st.randoms())
def test_no_order_of_return_changes_a_comparison(
    tmp_path_factory: pytest.TempPathFactory, chance: random.Random
) -> None:
    tmp_path = tmp_path_factory.mktemp("order")
    once = compare(a_run(tmp_path / "a", A), a_run(tmp_path / "b", B))
    again = compare(a_run(tmp_path / "c", A, chance=chance), a_run(tmp_path / "d", B, chance=chance))
    for found in (once, again):
        for side in "ab":
            found[side].pop("run")
    assert once == again


def test_the_same_run_differs_from_itself_by_nothing(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a", A)
    found = compare(run, run)
    assert {(at["difference"], at["p"]) for at in found["pass_at_k"]} == {(0.0, 1.0)}


def test_agents_with_other_names_are_compared_where_it_is_clear_which(tmp_path: Path) -> None:
    a, b = a_run(tmp_path / "a", A, "bash"), a_run(tmp_path / "b", B, "tools")
    assert [compare(a, b)[side]["agent"] for side in "ab"] == ["bash", "tools"]
    with pytest.raises(NotComparable, match="rollouts of tools: name one by --agent-b"):
        compare(a, b, agent_b="bash")


def test_tasks_that_changed_are_left_out_and_named(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", A)
    changed = [replace(an_attempt(task, 0, Outcome.PASSED), task_digest="another") for task in A]
    b = write(tmp_path / "b", changed, [(attempt, 1, 4) for attempt in changed])
    with pytest.raises(NotComparable, match="all 4 common tasks changed: --changed-tasks"):
        compare(a, b)
    assert compare(a, b, changed_tasks=True)["changed"] == sorted(A)
    with pytest.raises(NotComparable, match="no task in common"):
        compare(a, a_run(tmp_path / "c", {"other": "p"}))
