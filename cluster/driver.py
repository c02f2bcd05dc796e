"""Drives a job: asks the scheduler what to do, has hosts do it, and writes what came of it into the ledger.

    scheduler (pure) -> prepare / attempt on a host -> record the attempt -> tell the scheduler
                                                    \\-> settle (settling.py): ended rollouts, whole groups

Invariants:

- An attempt is in the ledger before the scheduler hears of its end, so nothing that counts is unwritten.
- One task of asyncio settles, so a group is committed after all of its rollouts.
- A host that is lost is drained, then replaced: what ran on it ends as `host_lost` and is tried again, and
  the host in its place removes what it left on its engine. Where there is none it is `unclean`.
- `stop` lets what runs end for `GRACE_SEC`, then cancels it; a second `stop` cancels at once. Either way
  every rollout is written and every host closed.
- Whatever a host raises ends one attempt. Only the ledger, and having no host at all, end the job.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollcage.cluster.decisions import Assignment, Preparation, TaskKey
from rollcage.cluster.drawing import Drawing
from rollcage.cluster.host import HostClient, HostLost, Prepared
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.ledger_rows import Group
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.progress import JobProgress
from rollcage.cluster.records import own_record, unknown
from rollcage.cluster.scheduler import Scheduler
from rollcage.cluster.settling import Settling
from rollcage.metrics.job_counts import JobCounts, RolloutState
from rollcage.rollout.outcome import BY_NAME, Domain, Evidence, Outcome
from rollcage.rollout.trajectory import Attempt

T = TypeVar("T")

HEARTBEAT_SEC = 5.0
"""How often progress is shown while nothing ends."""

GRACE_SEC = 30.0
"""How long attempts may go on after the first interrupt."""

STEER_SEC = 0.5
"""How often each host is told what comes next and asked how much it can hold."""

REPLACE_SEC = 180.0
"""How long the end of a job waits for the host that cleans up after a lost one."""


class Hosts(Protocol):
    """Where hosts come from. No two of them ever have one name."""

    async def start(self) -> list[HostClient]:
        """All hosts that can be had, at least one. Raises `HostLost` or `RolloutError` where there is none."""
        ...

    async def replace(self, lost: HostClient) -> HostClient | None:
        """Another host in the place of a lost one, which has removed what that one left; None where none can
        be had."""
        ...


@dataclass(frozen=True)
class _Fault:
    """Why a host gave no answer."""

    error_class: str
    evidence: Evidence


def job_counts(plan: JobPlan, *, exemplars: bool = False) -> JobCounts:
    """Those of the plan's driver, at 0. `exemplars`: see `JobCounts`."""
    return JobCounts(
        plan.job,
        [agent.label for agent in plan.agents],
        [agent.policy for agent in plan.agents if agent.policy is not None],
        exemplars=exemplars,
    )


