"""Drives a job: asks the scheduler what to do, has hosts do it, and writes what came of it into the ledger.

    scheduler (pure) -> prepare / attempt on a host -> record the attempt -> tell the scheduler
                                                    \\-> settle: ended rollouts, whole groups

Invariants:

- An attempt is in the ledger before the scheduler hears of its end, so nothing that counts is unwritten.
- One task settles, so a group is committed after all of its rollouts.
- A host that is lost is drained, then replaced; what ran on it ends as `host_lost` and is tried again.
- `stop` lets what runs end for `GRACE_SEC`, then cancels it; a second `stop` cancels at once. Either way
  every rollout is written and every host closed.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Coroutine
from typing import Any, Protocol

from rollcage.cluster.decisions import Assignment, Preparation, RolloutEnd, RolloutKey, TaskKey
from rollcage.cluster.host import HostClient, HostLost, Prepared
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.progress import JobProgress
from rollcage.cluster.scheduler import Scheduler
from rollcage.rollout.outcome import BY_NAME, Domain, Evidence, Outcome, Stage
from rollcage.rollout.trajectory import Attempt

GRACE_SEC = 30.0
"""How long attempts may go on after the first interrupt."""


class Hosts(Protocol):
    """Where hosts come from."""

    async def start(self) -> list[HostClient]:
        """All hosts that can be had, at least one. Raises `HostLost` or `RolloutError` where there is none."""
        ...

    async def replace(self, lost: HostClient) -> HostClient | None:
        """Another host in the place of a lost one; None where none can be had now."""
        ...


class Driver:
    """One run of one job."""

    def __init__(self, plan: JobPlan, ledger: Ledger, hosts: Hosts, progress: JobProgress) -> None:
        self._plan = plan
        self._ledger = ledger
        self._source = hosts
        self._progress = progress
        self._hosts: dict[str, HostClient] = {}
        self._on_host: dict[str, set[asyncio.Task[None]]] = {}
        self._lost: set[str] = set()
        self._scheduler = Scheduler(
            plan.rollouts(),
            concurrency=plan.concurrency,
            seed=plan.seed,
            retries=plan.retries,
            build_slots=plan.build_slots,
        )
        self._group_size = {agent.label: agent.samples for agent in plan.agents}
        self._last: dict[RolloutKey, Attempt] = {}
        self._evidence: dict[TaskKey, Evidence] = {broken.key: broken.evidence for broken in plan.broken}
        self._work: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._stopping = 0
        self._grace: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None

    @property
    def stopped(self) -> bool:
        """True once `stop` was called."""
        return self._stopping > 0

    async def run(self) -> None:
        """Run the job to its end. Raises what `Hosts.start` raises, and what the ledger raises."""
        try:
            for host in await self._source.start():
                self._join(host)
            for broken in self._plan.broken:
                self._scheduler.quarantine(broken.key, broken.error_class)
            await self._loop()
        except HostLost:
            self._scheduler.cancel(time.monotonic())
            await self._settle()
            raise
        finally:
            await self._close()

    def stop(self) -> None:
        """Take no more rollouts. Called again: cancel those that run, too. From the event loop's thread."""
        self._stopping += 1
        if self._stopping == 1:
            self._scheduler.cancel(time.monotonic())
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(GRACE_SEC, lambda: self._spawn(self._cancel()))
        else:
            self._spawn(self._cancel())
        self._changed.set()

    # The loop

    async def _loop(self) -> None:
        while True:
            self._changed.clear()
            if self._failure is not None:
                raise self._failure
            self._decide()
            await self._settle()
            if self._scheduler.done:
                return
            if self._hosts.keys() <= self._lost and not self._work:
                raise HostLost("every host is lost and none could be had in its place")
            due = self._scheduler.wake_at()
            try:
                async with asyncio.timeout(None if due is None else max(0.0, due - time.monotonic())):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _decide(self) -> None:
        now = time.monotonic()
        for preparation in self._scheduler.prepare(now):
            self._spawn(self._prepare(preparation))
        for assignment in self._scheduler.next(now):
            self._spawn(self._attempt(assignment), host=assignment.host)
        for preparation in self._scheduler.prepare(now):
            self._spawn(self._prepare(preparation))

    def _spawn(self, work: Coroutine[Any, Any, None], host: str | None = None) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        if host is not None:
            self._on_host[host].add(task)
            task.add_done_callback(self._on_host[host].discard)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failure = self._failure or failure
        self._changed.set()

    # Work on hosts

    async def _prepare(self, preparation: Preparation) -> None:
        host = self._hosts[preparation.host]
        try:
            prepared = await host.prepare(self._plan.tasks[preparation.task])
        except HostLost as lost:
            self._lose(host)
            prepared = Prepared(error_class=lost.error_class, evidence=Evidence(str(lost), "rollcage"))
        except Exception as error:  # noqa: BLE001 -- what has no name yet is internal_error, never a silent 0
            prepared = Prepared(error_class="internal_error", evidence=_unknown(error))
        now = time.monotonic()
        end = self._scheduler.prepared(
            preparation.preparation_id, prepared.error_class, prepared.retry_after_sec, now
        )
        if prepared.evidence is not None:
            self._evidence[preparation.task] = prepared.evidence
        if end is not None and end.quarantined is not None:
            self._say_quarantined(end.quarantined, prepared.error_class or "")

    async def _attempt(self, assignment: Assignment) -> None:
        host = self._hosts[assignment.host]
        policy = self._plan.agent(assignment.key.agent).policy
        started = time.time()
        try:
            attempt = await host.run(self._plan.attempt(assignment), policy)
        except HostLost as lost:
            self._lose(host)
            evidence = Evidence(str(lost), "rollcage")
            attempt = self._ended_without_host(assignment, started, lost.error_class, evidence)
        except Exception as error:  # noqa: BLE001 -- what has no name yet is internal_error, never a silent 0
            attempt = self._ended_without_host(assignment, started, "internal_error", _unknown(error))
        await self._ledger.record_attempt(attempt)
        self._last[assignment.key] = attempt
        end = self._scheduler.ended(
            assignment.attempt_id,
            attempt.outcome,
            attempt.error_class,
            attempt.retry_after_sec,
            time.monotonic(),
        )
        if end is None:
            return
        if end.quarantined is not None:
            self._evidence[end.quarantined] = attempt.evidence or Evidence()
            self._say_quarantined(end.quarantined, attempt.error_class or "")
        if not end.final:
            self._progress.retried(end.error_class or "", self._scheduler.counts().in_flight)

    def _join(self, host: HostClient) -> None:
        self._hosts[host.name] = host
        self._on_host[host.name] = set()
        self._scheduler.host_up(host.name, self._plan.concurrency, time.monotonic())

    def _lose(self, host: HostClient) -> None:
        if host.name in self._lost:
            return
        self._lost.add(host.name)
        self._scheduler.host_up(host.name, 0, time.monotonic())
        self._progress.say(f"host {host.name} is lost; what ran on it is tried again")
        self._spawn(self._replace(host))

    async def _replace(self, lost: HostClient) -> None:
        if running := self._on_host[lost.name]:
            await asyncio.wait(set(running))
        self._scheduler.host_down(lost.name, time.monotonic())
        del self._hosts[lost.name]
        if self._scheduler.done:
            return
        host = await self._source.replace(lost)
        if host is not None:
            self._join(host)

    async def _cancel(self) -> None:
        hosts = [host for name, host in self._hosts.items() if name not in self._lost]
        await asyncio.gather(*(host.cancel() for host in hosts), return_exceptions=True)

    async def _close(self) -> None:
        """Close every host, whatever else went wrong; a host that is lost has nothing left to close."""
        if self._grace is not None:
            self._grace.cancel()
        closing = [host.close() for name, host in self._hosts.items() if name not in self._lost]
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, BaseException):
                self._progress.say(f"a host did not close well: {result}; `rollcage gc` removes what is left")
        for task in set(self._work):
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    # Settling

    async def _settle(self) -> None:
        """Write the rollouts that ended, then commit the groups that are whole."""
        while (ends := self._scheduler.finished()) or self._scheduler.done:
            groups = self._scheduler.groups_done()
            await asyncio.gather(*(self._record(end) for end in ends))
            await asyncio.gather(*(self._ledger.commit_group(group.agent, group.task) for group in groups))
            if not ends:
                return

    async def _record(self, end: RolloutEnd) -> None:
        attempt = self._last.pop(end.key, None)
        if attempt is None or attempt.attempt_id != end.attempt_id:
            attempt = self._ended_unattempted(end)
        self._progress.ended(end.outcome, self._scheduler.counts().in_flight)
        await self._ledger.record_rollout(attempt, end.attempts, self._group_size[end.key.agent])

    def _ended_unattempted(self, end: RolloutEnd) -> Attempt:
        """The record of a rollout that no attempt decided: its task was quarantined, or the job cancelled."""
        row = BY_NAME[end.error_class or "cancelled"]
        now = time.time()
        return Attempt(
            attempt_id="",
            job=end.key.job,
            task=end.key.task,
            task_digest=end.key.task_digest,
            sample=end.key.sample,
            number=end.attempts,
            agent=end.key.agent,
            policy=self._plan.agent(end.key.agent).policy or "",
            host="",
            outcome=end.outcome,
            error_class=row.name,
            stage=Stage.QUEUE if row.domain is Domain.SERVICE else row.stages[0],
            evidence=self._evidence.get(end.key.task_key) if end.outcome is Outcome.INVALID else None,
            started_at=now,
            ended_at=now,
        )

    def _ended_without_host(
        self, assignment: Assignment, started: float, error_class: str, evidence: Evidence
    ) -> Attempt:
        key = assignment.key
        return Attempt(
            attempt_id=assignment.attempt_id,
            job=key.job,
            task=key.task,
            task_digest=key.task_digest,
            sample=key.sample,
            number=assignment.number,
            agent=key.agent,
            policy=self._plan.agent(key.agent).policy or "",
            host=assignment.host,
            outcome=Outcome.INVALID,
            error_class=error_class,
            stage=Stage.QUEUE,
            evidence=evidence.capped(),
            started_at=started,
            ended_at=time.time(),
        )

    def _say_quarantined(self, task: TaskKey, error_class: str) -> None:
        said = self._evidence.get(task, Evidence()).message
        first = said.splitlines()[0][:300] if said else ""
        self._progress.say(f"quarantined {task.name}: {error_class}: {first}")
        limit = self._plan.max_quarantined_tasks
        if limit is not None and len(self._scheduler.counts().quarantined) > limit and not self._stopping:
            self._progress.say(f"more than {limit} tasks are quarantined: the job stops")
            self.stop()


def _unknown(error: Exception) -> Evidence:
    tail = "".join(traceback.format_exception(error))[-3000:]
    return Evidence(f"{type(error).__name__}: {error}", "rollcage", log_tail=tail).capped()
