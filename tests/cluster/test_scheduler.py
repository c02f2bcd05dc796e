"""The scheduler in simulated worlds: time is a number, attempts give what a table says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from heapq import heappop, heappush
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollcage.cluster.retries import RETRY_AFTER_CAP_SEC, Retries, row_of
from rollcage.cluster.scheduler import Assignment, Preparation, RolloutEnd, RolloutKey, Scheduler, TaskKey
from rollcage.rollout.outcome import BY_NAME, TABLE, Domain, Outcome, Quarantine

PASSED = (Outcome.PASSED, None)
FAILED = (Outcome.FAILED, None)
INFRA = [row.name for row in TABLE if row.domain is Domain.INFRA]
RESULTS = [
    PASSED,
    FAILED,
    (Outcome.FAILED, "agent_timeout"),
    *((Outcome.INVALID, row.name) for row in TABLE if not row.reward_valid and row.name != "cancelled"),
]

Result = tuple[Outcome, str | None]


def keys(tasks: int, samples: int, agents: tuple[str, ...] = ("a",)) -> list[RolloutKey]:
    return [
        RolloutKey("job", agent, f"task{task}", f"digest{task}", sample)
        for task in range(tasks)
        for agent in agents
        for sample in range(samples)
    ]


def task_key(number: int) -> TaskKey:
    return TaskKey(f"task{number}", f"digest{number}")


class World:
    """Runs a scheduler to its end. `attempt` and `build` say what each try gives, `seconds` how long it takes."""

    def __init__(
        self,
        scheduler: Scheduler,
        attempt: Callable[[Assignment], Result] = lambda _: PASSED,
        build: Callable[[Preparation], str | None] = lambda _: None,
        seconds: Callable[[str], float] = lambda _: 1.0,
    ) -> None:
        self.scheduler = scheduler
        self.attempt, self.build, self.seconds = attempt, build, seconds
        self.now = 0.0
        self.events: list[tuple[float, int, Assignment | Preparation]] = []
        self.sequence = count()
        self.assignments: list[Assignment] = []
        self.preparations: list[Preparation] = []
        self.ends: list[RolloutEnd] = []
        self.dispatched_at: dict[str, float] = {}
        self.retry_at: dict[RolloutKey, float] = {}
        self.most_in_flight = 0
        self.most_open = 0
        self.at: list[tuple[float, Callable[[], object]]] = []

    def begin(self) -> None:
        for assignment in self.scheduler.next(self.now):
            self.assignments.append(assignment)
            self.dispatched_at[assignment.attempt_id] = self.now
            assert self.now >= self.retry_at.get(assignment.key, 0.0)
            self._later(assignment, assignment.attempt_id)
        for preparation in self.scheduler.prepare(self.now):
            self.preparations.append(preparation)
            self._later(preparation, preparation.preparation_id)
        counts = self.scheduler.counts()
        self.most_in_flight = max(self.most_in_flight, counts.in_flight)
        self.most_open = max(self.most_open, counts.groups_open)
        self.ends += self.scheduler.finished()

    def _later(self, what: Assignment | Preparation, name: str) -> None:
        heappush(self.events, (self.now + self.seconds(name), next(self.sequence), what))

    def step(self) -> bool:
        """One event, or the time moved on. False where nothing more will happen by itself."""
        due = self.scheduler.wake_at()
        if self.at and self.at[0][0] <= min(self.events[0][0] if self.events else 1e18, due or 1e18):
            self.now, do = self.at.pop(0)
            do()
        elif self.events and (due is None or self.events[0][0] <= due):
            self.now, _, what = heappop(self.events)
            if isinstance(what, Assignment):
                outcome, error_class = self.attempt(what)
                end = self.scheduler.ended(what.attempt_id, outcome, error_class, None, self.now)
                if end is not None and end.retry_at is not None:
                    self.retry_at[what.key] = end.retry_at
            else:
                self.scheduler.prepared(what.preparation_id, self.build(what), None, self.now)
        elif due is not None:
            self.now = max(self.now, due)
        else:
            return False
        self.begin()
        return True

    def run(self) -> World:
        self.begin()
        while not self.scheduler.done:
            assert self.step(), f"nothing moves any more: {self.scheduler.counts()}"
        self.ends += self.scheduler.finished()
        return self

    def outcomes(self) -> dict[RolloutKey, Result]:
        assert len({end.key for end in self.ends}) == len(self.ends)
        return {end.key: (end.outcome, end.error_class) for end in self.ends}

    def attempts(self) -> Counter[RolloutKey]:
        return Counter(assignment.key for assignment in self.assignments)


def by_number(results: Mapping[RolloutKey, list[Result]]) -> Callable[[Assignment], Result]:
    """What a rollout's attempts give, in their order; afterwards they pass."""

    def attempt(assignment: Assignment) -> Result:
        of_key = results.get(assignment.key, [])
        return of_key[assignment.number - 1] if assignment.number <= len(of_key) else PASSED

    return attempt


# Outcomes and budgets


