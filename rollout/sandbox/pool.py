"""Sandboxes for tasks on one host: image, network lease, container, and all of it given back.

The pool is the only maker of sandboxes. What it hands out it knows, so `close` leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollcage.rollout.sandbox.base import Sandbox, SandboxSpec
from rollcage.rollout.sandbox.container import start_sandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.images import BuiltImage, Images
from rollcage.rollout.sandbox.networks import NetworkLease, Networks
from rollcage.rollout.sandbox.reaper import Reaped, reap
from rollcage.rollout.task import Environment, resolve_env


@dataclass(frozen=True)
class SandboxSettings:
    """What a job wants of its sandboxes.

    `cpus`, `memory_mb` (MiB) and `storage_mb` (MiB) stand in where a task sets none; None means no limit.
    `deadline_sec`: a sandbox ends by itself so long after its start. `environ` resolves `${VAR}` in tasks.
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
    environ: Mapping[str, str] = field(default_factory=dict)


class SandboxPool:
    """Makes and unmakes sandboxes on one engine for one job."""

    def __init__(self, engine: Engine, settings: SandboxSettings, *, host: str, job: str) -> None:
        self.engine = engine
        self.settings = settings
        self.host = host
        self.job = job
        self.images = Images(engine, host=host, build_slots=settings.build_slots)
        self.networks = Networks(
            engine, host, cidr=settings.network_cidr, leases_per_bridge=settings.leases_per_bridge
        )
        self._held: dict[str, tuple[Sandbox, NetworkLease]] = {}

    async def image(self, environment: Environment, task: str) -> BuiltImage:
        """The task's image, built or fetched once however many ask. Raises `BuildError`."""
        return await self.images.ensure(environment, task=task)

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
        Waits for a network lease. Raises `SandboxError` or `TaskError`."""
        lease = await self.networks.lease(network_mode or environment.network_mode)
        try:
            deadline_sec = max(self.settings.deadline_sec, least_sec)
            spec = self._spec(image, environment, attempt_id, role, lease.name, deadline_sec)
            sandbox = await start_sandbox(self.engine, spec, image_user=image.user)
        except BaseException:
            self.networks.release(lease)
            raise
        self._held[sandbox.id] = (sandbox, lease)
        return sandbox

    async def release(self, sandbox: Sandbox) -> None:
        """Remove a sandbox and give its lease back. Twice is no error. Raises `SandboxError`: what could not be
        removed is then left to the reaper."""
        held = self._held.pop(sandbox.id, None)
        if held is None:
            return
        try:
            await sandbox.remove()
        finally:
            self.networks.release(held[1])

    async def close(self) -> Reaped:
        """End what is being built, and remove whatever this host still has on its engine: containers,
        networks, unfinished images. Returns what the pool did not hold any more. Raises `SandboxError`."""
        await self.images.close()
        held = [self.release(sandbox) for sandbox, _ in list(self._held.values())]
        await asyncio.gather(*held, return_exceptions=True)  # what could not be removed is tried once more:
        return await reap(self.engine, host=self.host, job=None, now=time.time())

    def _spec(
        self,
        image: BuiltImage,
        environment: Environment,
        attempt_id: str,
        role: str,
        network: str,
        deadline_sec: float,
    ) -> SandboxSpec:
        settings = self.settings
        return SandboxSpec(
            image=image.id,
            name=f"rollcage-{attempt_id}-{role}",
            network=network,
            env=resolve_env(environment.env, settings.environ),
            workdir=environment.workdir or image.workdir,
            cpus=environment.cpus or settings.cpus,
            memory_mb=environment.memory_mb or settings.memory_mb,
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
