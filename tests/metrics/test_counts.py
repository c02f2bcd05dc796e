"""What a source counts: complete from the start, closed, cumulative."""

from __future__ import annotations

import math

import pytest

from rollcage.metrics.counts import Buckets, Counts, UnknownLabel
from rollcage.metrics.definitions import BY_NAME, FAMILIES, MOST, Kind, Sender
from rollcage.metrics.exporter import Exporter
from rollcage.metrics.job_counts import JobCounts, RolloutState, ending
from rollcage.rollout.outcome import TABLE, ErrorClass, Outcome
from rollcage.rollout.trajectory import Attempt, Trajectory, Turn


def a_host() -> Counts:
    return Counts(Sender.HOST, {"host": ["host-1"]})


@pytest.mark.parametrize("sender", Sender)
def test_every_series_is_there_at_zero_from_the_start(sender: Sender) -> None:
    declared = {"host": ("host-1",), "agent": ("a", "b"), "policy": ("p",), "job_id": ("j",)}
    snapshot = Counts(sender, declared).snapshot()
    for family in FAMILIES:
        if family.sender is not sender:
            continue
        series = set(family.series(declared))
        if family.kind is Kind.HISTOGRAM:
            assert set(snapshot.histograms[family.name]) == series
            assert not any(one.total for one in snapshot.histograms[family.name].values())
        else:
            assert snapshot.values[family.name] == dict.fromkeys(series, 0.0)


def test_a_thousand_task_names_are_refused_and_leave_no_series() -> None:
    counts = Counts(Sender.JOB, {"agent": ["oracle"], "policy": ["p"], "job_id": ["j"]})
    before = counts.snapshot()
    for task in (f"task-{number}" for number in range(1000)):
        with pytest.raises(UnknownLabel):
            counts.add("attempts", "passed", "none", "none", task)
        with pytest.raises(UnknownLabel):
            counts.set("job_rollouts", 1, task)
        with pytest.raises(UnknownLabel):
            counts.observe("policy_queue_seconds", 1, task)
    after = counts.snapshot()
    assert (after.values, after.histograms) == (before.values, before.histograms)


def test_what_a_sandbox_printed_is_no_error_class() -> None:
    printed = "could not find an available, non-overlapping IPv4 address pool"
    assert ending(Outcome.INVALID, printed) == ("invalid", "service", "internal_error")
    with pytest.raises(UnknownLabel, match="no such series"):
        Counts(Sender.JOB, {"agent": ["a"]}).add("attempts", "invalid", "infra", printed, "a")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_every_error_class_can_be_counted_with_every_outcome(row: ErrorClass) -> None:
    counts = Counts(Sender.JOB, {"agent": ["a"]})
    for outcome in Outcome:
        counts.add("attempts", *ending(outcome, row.name), "a")
    counted = {labels: value for labels, value in counts.snapshot().values["attempts"].items() if value}
    assert len(counted) == len(Outcome)
    own = {labels[0] for labels in counted if labels[2] == row.name}
    assert own == (
        {"passed", "failed"} if row.reward_valid else {"cancelled" if row.name == "cancelled" else "invalid"}
    )


def test_a_counter_never_falls() -> None:
    with pytest.raises(ValueError, match="never falls"):
        a_host().add("image_builds", "built", amount=-1)


def test_a_host_counts_nothing_of_a_job() -> None:
    with pytest.raises(UnknownLabel, match="a host counts no 'attempts'"):
        a_host().add("attempts", "passed", "none", "none", "a")


@pytest.mark.parametrize("value", [0.0, 0.005, 0.0051, 30.0, 31.0])
def test_a_value_is_in_the_first_bucket_whose_bound_is_not_below_it(value: float) -> None:
    counts = a_host()
    counts.observe("sandbox_remove_seconds", value)
    one = counts.snapshot().histograms["sandbox_remove_seconds"][()]
    bounds = [*BY_NAME["sandbox_remove_seconds"].buckets, float("inf")]
    assert one == Buckets([int(bound == min(b for b in bounds if b >= value)) for bound in bounds], value)


def test_a_snapshot_stays_as_it_was_and_has_the_next_number() -> None:
    counts = a_host()
    before = counts.snapshot()
    counts.add("image_builds", "built")
    counts.observe("sandbox_remove_seconds", 1)
    after = counts.snapshot()
    assert (before.values["image_builds"]["built",], after.values["image_builds"]["built",]) == (0, 1)
    assert (before.number, after.number) == (1, 2)
    assert before.histograms["sandbox_remove_seconds"][()].total == 0


@pytest.mark.parametrize("spoil", ["series", "declared", "too many", "buckets"])
def test_a_snapshot_that_was_tampered_with_is_refused(spoil: str) -> None:
    snapshot = a_host().snapshot()
    if spoil == "series":
        snapshot.values["image_builds"]["task-1",] = 1
    elif spoil == "declared":
        snapshot.declared["task"] = ("task-1",)
    elif spoil == "too many":
        snapshot.declared["host"] = tuple(map(str, range(65)))
    else:
        snapshot.histograms["sandbox_remove_seconds"][()].counts.append(0)
    with pytest.raises(UnknownLabel):
        snapshot.check()


def test_a_job_that_has_just_begun_is_not_one_without_progress() -> None:
    values = JobCounts("j", ["a"], []).snapshot().values
    assert (
        values["job_progress_timestamp_seconds"] == values["job_started_timestamp_seconds"] != {("j",): 0.0}
    )


