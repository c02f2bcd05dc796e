"""Ray: joining or starting it, and a `SandboxHost` on each of its nodes.

Actors are asyncio actors with as many concurrent calls as there may be rollouts; they do I/O only and take no
CPU of Ray's. A host whose actor does not answer is `HostLost` and ended for good, so that nothing goes on there
unseen; `start_host` makes another on the same node.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.exceptions import (
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rollcage.cluster.errors import CouldNotRun
from rollcage.cluster.host import HostClient, HostLoad, HostLost, HostSpec, Prepared, SandboxHost
from rollcage.cluster.own_ray import Connection, own_processes
from rollcage.cluster.ray_names import NAMESPACE
from rollcage.cluster.scratch import ray_files
from rollcage.cluster.task_copies import pack_task
from rollcage.cluster.telling import telling
from rollcage.rollout.outcome import RolloutError
from rollcage.rollout.rollout import AttemptSpec
from rollcage.rollout.task import Task
from rollcage.rollout.trajectory import Attempt

CONCURRENT_CALLS = 20_000
"""More than one host can ever hold sandboxes; Ray's default for asyncio actors is 1,000."""

CONNECT_SEC = 10.0
"""How long the head of a Ray cluster may take to accept a connection, and to say which nodes it has."""

TOKEN_HINT = (
    "where `ray start` said that token authentication is enabled, set RAY_AUTH_MODE=token here, and RAY_AUTH_TOKEN "
    "to what ~/.ray/auth_token holds on the cluster"
)

OPEN_SEC = 120.0
"""How long a node may take to start the actor and reach its engine."""

GONE = (
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    WorkerCrashedError,
)
"""What Ray raises where an actor is gone. Its other errors are about one call: a result that was lost, say."""

OBJECT_STORE_BYTES = 256 << 20
"""Attempts are some hundred kB each and leave the store at once; Ray's default is 30% of the memory."""

WORKER_NICENESS = 0
"""Ray's own is 15: hosts and engines would have a thirtieth of a processor that one busy sandbox wants."""


LAST_SEC = 600
"""As long as a process lives on whose own Ray is gone: a job writes and cleans up what there is. Ray's default ends it
after 60 s."""


END_SEC = 3.0
"""As long as processes of an own Ray may take to end once it is shut down."""


@contextmanager
def connected(
    address: str | None = None, *, num_cpus: int | None = None, files: Path | None = None
) -> Iterator[Connection]:
    """Inside the block this process is connected to Ray: to the cluster at `address`, else to one that is
    started here and ended with the block, its files with it, or `files` are the directory for them. Raises
    `CouldNotRun`."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with ExitStack() as stack:
        settings: dict[str, Any] = {"address": address}
        if address is None:
            # A token of this session's own, so that Ray does not keep one in the home directory.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            files = files or stack.enter_context(ray_files())
            settings = {
                "address": "local",
                "num_cpus": num_cpus,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": str(files),
                "_system_config": {
                    "worker_niceness": WORKER_NICENESS,
                    "gcs_rpc_server_reconnect_timeout_s": LAST_SEC,
                },
            }
        connection = Connection()
        stack.callback(lambda: _shut_down(connection.below))
        try:
            if address is not None:
                _reach(address)
            ray.init(namespace=NAMESPACE, logging_level="error", log_to_driver=False, **settings)
        except (Exception, SystemExit) as error:  # it raises bare exceptions too
            if address is None:
                raise CouldNotRun(f"could not start Ray on this machine: {error}") from error
            raise CouldNotRun(
                f"could not join the Ray cluster at {address}: {error}; --address names another, and "
                f"`--address local` starts Ray on this machine\n{TOKEN_HINT}"
            ) from error
        if address is None:
            connection = Connection(own_processes())
        yield connection


def _shut_down(below: Sequence[psutil.Process]) -> None:
    """Ray leaves processes that wait for what is gone, for a minute or two."""
    ray.shutdown()
    _, left = psutil.wait_procs(below, timeout=END_SEC)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _reach(address: str) -> None:
    """Raise `OSError` where nothing listens at `host:port`: Ray itself finds out after three minutes, and then
    exits the process."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SEC).close()


class HostActor(SandboxHost):
    """A `SandboxHost` in a process of its own, that tells the cluster's exporter what it counts."""

    def __init__(self, spec: HostSpec, exporter: Any = None) -> None:
        super().__init__(spec)
        self._job = spec.job
        self._exporter = exporter
        self._telling = AsyncExitStack()

    async def open(self, after: str | None = None) -> str:
        """See `SandboxHost.open`."""
        name = await super().open(after)
        if self._exporter is not None:
            told = telling(self._exporter, name, self.counted, of=self._job)
            await self._telling.enter_async_context(told)
        return name

    async def close(self) -> None:
        """See `SandboxHost.close`."""
        try:
            await super().close()
        finally:
            await self._telling.aclose()


