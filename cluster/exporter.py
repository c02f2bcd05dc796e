"""The exporter as a detached Ray actor on the head node; `telling.py` tells it a source's counts.

    exporter = start_exporter(ExporterConfig())
    async with telling(exporter, "demo-1a2b", snapshot):
        ...

The actor outlives the jobs that it counts, as far as their Ray cluster does. Ray starts it again as often as it dies,
and calls that its death met are made again: snapshots are cumulative and numbered, so that one which was taken in twice
counts once.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

import ray

from rollcage.cluster.ray_names import EXPORTER, NAMESPACE, reachable
from rollcage.metrics.counts import Snapshot
from rollcage.metrics.exporter import Exporter
from rollcage.metrics.serving import PORT, Server, serve
from rollcage.metrics.targets import address_of, remove_ended, targets_json, write_targets

TARGETS_SEC = 10.0
"""Between two looks at the nodes that Ray has."""

AGAIN_SEC = 5.0
"""Between two tries of an exporter that cannot begin."""

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
    others are those of `Exporter` and `serve`."""

    state: Path | None = None
    targets: Path | None = None
    host: str = "127.0.0.1"
    port: int | None = None
    user: str | None = None
    password: str | None = None
    certificate: Path | None = None
    key: Path | None = None
    exemplars: bool = False

    @property
    def guard(self) -> dict[str, Any]:
        """Who may scrape and how, as `serving.serve` takes it: here, and at the ports of vLLM's own metrics."""
        names = ("host", "user", "password", "certificate", "key")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class ExporterPlace:
    """Where an exporter is: `address` is `host:port`, `targets` its file for `file_sd_configs`, on the head node.
    `failure`: why it does not listen, and `no_targets` why there is no such file; empty where all is well. `others`:
    settings of who asks that this exporter, which another job has started, does not have."""

    address: str = ""
    url: str = ""
    targets: str = ""
    no_targets: str = ""
    failure: str = ""
    others: tuple[str, ...] = ()


