"""Sandboxes for tasks on one host: admitted, made, handed out, and all of it given back.

The pool is the only maker of sandboxes. What it hands out it knows, so `close` leaves nothing behind.

- What a host has too little of is waited for (`admission.py`, `networks.py`), first come, first served.
- Sandboxes for the rollouts that come next are started ahead (`warm.py`).
- Removal is on nobody's way: `release` hands over and returns. It waits only while `MOST_REMOVALS` are under way,
  so that a host that removes slowly takes in slowly too.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.admission import MIB, Admission, Need
from rollcage.rollout.sandbox.base import Sandbox
from rollcage.rollout.sandbox.engine import Engine, is_local
from rollcage.rollout.sandbox.images import BuiltImage
from rollcage.rollout.sandbox.maker import Held, Maker, Wanted
from rollcage.rollout.sandbox.reaper import Reaped, reap
from rollcage.rollout.sandbox.settings import SandboxSettings
from rollcage.rollout.sandbox.states import States
from rollcage.rollout.sandbox.warm import LIFE_SEC, Stock
from rollcage.rollout.task import Environment

__all__ = ["Expected", "Listener", "SandboxPool", "SandboxSettings"]

MEMORY_SHARE = 0.9
"""Of the engine's memory so much may be admitted; the rest is the engine's, Ray's and the page cache's."""

CPU_OVERCOMMIT = 16.0
"""CPUs that are admitted for each that there is: agents wait for a model most of the time."""

MOST_REMOVALS = 32

REMOVALS_AT_ONCE = 8
"""More are no faster, and engines have been seen to lose count of a bridge's endpoints under many:
https://github.com/moby/moby/issues/42119"""

REMOVAL_SEC = 120.0
REMOVAL_WAITS_SEC = (5.0, 30.0)
"""Between tries. What cannot be removed then is left to the reaper."""


class Listener(Protocol):
    """Who is told what a pool does."""

    def acquired(self, seconds: float, *, warm: bool) -> None:
        """A sandbox was handed out, `seconds` after it was asked for; `warm`: it had been started ahead."""
        ...

    def removed(self, seconds: float) -> None:
        """A sandbox was removed, `seconds` after its removal had its turn."""
        ...


@dataclass(frozen=True)
class Expected:
    """A sandbox that will be asked for: what `acquire` will be given."""

    image: BuiltImage
    environment: Environment
    least_sec: float = 0.0


