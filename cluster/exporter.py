"""The exporter as a detached Ray actor on the head node, and what tells it a source's counts.

    exporter = start_exporter(ExporterConfig())
    async with telling(exporter, "demo-1a2b", snapshot):
        ...

The actor outlives the jobs that it counts, as far as their Ray cluster does. Ray starts it again as often as it dies,
and calls that its death met are made again: snapshots are cumulative and numbered, so that one which was taken in twice
counts once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import ray
from ray.exceptions import RayError

from rollcage.cluster.ray_names import EXPORTER, NAMESPACE, reachable
from rollcage.metrics.counts import Snapshot, UnknownLabel
from rollcage.metrics.exporter import Exporter
from rollcage.metrics.serving import PORT, Server, serve
from rollcage.metrics.targets import write_targets

SEND_SEC = 2.0
"""Between two snapshots of a source: less than any scrape interval in use."""

TARGETS_SEC = 10.0
"""Between two looks at the nodes that Ray has."""

ANSWER_SEC = 10.0
"""As long as an exporter that starts again may take; a snapshot that it has not taken by then is followed by a later
one anyway."""

PORT_SEC = 5.0
"""For so long an exporter that is started again tries to have its port again."""

ON_THE_HEAD = {"node:__internal_head__": 0.001}
"""The address that Prometheus was told and the state stay where they are when the actor starts again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExporterConfig:
    """Paths are the head node's. `state`: a directory where what was counted is kept; None: among the files of Ray's
    session, so that it goes with the cluster. `targets`: a directory for the file that Prometheus' `file_sd_configs`
    reads, one for each exporter's port; None: no file. `port`: None: `PORT`, or a free one where that is taken. The
    others are those of `serve`."""

    state: Path | None = None
    targets: Path | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    user: str | None = None
    password: str | None = None
    certificate: Path | None = None
    key: Path | None = None

    def serve(self, exporter: Exporter, port: int) -> Server:
        """See `serving.serve`."""
        return serve(
            exporter,
            host=self.host,
            port=port,
            user=self.user,
            password=self.password,
            certificate=self.certificate,
            key=self.key,
        )


class ExporterActor:
    """`Exporter` and its port, in a process of its own."""

    def __init__(self, config: ExporterConfig) -> None:
        self._vllm: dict[str, tuple[str, ...]] = {}
        self._look, self._over = Event(), False
        self._address, self._failure = "", ""
        self._targets: Path | None = None
        state = config.state or _session_directory()
        memory = state / "port"
        former = memory.read_text() if memory.is_file() else ""
        try:
            self._exporter = Exporter(state)
            port = _serve(self._exporter, config, memory).port
        except (OSError, ValueError) as error:  # raised here, Ray would start it again for ever
            where = f"{config.host}:{config.port or PORT}"
            self._failure = f"the exporter cannot listen at {where}, or not read what it has kept: {error}"
            return
        self._address = f"{reachable(config.host)}:{port}"
        if config.targets is not None:
            self._targets = config.targets / f"{port}.json"
            if former not in ("", str(port)):  # somebody else has taken that port meanwhile
                (config.targets / f"{former}.json").unlink(missing_ok=True)
            keeping = Thread(target=self._keep_targets, args=(self._targets,), name="targets", daemon=True)
            keeping.start()

    def address(self) -> tuple[str, str]:
        """Where it listens, as `host:port`; or nothing, and why it does not."""
        return self._address, self._failure

    def targets(self) -> str | None:
        """The file for `file_sd_configs`, on the head node."""
        return None if self._targets is None else str(self._targets)

    def accept(
        self, source: str, snapshot: Snapshot, incarnation: str, final: bool = False, of: str = ""
    ) -> None:
        """See `Exporter.accept`. Takes nothing where it does not listen."""
        if not self._failure:
            self._exporter.accept(source, snapshot, incarnation=incarnation, final=final, of=of)

    def end(self, source: str) -> None:
        """See `Exporter.end`."""
        if not self._failure:
            self._exporter.end(source)

    def set_vllm(self, source: str, addresses: tuple[str, ...]) -> None:
        """Where vLLM's own metrics of a source's replicas are; none once it has ended."""
        self._vllm[source] = addresses
        self._look.set()

    def close(self) -> None:
        """Its cluster is about to end: no Prometheus is to look for it any more."""
        self._over = True
        if self._targets is not None:
            self._targets.unlink(missing_ok=True)

    def _keep_targets(self, path: Path) -> None:
        while not self._over:
            self._look.clear()
            ray_s = [
                f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
                for node in ray.nodes()
                if node["Alive"]
            ]
            vllm_s = [address for addresses in list(self._vllm.values()) for address in addresses]
            write_targets(path, {"rollcage": [self._address], "ray": ray_s, "vllm": vllm_s})
            self._look.wait(TARGETS_SEC)


def _session_directory() -> Path:
    context: Any = ray.get_runtime_context()
    return Path(str(context.get_temp_dir())) / str(context.get_session_name()) / "rollcage-metrics"


def _serve(exporter: Exporter, config: ExporterConfig, memory: Path) -> Server:
    """On the port that is asked for; else on that of the life before, which `memory` has, or `PORT`, or a free one.
    The life before may hold its port for a moment still. Raises as `serve`."""
    before = memory.is_file()
    wanted = config.port if config.port is not None else int(memory.read_text()) if before else PORT
    until = time.monotonic() + (PORT_SEC if before else 0.0)
    while True:
        try:
            server = config.serve(exporter, wanted)
            break
        except OSError:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            if config.port is not None:
                raise
            server = config.serve(exporter, 0)
            break
    temporary = memory.with_suffix(".new")
    temporary.write_text(str(server.port))
    os.replace(temporary, memory)
    return server


def start_exporter(config: ExporterConfig) -> Any:
    """The cluster's exporter: the one that there is, whatever its configuration, or a new one, which may be starting
    still. `ExporterActor.address` says whether it could."""
    return (
        ray.remote(ExporterActor)
        .options(
            name=EXPORTER,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources=ON_THE_HEAD,
            max_restarts=-1,
            max_task_retries=-1,
        )
        .remote(config)
    )


@asynccontextmanager
async def telling(
    exporter: Any, source: str, snapshot: Callable[[], Awaitable[Snapshot]], *, of: str = ""
) -> AsyncIterator[None]:
    """Inside the block the exporter is told every `SEND_SEC` what `source` has counted, and once more at its end. `of`:
    a host's job.

    An exporter that does not answer, or refuses the source, is logged, once for each reason, and harms nobody: counting
    is no reason for a job to fail.
    """
    incarnation = secrets.token_hex(8)
    said: set[str] = set()

    async def tell(*, final: bool = False) -> None:
        try:
            async with asyncio.timeout(ANSWER_SEC):
                await exporter.accept.remote(source, await snapshot(), incarnation, final, of)
        except (RayError, TimeoutError, UnknownLabel) as error:
            why = f"{type(error).__name__}: {error}"
            if why not in said:
                said.add(why)
                _log.warning("the exporter did not take what %s has counted: %s", source, why)

    async def keep_telling() -> None:
        while True:
            await tell()
            await asyncio.sleep(SEND_SEC)

    task = asyncio.create_task(keep_telling())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await tell(final=True)
