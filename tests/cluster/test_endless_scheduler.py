"""A scheduler to which groups are added for ever: what ended is forgotten, and a rollout costs what the first did."""

from __future__ import annotations

import gc
import random
import sys
import time
from types import FunctionType, ModuleType
from typing import Any

import pytest

from rollcage.cluster.roster import REMEMBERED
from rollcage.cluster.scheduler import RolloutKey, Scheduler, TaskKey
from rollcage.rollout.outcome import Outcome

SAMPLES, TASKS, CONCURRENCY = 8, 50, 48


def group(draw: int, samples: int = SAMPLES, tasks: int = TASKS) -> list[RolloutKey]:
    number = draw % tasks
    return [
        RolloutKey("job", "a", f"task{number}", f"digest{number}", sample, draw // tasks)
        for sample in range(samples)
    ]


def held_bytes(root: object) -> int:
    """Bytes of all that can be reached from `root`, but for code."""
    seen, edge, total = {id(root)}, [root], 0
    while edge:
        found = edge.pop()
        total += sys.getsizeof(found)
        for other in gc.get_referents(found):
            if id(other) not in seen and not isinstance(other, type | ModuleType | FunctionType):
                seen.add(id(other))
                edge.append(other)
    return total


class Endless:
    """A simulated stream: everything that was begun in a step has ended in the next, one attempt in fifty of infra."""

    def __init__(self, hosts: int = 3) -> None:
        self.scheduler = Scheduler(
            [],
            concurrency=CONCURRENCY,
            hosts={f"host{number}": CONCURRENCY // hosts for number in range(hosts)},
        )
        self.chance = random.Random(1)
        self.draws = self.finished = self.groups_done = 0
        self.now = 0.0

    def until(self, rollouts: int) -> float:
        """Go on until so many have ended. Returns CPU seconds."""
        scheduler, began = self.scheduler, time.thread_time()
        while self.finished < rollouts:
            self.now += 1.0
            while scheduler.counts().waiting < CONCURRENCY:
                scheduler.add(group(self.draws), self.now)
                self.draws += 1
            for assignment in scheduler.next(self.now):
                infra = self.chance.random() < 0.02
                outcome = Outcome.INVALID if infra else Outcome.PASSED
                scheduler.ended(
                    assignment.attempt_id, outcome, "container_start" if infra else None, None, self.now
                )
            for preparation in scheduler.prepare(self.now):
                scheduler.prepared(preparation.preparation_id, None, None, self.now)
            self.finished += len(scheduler.finished())
            self.groups_done += len(scheduler.groups_done())
        return time.thread_time() - began


def test_two_hundred_thousand_rollouts_need_no_more_memory_and_no_more_time_each_than_the_first_ones() -> (
    None
):
    world = Endless()
    world.until(20_000)
    seconds, held = world.until(40_000), held_bytes(world.scheduler)
    world.until(180_000)
    late_seconds = world.until(200_000)
    assert held_bytes(world.scheduler) < 1.1 * held
    assert late_seconds < 3 * seconds, "what grows with the rollouts would have made it five times as much"
    counts = world.scheduler.counts()
    assert counts.rollouts == world.draws * SAMPLES
    assert counts.rollouts == counts.waiting + counts.delayed + counts.in_flight + sum(
        counts.outcomes.values()
    )
    assert sum(counts.outcomes.values()) == world.finished
    assert counts.dispatched == counts.ended + counts.in_flight
    assert counts.groups_done == world.groups_done


def started(samples: int = 2, concurrency: int = 2, **settings: Any) -> Scheduler:
    """A scheduler with one host that is ready for tasks 0 and 1, and a group of each of them."""
    scheduler = Scheduler(
        [*group(0, samples), *group(1, samples)],
        concurrency=concurrency,
        hosts={"h": concurrency},
        **settings,
    )
    for preparation in scheduler.prepare(0.0):
        scheduler.prepared(preparation.preparation_id, None, None, 0.0)
    return scheduler


def pass_all(scheduler: Scheduler, now: float = 1.0) -> list[RolloutKey]:
    keys = []
    while assignments := scheduler.next(now):
        for assignment in assignments:
            keys.append(assignment.key)
            scheduler.ended(assignment.attempt_id, Outcome.PASSED, None, None, now)
    return keys


def test_added_groups_run_behind_those_that_are_there() -> None:
    scheduler = started()
    scheduler.add(group(TASKS, 2), 0.0)  # the second draw of task 0
    assert pass_all(scheduler) == [*group(0, 2), *group(1, 2), *group(TASKS, 2)]
    assert scheduler.done
    scheduler.add(group(2, 2), 2.0)
    assert not scheduler.done
    [preparation] = scheduler.prepare(2.0)
    assert preparation.task == TaskKey("task2", "digest2")
    scheduler.prepared(preparation.preparation_id, None, None, 2.0)
    assert pass_all(scheduler, 2.0) == group(2, 2)
    assert scheduler.done


def test_a_group_that_is_there_or_has_just_ended_is_not_taken_again() -> None:
    scheduler = started()
    with pytest.raises(ValueError, match="was given before"):
        scheduler.add(group(0, 3)[2:], 0.0)
    pass_all(scheduler)
    with pytest.raises(ValueError, match="was given before"):
        scheduler.add(group(0, 2), 0.0)
    with pytest.raises(ValueError, match="given twice"):
        scheduler.add(group(3, 2) * 2, 0.0)
    assert scheduler.counts().rollouts == 4
    assert scheduler.done


def test_groups_that_nothing_was_begun_of_can_be_withdrawn_and_added_again() -> None:
    scheduler = started()
    [first, *_] = scheduler.next(0.0)
    scheduler.add(group(2, 2), 0.0)
    assert [(key.task, key.draw) for key in scheduler.withdraw(0.0)] == [("task1", 0), ("task2", 0)]
    counts = scheduler.counts()
    assert (counts.rollouts, counts.groups, counts.waiting, counts.in_flight) == (2, 1, 0, 2)
    scheduler.ended(first.attempt_id, Outcome.INVALID, "container_start", None, 1.0)
    scheduler.add(group(1, 2), 2.0)
    again = scheduler.wake_at()
    assert again is not None
    assert [key for key in pass_all(scheduler, again) if key.task == "task1"] == group(1, 2)
    assert scheduler.withdraw(3.0) == []


def test_what_is_added_of_a_quarantined_task_ends_at_once() -> None:
    scheduler = Scheduler([], concurrency=2, hosts={"h": 2})
    scheduler.quarantine(TaskKey("task0", "digest0"), "task_malformed")
    scheduler.add([*group(0, 2), *group(1, 2)], 0.0)
    ends = scheduler.finished()
    assert [(end.key, end.outcome, end.error_class) for end in ends] == [
        (key, Outcome.INVALID, "task_malformed") for key in group(0, 2)
    ]
    assert [key.task for key in scheduler.groups_done()] == ["task0"]
    assert scheduler.counts().waiting == 2


def test_what_is_added_to_a_job_that_was_called_off_is_cancelled() -> None:
    scheduler = started()
    scheduler.cancel(0.0)
    scheduler.add(group(5, 2), 1.0)
    assert {end.outcome for end in scheduler.finished()} == {Outcome.CANCELLED}
    assert scheduler.done


def test_a_second_report_is_told_from_one_about_an_attempt_that_never_was() -> None:
    scheduler = started()
    [first, *_] = scheduler.next(0.0)
    scheduler.ended(first.attempt_id, Outcome.PASSED, None, None, 0.0)
    pass_all(scheduler)
    assert scheduler.ended(first.attempt_id, Outcome.PASSED, None, None, 1.0) is None
    assert scheduler.counts().late == 1
    with pytest.raises(KeyError):
        scheduler.ended(first.attempt_id[:-1] + "2", Outcome.PASSED, None, None, 1.0)
    assert len(scheduler._roster.forgotten) <= REMEMBERED


def verifier_fails(scheduler: Scheduler, draw: int, failing: int, now: float) -> bool:
    """Run one more draw of task 0; so many samples give up over the verifier. True where that quarantines it."""
    scheduler.add(group(draw * TASKS), now)
    quarantined = False
    for _ in range(2 * SAMPLES):
        due = max(now, scheduler.wake_at() or 0.0)
        for assignment in scheduler.next(due):
            crashes = assignment.key.sample < failing
            outcome, error = (Outcome.INVALID, "verifier_crash") if crashes else (Outcome.PASSED, None)
            end = scheduler.ended(assignment.attempt_id, outcome, error, None, due)
            quarantined |= end is not None and end.quarantined is not None
    return quarantined


def test_a_verifier_that_fails_now_and_then_does_not_end_a_task_of_an_endless_stream() -> None:
    scheduler = started(SAMPLES, concurrency=SAMPLES)
    pass_all(scheduler)
    for draw in range(1, 20):
        assert not verifier_fails(scheduler, draw, draw % 2, 100.0 * draw)
    assert verifier_fails(scheduler, 20, 2, 5000.0), "two of one draw are enough"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_between_adding_and_withdrawing_everything_ends_once(seed: int) -> None:
    chance = random.Random(seed)
    scheduler = Scheduler(
        [], concurrency=12, hosts={"h0": 6, "h1": 6}, open_groups=chance.choice([None, 2, 4])
    )
    given: set[RolloutKey] = set()
    ends: list[RolloutKey] = []
    flying: list[str] = []
    building: list[str] = []
    now, draw = 0.0, 0

    def step(*, adding: bool) -> None:
        nonlocal now, draw
        now = max(now + chance.random(), (scheduler.wake_at() or 0.0) if chance.random() < 0.3 else 0.0)
        what = chance.random()
        if adding and what < 0.3:
            keys = group(draw, chance.randint(1, 4), tasks=7)
            scheduler.add(keys, now)
            given.update(keys)
            draw += 1
        elif adding and what < 0.35:
            withdrawn = set(scheduler.withdraw(now))
            given.difference_update([key for key in given if key.group in withdrawn])
        elif adding and what < 0.37:
            scheduler.host_down("h1", now)
        elif adding and what < 0.40:
            scheduler.host_up("h1", chance.randint(0, 8), now)
        elif adding and what < 0.405:
            scheduler.quarantine(TaskKey("task3", "digest3"), "image_build")
        elif what < 0.6 and building:
            error = chance.choice([None, None, None, "image_pull"])
            scheduler.prepared(building.pop(chance.randrange(len(building))), error, None, now)
        elif flying:
            outcome, error = chance.choice(
                [(Outcome.PASSED, None), (Outcome.FAILED, None), (Outcome.INVALID, "container_start")]
            )
            scheduler.ended(flying.pop(chance.randrange(len(flying))), outcome, error, None, now)
        flying.extend(one.attempt_id for one in scheduler.next(now))
        building.extend(one.preparation_id for one in scheduler.prepare(now))
        ends.extend(end.key for end in scheduler.finished())
        counts = scheduler.counts()
        assert counts.rollouts == len(given)
        assert counts.rollouts == counts.waiting + counts.delayed + counts.in_flight + len(ends)
        assert counts.dispatched == counts.ended + counts.in_flight
        assert counts.waiting >= 0

    for _ in range(3000):
        step(adding=True)
    scheduler.host_up("h1", 6, now)
    for _ in range(20_000):
        if scheduler.done:
            break
        step(adding=False)
    assert scheduler.done
    assert len(ends) == len(set(ends))
    assert set(ends) == given
    assert not scheduler._roster.by_id
    assert not scheduler._placement.rollouts
    assert not scheduler._placement.groups