class ExporterActor:
    """`Exporter` and its port, in a process of its own. Where it cannot begin it says so to whoever asks it, and tries
    again: raised by its constructor, Ray would start it again for ever."""

    def __init__(self, config: ExporterConfig) -> None:
        self._config = config
        self._vllm: dict[str, tuple[str, ...]] = {}
        self._look, self._over, self._writing = Event(), False, Lock()
        self._state = config.state or _session_directory()
        self._held: int | None = None
        self._place = ExporterPlace()
        self._begin()

    def _begin(self) -> None:
        self._tried_at = time.monotonic()
        try:
            self._hold()
            former = _remembered(self._state)
            self._exporter = Exporter(self._state, exemplars=self._config.exemplars)
        except (OSError, ValueError, RecursionError) as error:
            failure = f"the exporter cannot use what it has kept in {self._state}: {error}"
            self._place = ExporterPlace(failure=failure)
            return
        try:
            port = _serve(self._exporter, self._config, former, lambda: targets_json(self._targets())).port
        except (OSError, ValueError, OverflowError) as error:
            where = address_of(self._config.host, self._config.port or PORT)
            self._place = ExporterPlace(failure=f"the exporter cannot listen at {where}: {error}")
            return
        try:
            _remember(self._state, port)
        except OSError as error:  # it is for the next life, which may find another port
            _log.warning("its port cannot be kept in %s: %s", self._state, error)
        address = address_of(reachable(self._config.host), port)
        scheme = "http" if self._config.certificate is None else "https"
        self._place = ExporterPlace(address, f"{scheme}://{address}/metrics")
        if (directory := self._config.targets) is not None:
            self._begin_targets(directory / f"{port}.json", directory / f"{former or port}.json")

    def _hold(self) -> None:
        """Have the state for this process alone: two that share one would each count what both have. Raises
        `OSError`."""
        if self._held is None:
            self._state.mkdir(parents=True, exist_ok=True)
            held = os.open(self._state, os.O_RDONLY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(held)
                raise OSError(f"{self._state} is another exporter's state: name another directory") from None
            self._held = held

    def _begin_targets(self, path: Path, former: Path) -> None:
        try:
            self._write_targets(path)
            if former != path:  # somebody else has taken that port meanwhile
                former.unlink(missing_ok=True)
            remove_ended(path.parent)
        except OSError as error:
            self._place = replace(self._place, no_targets=str(error))
            return
        self._place = replace(self._place, targets=str(path))
        Thread(target=self._keep_targets, args=(path,), name="targets", daemon=True).start()

    def place(self, asked: ExporterConfig | None = None) -> ExporterPlace:
        """Where it is. `asked`: the configuration of who wants to know; where it could not begin with its own, it tries
        again with that one."""
        if asked is None:
            return self._place
        if self._place.failure:
            self._config = asked
            if (state := asked.state or _session_directory()) != self._state and self._held is not None:
                os.close(self._held)
                self._held = None
            self._state = state
            self._begin()
        default = ExporterConfig()
        others = tuple(
            field.name
            for field in fields(asked)
            if getattr(asked, field.name)
            not in (getattr(default, field.name), getattr(self._config, field.name))
        )
        return replace(self._place, others=others)

    def accept(
        self, source: str, snapshot: Snapshot, incarnation: str, final: bool = False, of: str = ""
    ) -> str:
        """See `Exporter.accept`. Returns why it did not take it whole, or could not keep it; nothing where all is
        well."""
        if self._place.failure and time.monotonic() - self._tried_at > AGAIN_SEC:
            self._begin()
        if self._place.failure:
            return self._place.failure
        try:
            return self._exporter.accept(source, snapshot, incarnation=incarnation, final=final, of=of)
        except ValueError as error:
            return str(error)
        except OSError as error:
            return f"it is counted, but cannot be kept in {self._state}: {error}"

    def end(self, source: str) -> None:
        """See `Exporter.end`."""
        if not self._place.failure:
            with suppress(OSError):  # it is kept with the next snapshot of anybody
                self._exporter.end(source)

    def set_vllm(self, source: str, addresses: tuple[str, ...]) -> None:
        """Where vLLM's own metrics of a source's replicas are; none once it has ended. Told again and again, for it is
        forgotten when this process ends."""
        if self._vllm.get(source, ()) != addresses:
            self._vllm[source] = addresses
            self._look.set()

    def close(self) -> None:
        """Its cluster is about to end: no Prometheus is to look for it any more."""
        with self._writing:
            self._over = True
            if self._place.targets:
                Path(self._place.targets).unlink(missing_ok=True)

    def _keep_targets(self, path: Path) -> None:
        while not self._over:
            self._look.wait(TARGETS_SEC)
            self._look.clear()
            try:
                self._write_targets(path)
            except OSError as error:
                _log.warning("%s cannot be written: %s", path, error)

    def _targets(self) -> dict[str, list[str]]:
        """What there is to scrape, by kind."""
        ray_s = [
            address_of(node["NodeManagerAddress"], node["MetricsExportPort"])
            for node in ray.nodes()
            if node["Alive"]
        ]
        vllm_s = [address for addresses in list(self._vllm.values()) for address in addresses]
        ours = [self._place.address] if self._place.address else []
        return {"rollcage": ours, "ray": ray_s, "vllm": vllm_s}

    def _write_targets(self, path: Path) -> None:
        targets = self._targets()
        with self._writing:
            if not self._over:
                write_targets(path, targets)


def _session_directory() -> Path:
    context: Any = ray.get_runtime_context()
    return Path(str(context.get_temp_dir())) / str(context.get_session_name()) / "rollcage-metrics"


def _remembered(state: Path) -> int | None:
    """The port of the life before, where it is known."""
    with suppress(OSError, ValueError):
        return int((state / "port").read_text(encoding="utf-8"))
    return None


def _remember(state: Path, port: int) -> None:
    temporary = state / "port.new"
    temporary.write_text(str(port), encoding="utf-8")
    os.replace(temporary, state / "port")


def _serve(
    exporter: Exporter, config: ExporterConfig, former: int | None, targets: Callable[[], str]
) -> Server:
    """On the port that is asked for; else on that of the life before, or `PORT`, or a free one. The life before may
    hold its port for a moment still. Raises as `serve`."""
    wanted = config.port if config.port is not None else former if former is not None else PORT
    until = time.monotonic() + (PORT_SEC if former is not None else 0.0)
    while True:
        try:
            return serve(exporter, port=wanted, targets=targets, **config.guard)
        except OSError:
            if time.monotonic() < until:
                time.sleep(0.1)
            elif config.port is not None:
                raise
            else:
                return serve(exporter, port=0, targets=targets, **config.guard)


def start_exporter(config: ExporterConfig) -> Any:
    """The cluster's exporter: the one that there is, whatever its configuration, or a new one, which may be starting
    still. `ExporterActor.place` says whether it could."""
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