def test_every_rollout_of_a_job_passes_once() -> None:
    world = World(Scheduler(keys(5, 4, ("a", "b")), concurrency=6, hosts={"h": 6})).run()
    assert world.outcomes() == {key: PASSED for key in keys(5, 4, ("a", "b"))}
    assert set(world.attempts().values()) == {1}
    assert world.most_in_flight == 6
    assert len(world.scheduler.groups_done()) == 10


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_each_class_gets_exactly_the_retries_of_the_table(row) -> None:
    if row.name == "cancelled":
        return
    outcome = Outcome.FAILED if row.reward_valid else Outcome.INVALID
    world = World(
        Scheduler(keys(1, 1), concurrency=1, hosts={"h": 1}), attempt=lambda _: (outcome, row.name)
    ).run()
    assert world.outcomes() == {keys(1, 1)[0]: (outcome, row.name)}
    assert len(world.assignments) == row.retries + 1
    quarantined = {task_key(0): row.name} if row.quarantine is not Quarantine.NEVER else {}
    assert world.scheduler.counts().quarantined == quarantined


def test_a_job_may_change_a_budget_but_not_that_of_a_broken_task() -> None:
    retries = {"docker_timeout": 0, "reward_missing": 2, "image_build": 5}
    for error_class, attempts in {"docker_timeout": 1, "reward_missing": 3, "image_build": 1}.items():
        scheduler = Scheduler(keys(1, 1), concurrency=1, hosts={"h": 1}, retries=retries)
        result = (Outcome.INVALID, error_class)
        assert len(World(scheduler, attempt=lambda _, result=result: result).run().assignments) == attempts
    with pytest.raises(ValueError, match="no_such"):
        Scheduler(keys(1, 1), concurrency=1, retries={"no_such": 1})


def test_an_agents_failure_is_its_result_and_never_tried_again() -> None:
    results = {
        keys(1, 3)[0]: [(Outcome.FAILED, "agent_oom")],
        keys(1, 3)[1]: [(Outcome.PASSED, "turn_limit")],
    }
    world = World(Scheduler(keys(1, 3), concurrency=3, hosts={"h": 3}), attempt=by_number(results)).run()
    assert list(world.outcomes().values()) == [
        (Outcome.FAILED, "agent_oom"),
        (Outcome.PASSED, "turn_limit"),
        PASSED,
    ]
    assert set(world.attempts().values()) == {1}


def test_only_the_failed_sample_of_a_group_is_run_again() -> None:
    unlucky = keys(1, 8)[3]
    world = World(
        Scheduler(keys(1, 8), concurrency=8, hosts={"h": 8}),
        attempt=by_number({unlucky: [(Outcome.INVALID, "container_lost")]}),
    ).run()
    assert world.attempts() == {key: 2 if key == unlucky else 1 for key in keys(1, 8)}
    assert set(world.outcomes().values()) == {PASSED}


def test_unknown_errors_are_internal_and_a_reward_beside_an_infra_error_does_not_count() -> None:
    for result in [(Outcome.INVALID, None), (Outcome.INVALID, "what_is_this")]:
        world = World(
            Scheduler(keys(1, 1), concurrency=1, hosts={"h": 1}), attempt=lambda _, r=result: r
        ).run()
        assert list(world.outcomes().values()) == [(Outcome.INVALID, "internal_error")]
        assert len(world.assignments) == 2
    world = World(
        Scheduler(keys(1, 1), concurrency=1, hosts={"h": 1}, retries={"docker_timeout": 0}),
        attempt=lambda _: (Outcome.PASSED, "docker_timeout"),
    ).run()
    assert list(world.outcomes().values()) == [(Outcome.INVALID, "docker_timeout")]


def test_a_server_that_asks_us_to_wait_is_waited_for_but_not_for_days() -> None:
    retries = Retries(seed=1)
    row = row_of("rate_limited")
    assert 120 <= retries.delay(row, 1, 120.0, "x") <= 180
    assert RETRY_AFTER_CAP_SEC <= retries.delay(row, 1, 86400.0, "x") <= 1.5 * RETRY_AFTER_CAP_SEC
    assert row.backoff_sec <= retries.delay(row, 1, float("nan"), "x") <= 1.5 * row.backoff_sec
    assert row.backoff_sec <= retries.delay(row, 1, -5.0, "x") <= 1.5 * row.backoff_sec
    assert 60 <= retries.delay(row, 5000, None, "x") <= 90
    waits = {retries.delay(row, 1, None, str(n)) for n in range(50)}
    assert len(waits) == 50
    assert retries.delay(row, 1, None, "7") == Retries(seed=1).delay(row, 1, None, "7")
    assert retries.delay(row, 1, None, "7") != Retries(seed=2).delay(row, 1, None, "7")


def test_a_resumed_rollout_goes_on_with_its_numbers_and_what_is_left_of_its_budget() -> None:
    key = keys(1, 1)[0]
    spent = {key: ["docker_timeout"] * 3}
    world = World(
        Scheduler([key], concurrency=1, hosts={"h": 1}, earlier=spent),
        attempt=lambda _: (Outcome.INVALID, "docker_timeout"),
    ).run()
    assert [assignment.number for assignment in world.assignments] == [4, 5]


# Quarantine


