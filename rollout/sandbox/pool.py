"""Sandboxes for tasks on one host: image, admission, network lease, container, and all of it given back.

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
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollcage.rollout.compose import MAIN, Service, has_internet, image_environment
from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.admission import Admission, Need
from rollcage.rollout.sandbox.base import Sandbox, SandboxSpec
from rollcage.rollout.sandbox.container import DockerSandbox, start_sandbox
from rollcage.rollout.sandbox.engine import Engine, is_local
from rollcage.rollout.sandbox.images import BuiltImage, Images
from rollcage.rollout.sandbox.networks import NetworkLease, Networks
from rollcage.rollout.sandbox.reaper import Reaped, reap
from rollcage.rollout.sandbox.services import Group, Services
from rollcage.rollout.sandbox.trust import Proxies, load_trust, sandbox_env
from rollcage.rollout.sandbox.warm import LIFE_SEC, Stock
from rollcage.rollout.task import Environment, resolve_env

MEMORY_SHARE = 0.9
"""Of the engine's memory so much may be admitted; the rest is the engine's, Ray's and the page cache's."""

CPU_OVERCOMMIT = 16.0
"""CPUs that are admitted for each that there is: agents wait for a model most of the time."""

UNLIMITED_MB = 256
"""What a sandbox without a limit counts for."""

LEASE_SEC = 0.2
"""A lease that takes longer is one that somebody must give back first."""

MOST_REMOVALS = 32

REMOVAL_SEC = 120.0
REMOVAL_WAITS_SEC = (5.0, 30.0)
"""Between tries. What cannot be removed then is left to the reaper."""


@dataclass(frozen=True)
class SandboxSettings:
    """What a job wants of its sandboxes.

    `cpus`, `memory_mb` (MiB) and `storage_mb` (MiB) stand in where a task sets none; None means no limit.
    `deadline_sec`: a sandbox ends by itself so long after its start. `environ` resolves `${VAR}` in tasks.
    `memory_reserve_mb`: what a sandbox counts for in admission, None: its limit. `admit_memory_mb` and
    `admit_cpus`: what may be admitted at once, None: by the engine's machine. `warm`: how many sandboxes are
    started ahead. `image_disk_gb` (GiB): what our images may take of the engine's disk (`image_gc.py`). `ca_bundle`
    and `proxies`: see `trust.py`.
    """

    docker_host: str | None = None
    build_slots: int = 2
    pids: int = 1024
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    deadline_sec: float = 6 * 3600.0
    runtime: str | None = None
    network_cidr: str | None = None
    leases_per_bridge: int = 900
    insecure_network: bool = False
    allow_private: tuple[str, ...] = ()
    network_modes: frozenset[str] = frozenset()
    environ: Mapping[str, str] = field(default_factory=dict)
    memory_reserve_mb: int | None = None
    admit_memory_mb: int | None = None
    admit_cpus: float | None = None
    least_disk_mb: int = 1024
    warm: int = 0
    image_disk_gb: float | None = None
    ca_bundle: str | None = None
    proxies: Proxies = field(default_factory=Proxies)


@dataclass(frozen=True)
class Expected:
    """A sandbox that will be asked for: what `acquire` will be given."""

    image: BuiltImage
    environment: Environment
    least_sec: float = 0.0


@dataclass
class _Held:
    """A sandbox and what goes back with it."""

    sandbox: Sandbox
    lease: NetworkLease
    need: Need
    services: Services | None = None


class SandboxPool:
    """Makes and unmakes sandboxes on one engine for one job.

    `waiting` calls of `acquire` wait for room. `failed_removals` says what could not be removed, and why.
    """

    def __init__(self, engine: Engine, settings: SandboxSettings, *, host: str, job: str) -> None:
        self.engine = engine
        self.settings = settings
        self.host = host
        self.job = job
        self.trust = load_trust(settings.ca_bundle, local=is_local(engine))
        self.images = Images(
            engine,
            host=host,
            build_slots=settings.build_slots,
            trust=self.trust,
            proxies=settings.proxies,
            disk_gb=settings.image_disk_gb,
        )
        self.networks = Networks(
            engine,
            host,
            cidr=settings.network_cidr,
            leases_per_bridge=settings.leases_per_bridge,
            insecure=settings.insecure_network,
            allow_private=settings.allow_private,
        )
        self.waiting = 0
        self.cold_starts = 0
        self.failed_removals: list[str] = []
        self.stock: Stock[_Held] = Stock(self._start_ahead, _is_alive, self._discard)
        self._expected: dict[str, Expected] = {}
        self._held: dict[str, _Held] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._admission: Admission | None = None
        self._opening = asyncio.Lock()

    async def image(self, environment: Environment, task: str) -> BuiltImage:
        """The image of the task's sandbox, built or fetched once however many ask; those of its other services
        are made as well. Raises `BuildError`, and `TaskError` for a compose file that is wrong with the job's
        variables."""
        if environment.compose is None:
            return await self.images.ensure(environment, task=task)
        services = self._services(environment)
        return (await self._service_images(services, environment, task))[MAIN]

    async def acquire(
        self,
        image: BuiltImage,
        environment: Environment,
        *,
        attempt_id: str,
        role: str = "main",
        network_mode: str | None = None,
        least_sec: float = 0.0,
    ) -> Sandbox:
        """A running sandbox of `image`, that lives for the deadline of the settings and for `least_sec` at least.
        Waits for room, except in another role than `main`: who holds a sandbox does not wait for a second one.
        Raises `SandboxError` or `TaskError`."""
        mode = network_mode or environment.network_mode
        life = max(self.settings.deadline_sec, least_sec)
        name = f"rollcage-{attempt_id}-{role}"
        ready = await self.stock.take(_key(image, environment, mode), lambda held: _life_left(held) >= life)
        if ready is not None:
            self._held[ready.sandbox.id] = ready
            self._rename(ready, name)
            return ready.sandbox
        admission = await self._admitting()
        need = self._need(environment, admission)
        self.waiting += 1
        self.images.hold(image.id)
        try:
            await admission.admit(need, at_once=role != "main")
        finally:
            self.images.let_go(image.id)
            self.waiting -= 1
        spec = self._spec(image, environment, mode, name, attempt_id, life)
        self.cold_starts += 1
        if environment.compose is not None:
            held = await self._start_services(spec, mode, environment, need, image)
        else:
            held = await self._start(spec, mode, environment.allowed_hosts, need, image.user)
        self._held[held.sandbox.id] = held
        return held.sandbox

    def expect(self, coming: Sequence[Expected]) -> None:
        """These will be asked for next, in this order: the first `settings.warm` of them are started ahead, as far
        as nobody waits for the room."""
        coming = [one for one in coming if one.environment.compose is None][: self.settings.warm]
        keys = [_key(one.image, one.environment, one.environment.network_mode) for one in coming]
        self._expected = dict(zip(keys, coming, strict=True))
        self.stock.expect(keys)

    async def release(self, sandbox: Sandbox) -> None:
        """Have a sandbox removed and what it held given back. Twice is no error. See `drained`."""
        held = self._held.pop(sandbox.id, None)
        if held is None:
            return
        self._discard(held)
        while len(self._removals) > MOST_REMOVALS:
            await asyncio.wait(self._removals, return_when=asyncio.FIRST_COMPLETED)

    async def drained(self) -> None:
        """Wait until nothing is being removed."""
        while self._removals:
            await asyncio.wait(self._removals)

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

    async def _start(
        self, spec: SandboxSpec, mode: str, allowed_hosts: Sequence[str], need: Need, user: str
    ) -> _Held:
        """Start a container on a network of this mode. Gives back `need` where that fails."""
        lease = None
        self.images.hold(spec.image)
        try:
            lease = await self._lease(mode, allowed_hosts)
            spec = replace(spec, network=lease.name, dns=lease.dns)
            sandbox = await start_sandbox(self.engine, spec, image_user=user)
            try:
                await self.networks.seclude(lease, sandbox.id)
            except BaseException:
                await sandbox.remove()
                raise
        except BaseException:
            if lease is not None:
                self.networks.release(lease)
            if self._admission is not None:
                self._admission.release(need)
            raise
        finally:
            self.images.let_go(spec.image)
        return _Held(sandbox, lease, need)

    async def _start_services(
        self, spec: SandboxSpec, mode: str, environment: Environment, need: Need, image: BuiltImage
    ) -> _Held:
        """Start a task's several containers on a network of their own. Gives back `need` where that fails."""
        lease, running = None, None
        try:
            services = self._services(environment)
            images = await self._service_images(services, environment, spec.name)
            if len(services) == 1:
                lease = await self._lease(mode, environment.allowed_hosts)
            else:
                internet = mode == "public" and has_internet(environment, services)
                lease = await self._leased(self.networks.lease_private(internet))
            main = services[MAIN]
            spec = replace(
                spec,
                network=lease.name,
                dns=lease.dns,
                workdir=environment.workdir or main.workdir or image.workdir,
                cpus=main.cpus or spec.cpus,
                memory_mb=main.memory_mb or spec.memory_mb,
            )
            settings = self.settings
            start_sec = environment.build_timeout_sec
            group = Group(services, images, spec, settings.cpus, settings.memory_mb, start_sec)
            running = Services(self.engine, group)

            async def start_main(spec: SandboxSpec) -> DockerSandbox:
                sandbox = await start_sandbox(self.engine, spec, image_user=main.user or image.user)
                try:
                    await self.networks.seclude(lease, sandbox.id)
                except BaseException:
                    await sandbox.remove()
                    raise
                return sandbox

            sandbox = await running.start(start_main)
        except BaseException:
            if running is not None:
                await self._give_up(running)
            if lease is not None:
                self.networks.release(lease)
            if self._admission is not None:
                self._admission.release(need)
            raise
        return _Held(sandbox, lease, need, running)

    async def _give_up(self, services: Services) -> None:
        try:
            await services.remove()
        except SandboxError as error:
            self.failed_removals.append(str(error))

    def _services(self, environment: Environment) -> dict[str, Service]:
        """The services of an environment with a compose file. Raises `TaskError`."""
        if environment.compose is None:
            return {}
        environ = self.settings.environ
        return environment.compose.services(environ, resolve_env(environment.env, environ))

    async def _service_images(
        self, services: Mapping[str, Service], environment: Environment, task: str
    ) -> dict[str, BuiltImage]:
        """The services' images by service, made at the same time."""
        made = await asyncio.gather(
            *(
                self.images.ensure(
                    image_environment(service, environment),
                    task=task if service.name == MAIN else f"{task} (service {service.name})",
                )
                for service in services.values()
            ),
            return_exceptions=True,
        )
        for one in made:
            if isinstance(one, BaseException):
                raise one
        return {name: one for name, one in zip(services, made, strict=True) if isinstance(one, BuiltImage)}

    async def _lease(self, mode: str, allowed_hosts: Sequence[str]) -> NetworkLease:
        return await self._leased(self.networks.lease(mode, allowed_hosts))

    async def _leased(self, asked: Coroutine[Any, Any, NetworkLease]) -> NetworkLease:
        leasing = asyncio.ensure_future(asked)
        try:
            await asyncio.wait({leasing}, timeout=LEASE_SEC)
            if not leasing.done():
                self.stock.give_way()
                await asyncio.wait({leasing})
            return leasing.result()
        except asyncio.CancelledError:
            leasing.cancel()
            await asyncio.wait({leasing})
            if not leasing.cancelled() and leasing.exception() is None:
                self.networks.release(leasing.result())
            raise

    def _discard(self, held: _Held) -> None:
        """Remove in the background."""
        removal = asyncio.create_task(self._remove(held))
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove(self, held: _Held) -> None:
        waits = iter(REMOVAL_WAITS_SEC)
        try:
            while True:
                try:
                    async with asyncio.timeout(REMOVAL_SEC):
                        await (held.services or held.sandbox).remove()
                    return
                except (SandboxError, TimeoutError, OSError) as error:
                    pause = next(waits, None)
                    if pause is None:
                        said = f"{held.sandbox.spec.name}: {error or 'its removal took too long'}"
                        self.failed_removals.append(said)
                        return
                    await asyncio.sleep(pause)
        finally:
            self.networks.release(held.lease)
            if self._admission is not None:
                self._admission.release(held.need)

    # Ahead

    async def _start_ahead(self, key: Any) -> _Held | None:
        expected = self._expected.get(key)
        admission = await self._admitting()
        if expected is None or self.waiting:
            return None
        environment = expected.environment
        need = self._need(environment, admission)
        if not admission.admit_now(need):
            return None
        number = self.stock.handed_out + len(self.stock) + self.stock.found_dead
        life = max(self.settings.deadline_sec, expected.least_sec) + LIFE_SEC
        name = f"rollcage-{self.host}-warm-{number}-{time.monotonic_ns():x}"
        spec = self._spec(expected.image, environment, environment.network_mode, name, "", life)
        hosts = environment.allowed_hosts
        return await self._start(spec, environment.network_mode, hosts, need, expected.image.user)

    def _rename(self, held: _Held, name: str) -> None:
        """Give a warm container its rollout's name, for people who look; nobody waits for it."""

        async def rename() -> None:
            try:
                await self.engine.call("rename a container", lambda api: api.rename(held.sandbox.id, name))
            except SandboxError:
                return  # gone already, and then nobody looks

        renaming = asyncio.create_task(rename())
        self._removals.add(renaming)
        renaming.add_done_callback(self._removals.discard)

    # Admission

    async def _admitting(self) -> Admission:
        async with self._opening:
            if self._admission is None:
                info = await self.engine.call("ask the engine about itself", lambda api: api.info())
                settings = self.settings
                root = Path(info.get("DockerRootDir") or "/")
                capacity = Need(
                    settings.admit_memory_mb or MEMORY_SHARE * int(info.get("MemTotal") or 0) / (1 << 20),
                    settings.admit_cpus or CPU_OVERCOMMIT * int(info.get("NCPU") or 1),
                )
                self._admission = Admission(
                    capacity,
                    free_disk=lambda: shutil.disk_usage(root).free if self._sees(root) else None,
                    least_disk_mb=settings.least_disk_mb,
                    make_room=self.stock.give_way,
                )
        return self._admission

    def _sees(self, root: Path) -> bool:
        return is_local(self.engine) and root.is_dir()

    def _need(self, environment: Environment, admission: Admission) -> Need:
        """What a sandbox counts for: the whole host at most."""
        limit = environment.memory_mb or self.settings.memory_mb
        memory = self.settings.memory_reserve_mb or limit or UNLIMITED_MB
        cpus = environment.cpus or self.settings.cpus or 0.0
        for service in self._services(environment).values():
            if service.name != MAIN:
                limit = service.memory_mb or self.settings.memory_mb
                memory += self.settings.memory_reserve_mb or limit or UNLIMITED_MB
                cpus += service.cpus or self.settings.cpus or 0.0
        capacity = admission.capacity
        return Need(min(memory, capacity.memory_mb), min(cpus, capacity.cpus))

    def _spec(
        self,
        image: BuiltImage,
        environment: Environment,
        mode: str,
        name: str,
        attempt_id: str,
        deadline_sec: float,
    ) -> SandboxSpec:
        """What a sandbox is made with, but for its network."""
        settings = self.settings
        return SandboxSpec(
            image=image.id,
            name=name,
            env={
                **sandbox_env(self.trust, settings.proxies, image.env, internet=mode == "public"),
                **resolve_env(environment.env, settings.environ),
            },
            binds=() if self.trust is None else (self.trust.bind,),
            workdir=environment.workdir or image.workdir,
            cpus=environment.cpus or settings.cpus,
            memory_mb=environment.memory_mb or settings.memory_mb,
            memory_reservation_mb=settings.memory_reserve_mb,
            storage_mb=environment.storage_mb or settings.storage_mb,
            pids=settings.pids,
            deadline_sec=deadline_sec,
            runtime=settings.runtime,
            labels={
                "rollcage.job": self.job,
                "rollcage.host": self.host,
                "rollcage.rollout": attempt_id,
                "rollcage.deadline": str(int(time.time() + deadline_sec)),
            },
        )


def _key(image: BuiltImage, environment: Environment, mode: str) -> str:
    """What two sandboxes have in common of which one can stand for the other."""
    return repr((image.id, mode, environment))


def _life_left(held: _Held) -> float:
    """Seconds until the sandbox's deadline."""
    return float(held.sandbox.spec.labels["rollcage.deadline"]) - time.time()


async def _is_alive(held: _Held) -> bool:
    sandbox = held.sandbox
    assert isinstance(sandbox, DockerSandbox)
    return await sandbox.is_alive()
