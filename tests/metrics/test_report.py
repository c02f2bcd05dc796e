"""The report of a run, from its files alone."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollcage.metrics.report import render, summarize
from rollcage.metrics.statistics import wilson
from rollcage.metrics.terminal import dollars
from rollcage.rollout.arrow import Journal, Location, NoRun
from rollcage.rollout.outcome import BY_NAME, Evidence, Outcome
from rollcage.rollout.rows import attempts_batch, rollouts_batch
from rollcage.rollout.trajectory import Attempt, Phase, Reward, Segment, Trajectory, Turn

START = 1_700_000_000.0


def an_attempt(
    task: str,
    sample: int,
    outcome: Outcome = Outcome.PASSED,
    error_class: str | None = None,
    *,
    agent: str = "bash",
    number: int = 0,
    message: str = "",
    attempt_id: str | None = None,
) -> Attempt:
    tokens = Trajectory(
        turns=[Turn(0, "ls", "stop", 0, 10, 5, prompt_tokens=10, completion_tokens=5)],
        segments=[Segment([1] * 15, [0] * 10 + [1] * 5)],
    )
    return Attempt(
        f"{agent}/{task}/{sample}/{number}" if attempt_id is None else attempt_id,
        "demo", task, f"digest of {task}", sample, number, agent, "model", "host", outcome,
        error_class=error_class,
        stage=None if error_class is None else BY_NAME[error_class].stages[0],
        evidence=Evidence(message, "engine") if message else None,
        reward=Reward(float(outcome is Outcome.PASSED)) if outcome in (Outcome.PASSED, Outcome.FAILED) else None,
        started_at=START + sample, ended_at=START + sample + 2,
        phases={Phase.AGENT.value: 1.0 + sample, Phase.VERIFY.value: 0.5},
        infra_seconds=0.25, trajectory=tokens,
    )  # fmt: skip


def write(run: Location, attempts: list[Attempt], rollouts: list[tuple[Attempt, int, int]]) -> None:
    run.write_json("job.json", {})
    run.write_shard("attempts", [attempts_batch(attempts)])
    run.write_shard("rollouts", [rollouts_batch(rollouts)])


@pytest.fixture
def run(tmp_path: Path) -> Location:
    """Three tasks by one agent: one clean, one with infra trouble, one quarantined before its first attempt."""
    clean = [an_attempt("clean", 0), an_attempt("clean", 1, Outcome.FAILED, "turn_limit")]
    pool = [
        an_attempt("shaky", 0, Outcome.INVALID, "network_pool", number=n, message="no [bold]pool")
        for n in (0, 1)
    ]
    shaky = an_attempt("shaky", 1)
    built = [
        an_attempt("broken", k, Outcome.INVALID, "image_build", message="step 3 failed", attempt_id="")
        for k in (0, 1)
    ]
    run = Location(tmp_path / "run")
    write(
        run,
        [*clean, *pool, shaky],
        [(a, 1, 2) for a in (*clean, shaky)] + [(pool[1], 2, 2)] + [(a, 0, 2) for a in built],
    )
    return run  # fmt: skip


def shown(summary: dict[str, Any]) -> str:
    console = Console(width=150, file=io.StringIO())
    with console.capture() as capture:
        console.print(render(summary))
    return capture.get()


def test_every_rollout_is_counted_once_under_its_outcome(run: Location) -> None:
    report = summarize(run)
    assert [report[name] for name in ("rollouts", "attempts", "retries")] == [6, 5, 1]
    assert {outcome.value: report[outcome] for outcome in Outcome} == {
        "passed": 2,
        "failed": 1,
        "invalid": 3,
        "cancelled": 0,
    }
    assert report["by_error_class"] == {"turn_limit": 1, "image_build": 2, "network_pool": 1}
    assert report["by_domain"] == {"agent": 1, "task": 2, "verifier": 0, "infra": 1, "service": 0}
    assert report["attempt_errors"] == {"turn_limit": 1, "network_pool": 2}
    json.dumps(report)


def test_rates_leave_invalid_rollouts_out_and_bound_them(run: Location) -> None:
    report = summarize(run)
    assert report["pass_rate"] == pytest.approx(2 / 3)
    assert (report["pass_rate_low"], report["pass_rate_high"]) == wilson(2, 3)
    assert (report["pass_rate_worst"], report["pass_rate_best"]) == (2 / 6, 5 / 6)
    # clean: 1 of 2; shaky: 1 of 1; broken has no valid sample.
    assert report["pass_at_k"] == [
        {"k": 1, "value": 0.75, "tasks": 2, "low": 0.5, "high": 1.0},
        {"k": 2, "value": 1.0, "tasks": 1, "low": None, "high": None},
    ]
    assert report["bootstrap"] == {"confidence": 0.95, "resamples": 10_000, "seed": 0}


def test_tasks_have_their_counts_and_quarantined_ones_their_class(run: Location) -> None:
    report = summarize(run)
    broken, clean, shaky = report["tasks"]
    assert {
        key: broken[key] for key in ("task", "digest", "passed", "failed", "invalid", "error_classes")
    } == {
        "task": "broken",
        "digest": "digest of broken",
        "passed": 0,
        "failed": 0,
        "invalid": 2,
        "error_classes": {"image_build": 2},
    }
    assert broken["pass_rate"] is broken["pass_rate_low"] is None
    assert [entry["quarantined"] for entry in (broken, clean, shaky)] == ["image_build", None, None]
    assert [entry["task"] for entry in report["quarantined"]] == ["broken"]


def test_times_and_tokens_are_those_of_the_attempts(run: Location) -> None:
    report = summarize(run)
    assert report["wall_seconds"] == 3.0
    assert report["rollouts_per_second"] == 2.0
    assert (report["turns"], report["prompt_tokens"], report["completion_tokens"]) == (5, 50, 25)
    assert report["infra_seconds"] == 1.25
    assert report["phases"]["agent"] == {"count": 5, "p50": 1.0, "p95": 2.0, "total": 7.0}
    assert report["phases"]["queue"] == {"count": 0, "p50": None, "p95": None, "total": 0}
    run.write_json("summary.json", {"wall_seconds": 12.0})
    report = summarize(run)  # with Ray's start and end
    assert (report["wall_seconds"], report["rollout_seconds"], report["rollouts_per_second"]) == (
        12.0,
        3.0,
        2.0,
    )
    assert "in 3.0 s, 2.00 rollouts/s (the whole job: 12.0 s)" in shown(report)


def test_each_error_class_has_examples_of_its_evidence_that_differ(run: Location) -> None:
    evidence = summarize(run)["evidence"]
    assert {name: [example["message"] for example in examples] for name, examples in evidence.items()} == {
        "image_build": ["step 3 failed"],
        "network_pool": ["no [bold]pool"],
    }
    assert evidence["network_pool"][0]["task"] == "shaky"


def test_a_run_that_was_killed_says_so_and_counts_its_journal(run: Location) -> None:
    assert run.journal
    journal = Journal(run.journal, "rollouts")
    journal.append([rollouts_batch([(an_attempt("late", 0), 1, 1)])])
    journal.close()
    report = summarize(run)
    assert report["finished"] is False
    assert report["rollouts"] == 7
    assert "has not ended" in shown(report)
    run.write_json("summary.json", {})
    assert summarize(run)["finished"] is True
    assert "has not ended" not in shown(summarize(run))


def test_agents_of_one_run_are_counted_apart(tmp_path: Path) -> None:
    rollouts = [an_attempt("a", k, agent="oracle") for k in (0, 1)]
    rollouts += [an_attempt("a", k, Outcome.FAILED, agent="nop") for k in (0, 1)]
    run = Location(tmp_path)
    write(run, rollouts, [(attempt, 1, 2) for attempt in rollouts])
    report = summarize(run)
    assert {agent: entry["pass_rate"] for agent, entry in report["by_agent"].items()} == {
        "nop": 0.0,
        "oracle": 1.0,
    }
    assert [(entry["agent"], entry["task"], entry["rollouts"]) for entry in report["tasks"]] == [
        ("nop", "a", 2),
        ("oracle", "a", 2),
    ]
    assert report["pass_at_k"] is None
    assert report["by_agent"]["oracle"]["pass_at_k"][1]["value"] == 1.0


def test_a_task_that_was_drawn_often_counts_all_its_samples_and_no_larger_k(tmp_path: Path) -> None:
    draws = [replace(an_attempt("a", k, Outcome.FAILED if k else Outcome.PASSED), draw=draw,
                     attempt_id=f"{draw}/{k}") for draw in range(3) for k in range(2)]  # fmt: skip
    write(Location(tmp_path), draws, [(attempt, 1, 2) for attempt in draws])
    report = summarize(tmp_path)
    assert [(at["k"], at["value"]) for at in report["pass_at_k"]] == [(1, 0.5), (2, pytest.approx(0.8))]
    assert report["tasks"][0]["rollouts"] == 6


@pytest.mark.parametrize(("attempts", "quarantined"), [(0, True), (1, False), (2, True)])
def test_a_verifier_quarantines_its_task_only_after_its_retries(
    tmp_path: Path, attempts: int, quarantined: bool
) -> None:
    attempt = an_attempt("a", 0, Outcome.INVALID, "reward_missing")
    write(Location(tmp_path), [attempt], [(attempt, attempts, 1)])
    assert bool(summarize(tmp_path)["quarantined"]) is quarantined


@pytest.mark.parametrize(
    ("spoilt", "agents", "quarantined"),
    [(1, ("bash",), []), (2, ("bash",), ["bash"]), (1, ("bash", "nop"), ["bash", "nop"])],
)
def test_one_rollout_of_several_does_not_speak_for_its_task(
    tmp_path: Path, spoilt: int, agents: tuple[str, ...], quarantined: list[str]
) -> None:
    rows = [
        an_attempt("a", sample, Outcome.INVALID, "verifier_crash", agent=agent)
        if sample < spoilt
        else an_attempt("a", sample, agent=agent)
        for agent in agents
        for sample in range(3)
    ]
    write(Location(tmp_path), rows, [(row, 2 if row.error_class else 1, 3) for row in rows])
    assert [entry["agent"] for entry in summarize(tmp_path)["quarantined"]] == quarantined


def test_a_run_in_which_nothing_has_ended_yet_has_a_report(tmp_path: Path) -> None:
    Location(tmp_path).write_json("job.json", {})
    report = summarize(tmp_path)
    assert report["rollouts"] == report["attempts"] == 0
    assert report["pass_rate"] is report["wall_seconds"] is report["rollouts_per_second"] is None
    assert "0 rollouts" in shown(report)
    with pytest.raises(NoRun):
        summarize(tmp_path / "nothing")


def test_the_table_shows_what_a_person_asks_first(run: Location) -> None:
    text = shown(summarize(run))
    for expected in (
        "6 rollouts, 5 attempts (retries: 1) in 3.0 s, 2.00 rollouts/s",
        "66.7%",
        "20.8-93.9%",
        "33.3-83.3%",
        "50.0-100.0%",
        "quarantined:",
        "2 image_build",
        "network_pool",
        "no [bold]pool",
        "shaky #0 (bash)",
        "step 3 failed",
        "lost to infra (waiting for the policy)",
    ):
        assert expected in text, text


@pytest.mark.parametrize(
    ("amount", "said"),
    [
        (0.0, "$0.00"), (0.002, "$0.0020"), (0.0050148, "$0.0050"), (0.5, "$0.50"), (1.5e-6, "$0.0000015"),
        (1.0, "$1.00"), (1234.567, "$1,234.57"),
    ],
)  # fmt: skip
def test_money_is_shown_with_the_digits_that_say_something(amount: float, said: str) -> None:
    assert dollars(amount) == said