def test_a_build_that_fails_is_made_once_and_spends_no_attempt() -> None:
    scheduler = Scheduler(keys(3, 8, ("a", "b")), concurrency=8, hosts={"h": 8, "i": 8})
    bad = task_key(1)
    world = World(scheduler, build=lambda p: "image_build" if p.task == bad else None).run()
    assert Counter(p.task for p in world.preparations)[bad] == 1
    assert not [a for a in world.assignments if a.key.task_key == bad]
    for key, result in world.outcomes().items():
        assert result == ((Outcome.INVALID, "image_build") if key.task_key == bad else PASSED)
    assert {end.attempts for end in world.ends if end.key.task_key == bad} == {0}
    assert scheduler.counts().quarantined == {bad: "image_build"}


def test_a_build_that_the_registry_failed_is_tried_again_and_ends_the_task_only_when_the_budget_is_spent() -> (
    None
):
    scheduler = Scheduler(keys(1, 4), concurrency=4, hosts={"h": 4})
    world = World(scheduler, build=lambda p: "image_pull" if p.number <= 4 else None).run()
    assert len(world.preparations) == 5
    assert set(world.outcomes().values()) == {PASSED}
    world = World(Scheduler(keys(1, 4), concurrency=4, hosts={"h": 4}), build=lambda _: "image_pull").run()
    assert len(world.preparations) == BY_NAME["image_pull"].retries + 1
    assert world.outcomes() == {key: (Outcome.INVALID, "image_pull") for key in keys(1, 4)}
    assert not world.assignments
    assert world.now >= 5 + 10 + 20 + 40, "each retry of a build waits twice as long"


def test_a_build_that_failed_on_one_host_is_tried_on_another() -> None:
    scheduler = Scheduler(keys(1, 4), concurrency=4, hosts={"h": 4, "i": 4})
    world = World(scheduler, build=lambda p: "disk_full" if p.host == "h" else None).run()
    assert [p.host for p in world.preparations] == ["h", "i"]
    assert {a.host for a in world.assignments} == {"i"}


def test_a_second_host_that_cannot_build_is_left_out_and_the_task_goes_on_where_it_is_ready() -> None:
    scheduler = Scheduler(keys(1, 12), concurrency=12, hosts={"h": 2, "i": 2})
    world = World(scheduler, build=lambda p: "unsupported" if p.host == "i" else None).run()
    assert [p.host for p in world.preparations] == ["h", "i"]
    assert set(world.outcomes().values()) == {PASSED}
    assert not scheduler.counts().quarantined


def test_a_quarantined_task_gets_no_further_attempt_by_any_agent_and_what_is_in_flight_counts() -> None:
    scheduler = Scheduler(keys(1, 3, ("a", "b")), concurrency=3, hosts={"h": 3})
    (build,) = scheduler.prepare(0.0)
    scheduler.prepared(build.preparation_id, None, None, 0.0)
    first, second, third = scheduler.next(0.0)
    end = scheduler.ended(first.attempt_id, Outcome.INVALID, "healthcheck", None, 1.0)
    assert end is not None
    assert end.final
    assert end.quarantined == task_key(0)
    assert scheduler.next(1.0) == []
    scheduler.ended(second.attempt_id, Outcome.PASSED, None, None, 2.0)
    lost = scheduler.ended(third.attempt_id, Outcome.INVALID, "container_lost", None, 3.0)
    assert lost is not None
    assert lost.final
    assert scheduler.done
    ends = {(end.key.agent, end.key.sample): end for end in scheduler.finished()}
    assert ends["a", 1].outcome is Outcome.PASSED
    assert ends["a", 2][1:] == (Outcome.INVALID, "healthcheck", 1, None)
    assert {ends["b", n][1:] for n in range(3)} == {(Outcome.INVALID, "healthcheck", 0, None)}


def run_with(results: Mapping[RolloutKey, str], all_keys: list[RolloutKey]) -> World:
    """One at a time; every attempt of these rollouts ends with the class."""

    def attempt(assignment: Assignment) -> Result:
        error_class = results.get(assignment.key)
        return PASSED if error_class is None else (Outcome.INVALID, error_class)

    return World(Scheduler(all_keys, concurrency=1, hosts={"h": 1}), attempt=attempt).run()


def test_one_samples_agent_that_breaks_its_verifier_costs_the_others_nothing() -> None:
    bad = keys(2, 4)[0]
    world = run_with({bad: "verifier_crash"}, keys(2, 4))
    assert world.attempts()[bad] == 2
    assert world.outcomes() == {
        key: (Outcome.INVALID, "verifier_crash") if key == bad else PASSED for key in keys(2, 4)
    }
    assert not world.scheduler.counts().quarantined