class Driver:
    """One run of one job."""

    def __init__(
        self,
        plan: JobPlan,
        ledger: Ledger,
        hosts: Hosts,
        progress: JobProgress,
        counts: JobCounts | None = None,
    ) -> None:
        self.counts = counts or job_counts(plan)
        """What Prometheus is told of the job."""
        self.begun = False
        """True once there was a host."""
        self.unclean: set[str] = set()
        """Hosts that may have left something on their engines."""
        self._plan = plan
        self._source = hosts
        self._progress = progress
        self._hosts: dict[str, HostClient] = {}
        self._on_host: dict[str, set[asyncio.Task[None]]] = {}
        self._lost: set[str] = set()
        self._capacities: dict[str, int] = {}
        self._unsteered: set[str] = set()
        self._scheduler = Scheduler(
            plan.rollouts(),
            concurrency=plan.concurrency,
            seed=plan.seed,
            retries=plan.retries,
            build_slots=plan.build_slots,
            earlier=plan.earlier,
        )
        self._drawing = None if plan.stream is None else Drawing(plan, ledger.location, progress.say)
        if self._drawing is not None:
            self._drawing.committed = ledger.committed
        self._settling = Settling(plan, ledger, self._scheduler, progress, self.counts)
        self._work: set[asyncio.Task[None]] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._stopping = 0
        self._grace: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None

    async def run(self) -> None:
        """Run the job to its end.

        Raises what `Hosts.start` raises, before anything is spent; `HostLost` where every host is lost and none
        can be had in its place (what is unfinished is written as `cancelled`); and what the ledger raises.
        """
        try:
            for host in await self._source.start():
                self._join(host)
            self.begun = True
            for broken in self._plan.broken:
                self._scheduler.quarantine(broken.key, broken.error_class)
                self.counts.quarantined(broken.error_class)
            self._check_quarantined()
            beside = [asyncio.create_task(self._steer())]
            if self._drawing is not None:
                await self._drawing.begin()
                beside.append(asyncio.create_task(self._drawing.watch(self._changed.set)))
            for task in beside:
                task.add_done_callback(self._done)
            try:
                await self._loop()
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.wait(beside)
        finally:
            await self._close()

    def goes_on(self, rewards: Mapping[Group, list[float]]) -> None:
        """The run has rollouts already: `rewards` are those of its open groups' valid ones. Before `run`."""
        self._settling.goes_on(rewards)

    @property
    def groups_committed(self) -> int:
        """By this driver."""
        return self._settling.groups_committed

    def look(self) -> None:
        """Bring the gauges of `counts` up to date."""
        now = self._scheduler.counts()
        self.counts.state(
            RolloutState(now.waiting, now.delayed, now.in_flight), now.rollouts, sum(now.outcomes.values())
        )

    def stop(self) -> None:
        """Take no more rollouts. Called again: cancel those that run, too. From the event loop's thread."""
        self._stopping += 1
        if self._stopping == 1:
            self._call_off()
            self._grace = asyncio.get_running_loop().call_later(GRACE_SEC, self._cancel)
        else:
            self._cancel()
        self._changed.set()

    def run_out(self, why: str = "") -> None:
        """Take no more rollouts, and let those that run end by themselves, however long it takes. `stop` cancels them.
        `why` is the evidence of those that had not begun. Changes nothing where the job stops already."""
        if not self._stopping:
            self._stopping = 1
            self._settling.run_out = Evidence(why, "rollcage") if why else None
            self._call_off()
            self._changed.set()

    def finish(self) -> None:
        """Begin no more groups, and let those that are under way end, retries too: what is written is whole. The others
        have never been, so that a resumed job begins them."""
        if self._drawing is not None:
            self._drawing.end()
        self._scheduler.withdraw(time.monotonic())
        self._changed.set()

    async def set_weights(self, weights: Mapping[str, float]) -> int:
        """Have a stream draw these tasks so often; returns from which draw on. Raises `ValueError` and `OSError`."""
        if self._drawing is None:
            raise ValueError("this job draws each task once: only `mode: stream` has weights")
        return await self._drawing.set_weights(weights)

    def _call_off(self) -> None:
        if self._drawing is not None:
            self._drawing.end()
            self._scheduler.withdraw(time.monotonic())
        self._scheduler.cancel(time.monotonic())

    # The loop

    async def _loop(self) -> None:
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            self._decide()
            if self._drawing is not None:
                self._drawing.fill(self._scheduler, time.monotonic())
                self._decide()
            await self._settling.settle()
            if self._scheduler.done and (self._drawing is None or self._drawing.ended):
                return
            if self._hosts.keys() <= self._lost and not self._work:
                self._call_off()
                await self._settling.settle()
                raise HostLost("every host is lost and none could be had in its place")
            due = self._scheduler.wake_at()
            wait = HEARTBEAT_SEC if due is None else min(HEARTBEAT_SEC, max(0.0, due - time.monotonic()))
            try:
                async with asyncio.timeout(wait):
                    await self._changed.wait()
            except TimeoutError:
                counts = self._scheduler.counts()
                self._progress.show(counts.in_flight, counts.preparing)

    def _decide(self) -> None:
        now = time.monotonic()
        # What is prepared now may stand before what `next` finds idle, so the scheduler is asked on both sides.
        preparations = self._scheduler.prepare(now)
        for assignment in self._scheduler.next(now):
            self.counts.dispatched()
            host = self._hosts[assignment.host]
            self._spawn(self._attempt(assignment, host), self._on_host[host.name])
        for preparation in preparations + self._scheduler.prepare(now):
            host = self._hosts[preparation.host]
            self._spawn(self._prepare(preparation, host), self._on_host[host.name])

    def _spawn(self, work: Coroutine[Any, Any, None], among: set[asyncio.Task[None]]) -> None:
        """Begin some work, and count it among others of its kind until it is done."""
        task = asyncio.create_task(work)
        for tasks in (self._work, among):
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
        self._changed.set()

    # Work on hosts

    async def _prepare(self, preparation: Preparation, host: HostClient) -> None:
        prepared = await self._ask(host, host.prepare(self._plan.tasks[preparation.task]))
        if isinstance(prepared, _Fault):
            prepared = Prepared(error_class=prepared.error_class, evidence=prepared.evidence)
        end = self._scheduler.prepared(
            preparation.preparation_id, prepared.error_class, prepared.retry_after_sec, time.monotonic()
        )
        if end is not None and end.quarantined is not None:
            self._quarantined(end.quarantined, prepared.error_class, prepared.evidence)

    async def _attempt(self, assignment: Assignment, host: HostClient) -> None:
        started = time.time()
        policy = self._plan.agent(assignment.key.agent).policy
        attempt = await self._ask(host, host.run(self._plan.attempt(assignment), policy))
        if isinstance(attempt, _Fault):
            attempt = own_record(
                assignment.key,
                Outcome.INVALID,
                attempt.error_class,
                attempt.evidence,
                number=assignment.number,
                policy=policy,
                attempt_id=assignment.attempt_id,
                host=host.name,
                started_at=started,
            )
        attempt = await self._settling.attempt(attempt)
        end = self._scheduler.ended(
            assignment.attempt_id,
            attempt.outcome,
            attempt.error_class,
            attempt.retry_after_sec,
            time.monotonic(),
        )
        if end is None:
            await self._drop_states(host, attempt)
            return
        if end.final:
            self._settling.last(assignment.key, attempt)
        if end.quarantined is not None:
            self._quarantined(end.quarantined, end.error_class, attempt.evidence)
        if not end.final:
            self.counts.retried(end.error_class)
            self._progress.retried(end.error_class or "", self._scheduler.counts().in_flight)
            await self._drop_states(host, attempt)

    async def _drop_states(self, host: HostClient, attempt: Attempt) -> None:
        """Of a rollout that is tried again only the last attempt's states stay."""
        if not attempt.extra.get("state", {}).get("images"):
            return
        fault = await self._ask(host, host.drop_states(attempt.attempt_id))
        if fault is not None:
            self._progress.say(
                f"states of {attempt.attempt_id} stay on {host.name}: {fault.evidence.message}"
            )

    async def _ask(self, host: HostClient, call: Coroutine[Any, Any, T]) -> T | _Fault:
        """What the host answers, or why it gave no answer."""
        try:
            return await call
        except HostLost as lost:
            self._lose(host)
            return self._fault(lost.error_class, Evidence(str(lost), "rollcage"))
        except asyncio.CancelledError as error:
            me = asyncio.current_task()
            if me is None or me.cancelling():
                raise
            return self._fault("internal_error", unknown(error))  # nobody cancelled it but the host itself
        except Exception as error:  # noqa: BLE001 -- what has no name yet is internal_error, never a silent 0
            return self._fault("internal_error", unknown(error))

    def _fault(self, error_class: str, evidence: Evidence) -> _Fault:
        return _Fault(error_class, evidence.mapped(self._progress.redact))

    async def _steer(self) -> None:
        """Tell the hosts what comes next, so that they start sandboxes ahead, and give them no more than they can
        hold."""
        asked: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                for name, host in self._hosts.items():
                    if name not in self._lost and (name not in asked or asked[name].done()):
                        asked[name] = asyncio.create_task(self._steer_host(host))
                await asyncio.sleep(STEER_SEC)
        finally:
            for task in asked.values():
                task.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)

    async def _steer_host(self, host: HostClient) -> None:
        coming = () if self._stopping else self._scheduler.coming(host.name, self._plan.warm)
        load = await self._ask(host, host.expect([key.digest for key in coming]))
        if host.name in self._lost or host.name not in self._hosts:
            return
        if isinstance(load, _Fault):
            if host.name not in self._unsteered:
                self._unsteered.add(host.name)
                self._progress.say(f"host {host.name} starts nothing ahead: {load.evidence.message}")
            return
        self._progress.so_far[host.name] = (load.turns, load.tokens)
        concurrency = self._plan.concurrency
        capacity = concurrency if load.room is None else max(1, min(concurrency, load.room))
        if self._capacities.get(host.name) != capacity:
            self._capacities[host.name] = capacity
            self._scheduler.host_up(host.name, capacity, time.monotonic())
            self._changed.set()

    def _cancel(self) -> None:
        for name, host in self._hosts.items():
            if name not in self._lost:
                self._spawn(self._cancel_on(host), self._on_host[name])

    async def _cancel_on(self, host: HostClient) -> None:
        fault = await self._ask(host, host.cancel())
        if fault is not None:
            self._progress.say(f"host {host.name} could not cancel what it runs: {fault.evidence.message}")

    # Hosts come and go

    def _join(self, host: HostClient) -> None:
        self._hosts[host.name] = host
        self._on_host[host.name] = set()
        self._capacities[host.name] = self._plan.concurrency
        self._scheduler.host_up(host.name, self._plan.concurrency, time.monotonic())

    def _lose(self, host: HostClient) -> None:
        if host.name in self._lost:
            return
        self._lost.add(host.name)
        self._progress.so_far.pop(host.name, None)
        self._scheduler.host_up(host.name, 0, time.monotonic())
        self._progress.say(f"host {host.name} is lost; what ran on it is tried again")
        self._spawn(self._replace(host), self._replacing)

    async def _replace(self, lost: HostClient) -> None:
        if running := self._on_host[lost.name]:
            await asyncio.wait(set(running))
        self._scheduler.host_down(lost.name, time.monotonic())
        del self._hosts[lost.name], self._on_host[lost.name]
        self.unclean.add(lost.name)
        host = await self._source.replace(lost)
        if host is not None:
            self.unclean.discard(lost.name)
            self._join(host)
        else:
            self._progress.say(f"no host could be had in the place of {lost.name}")

    async def _close(self) -> None:
        """Close every host, whatever else went wrong. A lost one is cleaned up after by the host in its place."""
        if self._grace is not None:
            self._grace.cancel()
        if self._replacing:
            await asyncio.wait(set(self._replacing), timeout=REPLACE_SEC)
        closing = [host for name, host in self._hosts.items() if name not in self._lost]
        results = await asyncio.gather(*(host.close() for host in closing), return_exceptions=True)
        for host, result in zip(closing, results, strict=True):
            if isinstance(result, BaseException):
                self.unclean.add(host.name)
                self._progress.say(f"host {host.name} did not close well: {result}")
        for task in set(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    # Quarantine

    def _quarantined(self, task: TaskKey, error_class: str | None, evidence: Evidence | None) -> None:
        self._settling.evidence[task] = evidence or Evidence()
        self.counts.quarantined(error_class)
        if self._drawing is not None:
            self._drawing.drop(task.name)
        first = self._settling.evidence[task].message.partition("\n")[0][:300]
        infra = error_class is not None and BY_NAME[error_class].domain is Domain.INFRA
        word = "given up" if infra else "quarantined"
        self._progress.say(f"{word} {task.name}: {error_class}: {first}")
        self._check_quarantined()

    def _check_quarantined(self) -> None:
        limit = self._plan.max_quarantined_tasks
        if limit is not None and len(self._scheduler.counts().quarantined) > limit and not self._stopping:
            self._progress.say(f"more than {limit} tasks are quarantined: the job stops")
            self.stop()
