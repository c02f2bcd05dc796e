"""Which attempt runs next and where, what is prepared ahead of it, and what becomes of one that ended.

A pure state machine: it owns no task, no client and no clock. It is told events with the time (any clock that
only goes forward, in seconds) and answers with decisions; the driver does the I/O:

    for assignment in scheduler.next(now): ...       # and, when it is over, scheduler.ended(...)
    for preparation in scheduler.prepare(now): ...   # and, when it is over, scheduler.prepared(...)
    wait for an event, or until scheduler.wake_at()

Invariants:

- dispatched = ended + in flight; an attempt ends once, later reports about it are counted and ignored.
- Every rollout ends once, in one outcome (`finished`), and every group after its last rollout (`groups_done`).
- An attempt is dispatched only to a host where its task was prepared, so a failed build spends no attempt.
- A rollout spends on each error class at most the class's retries, and one attempt more. A fault of the task
  quarantines it at once, one of its verifier when enough rollouts have given up over one. A quarantined task
  gets no further attempt, by any agent; those in flight may end, and a valid reward counts. A rollout that
  would have had to wait ends `invalid` with the quarantine's class.
- Open groups go before new ones, the one opened first before the others, so retries of an old group come first.
  At most `open_groups` are open, so an outage burns the budgets of those and not of the whole job.
- What has ended is forgotten, so that a stream, to which groups are added for ever (`add`), costs the memory of what
  has not, of its tasks, and of the last `roster.REMEMBERED` rollouts.
- Given what each attempt gives, a rollout's outcome does not depend on the order in which attempts end, except
  where a quarantine saves attempts.

A decision costs O(log rollouts + hosts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from rollcage.cluster.decisions import (
    Assignment,
    Counts,
    Ended,
    GroupKey,
    Preparation,
    Prepared,
    RolloutEnd,
    RolloutKey,
    TaskKey,
)
from rollcage.cluster.placement import Placement
from rollcage.cluster.retries import Retries, Verdict, row_of
from rollcage.cluster.roster import Roster
from rollcage.cluster.state import GroupState, Host, RolloutState, State, TaskState
from rollcage.cluster.timers import Timers
from rollcage.rollout.outcome import SUSPECTS, ErrorClass, Outcome, Quarantine

__all__ = [
    "Assignment",
    "Counts",
    "Ended",
    "GroupKey",
    "Preparation",
    "Prepared",
    "RolloutEnd",
    "RolloutKey",
    "Scheduler",
    "TaskKey",
]

BUILD_SLOTS = 2
"""Preparations at once on one host: a build is mostly one busy core and one busy disk."""


class Scheduler:
    """One job's rollouts, in the order in which groups are to be opened.

    `hosts`: capacity (attempts at once) by name. `retries`: budgets other than the table's. `open_groups`:
    groups begun and not done, at most (default: `concurrency`, which never leaves a slot idle while all that
    is open is in flight). `prepare_ahead`: rollouts of unopened groups whose tasks are prepared or being
    prepared, at most about (default: twice `concurrency`). `earlier`: error classes of attempts that an
    interrupted run had already spent on a rollout.

    Raises `ValueError` for a rollout given twice and for limits below 1.
    """

    def __init__(
        self,
        rollouts: Iterable[RolloutKey],
        *,
        concurrency: int,
        hosts: Mapping[str, int] | None = None,
        seed: int = 0,
        retries: Mapping[str, int] | None = None,
        open_groups: int | None = None,
        prepare_ahead: int | None = None,
        build_slots: int = BUILD_SLOTS,
        earlier: Mapping[RolloutKey, Sequence[str]] | None = None,
    ) -> None:
        open_limit = concurrency if open_groups is None else open_groups
        ahead_limit = 2 * concurrency if prepare_ahead is None else prepare_ahead
        if min(concurrency, open_limit, ahead_limit, build_slots) < 1:
            raise ValueError("concurrency, open_groups, prepare_ahead and build_slots must be at least 1")
        self._concurrency = concurrency
        self._placement = Placement(open_limit=open_limit, ahead_limit=ahead_limit, build_slots=build_slots)
        self._roster = Roster(self._placement)
        self._retries = Retries(retries, seed=seed)
        self._now = float("-inf")
        self._in_flight: dict[str, RolloutState] = {}
        self._preparing: dict[str, tuple[TaskState, Host]] = {}
        self._timers = Timers()
        self._quarantined: dict[TaskKey, str] = {}
        self._cancelled = False
        self._dispatched = self._ended = self._late = self._delayed = self._groups_done = 0
        self._outcomes: Counter[Outcome] = Counter()
        self._finished: list[RolloutEnd] = []
        self._done_groups: list[GroupKey] = []
        self._take_in(rollouts, earlier or {})
        for name, capacity in (hosts or {}).items():
            self._placement.set_host(name, capacity)

    def _take_in(self, rollouts: Iterable[RolloutKey], earlier: Mapping[RolloutKey, Sequence[str]]) -> None:
        groups = self._roster.take_in(rollouts, earlier)
        for group in groups:
            self._placement.offer(group)
        for group in groups:
            if self._cancelled or group.task.quarantined is not None:
                self._finish_all_waiting(group.task)
        for task in {id(group.task): group.task for group in groups}.values():
            self._placement.settle(task)

    # Decisions

    def next(self, now: float) -> list[Assignment]:
        """The attempts to start now: as many as concurrency, hosts and ready images allow."""
        self._advance(now)
        assignments: list[Assignment] = []
        while len(self._in_flight) < self._concurrency and (found := self._placement.next()) is not None:
            rollout, host = found
            rollout.attempts += 1
            rollout.state = State.IN_FLIGHT
            attempt_id = f"{rollout.id}-{rollout.attempts}"
            rollout.attempt = Assignment(rollout.key, rollout.attempts, host.name, attempt_id)
            self._in_flight[attempt_id] = rollout
            host.attempts.add(attempt_id)
            self._dispatched += 1
            assignments.append(rollout.attempt)
        return assignments

    def prepare(self, now: float) -> list[Preparation]:
        """The preparations to start now. Ask after `next`: what it left idle is looked at."""
        self._advance(now)
        started = self._placement.prepare(spread=len(self._in_flight) < self._concurrency)
        for preparation in started:
            self._preparing[preparation.preparation_id] = (
                self._roster.tasks[preparation.task],
                self._placement.hosts[preparation.host],
            )
        return started

    def wake_at(self) -> float | None:
        """When the next retry becomes due; None where nothing waits for the time."""
        return self._timers.next_at()

    # Events

    def ended(
        self,
        attempt_id: str,
        outcome: Outcome,
        error_class: str | None,
        retry_after_sec: float | None,
        now: float,
    ) -> Ended | None:
        """An attempt ended. None where it had ended before (its host was lost first, say).

        A reward counts only beside no error class or one whose reward is valid; an unknown class is
        `internal_error`. Raises `KeyError` for an attempt that was never dispatched.
        """
        self._advance(now)
        rollout = self._in_flight.pop(attempt_id, None)
        if rollout is None:
            self._roster.check_was_dispatched(attempt_id)
            self._late += 1
            return None
        self._ended += 1
        attempt = rollout.attempt
        assert attempt is not None
        rollout.attempt = None
        rollout.state = State.WAITING
        host = self._placement.hosts[attempt.host]
        host.attempts.discard(attempt_id)
        row = row_of(error_class)
        if outcome in (Outcome.PASSED, Outcome.FAILED) and (error_class is None or row.reward_valid):
            host.strikes = 0
            self._finish(rollout, outcome, error_class, attempt_id)
            return Ended(attempt, error_class, final=True)
        if outcome is Outcome.CANCELLED or row.name == "cancelled":
            self._finish(rollout, Outcome.CANCELLED, "cancelled", attempt_id)
            return Ended(attempt, "cancelled", final=True)
        if row.other_host:
            rollout.avoid.add(attempt.host)
            host.strikes += 1
        failures = rollout.failures[row.name] = rollout.failures.get(row.name, 0) + 1
        verdict = self._retries.verdict(row, failures)
        task = rollout.group.task
        if verdict is not Verdict.RETRY:
            self._finish(rollout, Outcome.INVALID, row.name, attempt_id)
            at_fault = verdict is Verdict.QUARANTINE and _is_at_fault(rollout.group, row)
            quarantined = at_fault and self.quarantine(task.key, row.name)
            return Ended(attempt, row.name, final=True, quarantined=task.key if quarantined else None)
        if task.quarantined is not None or self._cancelled:
            self._finish_waiting(rollout)
            return Ended(attempt, row.name, final=True)
        due = self._now + self._retries.delay(row, failures, retry_after_sec, attempt_id)
        rollout.state = State.DELAYED
        self._delayed += 1
        self._timers.set(due, rollout, rollout.attempts)
        return Ended(attempt, row.name, final=False, retry_at=due)

    def prepared(
        self, preparation_id: str, error_class: str | None, retry_after_sec: float | None, now: float
    ) -> Prepared | None:
        """A preparation ended, well (None) or with an error class. None where it had ended before.

        A fault of the task quarantines it at once, any other once the task's budget for the class is used up;
        but where the task is ready on another host, only this host is given up for it. Raises `KeyError` for
        a preparation that was never started.
        """
        self._advance(now)
        if preparation_id not in self._preparing:
            if not self._placement.started(preparation_id):
                raise KeyError(preparation_id)
            self._late += 1
            return None
        task, host = self._preparing.pop(preparation_id)
        preparation = host.preparations.pop(preparation_id)
        task.preparing.discard(host)
        if error_class is None:
            task.failures.clear()
            self._placement.make_ready(task, host)
            return Prepared(preparation, ready=True)
        row = row_of(error_class)
        failures = task.failures[row.name] = task.failures.get(row.name, 0) + 1
        retry_at = None
        if self._retries.verdict(row, failures) is Verdict.RETRY and task.unended:
            task.avoid.add(host.name)
            task.delayed = True
            retry_at = self._now + self._retries.delay(row, failures, retry_after_sec, preparation_id)
            self._timers.set(retry_at, task, task.preparations)
        elif task.ready or task.preparing:
            task.refused.add(host)
        elif task.unended and self.quarantine(task.key, row.name):
            return Prepared(preparation, ready=False, quarantined=task.key)
        self._placement.place_stranded(task)
        return Prepared(preparation, ready=False, retry_at=retry_at)

    def add(
        self,
        rollouts: Iterable[RolloutKey],
        now: float,
        *,
        earlier: Mapping[RolloutKey, Sequence[str]] | None = None,
    ) -> None:
        """Further rollouts, behind those that are there, whole groups. Those of a quarantined task end at once.

        Raises `ValueError`, and takes none, where one is there already, or belongs to a group that is.
        """
        self._advance(now)
        self._take_in(rollouts, earlier or {})

    def withdraw(self, now: float) -> list[GroupKey]:
        """Forget the groups of which no rollout was begun, as if they had never been given. Returns them."""
        self._advance(now)
        unopened = self._roster.take_back()
        for group in unopened:
            self._placement.settle(group.task)
        return [group.key for group in unopened]

    def host_up(self, host: str, capacity: int, now: float) -> None:
        """A host came up, or may run another number of attempts at once. With 0 it takes nothing new."""
        self._advance(now)
        self._placement.set_host(host, capacity)

    def host_down(self, host: str, now: float) -> list[Ended]:
        """A host is gone: its attempts and preparations end as `host_lost`. Returns the ends of its attempts."""
        self._advance(now)
        state = self._placement.hosts.get(host)
        if state is None:
            return []
        ends = [
            self.ended(attempt_id, Outcome.INVALID, "host_lost", None, now)
            for attempt_id in sorted(state.attempts)
        ]
        for preparation_id in sorted(state.preparations):
            self.prepared(preparation_id, "host_lost", None, now)
        self._placement.drop_host(state)
        return [end for end in ends if end is not None]

    def quarantine(self, task: TaskKey, error_class: str) -> bool:
        """Spend no further attempt on this task: what waits ends `invalid` with this class.

        False where it is quarantined already; the first class stays. The task may be one that is yet to come.
        """
        state = self._roster.task(task)
        if state.quarantined is not None:
            return False
        state.quarantined = self._quarantined[task] = error_class
        self._finish_all_waiting(state)
        return True

    def cancel(self, now: float) -> list[str]:
        """Call the job off: what waits ends `cancelled`. Returns the attempts in flight, which end as usual; one
        that would be tried again is cancelled instead."""
        self._advance(now)
        self._cancelled = True
        for task in self._placement.tasks:
            self._finish_all_waiting(task)
        return list(self._in_flight)

    # Answers

    def finished(self) -> list[RolloutEnd]:
        """Rollouts that ended since this was last asked: each is returned once."""
        finished, self._finished = self._finished, []
        return finished

    def groups_done(self) -> list[GroupKey]:
        """Groups whose last rollout ended since this was last asked: each is returned once."""
        done, self._done_groups = self._done_groups, []
        return done

    def coming(self, host: str, limit: int) -> list[TaskKey]:
        """The tasks of the next rollouts that wait for this host, in order, `limit` at most: where it stands, one
        rollout a time. A forecast: nothing is decided by it."""
        state = self._placement.hosts.get(host)
        return [] if state is None else self._placement.coming(state, limit)

    @property
    def done(self) -> bool:
        """True once every rollout has ended."""
        return self._outcomes.total() == self._roster.rollouts

    def counts(self) -> Counts:
        """Where everything is now."""
        total = self._roster.rollouts
        return Counts(
            rollouts=total,
            waiting=total - self._outcomes.total() - len(self._in_flight) - self._delayed,
            delayed=self._delayed,
            in_flight=len(self._in_flight),
            dispatched=self._dispatched,
            ended=self._ended,
            late=self._late,
            outcomes={outcome: self._outcomes[outcome] for outcome in Outcome},
            groups=self._roster.groups,
            groups_open=self._placement.open_groups,
            groups_done=self._groups_done,
            preparing=len(self._preparing),
            quarantined=MappingProxyType(self._quarantined),
        )

    # Inside

    def _advance(self, now: float) -> None:
        """Move the time on and let what is due wait for a host."""
        self._now = max(self._now, now)
        for waiting in self._timers.due(self._now):
            if isinstance(waiting, TaskState):
                waiting.delayed = False
                self._placement.settle(waiting)
            else:
                waiting.state = State.WAITING
                self._delayed -= 1
                self._placement.place(waiting)

    def _finish(
        self, rollout: RolloutState, outcome: Outcome, error_class: str | None, attempt_id: str | None
    ) -> None:
        group = rollout.group
        rollout.state = State.ENDED
        self._outcomes[outcome] += 1
        self._finished.append(RolloutEnd(rollout.key, outcome, error_class, rollout.attempts, attempt_id))
        group.unended -= 1
        group.task.unended -= 1
        if group.opened is None:
            group.task.fresh -= 1
        if not group.unended:
            self._groups_done += 1
            self._done_groups.append(group.key)
            if group.opened is not None:
                self._placement.open_groups -= 1
            if group.key.draw and not group.suspected:
                group.task.suspicions = 0  # or a stream would quarantine every task in the end
            self._roster.forget(group)

    def _finish_waiting(self, rollout: RolloutState) -> None:
        """End a rollout that waits, as its task's quarantine or the job's cancellation has it."""
        if rollout.state is State.DELAYED:
            self._delayed -= 1
        elif rollout.state is not State.WAITING:
            return
        quarantined = rollout.group.task.quarantined
        if quarantined is None:
            self._finish(rollout, Outcome.CANCELLED, "cancelled", None)
        else:
            self._finish(rollout, Outcome.INVALID, quarantined, None)

    def _finish_all_waiting(self, task: TaskState) -> None:
        for group in list(task.groups.values()):
            for rollout in group.rollouts:
                self._finish_waiting(rollout)
        self._placement.place_stranded(task)


def _is_at_fault(group: GroupState, row: ErrorClass) -> bool:
    """Whether the task is, now that one more of its rollouts has given up over an error of this class."""
    task = group.task
    if row.quarantine is Quarantine.AFTER_RETRIES:
        group.suspected = True
        task.suspicions += 1
        return task.suspicions >= min(SUSPECTS, task.rollouts)
    return True