@pytest.mark.parametrize("agents", [("a",), ("a", "b")])
def test_a_verifier_that_fails_two_rollouts_quarantines_its_task(agents: tuple[str, ...]) -> None:
    everyone = keys(2, 4 // len(agents), agents)
    first, second = everyone[0], everyone[2]
    world = run_with({first: "verifier_crash", second: "reward_missing"}, everyone)
    assert world.attempts()[first] == world.attempts()[second] == 2
    assert world.scheduler.counts().quarantined == {task_key(0): "reward_missing"}
    outcomes = world.outcomes()
    assert outcomes[first] == (Outcome.INVALID, "verifier_crash")
    assert outcomes[everyone[1]] == PASSED
    assert outcomes[everyone[3]] == (Outcome.INVALID, "reward_missing")
    assert world.attempts()[everyone[3]] == 0
    assert outcomes[everyone[4]] == PASSED


def test_the_only_rollout_of_a_task_is_enough_to_quarantine_it() -> None:
    world = run_with({keys(2, 1)[0]: "verifier_timeout"}, keys(2, 1))
    assert world.scheduler.counts().quarantined == {task_key(0): "verifier_timeout"}


def test_tampering_with_a_reward_is_its_own_agents_doing_however_many_do_it() -> None:
    world = run_with(dict.fromkeys(keys(1, 4), "reward_tampered"), keys(1, 4))
    assert world.outcomes() == dict.fromkeys(keys(1, 4), (Outcome.INVALID, "reward_tampered"))
    assert world.attempts() == dict.fromkeys(keys(1, 4), 2)
    assert not world.scheduler.counts().quarantined


def test_a_driver_may_quarantine_a_task_that_it_cannot_load() -> None:
    scheduler = Scheduler(keys(2, 2), concurrency=4, hosts={"h": 4})
    assert scheduler.quarantine(task_key(0), "task_malformed")
    assert not scheduler.quarantine(task_key(0), "unsupported")
    world = World(scheduler).run()
    assert {p.task for p in world.preparations} == {task_key(1)}
    assert world.outcomes()[keys(2, 2)[0]] == (Outcome.INVALID, "task_malformed")


# Order, fairness, hosts


def test_groups_are_finished_in_order_and_their_samples_stay_together() -> None:
    world = World(Scheduler(keys(10, 4), concurrency=4, hosts={"h": 4})).run()
    assert [a.key for a in world.assignments] == keys(10, 4)
    assert [key.task for key in world.scheduler.groups_done()] == [f"task{n}" for n in range(10)]


def test_what_it_says_comes_next_comes_next() -> None:
    """With nothing failing, the forecast before each dispatch is what is then dispatched."""
    scheduler = Scheduler(keys(6, 3), concurrency=2, hosts={"h": 2}, prepare_ahead=18)
    seen = 0
    while not scheduler.done:
        for build in scheduler.prepare(0.0):
            scheduler.prepared(build.preparation_id, None, None, 0.0)
        coming = scheduler.coming("h", 5)
        assert coming == [key.task_key for key in keys(6, 3)][seen : seen + 5][: len(coming)]
        assert len(coming) >= min(4, 18 - seen)
        for assignment in scheduler.next(0.0):
            assert assignment.key.task_key == coming.pop(0)
            seen += 1
            scheduler.ended(assignment.attempt_id, Outcome.PASSED, None, None, 0.0)
        scheduler.finished()
    assert scheduler.coming("h", 5) == []
    assert scheduler.coming("nobody", 5) == []


def test_the_retry_of_an_old_group_comes_before_new_groups() -> None:
    key = keys(20, 2)[0]
    world = World(
        Scheduler(keys(20, 2), concurrency=2, hosts={"h": 2}),
        attempt=by_number({key: [(Outcome.INVALID, "container_start")]}),
    ).run()
    again = next(a for a in world.assignments if a.key == key and a.number == 2)
    at = world.dispatched_at[again.attempt_id]
    assert at == pytest.approx(world.retry_at[key], abs=1.0)
    assert len([a for a in world.assignments if world.dispatched_at[a.attempt_id] > at]) > 20


def test_an_outage_burns_the_budgets_of_a_few_groups_and_not_of_the_whole_job() -> None:
    scheduler = Scheduler(keys(50, 2), concurrency=4, hosts={"h": 4})
    world = World(scheduler)
    world.attempt = lambda _: (Outcome.INVALID, "policy_unavailable") if world.now < 40 else PASSED
    world.run()
    touched = {a.key.group for a in world.assignments if world.dispatched_at[a.attempt_id] < 39}
    assert len(touched) <= 4
    assert world.most_open <= 4
    assert set(world.outcomes().values()) == {PASSED}


def test_a_slow_build_does_not_hold_up_the_tasks_behind_it() -> None:
    scheduler = Scheduler(keys(6, 2), concurrency=2, hosts={"h": 2})
    world = World(scheduler, seconds=lambda name: 100.0 if name == "prepare-1" else 1.0).run()
    assert {a.key.task for a in world.assignments[:10]} == {f"task{n}" for n in range(1, 6)}
    assert world.now < 105


def test_images_are_prepared_a_little_ahead_and_not_all_at_once() -> None:
    scheduler = Scheduler(keys(100, 4), concurrency=4, hosts={"h": 4})
    world = World(scheduler, seconds=lambda name: 1.0 if name.startswith("prepare") else 50.0)
    world.begin()
    for _ in range(6):
        world.step()
    assert 2 <= len(world.preparations) <= 4


def test_work_is_spread_over_hosts_by_load() -> None:
    scheduler = Scheduler(keys(40, 4), concurrency=24, hosts={"h": 8, "i": 8, "j": 8})
    world = World(scheduler).run()
    share = Counter(a.host for a in world.assignments)
    assert min(share.values()) > 35
    assert len(world.preparations) <= 60


def test_many_samples_of_one_task_spread_to_idle_hosts_once_it_is_known_to_build() -> None:
    world = World(Scheduler(keys(1, 64), concurrency=64, hosts={"h": 8, "i": 8, "j": 8})).run()
    assert next(p.host for p in world.preparations) == "h"
    assert {p.host for p in world.preparations} == {"h", "i", "j"}
    assert min(Counter(a.host for a in world.assignments).values()) >= 8


def test_a_retry_prefers_another_host_and_takes_the_same_where_there_is_none() -> None:
    lost = (Outcome.INVALID, "container_lost")
    two = World(
        Scheduler(keys(1, 1), concurrency=1, hosts={"h": 4, "i": 4}),
        attempt=by_number({keys(1, 1)[0]: [lost]}),
    ).run()
    assert [a.host for a in two.assignments] == ["h", "i"]
    one = World(
        Scheduler(keys(1, 1), concurrency=1, hosts={"h": 4}), attempt=by_number({keys(1, 1)[0]: [lost]})
    ).run()
    assert [a.host for a in one.assignments] == ["h", "h"]
    policy = (Outcome.INVALID, "policy_error")
    same = World(
        Scheduler(keys(1, 1), concurrency=1, hosts={"h": 4, "i": 4}),
        attempt=by_number({keys(1, 1)[0]: [policy]}),
    ).run()
    assert [a.host for a in same.assignments] == ["h", "h"]


def test_a_host_that_fails_everything_costs_each_rollout_one_attempt() -> None:
    world = World(
        Scheduler(keys(10, 4), concurrency=8, hosts={"bad": 4, "good": 4}),
        attempt=lambda a: (Outcome.INVALID, "disk_full") if a.host == "bad" else PASSED,
    ).run()
    assert set(world.outcomes().values()) == {PASSED}
    assert max(world.attempts().values()) <= 2


def test_a_retry_goes_back_to_its_host_when_the_other_one_is_drained() -> None:
    scheduler = Scheduler(keys(1, 1), concurrency=1, hosts={"h": 1, "i": 1})
    (build,) = scheduler.prepare(0.0)
    scheduler.prepared(build.preparation_id, None, None, 0.0)
    (attempt,) = scheduler.next(0.0)
    end = scheduler.ended(attempt.attempt_id, Outcome.INVALID, "container_lost", None, 1.0)
    assert end is not None
    assert end.retry_at is not None
    assert scheduler.next(end.retry_at) == []
    scheduler.host_up("i", 0, end.retry_at)
    assert [a.host for a in scheduler.next(end.retry_at)] == [attempt.host]


def ready_on_two_hosts(samples: int) -> tuple[Scheduler, list[Assignment]]:
    """A scheduler whose one task is ready on hosts `h` and `i`, with two attempts in flight on each."""
    scheduler = Scheduler(keys(1, samples), concurrency=8, hosts={"h": 2, "i": 2})
    running: list[Assignment] = []
    for _ in range(2):
        for build in scheduler.prepare(0.0):
            scheduler.prepared(build.preparation_id, None, None, 0.0)
        running += scheduler.next(0.0)
    assert Counter(a.host for a in running) == {"h": 2, "i": 2}
    return scheduler, running


def test_of_two_hosts_that_are_ready_the_emptier_one_is_taken() -> None:
    scheduler, _ = ready_on_two_hosts(8)
    scheduler.host_up("h", 8, 0.0)
    scheduler.host_up("i", 8, 0.0)
    assert Counter(a.host for a in scheduler.next(0.0)) == {"h": 2, "i": 2}


def test_of_two_empty_hosts_the_one_that_did_not_just_fail_is_taken() -> None:
    scheduler, running = ready_on_two_hosts(5)
    for attempt in running:
        result = PASSED if attempt.host == "i" else (Outcome.INVALID, "container_lost")
        scheduler.ended(attempt.attempt_id, *result, None, 1.0)
    assert [a.host for a in scheduler.next(1.0)] == ["i"]


def test_a_host_that_was_given_up_for_a_task_is_asked_again_when_it_is_the_last() -> None:
    scheduler = Scheduler(keys(1, 12), concurrency=12, hosts={"h": 2, "i": 2})
    world = World(
        scheduler,
        build=lambda p: "unsupported" if p.host == "i" and p.number == 2 else None,
        seconds=lambda name: 1.0 if name.startswith("prepare") else 10.0,
    )
    world.at = [(5.0, lambda: scheduler.host_down("h", 5.0))]
    world.run()
    assert [p.host for p in world.preparations] == ["h", "i", "i"]
    assert set(world.outcomes().values()) == {PASSED}


def test_a_lost_hosts_attempts_run_elsewhere_and_its_late_reports_are_ignored() -> None:
    scheduler = Scheduler(keys(4, 4), concurrency=8, hosts={"h": 4, "i": 4})
    world = World(scheduler, seconds=lambda name: 1.0 if name.startswith("prepare") else 10.0)
    world.at = [(5.0, lambda: scheduler.host_down("h", 5.0))]
    world.run()
    assert set(world.outcomes().values()) == {PASSED}
    assert scheduler.counts().late == 4
    assert {a.host for a in world.assignments if world.dispatched_at[a.attempt_id] > 5} == {"i"}


def test_the_only_host_goes_away_and_comes_back() -> None:
    scheduler = Scheduler(keys(2, 2), concurrency=4, hosts={"h": 4})
    world = World(scheduler, seconds=lambda name: 1.0 if name.startswith("prepare") else 10.0)
    world.at = [
        (5.0, lambda: scheduler.host_down("h", 5.0)),
        (50.0, lambda: scheduler.host_up("h", 4, 50.0)),
    ]
    world.run()
    assert set(world.outcomes().values()) == {PASSED}
    assert set(world.attempts().values()) == {2}
    assert all(at < 5 or at > 50 for at in world.dispatched_at.values())


def test_a_draining_host_takes_nothing_new_and_its_attempts_count() -> None:
    scheduler = Scheduler(keys(4, 4), concurrency=4, hosts={"h": 4})
    world = World(scheduler, seconds=lambda name: 1.0 if name.startswith("prepare") else 10.0)
    world.at = [
        (5.0, lambda: (scheduler.host_up("h", 0, 5.0), scheduler.host_up("i", 4, 5.0))),
    ]
    world.run()
    assert set(world.attempts().values()) == {1}
    assert {a.host for a in world.assignments if world.dispatched_at[a.attempt_id] > 5} == {"i"}


# Ends


def test_nothing_ends_twice() -> None:
    scheduler = Scheduler(keys(1, 1), concurrency=1, hosts={"h": 1})
    (build,) = scheduler.prepare(0.0)
    assert scheduler.prepared(build.preparation_id, None, None, 0.0) is not None
    assert scheduler.prepared(build.preparation_id, "image_build", None, 0.0) is None
    (attempt,) = scheduler.next(0.0)
    assert scheduler.ended(attempt.attempt_id, Outcome.PASSED, None, None, 1.0) is not None
    assert scheduler.ended(attempt.attempt_id, Outcome.FAILED, None, None, 2.0) is None
    assert [end.outcome for end in scheduler.finished()] == [Outcome.PASSED]
    assert scheduler.finished() == []
    assert scheduler.counts().late == 2
    for unknown in ("nobody", attempt.attempt_id.replace("-1", "-2"), "prepare-1"):
        with pytest.raises(KeyError):
            scheduler.ended(unknown, Outcome.PASSED, None, None, 3.0)
    with pytest.raises(KeyError):
        scheduler.prepared("prepare-2", None, None, 3.0)


def test_cancelling_ends_what_waits_and_lets_what_runs_end() -> None:
    scheduler = Scheduler(keys(3, 2), concurrency=2, hosts={"h": 2})
    for build in scheduler.prepare(0.0):
        scheduler.prepared(build.preparation_id, None, None, 0.0)
    first, second = scheduler.next(0.0)
    assert set(scheduler.cancel(1.0)) == {first.attempt_id, second.attempt_id}
    assert scheduler.next(1.0) == []
    assert scheduler.prepare(1.0) == []
    scheduler.ended(first.attempt_id, Outcome.PASSED, None, None, 2.0)
    end = scheduler.ended(second.attempt_id, Outcome.INVALID, "docker_timeout", None, 2.0)
    assert end is not None
    assert end.final
    assert scheduler.done
    assert Counter(end.outcome for end in scheduler.finished()) == {Outcome.PASSED: 1, Outcome.CANCELLED: 5}


@pytest.mark.parametrize("how", ["quarantine", "cancel"])
def test_a_rollout_that_waits_for_its_retry_ends_with_the_others(how: str) -> None:
    scheduler = Scheduler(keys(1, 2), concurrency=1, hosts={"h": 1})
    (build,) = scheduler.prepare(0.0)
    scheduler.prepared(build.preparation_id, None, None, 0.0)
    (attempt,) = scheduler.next(0.0)
    scheduler.ended(attempt.attempt_id, Outcome.INVALID, "image_pull", None, 1.0)
    assert scheduler.counts().delayed == 1
    if how == "cancel":
        scheduler.cancel(2.0)
    else:
        scheduler.quarantine(task_key(0), "unsupported")
    counts = scheduler.counts()
    assert (counts.delayed, counts.waiting, scheduler.wake_at()) == (0, 0, None)
    assert scheduler.done
    assert [end.attempts for end in scheduler.finished()] == [1, 0]


def test_a_rollout_given_twice_or_limits_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        Scheduler([*keys(1, 2), keys(1, 1)[0]], concurrency=1)
    with pytest.raises(ValueError, match="at least 1"):
        Scheduler(keys(1, 1), concurrency=0)


# Any world


@st.composite
def plans(draw: st.DrawFn) -> dict[RolloutKey, list[Result]]:
    """What each rollout's attempts give: infra and service errors, then a reward or an agent's failure."""
    rollouts = keys(draw(st.integers(1, 5)), draw(st.integers(1, 4)), ("a", "b")[: draw(st.integers(1, 2))])
    transient = st.sampled_from([(Outcome.INVALID, name) for name in [*INFRA, "internal_error"]])
    last = st.sampled_from([PASSED, FAILED, (Outcome.FAILED, "agent_timeout")])
    return {key: [*draw(st.lists(transient, max_size=4)), draw(last)] for key in rollouts}


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plans(), st.integers(0, 2**32), st.integers(0, 2**32))
def test_outcomes_do_not_depend_on_the_order_in_which_attempts_end(plan, one: int, other: int) -> None:
    def world(seed: int) -> World:
        chance = random.Random(seed)
        hosts = {f"h{n}": chance.randint(1, 5) for n in range(chance.randint(1, 4))}
        scheduler = Scheduler(plan, concurrency=chance.randint(1, 8), hosts=hosts, seed=seed)
        return World(scheduler, by_number(plan), seconds=lambda _: chance.expovariate(0.3)).run()

    assert world(one).outcomes() == world(other).outcomes()


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32))
def test_with_one_live_host_everything_ends_and_no_task_starves(seed: int) -> None:
    chance = random.Random(seed)
    rollouts = keys(chance.randint(1, 12), chance.randint(1, 5), ("a", "b")[: chance.randint(1, 2)])
    scheduler = Scheduler(
        rollouts,
        concurrency=chance.randint(1, 12),
        hosts={f"h{n}": chance.randint(1, 4) for n in range(chance.randint(1, 4))},
        seed=seed,
        open_groups=chance.choice([None, 1, 3]),
        prepare_ahead=chance.choice([None, 1]),
        build_slots=chance.randint(1, 2),
    )
    weights = [4 if result[0] is not Outcome.INVALID else 1 for result in RESULTS]
    world = World(
        scheduler,
        attempt=lambda _: chance.choices(RESULTS, weights)[0],
        build=lambda _: chance.choice([None, None, None, "image_pull", "disk_full", "image_build"]),
        seconds=lambda _: chance.expovariate(0.5),
    )

    def flap(host: str, up: bool) -> Callable[[], object]:
        if up:
            return lambda: scheduler.host_up(host, chance.randint(1, 4), world.now)
        return lambda: scheduler.host_down(host, world.now)

    at = 0.0
    for _ in range(chance.randint(0, 6)):
        host = f"h{chance.randint(0, 3)}"
        world.at.append(((at := at + chance.expovariate(0.2)), flap(host, up=False)))
        world.at.append(((at := at + chance.expovariate(0.2)), flap(host, up=True)))
    world.at.append((at + 1, flap("last", up=True)))
    world.run()
    assert set(world.outcomes()) == set(rollouts)
    counts = scheduler.counts()
    assert counts.dispatched == counts.ended
    assert counts.groups_done == counts.groups
    assert counts.groups_open == 0


