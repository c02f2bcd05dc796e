"""A host: one Docker Engine, and the attempts that run on it.

`SandboxHost` is plain asyncio and knows nothing of Ray, so `rollcage try` and tests use it in their own
process; `actors.py` runs one on each node of a cluster. Both implement `HostClient`.

Errors do not cross as exceptions: `prepare` returns what went wrong as a `Prepared`, `run` an `Attempt`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from rollcage.cluster.scratch import remove_abandoned
from rollcage.cluster.task_copies import TaskCopies
from rollcage.metrics.counts import Snapshot
from rollcage.metrics.host_counts import HostCounts
from rollcage.rollout.outcome import Evidence, RolloutError, SandboxError
from rollcage.rollout.policies.base import Policy
from rollcage.rollout.regrade import regrade_attempt
from rollcage.rollout.rollout import AttemptSpec, least_seconds, run_attempt
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.images import BuiltImage
from rollcage.rollout.sandbox.pool import Expected, SandboxPool, SandboxSettings
from rollcage.rollout.sandbox.reaper import host_name, left_over, reap, reap_dead
from rollcage.rollout.sandbox.states import SavedState, list_states
from rollcage.rollout.sandbox.traits import check_runtime, engine_traits
from rollcage.rollout.task import Environment, Task, redactor
from rollcage.rollout.trajectory import Attempt, Trajectory
from rollcage.verifier.verify import TestsVerifier

INSECURE = (
    "sandbox.network.insecure_network: sandboxes with internet reach this machine and whatever it reaches"
)

UNFILTERED = (
    "this engine cannot filter system calls (seccomp): an agent can reach its sandbox's own supervisor"
)

REAP_SEC = 60.0
"""How often a host looks for what hosts that were killed have left on its engine."""

QUEUE = 2
"""Attempts that may wait for room on a full host, so that one is there when some comes free."""


@dataclass(frozen=True)
class Prepared:
    """What came of making a task ready on a host: ready, its files wanted, or an error class with evidence."""

    wants_files: bool = False
    error_class: str | None = None
    evidence: Evidence | None = None
    retry_after_sec: float | None = None


class HostLoad(NamedTuple):
    """How a host is. `room`: how many attempts it can hold at once as things are, None where it knows of no limit.
    `turns`, `tokens`: those that the attempts which run have had and sampled so far."""

    room: int | None
    turns: int = 0
    tokens: int = 0


class HostClient(Protocol):
    """A host as the driver sees it, in this process or behind an actor.

    Any call may raise `HostLost` when the host is gone.
    """

    name: str

    async def prepare(self, task: Task) -> Prepared:
        """Make the task's images on this host."""
        ...

    async def run(self, spec: AttemptSpec, policy: str | None) -> Attempt:
        """Run one attempt to its end."""
        ...

    async def expect(self, coming: Sequence[str]) -> HostLoad:
        """These tasks (digests, one a rollout) are what comes next. Returns how the host is."""
        ...

    async def drop_states(self, attempt_id: str) -> None:
        """Remove what was saved of an attempt's sandbox: another one decides its rollout."""
        ...

    async def cancel(self) -> None:
        """Cancel every attempt that is running; each still ends in its record."""
        ...

    async def close(self) -> None:
        """Leave nothing on the engine but cached images."""
        ...


class HostLost(Exception):
    """The host is gone. `error_class` is `host_lost`, or `host_oom` where its memory ran out."""

    def __init__(self, message: str, error_class: str = "host_lost") -> None:
        super().__init__(message)
        self.error_class = error_class


@dataclass(frozen=True)
class HostSpec:
    """What every host of a job is made with. Can be pickled."""

    job: str
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    policies: Mapping[str, Policy] = field(default_factory=dict)
    reward_key: str | None = None
    verifier_timeout_multiplier: float = 1.0
    keep_processes: tuple[str, ...] = ()


