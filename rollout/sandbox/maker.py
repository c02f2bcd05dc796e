"""How one sandbox is made with all that it needs: its image, a network lease, and its container or, for a task of
several, its services. What cannot be made leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollcage.rollout.compose import MAIN, Service, has_internet, image_environment
from rollcage.rollout.outcome import Evidence, SandboxError
from rollcage.rollout.sandbox.admission import Need
from rollcage.rollout.sandbox.base import SandboxSpec
from rollcage.rollout.sandbox.container import DockerSandbox, start_sandbox
from rollcage.rollout.sandbox.engine import Engine, is_local
from rollcage.rollout.sandbox.images import BuiltImage, Images
from rollcage.rollout.sandbox.networks import NetworkLease, Networks
from rollcage.rollout.sandbox.services import Group, Services
from rollcage.rollout.sandbox.settings import SandboxSettings
from rollcage.rollout.sandbox.states import STATE_LABELS
from rollcage.rollout.sandbox.trust import load_trust, sandbox_env
from rollcage.rollout.task import Environment, resolve_env

UNLIMITED_MB = 256
"""What a sandbox without a limit counts for."""

LEASE_SEC = 0.2
"""A lease that takes longer is one that somebody must give back first."""


HOLDING_SEC = 300.0
"""How long who holds a sandbox waits for the lease of another one: all who do could wait for each other for ever."""


@dataclass
class Held:
    """A sandbox and what goes back with it."""

    sandbox: DockerSandbox
    lease: NetworkLease
    need: Need
    services: Services | None = None

    @property
    def life_left(self) -> float:
        """Seconds until the sandbox's deadline."""
        return float(self.sandbox.spec.labels["rollcage.deadline"]) - time.time()

    async def remove(self) -> None:
        """Remove its containers. Raises `SandboxError`."""
        await (self.services or self.sandbox).remove()


@dataclass(frozen=True)
class Wanted:
    """What a sandbox is to be: two that are wanted alike can stand for each other."""

    image: BuiltImage
    environment: Environment
    mode: str