class Machine(RuleBasedStateMachine):
    """Events in any order against a model that only counts."""

    @initialize(
        tasks=st.integers(1, 4),
        samples=st.integers(1, 4),
        concurrency=st.integers(1, 6),
        open_groups=st.none() | st.integers(1, 3),
        override=st.dictionaries(st.sampled_from([*INFRA, "reward_missing"]), st.integers(0, 3), max_size=3),
    )
    def begin(self, tasks, samples, concurrency, open_groups, override) -> None:
        self.rollouts = keys(tasks, samples, ("a", "b"))
        self.concurrency, self.open_groups = concurrency, open_groups or concurrency
        self.budgets = Retries(override)
        self.scheduler = Scheduler(
            self.rollouts, concurrency=concurrency, open_groups=open_groups, retries=override, hosts={"h0": 3}
        )
        self.now = 0.0
        self.capacity = {"h0": 3}
        self.running: dict[str, Assignment] = {}
        self.building: dict[str, Preparation] = {}
        self.ready: set[tuple[TaskKey, str]] = set()
        self.over: list[str] = []
        self.failures: Counter[tuple[RolloutKey, str]] = Counter()
        self.due: dict[RolloutKey, float] = {}
        self.final: dict[RolloutKey, RolloutEnd] = {}
        self.dispatched = 0
        self.quarantined: set[TaskKey] = set()
        self.cancelled = False

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def dispatch(self) -> None:
        for assignment in self.scheduler.next(self.now):
            assert assignment.key not in self.final
            assert assignment.key not in {running.key for running in self.running.values()}
            assert (assignment.key.task_key, assignment.host) in self.ready
            assert assignment.key.task_key not in self.quarantined
            assert self.due.get(assignment.key, 0.0) <= self.now
            assert not self.cancelled
            self.due.pop(assignment.key, None)
            self.running[assignment.attempt_id] = assignment
            self.dispatched += 1
            here = [running for running in self.running.values() if running.host == assignment.host]
            assert len(here) <= self.capacity[assignment.host]

    @rule()
    def build(self) -> None:
        for preparation in self.scheduler.prepare(self.now):
            assert preparation.task not in self.quarantined
            assert (preparation.task, preparation.host) not in self.ready
            assert self.capacity[preparation.host] > 0
            self.building[preparation.preparation_id] = preparation

    @precondition(lambda self: self.building)
    @rule(
        data=st.data(),
        error=st.sampled_from([None, None, None, "image_pull", "docker_timeout", "image_build"]),
    )
    def built(self, data, error: str | None) -> None:
        preparation = self.building.pop(data.draw(st.sampled_from(sorted(self.building))))
        result = self.scheduler.prepared(preparation.preparation_id, error, None, self.now)
        assert result is not None
        assert result.ready == (error is None)
        if error is None and self.capacity[preparation.host] > 0:
            self.ready.add((preparation.task, preparation.host))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), result=st.sampled_from(RESULTS), retry_after=st.none() | st.floats(0, 100))
    def attempt_ends(self, data, result: Result, retry_after: float | None) -> None:
        assignment = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        end = self.scheduler.ended(assignment.attempt_id, *result, retry_after, self.now)
        assert end is not None
        self._after(end, result, retry_after)

    def _after(self, end, result: Result, retry_after: float | None) -> None:
        outcome, error_class = result
        assignment = end.attempt
        self.over.append(assignment.attempt_id)
        if outcome is not Outcome.INVALID:
            assert end.final
            return
        self.failures[assignment.key, error_class] += 1
        spent_up = self.failures[assignment.key, error_class] > self.budgets.budget(BY_NAME[error_class])
        held = assignment.key.task_key in self.quarantined or self.cancelled
        assert end.final == (spent_up or held)
        if not end.final:
            assert end.retry_at >= self.now + (retry_after or 0.0)
            self.due[assignment.key] = end.retry_at

    @precondition(lambda self: self.over)
    @rule(data=st.data(), result=st.sampled_from(RESULTS))
    def late_report(self, data, result: Result) -> None:
        late = self.scheduler.counts().late
        assert self.scheduler.ended(data.draw(st.sampled_from(self.over)), *result, None, self.now) is None
        assert self.scheduler.counts().late == late + 1

    @rule(host=st.sampled_from(["h0", "h1", "h2"]), capacity=st.integers(0, 4))
    def host_up(self, host: str, capacity: int) -> None:
        self.scheduler.host_up(host, capacity, self.now)
        self.capacity[host] = capacity
        if capacity == 0:
            self.ready = {(task, name) for task, name in self.ready if name != host}

    @rule(host=st.sampled_from(["h0", "h1", "h2"]))
    def host_down(self, host: str) -> None:
        ends = self.scheduler.host_down(host, self.now)
        lost = {id for id, running in self.running.items() if running.host == host}
        assert {end.attempt.attempt_id for end in ends} == lost
        for end in ends:
            del self.running[end.attempt.attempt_id]
            self._after(end, (Outcome.INVALID, "host_lost"), None)
        self.building = {id: p for id, p in self.building.items() if p.host != host}
        self.ready = {(task, name) for task, name in self.ready if name != host}
        self.capacity.pop(host, None)

    @rule(number=st.integers(0, 3))
    @precondition(lambda self: len(self.quarantined) < 2)
    def quarantine(self, number: int) -> None:
        if task_key(number) in {key.task_key for key in self.rollouts}:
            self.scheduler.quarantine(task_key(number), "unsupported")

    @precondition(lambda self: len(self.final) > len(self.rollouts) // 2)
    @rule()
    def cancel(self) -> None:
        assert set(self.scheduler.cancel(self.now)) == set(self.running)
        self.cancelled = True

    @invariant()
    def it_adds_up(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        assert self.scheduler.host_down("nobody", self.now) == [], "what is due waits from here on"
        counts = self.scheduler.counts()
        assert counts.dispatched == counts.ended + counts.in_flight == self.dispatched
        assert counts.in_flight == len(self.running) <= self.concurrency
        assert counts.preparing == len(self.building)
        assert counts.rollouts == counts.waiting + counts.delayed + counts.in_flight + sum(
            counts.outcomes.values()
        )
        assert 0 <= counts.groups_open <= self.open_groups
        assert (counts.delayed > 0) <= (self.scheduler.wake_at() is not None)
        for end in self.scheduler.finished():
            assert end.key not in self.final
            self.final[end.key] = end
        assert sum(counts.outcomes.values()) == len(self.final)
        assert counts.delayed == sum(due > self.now for key, due in self.due.items() if key not in self.final)
        self.quarantined = set(counts.quarantined)

    def teardown(self) -> None:
        """However things stand: with a live host all of it ends."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.host_up("last", 2, self.now)
        for _ in range(2000):
            if self.scheduler.done:
                break
            self.now = max(self.now, self.scheduler.wake_at() or 0.0)
            for assignment in self.scheduler.next(self.now):
                self.running[assignment.attempt_id] = assignment
            for preparation in self.scheduler.prepare(self.now):
                self.building[preparation.preparation_id] = preparation
            for preparation_id in list(self.building):
                self.scheduler.prepared(preparation_id, None, None, self.now)
            for attempt_id in list(self.running):
                self.scheduler.ended(attempt_id, Outcome.PASSED, None, None, self.now)
            self.building, self.running = {}, {}
        assert self.scheduler.done, self.scheduler.counts()


Machine.TestCase.settings = settings(
    deadline=None, max_examples=150, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow]
)
TestAnyEventsInAnyOrder = Machine.TestCase