def test_a_resumed_job_counts_what_its_ledger_holds() -> None:
    counts = JobCounts("j", ["a"], [])
    counts.resumed(
        attempts=[
            ("1", "a", "passed", None),
            ("2", "a", "invalid", "network_pool"),
            ("3", "a", "failed", "turn_limit"),
            ("4", "a", "invalid", "reward_missing"),
            ("5", "gone", "passed", None),
        ],
        rollouts=[
            ("1", "a", "passed", None, 2),
            ("3", "a", "failed", "turn_limit", 1),
            ("4", "a", "invalid", "reward_missing", 1),
            ("5", "gone", "passed", None, 1),
        ],
        groups=[("a", [1.0, 0.0], 2), ("a", [1.0, 1.0], 2), ("a", [1.0], 2)],
    )
    counts.state(RolloutState(1, 2, 3), total=8, ended=2)
    values = counts.snapshot().values
    assert values["attempts_dispatched"] == values["attempts_ended"] == {(): 5.0}
    assert values["retries"]["infra", "network_pool"] == sum(values["retries"].values()) == 1
    assert {key: count for key, count in values["groups"].items() if count} == {
        ("complete", "a"): 2.0,
        ("short", "a"): 1.0,
    }
    assert values["groups_zero_variance"]["a",] == 1
    assert values["rollouts"]["passed", "none", "none", "gone"] == 1
    assert values["rollouts"]["failed", "agent", "turn_limit", "a"] == 1
    assert values["rollouts_open"] == {("waiting",): 1.0, ("delayed",): 2.0, ("in_flight",): 3.0}


def test_agents_and_policies_past_the_most_are_counted_together_whatever_they_are_set_to() -> None:
    names = [f"a{number}" for number in range(100)]
    counts, exporter = JobCounts("j", names, names), Exporter()
    for number, name in enumerate(names):
        counts.rollout(name, Outcome.PASSED, None, trajectory=True)
        counts.policy(
            name, version=number, running=2, waiting=0, kv_use=0.5, replicas={"lost": 1}, restarts=3
        )
    exporter.accept("j", counts.snapshot(), incarnation="1")

    def found(name: str, label: str, **only: str) -> dict[str, float]:
        samples = (sample for metric in exporter.collect() for sample in metric.samples)
        return {
            sample.labels[label]: sample.value
            for sample in samples
            if sample.name == f"rollcage_{name}" and only.items() <= sample.labels.items() and sample.value
        }

    passed = found("rollouts_total", "agent", outcome="passed")
    assert len(passed) == MOST["agent"]
    assert (passed["a0"], passed["other"]) == (1, 85)
    assert found("policy_replica_restarts_total", "policy") == {
        **dict.fromkeys(names[: MOST["policy"] - 1], 3),
        "other": 3 * 93,
    }
    assert found("policy_replicas", "policy", state="lost")["other"] == 93
    assert found("policy_version", "policy")["other"] == 99


def test_a_run_that_goes_on_with_other_agents_in_front_is_counted_once() -> None:
    exporter = Exporter()

    def total(name: str) -> float:
        samples = (sample for metric in exporter.collect() for sample in metric.samples)
        return sum(sample.value for sample in samples if sample.name == f"rollcage_{name}_total")

    earlier, now = [f"a{n}" for n in range(10)], [f"n{n}" for n in range(20)]
    attempts: list[tuple[str, str, str, str | None]] = []
    for incarnation, agents in enumerate((earlier, [*now, *earlier], [*earlier[::-1], *now])):
        counts = JobCounts("j", agents, [])
        counts.resumed(attempts, [(*row, 1) for row in attempts], [])
        for agent in agents:
            attempts.append((f"{incarnation}-{agent}", agent, "passed", None))
            counts.rollout(agent, Outcome.PASSED, None, trajectory=True)
        exporter.accept("j", counts.snapshot(), incarnation=str(incarnation))
        assert total("rollouts") == len(attempts)


def test_time_lost_to_infra_is_all_of_what_an_infra_error_ended_and_waits_for_the_policy_of_others() -> None:
    counts = JobCounts("j", ["a"], [])
    for number, (outcome, error_class) in enumerate(
        [
            (Outcome.PASSED, None),
            (Outcome.FAILED, "turn_limit"),
            (Outcome.INVALID, "reward_missing"),
            (Outcome.INVALID, "container_lost"),
        ]
    ):
        attempt = Attempt(f"{number}-1", "j", "t", "d", 0, 1, "a", "p", "h", outcome, error_class)
        attempt.infra_seconds, attempt.phases = 0.25, {"agent": 8.0, "start": 64.0}
        counts.attempt(attempt)
    assert counts.snapshot().values["infra_lost_seconds"] == {(): 8.75}


def test_what_a_strange_server_says_ends_no_job() -> None:
    counts = JobCounts("j", ["a"], ["p"])
    turn = Turn(0, "", "stop", policy="p", cached_tokens=-3, queue_seconds=math.nan, cost_usd=-1.0)
    elsewhere = Turn(1, "", "stop", policy="not of this job")
    attempt = Attempt("1", "j", "t", "d", 0, 1, "a", "p", "h", Outcome.PASSED)
    attempt.trajectory = Trajectory(turns=[turn, elsewhere])
    counts.attempt(attempt)
    snapshot = counts.snapshot()
    assert snapshot.values["policy_turns"] == {("p",): 1.0}
    assert snapshot.values["policy_cost_usd"] == {("p",): 0.0}
    assert snapshot.histograms["policy_queue_seconds"]["p",].sum == 0
