"""Ray: joining or starting it, and a `SandboxHost` on each of its nodes.

Actors are asyncio actors with as many concurrent calls as there may be rollouts; they do I/O only and take no
CPU of Ray's. A host whose actor dies is `HostLost`, and `start_host` makes another on the same node.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollcage.cluster.host import HostClient, HostLost, HostSpec, Prepared, SandboxHost, pack_task
from rollcage.rollout.outcome import RolloutError
from rollcage.rollout.rollout import AttemptSpec
from rollcage.rollout.task import Task
from rollcage.rollout.trajectory import Attempt

NAMESPACE = "rollcage"

CONCURRENT_CALLS = 20_000
"""More than one host can ever hold sandboxes; Ray's default for asyncio actors is 1,000."""

OPEN_SEC = 120.0
"""How long a node may take to start the actor and reach its engine."""

OBJECT_STORE_BYTES = 256 << 20
"""Attempts are some hundred kB each and leave the store at once; Ray's default is 30% of the memory."""


@contextmanager
def connected(address: str | None = None, *, num_cpus: int | None = None) -> Iterator[None]:
    """Inside the block this process is connected to Ray: to the cluster at `address`, else to one that is
    started here and ended with the block, its files with it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    common: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": "error", "log_to_driver": False}
    if address is not None:
        ray.init(address=address, **common)
        try:
            yield
        finally:
            ray.shutdown()
        return
    # A token of this session's own, so that Ray does not keep one in the home directory.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    files = tempfile.mkdtemp(prefix="rollcage-ray-")
    try:
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _temp_dir=files,
            **common,
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(files, ignore_errors=True)


class ActorHost:
    """A `SandboxHost` behind an actor; implements `HostClient`."""

    def __init__(self, actor: Any, name: str, node_id: str) -> None:
        self.name = name
        self.node_id = node_id
        self._actor = actor

    async def prepare(self, task: Task) -> Prepared:
        prepared: Prepared = await self._call(self._actor.prepare.remote(task))
        if prepared.wants_files:
            files = await asyncio.to_thread(pack_task, task)
            prepared = await self._call(self._actor.prepare.remote(task, files))
        return prepared

    async def run(self, spec: AttemptSpec, policy: str | None) -> Attempt:
        attempt: Attempt = await self._call(self._actor.run.remote(spec, policy))
        return attempt

    async def cancel(self) -> None:
        await self._call(self._actor.cancel.remote())

    async def close(self) -> None:
        """Close the host and end its actor."""
        try:
            await self._call(self._actor.close.remote())
        finally:
            ray.kill(self._actor)

    @staticmethod
    async def _call(answer: Any) -> Any:
        try:
            return await answer
        except RayTaskError as error:
            raise error.as_instanceof_cause() from error
        except RayError as error:
            oom = isinstance(error, OutOfMemoryError) or "memory" in type(error).__name__.lower()
            raise HostLost(str(error), "host_oom" if oom else "host_lost") from error


def alive_nodes() -> list[str]:
    """Ids of the nodes that Ray has now."""
    return [node["NodeID"] for node in ray.nodes() if node["Alive"]]


async def start_host(node_id: str, spec: HostSpec, *, after: str | None = None) -> ActorHost:
    """A host on this node, in the place of the one called `after`.

    Raises `RolloutError` (`docker_unavailable`) where its engine does not answer, and
    `HostLost` where the actor cannot be had."""
    actor = (
        ray.remote(SandboxHost)
        .options(
            num_cpus=0,
            max_concurrency=CONCURRENT_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(spec)
    )
    try:
        async with asyncio.timeout(OPEN_SEC):
            name = await ActorHost._call(actor.open.remote(after))
    except (RolloutError, RayActorError, TimeoutError) as error:
        ray.kill(actor)
        if isinstance(error, RolloutError):
            raise
        raise HostLost(f"the host's actor did not start within {OPEN_SEC:g} s: {error}") from error
    return ActorHost(actor, name, node_id)


class RayHosts:
    """A host on each node of the cluster; implements the driver's `Hosts`.

    `say` is told of nodes that cannot be hosts.
    """

    REPLACE_TRIES = 5

    def __init__(
        self,
        spec: HostSpec,
        *,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._spec = spec
        self._say = say

    async def start(self) -> list[HostClient]:
        """All hosts that can be had. Raises what the first node said where that is none."""
        found = await asyncio.gather(*(self._start(node) for node in alive_nodes()), return_exceptions=True)
        hosts: list[HostClient] = []
        failures: list[BaseException] = []
        for host in found:
            if isinstance(host, BaseException):
                failures.append(host)
            else:
                hosts.append(host)
        if not hosts:
            raise failures[0] if failures else HostLost("Ray has no node that is alive")
        for failure in failures:
            self._say(f"a node is no host: {failure}")
        return hosts

    async def replace(self, lost: HostClient) -> HostClient | None:
        """Another host on the same node, else on any other that is alive; None after some tries."""
        node = lost.node_id if isinstance(lost, ActorHost) else ""
        for attempt in range(self.REPLACE_TRIES):
            nodes = alive_nodes()
            for candidate in sorted(nodes, key=lambda name: name != node):
                try:
                    return await self._start(candidate, after=lost.name)
                except (RolloutError, HostLost) as error:
                    self._say(f"no host in place of {lost.name} yet: {error}")
            await asyncio.sleep(2.0**attempt)
        return None

    async def _start(self, node_id: str, after: str | None = None) -> ActorHost:
        return await start_host(node_id, self._spec, after=after)
