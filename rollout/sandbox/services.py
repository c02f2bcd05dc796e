"""The containers of a task of several: started in their order, waited for, and removed together.

As `docker compose up --wait` does it, without the program: a service starts when what it depends on is so, and
the sandbox is handed out when every service is healthy, or runs where it has no healthcheck, or has ended with
status 0 where another one waits for that. `main` is one of them, started by whoever calls.

A service that ends, or never gets healthy, is the task's fault (`healthcheck`), with the end of what it wrote. One
that was killed from outside is `container_lost`. What becomes of services once the agent works is the agent's doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollcage.rollout.compose import MAIN, Check, Dependency, Service
from rollcage.rollout.compose_model import UNLIMITED
from rollcage.rollout.outcome import Evidence, SandboxError, TaskError
from rollcage.rollout.sandbox import files
from rollcage.rollout.sandbox.base import SandboxSpec
from rollcage.rollout.sandbox.container import DockerSandbox, remove_container
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.faults import is_rlimit_refusal
from rollcage.rollout.sandbox.images import BuiltImage
from rollcage.rollout.sandbox.service_config import service_config, service_spec
from rollcage.rollout.sandbox.service_container import DockerService, check_of
from rollcage.rollout.sandbox.traits import engine_traits

StartMain = Callable[[SandboxSpec], Awaitable[DockerSandbox]]


@dataclass(frozen=True)
class Group:
    """What the services of one sandbox are started with.

    `main` is the agent's spec without what the file adds to it, with the network that they share. `cpus` and
    `memory_mb` are for services that set none. All must be ready after `start_sec` seconds.
    """

    services: Mapping[str, Service]
    images: Mapping[str, BuiltImage]
    main: SandboxSpec
    cpus: float | None = None
    memory_mb: int | None = None
    start_sec: float = 600.0


class Services:
    """The services of one sandbox. Whoever makes one calls `remove` in the end, whatever `start` did."""

    def __init__(self, engine: Engine, group: Group) -> None:
        self._engine = engine
        self._group = group
        self._made: dict[str, DockerService] = {}
        self._volumes: dict[str, str] = {}
        self._sandbox: DockerSandbox | None = None
        loop = asyncio.get_running_loop()
        self._so: dict[tuple[str, str], asyncio.Future[None]] = {
            (name, condition): loop.create_future()
            for name in group.services
            for condition in ("service_started", "service_healthy", "service_completed_successfully")
        }

    async def start(self, start_main: StartMain) -> DockerSandbox:
        """Start all and wait until they are ready. Returns what `start_main` made.

        Raises `TaskError` (`healthcheck`) and `SandboxError`; `remove` has then to be called all the same.
        """
        await self._make_volumes()
        work = {
            name: asyncio.create_task(self._bring_up(service, start_main), name=name)
            for name, service in self._group.services.items()
        }
        try:
            done, waiting = await asyncio.wait(
                work.values(), timeout=self._group.start_sec, return_when=asyncio.FIRST_EXCEPTION
            )
        finally:
            for one in work.values():
                one.cancel()
            # Where the removal of one that was just being made fails, the reaper has it.
            await asyncio.gather(*work.values(), return_exceptions=True)
        for error in [one.exception() for one in work.values() if one in done]:
            if error is not None:
                raise error
        if waiting:
            names = ", ".join(sorted(one.get_name() for one in waiting))
            said = f"not ready after {self._group.start_sec:g} s (build_timeout_sec): {names}"
            raise TaskError("healthcheck", said, Evidence(said, "container state"))
        assert self._sandbox is not None
        self._sandbox.services = self._made
        return self._sandbox

    async def remove(self) -> None:
        """Remove every container, `main` too, and the volumes. Again is no error. Raises `SandboxError`."""
        gone = [remove_container(self._engine, service.id) for service in self._made.values()]
        if self._sandbox is not None:
            gone.append(self._sandbox.remove())
        for error in await asyncio.gather(*gone, return_exceptions=True):
            if error is not None:
                raise error
        for name in self._volumes.values():
            await self._remove_volume(name)

    # One service

    async def _bring_up(self, service: Service, start_main: StartMain) -> None:
        for dependency in service.depends:
            await self._reached(dependency)
        network = self._network(service)
        spec = service_spec(
            service, self._group.main, network, self._volumes, alone=len(self._group.services) == 1
        )
        if service.name == MAIN:
            self._sandbox = await start_main(spec)
            made = DockerService(self._engine, MAIN, self._sandbox.id, service.user)
            await self._put_files(service, made)
        else:
            made = await self._start(service, spec)
        self._say(service.name, "service_started")
        waited_for = {
            dependency.condition
            for other in self._group.services.values()
            for dependency in other.depends
            if dependency.service == service.name
        }
        image = None if service.name == MAIN else self._group.images[service.name].id
        check = await check_of(self._engine, service.check or Check(), image)
        if "service_healthy" in waited_for and not check.argv:
            said = f"the service {service.name} has no healthcheck, and another one waits for it"
            raise TaskError("healthcheck", said, Evidence(said, "task files"))
        completes = "service_completed_successfully" in waited_for
        if not completes or "service_healthy" in waited_for:
            await made.healthy(check)
            self._say(service.name, "service_healthy")
        if completes:
            await made.completed()
            self._say(service.name, "service_completed_successfully")

    async def _reached(self, dependency: Dependency) -> None:
        if dependency.service in self._group.services:
            await asyncio.shield(self._so[dependency.service, dependency.condition])

    def _say(self, name: str, condition: str) -> None:
        self._so[name, condition].set_result(None)

    def _network(self, service: Service) -> str:
        if service.network.startswith("service:"):
            other = service.network.removeprefix("service:")
            container = self._sandbox if other == MAIN else self._made[other]
            assert container is not None  # it is among what this one depends on
            return f"container:{container.id}"
        return service.network or self._group.main.network

    async def _start(self, service: Service, spec: SandboxSpec) -> DockerService:
        group = self._group
        spec = replace(
            spec,
            image=group.images[service.name].id,
            cpus=service.cpus or group.cpus,
            memory_mb=service.memory_mb or group.memory_mb,
            memory_reservation_mb=None,
        )
        try:
            return await self._run(service, spec)
        except SandboxError as error:
            # "Unlimited" asks for as much as there is: where the engine may not give it, what it has itself.
            bounded = {name: both for name, both in service.ulimits.items() if UNLIMITED not in both}
            if bounded == service.ulimits or not is_rlimit_refusal(error):
                raise
            await remove_container(self._engine, self._made[service.name].id)
            return await self._run(replace(service, ulimits=bounded), spec)

    async def _run(self, service: Service, spec: SandboxSpec) -> DockerService:
        config = service_config(service, spec, await engine_traits(self._engine))

        def create(api: Any) -> None:
            found = api.create_container_from_config(config, spec.name)
            self._made[service.name] = DockerService(self._engine, service.name, found["Id"])

        await self._engine.call(f"create the service {service.name}", create)
        made = self._made[service.name]
        await self._put_files(service, made)
        await self._engine.call(f"start the service {service.name}", lambda api: api.start(made.id))
        return made

    async def _put_files(self, service: Service, made: DockerService) -> None:
        contents = {
            mount.target: mount.content.encode() for mount in service.mounts if mount.content is not None
        }
        if contents:
            await files.write(self._engine, made.id, contents)
        for mount in service.mounts:
            if mount.source is not None and mount.volume is None:
                await files.upload(self._engine, made.id, mount.source, mount.target)

    # Volumes

    async def _make_volumes(self) -> None:
        """Volumes of the rollout's own, those of the task's files with a copy of them."""
        main = self._group.main
        sources: dict[str, Path | None] = {}
        for service in self._group.services.values():
            for mount in service.mounts:
                if mount.volume is not None:
                    sources[mount.volume] = mount.source
        for number, (volume, source) in enumerate(sources.items()):
            name = f"{main.name}-volume{number}"
            self._volumes[volume] = name
            labels = {"rollcage.volume": volume, **main.labels}
            await self._engine.call("create a volume", partial(_create_volume, name=name, labels=labels))
            if source is not None:
                await self._fill(name, source)

    async def _fill(self, volume: str, source: Path) -> None:
        """Copy a folder of the task into a volume, by a container that never runs."""
        spec = replace(self._group.main, name=f"{volume}-fill", network="none", binds=(f"{volume}:/fill",))
        config = service_config(Service("fill", 0), spec, await engine_traits(self._engine))
        made: list[str] = []

        def create(api: Any) -> None:
            made.append(api.create_container_from_config(config, spec.name)["Id"])

        try:
            await self._engine.call("create a container", create)
            await files.upload(self._engine, made[0], source, "/fill")
        finally:
            for container_id in made:
                await remove_container(self._engine, container_id)

    async def _remove_volume(self, name: str) -> None:
        try:
            await self._engine.call("remove a volume", lambda api: api.remove_volume(name))
        except SandboxError as error:
            if error.evidence.status != 404:
                raise


def _create_volume(api: Any, *, name: str, labels: Mapping[str, str]) -> None:
    api.create_volume(name, labels=dict(labels))