class ActorHost:
    """A `SandboxHost` behind an actor; implements `HostClient`."""

    def __init__(self, actor: Any, node_id: str) -> None:
        self.name = ""
        self.node_id = node_id
        self._actor = actor
        self._gone: asyncio.Future[HostLost] = asyncio.get_running_loop().create_future()

    async def open(self, after: str | None = None) -> None:
        """See `SandboxHost.open`. Ends the actor where this fails, by `OPEN_SEC` at the latest."""
        try:
            async with asyncio.timeout(OPEN_SEC):
                self.name = await self._call(self._actor.open.remote(after))
        except TimeoutError as error:
            ray.kill(self._actor)
            raise HostLost(f"the host's actor did not start within {OPEN_SEC:g} s") from error
        except BaseException:
            ray.kill(self._actor)
            raise

    async def prepare(self, task: Task) -> Prepared:
        prepared: Prepared = await self._call(self._actor.prepare.remote(task))
        if prepared.wants_files:
            files = await asyncio.to_thread(pack_task, task)
            prepared = await self._call(self._actor.prepare.remote(task, files))
        return prepared

    async def run(self, spec: AttemptSpec, policy: str | None) -> Attempt:
        attempt: Attempt = await self._call(self._actor.run.remote(spec, policy))
        return attempt

    async def expect(self, coming: Sequence[str]) -> HostLoad:
        load: HostLoad = await self._call(self._actor.expect.remote(list(coming)))
        return load

    async def drop_states(self, attempt_id: str) -> None:
        await self._call(self._actor.drop_states.remote(attempt_id))

    async def cancel(self) -> None:
        await self._call(self._actor.cancel.remote())

    async def close(self) -> None:
        """Close the host and end its actor."""
        try:
            await self._call(self._actor.close.remote())
        finally:
            ray.kill(self._actor)

    async def _call(self, answer: Any) -> Any:
        """What the actor answers. Raises what it raised, and `HostLost` where it is gone, as soon as any call finds
        out: where all of Ray is gone, some would wait for ever."""
        call = asyncio.ensure_future(answer)
        try:
            await asyncio.wait({call, self._gone}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._gone.result()
            return call.result()
        except RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from error
        except GONE as error:
            lost = HostLost(str(error), "host_oom" if isinstance(error, OutOfMemoryError) else "host_lost")
            if not self._gone.done():
                self._gone.set_result(lost)
                ray.kill(self._actor)
            raise lost from error
        finally:
            call.cancel()


async def alive_nodes() -> list[str]:
    """Ids of the nodes that Ray has now; none where Ray itself does not answer."""
    try:
        async with asyncio.timeout(CONNECT_SEC):
            nodes = await asyncio.to_thread(ray.nodes)
    except (RayError, TimeoutError):
        return []
    return [node["NodeID"] for node in nodes if node["Alive"]]


async def start_host(
    node_id: str, spec: HostSpec, *, after: str | None = None, exporter: Any = None
) -> ActorHost:
    """A host on this node, in the place of the one called `after`. `exporter`: the actor that it tells its counts.

    Raises `SandboxError` where its engine does not answer, and `HostLost` where the actor cannot be had."""
    actor = (
        ray.remote(HostActor)
        .options(
            num_cpus=0,
            max_concurrency=CONCURRENT_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(spec, exporter)
    )
    host = ActorHost(actor, node_id)
    await host.open(after)
    return host


class RayHosts:
    """A host on each node of the cluster, never two on one; implements the driver's `Hosts`.

    `say` is told of nodes that cannot be hosts. `exporter`: see `start_host`. `connection`: to Ray.
    """

    REPLACE_TRIES = 5

    def __init__(
        self,
        spec: HostSpec,
        *,
        say: Callable[[str], None] = lambda _line: None,
        exporter: Any = None,
        connection: Connection | None = None,
    ) -> None:
        self._connection = connection or Connection()
        self._spec = spec
        self._say = say
        self._exporter = exporter
        self._taken: set[str] = set()

    async def start(self) -> list[HostClient]:
        """All hosts that can be had. Raises what the first node said where that is none."""
        found = await asyncio.gather(*map(self._try, await alive_nodes()))
        hosts: list[HostClient] = [host for host in found if isinstance(host, ActorHost)]
        failures = [failure for failure in found if not isinstance(failure, ActorHost)]
        if not hosts:
            raise failures[0] if failures else HostLost("Ray has no node that is alive")
        for failure in failures:
            self._say(f"a node is no host: {failure}")
        return hosts

    async def replace(self, lost: HostClient) -> HostClient | None:
        """Another host on the same node, else on one that has none; None after some tries."""
        node = lost.node_id if isinstance(lost, ActorHost) else ""
        self._taken.discard(node)
        for attempt in range(self.REPLACE_TRIES):
            await asyncio.sleep(2.0**attempt - 1)
            if self._connection.ended():
                return None
            free = [name for name in await alive_nodes() if name not in self._taken]
            for candidate in sorted(free, key=lambda name: name != node):
                host = await self._try(candidate, after=lost.name)
                if isinstance(host, ActorHost):
                    if self._exporter is not None:
                        self._exporter.end.remote(lost.name)
                    return host
                self._say(f"no host in the place of {lost.name} yet: {host}")
        return None

    async def _try(self, node_id: str, after: str | None = None) -> ActorHost | RolloutError | HostLost:
        self._taken.add(node_id)
        try:
            async with self._connection.needed():
                return await start_host(node_id, self._spec, after=after, exporter=self._exporter)
        except (RolloutError, HostLost, CouldNotRun) as error:
            self._taken.discard(node_id)
            return HostLost(str(error)) if isinstance(error, CouldNotRun) else error