class SandboxHost:
    """One Docker Engine and what runs on it for one job. Implements `HostClient`."""

    def __init__(self, spec: HostSpec, *, emit: Callable[[str], None] = lambda _line: None) -> None:
        self.name = host_name()
        self._spec = spec
        self._emit = emit
        self._running: dict[str, asyncio.Task[Attempt]] = {}
        self._trajectories: dict[str, Trajectory] = {}
        self._tasks: dict[str, Task] = {}
        self._images: dict[str, BuiltImage] = {}
        self._least_sec: dict[str, float] = {}
        self._copies = TaskCopies()
        self._reaping: asyncio.Task[None] | None = None

    async def open(self, after: str | None = None) -> str:
        """Reach the engine and return this host's name. What is past its deadline there is removed, and
        everything of hosts whose process is dead, and of the one called `after`, whose place this one takes.

        Raises `SandboxError` where the engine does not answer or lacks the job's runtime, and where the job's sandboxes
        want internet and could not be kept from this machine.
        """
        spec = self._spec
        self._counts = HostCounts(self.name)
        self._engine = await asyncio.to_thread(Engine, spec.sandbox.docker_host)
        try:
            self._traits = await engine_traits(self._engine)
            check_runtime(self._traits, spec.sandbox.runtime)
            if not self._traits.seccomp:
                self._emit(UNFILTERED)
            if after is not None:
                await reap(self._engine, host=after, job=None, now=time.time())
            await self._clear_up()
        except BaseException:
            self._engine.close()
            raise
        self._pool = SandboxPool(
            self._engine, spec.sandbox, host=self.name, job=spec.job, listener=self._counts
        )
        await self._check_networks()
        self._verifier = TestsVerifier(
            environ=spec.sandbox.environ,
            reward_key=spec.reward_key,
            timeout_multiplier=spec.verifier_timeout_multiplier,
            keep_processes=spec.keep_processes,
        )
        self._reaping = asyncio.create_task(self._keep_clear())
        return self.name

    async def _clear_up(self) -> None:
        """Remove what the dead left. Raises `SandboxError`."""
        self._counts.reaped(asdict(await reap_dead(self._engine, now=time.time())))
        self._counts.leaked(asdict(await left_over(self._engine)))
        await asyncio.to_thread(remove_abandoned)

    async def _keep_clear(self) -> None:
        while True:
            await asyncio.sleep(REAP_SEC)
            try:
                await self._clear_up()
            except SandboxError as error:
                self._emit(f"what dead hosts left could not be removed: {error}")
            self._tell_failed_removals()

    def _tell_failed_removals(self) -> None:
        failed = self._pool.failed_removals
        while failed:
            self._emit(f"left to the reaper: {failed.pop(0)}")

    async def _check_networks(self) -> None:
        if self._spec.sandbox.insecure_network:
            self._emit(INSECURE)
        try:
            await self._pool.networks.check(self._spec.sandbox.network_modes)
        except BaseException:
            try:
                await self._pool.close()
            finally:
                self._engine.close()
            raise

    async def prepare(self, task: Task, files: bytes | None = None) -> Prepared:
        """Make the task's images here. `files` is a tar of the task's directory, needed where this machine
        does not have the same files at the same path. Values of the host's variables are not in what it says."""
        try:
            return Prepared(wants_files=not await self._prepare(task, files))
        except RolloutError as error:
            return Prepared(
                error_class=error.error_class,
                evidence=error.evidence.mapped(redactor(task, self._spec.sandbox.environ)),
                retry_after_sec=error.retry_after_sec,
            )

    async def _prepare(self, task: Task, files: bytes | None) -> bool:
        """Returns False where the files are wanted. Raises `RolloutError`."""
        local = self._tasks.get(task.digest)
        if local is None:
            local = await asyncio.to_thread(self._copies.take, task, files)
            if local is None:
                return False
            self._tasks[task.digest] = local
            self._note_cpus(local)
        self._images[task.digest] = await self._image(local.environment, task.name)
        for step in local.steps:
            if step.verifier.environment is not None:
                await self._image(step.verifier.environment, f"{task.name} (verifier)")
        return True

    async def _image(self, environment: Environment, task: str) -> BuiltImage:
        try:
            image = await self._pool.image(environment, task)
        except RolloutError as error:
            self._counts.image_failed(error.error_class)
            raise
        self._counts.image(image.build_seconds, built=image.built)
        return image

    def _note_cpus(self, task: Task) -> None:
        wanted, there = task.environment.cpus, self._traits.cpus
        if wanted is not None and there is not None and wanted > there:
            self._emit(f"{task.name} asks for {wanted:g} cpus and gets the {there} that there are")

    async def run(self, spec: AttemptSpec, policy: str | None, *, keep: bool = False) -> Attempt:
        """Run one attempt of a task that `prepare` has made ready."""
        local = self._tasks.get(spec.task.digest, spec.task)
        self._least_sec[spec.task.digest] = least_seconds(spec)
        trajectory = self._trajectories[spec.attempt_id] = Trajectory()
        work = run_attempt(
            replace(spec, task=replace(local, name=spec.task.name)),
            self._pool,
            self._verifier,
            self._spec.policies[policy] if policy is not None else None,
            emit=self._emit,
            keep=keep,
            trajectory=trajectory,
        )
        try:
            return await self._tracked(spec.attempt_id, work)
        finally:
            del self._trajectories[spec.attempt_id]

    async def _tracked(self, attempt_id: str, work: Coroutine[Any, Any, Attempt]) -> Attempt:
        """Await an attempt that `cancel` reaches."""
        attempt = self._running[attempt_id] = asyncio.ensure_future(work)
        try:
            return await attempt
        finally:
            del self._running[attempt_id]

    async def expect(self, coming: Sequence[str]) -> HostLoad:
        known = [digest for digest in coming if digest in self._images and digest in self._tasks]
        self._pool.expect(
            [
                Expected(
                    self._images[digest], self._tasks[digest].environment, self._least_sec.get(digest, 0.0)
                )
                for digest in known
            ]
        )
        waiting = self._pool.waiting
        turns = [turn for trajectory in self._trajectories.values() for turn in trajectory.turns]
        tokens = sum(turn.completion_tokens for turn in turns)
        return HostLoad(len(self._running) - waiting + QUEUE if waiting else None, len(turns), tokens)

    async def drop_states(self, attempt_id: str) -> None:
        await self._pool.states.drop(attempt_id)

    async def counted(self) -> Snapshot:
        """What this host has counted since it was made, and how it is now. After `open`."""
        counts, pool = self._counts, self._pool
        counts.sandboxes(warm=len(pool.stock), in_use=pool.in_use, removing=pool.removing)
        net = pool.networks.capacity()
        counts.networks(
            {"shared": net.leases, "private": net.private, "allowlist": net.allowlists},
            {"shared": net.leases_possible, "private": net.small_possible, "allowlist": net.small_possible},
            bridges=net.bridges,
            ports_in_use=net.leases,
        )
        # An engine that is down says nothing of its disk, and the last word stays.
        with suppress(SandboxError):
            counts.disk(await pool.free_disk())
        return counts.snapshot()

    async def saved_states(self) -> list[SavedState]:
        """All that this engine has. Raises `SandboxError`."""
        return await list_states(self._engine)

    async def regrade(self, old: Attempt, spec: AttemptSpec, states: Mapping[str, str]) -> Attempt | None:
        """The attempt's verdict anew, by the task as `prepare` has made it ready. `states` are names of saved states,
        by step; None where one of them is gone."""
        found = {step: await self._pool.states.image(name) for step, name in states.items()}
        images = {step: one[0] for step, one in found.items() if one is not None}
        if images.keys() != found.keys():
            return None
        local = replace(self._tasks[spec.task.digest], name=spec.task.name)
        work = regrade_attempt(
            old, replace(spec, task=local), images, self._pool, self._verifier, emit=self._emit
        )
        return await self._tracked(spec.attempt_id, work)

    async def cancel(self) -> None:
        running = list(self._running.values())
        await asyncio.sleep(0)  # one that has not begun yet could not end in a record
        for attempt in running:
            attempt.cancel()

    async def close(self) -> None:
        """Cancel what runs, wait for it, and remove everything of this host's from the engine."""
        await self.cancel()
        if self._running:
            await asyncio.wait(self._running.values())
        if self._reaping is not None:
            self._reaping.cancel()
            # What it has asked of the engine ends first.
            await asyncio.wait([self._reaping])
        try:
            await self._pool.close()
        finally:
            self._tell_failed_removals()
            self._engine.close()
            await asyncio.to_thread(self._copies.close)
