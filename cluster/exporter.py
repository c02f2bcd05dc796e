"""The exporter as a detached Ray actor on the head node, and what tells it a source's counts.

    exporter = start_exporter(ExporterConfig(state=Path("/var/lib/rollcage/exporter")))
    async with telling(exporter, "demo-1a2b", counts.snapshot):
        ...

The actor outlives the jobs that it counts. Ray starts it again as often as it dies, and calls that its death met are
made again: snapshots are cumulative and numbered, so that one which was taken in twice counts once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import ray
from ray.exceptions import RayError

from rollcage.cluster.actors import NAMESPACE
from rollcage.metrics.counts import Snapshot, UnknownLabel
from rollcage.metrics.exporter import Exporter
from rollcage.metrics.serving import PORT, serve
from rollcage.metrics.targets import write_targets

NAME = "exporter"

SEND_SEC = 2.0
"""Between two snapshots of a source: less than any scrape interval in use."""

TARGETS_SEC = 10.0
"""Between two looks at the nodes that Ray has."""

ANSWER_SEC = 10.0
"""As long as an exporter that starts again may take; a snapshot that it has not taken by then is followed by a later
one anyway."""

ON_THE_HEAD = {"node:__internal_head__": 0.001}
"""The address that Prometheus was told and the state stay where they are when the actor starts again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExporterConfig:
    """`state` and `targets` are on the head node: where what was counted is kept, and the file for `file_sd_configs`.
    The others are those of `serve`."""

    state: Path | None = None
    targets: Path | None = None
    host: str = "127.0.0.1"
    port: int = PORT
    user: str | None = None
    password: str | None = None
    certificate: Path | None = None
    key: Path | None = None


class ExporterActor:
    """`Exporter` and its port, in a process of its own. Raises what these raise."""

    def __init__(self, config: ExporterConfig) -> None:
        self._exporter = Exporter(config.state)
        self._server = serve(
            self._exporter,
            host=config.host,
            port=config.port,
            user=config.user,
            password=config.password,
            certificate=config.certificate,
            key=config.key,
        )
        self._address = f"{config.host}:{self._server.port}"
        self._vllm: dict[str, tuple[str, ...]] = {}
        self._look = Event()
        if config.targets is not None:
            Thread(target=self._keep_targets, args=(config.targets,), name="targets", daemon=True).start()

    def address(self) -> str:
        """Where it listens, as `host:port`."""
        return self._address

    def accept(self, source: str, snapshot: Snapshot, incarnation: str, final: bool = False) -> None:
        """See `Exporter.accept`."""
        self._exporter.accept(source, snapshot, incarnation=incarnation, final=final)

    def set_vllm(self, source: str, addresses: tuple[str, ...]) -> None:
        """Where vLLM's own metrics of a source's replicas are; none once it has ended."""
        self._vllm[source] = addresses
        self._look.set()

    def _keep_targets(self, path: Path) -> None:
        while True:
            self._look.clear()
            ray_s = [
                f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
                for node in ray.nodes()
                if node["Alive"]
            ]
            vllm_s = [address for addresses in list(self._vllm.values()) for address in addresses]
            write_targets(path, {"rollcage": [self._address], "ray": ray_s, "vllm": vllm_s})
            self._look.wait(TARGETS_SEC)


def start_exporter(config: ExporterConfig) -> Any:
    """The cluster's exporter: the one that there is, whatever its configuration, or a new one. Raises `RayError` where
    it cannot start (its port is taken, its state cannot be read)."""
    exporter = (
        ray.remote(ExporterActor)
        .options(
            name=NAME,
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
    ray.get(exporter.address.remote())
    return exporter


@asynccontextmanager
async def telling(exporter: Any, source: str, snapshot: Callable[[], Snapshot]) -> AsyncIterator[None]:
    """Inside the block the exporter is told every `SEND_SEC` what `source` has counted, and once more at its end.

    An exporter that does not answer, or refuses the source, is logged and harms nobody: counting is no reason for a
    job to fail.
    """
    incarnation = secrets.token_hex(8)

    async def tell(*, final: bool = False) -> None:
        try:
            async with asyncio.timeout(ANSWER_SEC):
                await exporter.accept.remote(source, snapshot(), incarnation, final)
        except (RayError, TimeoutError, UnknownLabel) as error:
            _log.warning("the exporter did not take what %s has counted: %s", source, error)

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