class SandboxPool:
    """Makes and unmakes sandboxes on one engine for one job.

    `waiting` calls of `acquire` wait for room. `failed_removals` says what could not be removed, and why.
    """

    def __init__(
        self,
        engine: Engine,
        settings: SandboxSettings,
        *,
        host: str,
        job: str,
        listener: Listener | None = None,
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.host = host
        self.job = job
        self.stock: Stock[Held] = Stock(self._start_ahead, _is_alive, self._discard)
        self.waiting = 0
        self.cold_starts = 0
        self.removing = 0
        self._listener = listener
        self._maker = Maker(engine, settings, host=host, job=job, give_way=self.stock.give_way)
        self.images = self._maker.images
        self.networks = self._maker.networks
        self.states = States(engine, settings.states_disk_gb)
        self.failed_removals = self._maker.failed_removals
        self._expected: dict[str, tuple[Wanted, float]] = {}
        self._held: dict[str, Held] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._removals = asyncio.Semaphore(REMOVALS_AT_ONCE)
        self._admission: Admission | None = None
        self._opening = asyncio.Lock()

    async def image(self, environment: Environment, task: str) -> BuiltImage:
        """The image of the task's sandbox, built or fetched once however many ask; those of its other services
        are made as well. Raises `BuildError`, and `TaskError` for a compose file that is wrong with the job's
        variables."""
        return await self._maker.image(environment, task)

    async def acquire(
        self,
        image: BuiltImage,
        environment: Environment,
        *,
        attempt_id: str,
        role: str = "main",
        network_mode: str | None = None,
        least_sec: float = 0.0,
        waited: Callable[[float], None] = lambda _seconds: None,
    ) -> Sandbox:
        """A running sandbox of `image`, that lives for the deadline of the settings and for `least_sec` at least.
        Waits for room, except in another role than `main`: who holds a sandbox does not wait for a second one, but
        for its network where no shared bridge takes one more, and then not for ever. `waited` is told how many seconds
        it waited for room. Raises `SandboxError` or `TaskError`."""
        wanted = Wanted(image, environment, network_mode or environment.network_mode)
        life_sec = max(self.settings.deadline_sec, least_sec)
        name = f"rollcage-{attempt_id}-{role}"
        asked = time.monotonic()
        held = await self.stock.take(_key(wanted), lambda held: held.life_left >= life_sec)
        warm = held is not None
        if held is not None:
            waited(0.0)
            self._spawn(self._rename(held, name))
        else:
            admission = await self._admitting()
            need = self._maker.need(environment, admission.capacity)
            self.waiting += 1
            self.images.hold(image.id)
            queued = time.monotonic()
            try:
                await admission.admit(need, at_once=role != "main")
            finally:
                self.images.let_go(image.id)
                self.waiting -= 1
                waited(time.monotonic() - queued)
            self.cold_starts += 1
            held = await self._make(
                admission, wanted, need, name, attempt_id, life_sec, holding=role != "main"
            )
        self._held[held.sandbox.id] = held
        if self._listener is not None:
            self._listener.acquired(time.monotonic() - asked, warm=warm)
        return held.sandbox

    @property
    def in_use(self) -> int:
        """Sandboxes that are handed out."""
        return len(self._held)

    async def free_disk(self) -> int | None:
        """Bytes that are free where the engine keeps its data; None where that is not on this machine. Raises
        `SandboxError`."""
        return (await self._admitting()).free_disk()

    def expect(self, coming: Sequence[Expected]) -> None:
        """These will be asked for next, in this order: the first `settings.warm` of them are started ahead, as far
        as nobody waits for the room. Tasks of several containers are not."""
        single = [one for one in coming if one.environment.compose is None][: self.settings.warm]
        wanted = [Wanted(one.image, one.environment, one.environment.network_mode) for one in single]
        keys = [_key(one) for one in wanted]
        self._expected = {
            key: (one, expected.least_sec) for key, one, expected in zip(keys, wanted, single, strict=True)
        }
        self.stock.expect(keys)

    async def release(self, sandbox: Sandbox) -> None:
        """Have a sandbox removed and what it held given back. Twice is no error. See `drained`."""
        held = self._held.pop(sandbox.id, None)
        if held is None:
            return
        self._discard(held)
        while len(self._background) > MOST_REMOVALS:
            await asyncio.wait(self._background, return_when=asyncio.FIRST_COMPLETED)

    async def drained(self) -> None:
        """Wait until nothing is being removed."""
        while self._background:
            await asyncio.wait(self._background)

    async def close(self) -> Reaped:
        """End what is being built, and remove whatever this host still has on its engine: containers,
        networks, unfinished images. Returns what the pool did not hold any more. Raises `SandboxError`."""
        await self.stock.close()
        await self.images.close()
        for held in [self._held.pop(name) for name in list(self._held)]:
            self._discard(held)
        await self.drained()  # what could not be removed is tried once more:
        await self.networks.stop()
        return await reap(self.engine, host=self.host, job=None, now=time.time())

    # Making and unmaking

    async def _make(
        self,
        admission: Admission,
        wanted: Wanted,
        need: Need,
        name: str,
        attempt_id: str,
        life_sec: float,
        *,
        holding: bool = False,
    ) -> Held:
        """Make a sandbox for which `need` has been admitted; gives that back where it fails."""
        try:
            return await self._maker.make(
                wanted, need, name=name, attempt_id=attempt_id, life_sec=life_sec, holding=holding
            )
        except BaseException:
            admission.release(need)
            raise

    def _discard(self, held: Held) -> None:
        """Remove in the background."""
        self._spawn(self._remove(held))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _remove(self, held: Held) -> None:
        waits = iter(REMOVAL_WAITS_SEC)
        self.removing += 1
        try:
            while True:
                try:
                    async with self._removals, asyncio.timeout(REMOVAL_SEC):
                        began = time.monotonic()
                        await held.remove()
                    if self._listener is not None:
                        self._listener.removed(time.monotonic() - began)
                    return
                except (SandboxError, TimeoutError, OSError) as error:
                    pause = next(waits, None)
                    if pause is None:
                        said = f"{held.sandbox.spec.name}: {error or 'its removal took too long'}"
                        self.failed_removals.append(said)
                        return
                    await asyncio.sleep(pause)
        finally:
            self.removing -= 1
            self.networks.release(held.lease)
            if self._admission is not None:
                self._admission.release(held.need)

    # Ahead

    async def _start_ahead(self, key: Any) -> Held | None:
        admission = await self._admitting()
        network = self.networks.capacity()
        if key not in self._expected or self.waiting or network.waiting:
            return None
        wanted, least_sec = self._expected[key]
        if wanted.mode == "public" and network.leases >= network.leases_possible:
            return None
        need = self._maker.need(wanted.environment, admission.capacity)
        if not admission.admit_now(need):
            return None
        name = f"rollcage-{self.host}-warm-{time.monotonic_ns():x}"
        life_sec = max(self.settings.deadline_sec, least_sec) + LIFE_SEC
        return await self._make(admission, wanted, need, name, "", life_sec)

    async def _rename(self, held: Held, name: str) -> None:
        """Give a warm container its rollout's name, for people who look; nobody waits for it."""
        try:
            await self.engine.call("rename a container", lambda api: api.rename(held.sandbox.id, name))
        except SandboxError:
            return  # gone already, and then nobody looks

    # Admission

    async def _admitting(self) -> Admission:
        async with self._opening:
            if self._admission is None:
                info = await self.engine.call("ask the engine about itself", lambda api: api.info())
                self._admission = Admission(
                    capacity_of(info, self.settings),
                    free_disk=partial(_free_disk, self.engine, Path(info.get("DockerRootDir") or "/")),
                    least_disk_mb=self.settings.least_disk_mb,
                    make_room=self.stock.give_way,
                )
        return self._admission


def capacity_of(info: Mapping[str, Any], settings: SandboxSettings) -> Need:
    """What may be admitted at once on the engine that says this about itself."""
    return Need(
        settings.admit_memory_mb or MEMORY_SHARE * int(info.get("MemTotal") or 0) / MIB,
        settings.admit_cpus or CPU_OVERCOMMIT * int(info.get("NCPU") or 1),
    )


def _free_disk(engine: Engine, root: Path) -> int | None:
    return shutil.disk_usage(root).free if is_local(engine) and root.is_dir() else None


def _key(wanted: Wanted) -> str:
    return repr((wanted.image.id, wanted.mode, wanted.environment))


async def _is_alive(held: Held) -> bool:
    return await held.sandbox.is_alive()