class Maker:
    """Makes sandboxes on one engine for one job. `give_way` is called while a lease has to be waited for."""

    def __init__(
        self,
        engine: Engine,
        settings: SandboxSettings,
        *,
        host: str,
        job: str,
        give_way: Callable[[], None],
    ) -> None:
        self.engine = engine
        self.settings = settings
        self.host = host
        self.job = job
        self.failed_removals: list[str] = []
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
        self._give_way = give_way

    async def image(self, environment: Environment, task: str) -> BuiltImage:
        """The image of the task's sandbox; those of its other services are made as well. Raises `BuildError`, and
        `TaskError` for a compose file that is wrong with the job's variables."""
        if environment.compose is None:
            return await self.images.ensure(environment, task=task)
        services = self._services(environment)
        return (await self._service_images(services, environment, task))[MAIN]

    def need(self, environment: Environment, capacity: Need) -> Need:
        """What a sandbox counts for: the whole host at most."""
        needs = [self._counted(environment.memory_mb, environment.cpus)]
        for service in self._services(environment).values():
            if service.name != MAIN:
                needs.append(self._counted(service.memory_mb, service.cpus))
        memory, cpus = (sum(values) for values in zip(*((n.memory_mb, n.cpus) for n in needs), strict=True))
        return Need(min(memory, capacity.memory_mb), min(cpus, capacity.cpus))

    async def make(
        self,
        wanted: Wanted,
        need: Need,
        *,
        name: str,
        attempt_id: str,
        life_sec: float,
        holding: bool = False,
    ) -> Held:
        """A running sandbox that holds `need` and lives for `life_sec`. `holding`: it is for who holds one already,
        and waits for a lease for `HOLDING_SEC` at most. Raises `SandboxError` or `TaskError`."""
        image, environment = wanted.image, wanted.environment
        spec = self._spec(wanted, name, attempt_id, life_sec)
        self.images.hold(image.id)
        try:
            if environment.compose is not None:
                return await self._make_services(spec, wanted, need, holding)
            asked = self.networks.lease(wanted.mode, environment.allowed_hosts, holding=holding)
            lease = await self._leased(asked, holding)
            try:
                sandbox = await self._start(spec, lease, image.user)
            except BaseException:
                self.networks.release(lease)
                raise
            return Held(sandbox, lease, need)
        finally:
            self.images.let_go(image.id)

    async def _start(self, spec: SandboxSpec, lease: NetworkLease, user: str) -> DockerSandbox:
        """A container on the lease's network, kept apart there before anything of a task runs in it."""
        spec = replace(spec, network=lease.name, dns=lease.dns)
        sandbox = await start_sandbox(self.engine, spec, image_user=user)
        try:
            await self.networks.seclude(lease, sandbox.id)
        except BaseException:
            await sandbox.remove()
            raise
        return sandbox

    async def _make_services(self, spec: SandboxSpec, wanted: Wanted, need: Need, holding: bool) -> Held:
        """A task's several containers, on a network of their own."""
        image, environment = wanted.image, wanted.environment
        services = self._services(environment)
        images = await self._service_images(services, environment, spec.name)
        if len(services) == 1:
            asked = self.networks.lease(wanted.mode, environment.allowed_hosts, holding=holding)
        else:
            internet = wanted.mode == "public" and has_internet(environment, services)
            asked = self.networks.lease_private(internet)
        lease = await self._leased(asked, holding)
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
        try:
            sandbox = await running.start(
                lambda main_spec: self._start(main_spec, lease, main.user or image.user)
            )
        except BaseException:
            try:
                await running.remove()
            except SandboxError as error:
                self.failed_removals.append(str(error))
            self.networks.release(lease)
            raise
        return Held(sandbox, lease, need, running)

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

    async def _leased(self, asked: Coroutine[Any, Any, NetworkLease], holding: bool) -> NetworkLease:
        leasing = asyncio.ensure_future(asked)
        try:
            await asyncio.wait({leasing}, timeout=LEASE_SEC)
            if not leasing.done():
                self._give_way()
                await asyncio.wait({leasing}, timeout=HOLDING_SEC if holding else None)
            if not leasing.done():
                leasing.cancel()
                await asyncio.wait({leasing})
            if leasing.cancelled():
                said = f"no network for another sandbox of an attempt within {HOLDING_SEC:.0f} s: others hold all"
                raise SandboxError("network_pool", said, Evidence(said, "rollcage"))
            return leasing.result()
        except asyncio.CancelledError:
            leasing.cancel()
            await asyncio.wait({leasing})
            if not leasing.cancelled() and leasing.exception() is None:
                self.networks.release(leasing.result())
            raise

    def _counted(self, memory_mb: int | None, cpus: float | None) -> Need:
        settings = self.settings
        memory = settings.memory_reserve_mb or memory_mb or settings.memory_mb or UNLIMITED_MB
        return Need(memory, cpus or settings.cpus or 0.0)

    def _spec(self, wanted: Wanted, name: str, attempt_id: str, life_sec: float) -> SandboxSpec:
        """What a sandbox is made with, but for its network."""
        image, environment, settings = wanted.image, wanted.environment, self.settings
        return SandboxSpec(
            image=image.id,
            name=name,
            env={
                **sandbox_env(self.trust, settings.proxies, image.env, internet=wanted.mode == "public"),
                **resolve_env(environment.env, settings.environ),
            },
            binds=() if self.trust is None else (self.trust.bind,),
            workdir=environment.workdir or image.workdir,
            cpus=environment.cpus or settings.cpus,
            memory_mb=environment.memory_mb or settings.memory_mb,
            memory_reservation_mb=settings.memory_reserve_mb,
            storage_mb=environment.storage_mb or settings.storage_mb,
            pids=settings.pids,
            deadline_sec=life_sec,
            runtime=settings.runtime,
            origin=image.origin,
            labels={
                "rollcage.job": self.job,
                "rollcage.host": self.host,
                "rollcage.rollout": attempt_id,
                "rollcage.deadline": str(int(time.time() + life_sec)),
                **({} if image.origin is None else dict.fromkeys(STATE_LABELS, "")),
            },
        )
