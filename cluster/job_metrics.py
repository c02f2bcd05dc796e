"""A job's part in the cluster's metrics: it starts the exporter, and tells it what the driver counts.

    metrics = JobMetrics(config.metrics, job, say)
    ...
    async with metrics.told(driver, ledger, served):
        await driver.run()
    await metrics.close(ray_ends=True)

Nothing here ends a job: an exporter that does not start is said once, and the job goes on uncounted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from rollcage.cluster.config_model import MetricsConfig
from rollcage.cluster.driver import Driver
from rollcage.cluster.exporter import ANSWER_SEC, ExporterConfig, ExporterPlace, start_exporter, telling
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.replica_protocol import ReplicaState
from rollcage.metrics.counts import Snapshot
from rollcage.metrics.serving import PORT
from rollcage.rollout.feed_files import acknowledged, acknowledgements
from rollcage.rollout.location import state_directory

if TYPE_CHECKING:
    from rollcage.cluster.policies import ServedPolicy

START_SEC = 60.0
"""How long the exporter may take to say where it is."""


def exporter_config(config: MetricsConfig) -> ExporterConfig:
    """As the actor takes it. The password's variable is set (`config_model.MetricsConfig.password`)."""
    host, _, port = (config.listen or "127.0.0.1:").rpartition(":")
    return ExporterConfig(
        state=None if config.state is None else Path(config.state),
        targets=state_directory() / "targets" if config.targets is None else Path(config.targets),
        host=host.strip("[]"),
        port=int(port) if port else None,
        user=config.user,
        password=config.password(),
        certificate=None if config.certificate is None else Path(config.certificate),
        key=None if config.key is None else Path(config.key),
    )


class JobMetrics:
    """See the module. `exporter` is the actor, None where nothing is counted. `vllm` says how vLLM's own metrics are
    served (`ReplicaSettings.metrics`)."""

    def __init__(self, config: MetricsConfig, job: str, say: Callable[[str], None]) -> None:
        """Ray must be there."""
        self.exporter: Any = None
        self.vllm: Mapping[str, Any] | None = None
        self._job = job
        self._say = say
        self._said = ""
        """Why the exporter does not listen, once that was said."""
        self._replicas: tuple[str, ...] = ()
        self._announcing: asyncio.Task[None] | None = None
        if config.enabled:
            made = exporter_config(config)
            self.vllm = made.guard
            self.exporter = start_exporter(made)
            self._announcing = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        try:
            async with asyncio.timeout(START_SEC):
                place: ExporterPlace = await self.exporter.place.remote()
        except (RayError, TimeoutError) as error:
            self._say(f"no metrics: the exporter did not start: {error or 'it does not answer'}")
            return
        if place.failure:
            self._said = place.failure
            self._say(f"no metrics yet: {place.failure}")
            return
        top = "" if place.url == f"http://127.0.0.1:{PORT}/metrics" else f" --url {place.url}"
        targets = place.targets or f"no file of targets ({place.no_targets})"
        self._say(f"metrics: {place.url} (`rollcage top{top}`); for Prometheus: {targets}")

    @asynccontextmanager
    async def told(
        self, driver: Driver, ledger: Ledger, served: Mapping[str, ServedPolicy]
    ) -> AsyncIterator[None]:
        """Inside the block the exporter hears of the job: what it has counted, and how it is."""
        if self.exporter is None:
            yield
            return
        committed = ledger.committed

        async def snapshot() -> Snapshot:
            driver.look()
            driver.counts.committed(ledger.commits, ledger.written_bytes)
            for name, policy in served.items():
                _look_at(name, policy, driver)
            self._tell_of_replicas(served)
            # Readers replace their files whole; what else lies there is nobody's progress (a stream's driver says so).
            with suppress(OSError, ValueError, TypeError):
                reached = await asyncio.to_thread(acknowledgements, ledger.location)
                taken = acknowledged(reached)
                there = committed + driver.groups_committed
                driver.counts.feed(taken, max(0, there - taken) if reached else there, len(reached))
            return driver.counts.snapshot()

        try:
            async with telling(self.exporter, self._job, snapshot, say=self._say_new):
                yield
        finally:
            self._tell_of_replicas({})

    def _say_new(self, line: str) -> None:
        if not self._said or self._said not in line:
            self._say(line)

    def _tell_of_replicas(self, served: Mapping[str, ServedPolicy]) -> None:
        """Where vLLM's own metrics are, if that has changed."""
        found = tuple(
            replica["metrics"]
            for policy in served.values()
            for replica in policy.status()
            if replica["metrics"]
        )
        if found != self._replicas:
            self._replicas = found
            with suppress(RayError):  # Ray has ended under the job
                self.exporter.set_vllm.remote(self._job, found)

    async def close(self, *, ray_ends: bool) -> None:
        """`ray_ends`: the exporter ends with this job's Ray, and no Prometheus is to look for it."""
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.wait([self._announcing])
        if self.exporter is None:
            return
        with suppress(RayError, TimeoutError):  # it is gone, and with it what is to be done
            async with asyncio.timeout(ANSWER_SEC):
                if ray_ends:
                    await self.exporter.close.remote()
                elif (await self.exporter.place.remote()).failure:
                    ray.kill(self.exporter)  # the next job may have other settings


def _look_at(name: str, policy: ServedPolicy, driver: Driver) -> None:
    replicas = policy.status()
    driver.counts.policy(
        name,
        version=policy.version,
        running=sum(replica["running"] for replica in replicas),
        waiting=sum(replica["waiting"] for replica in replicas),
        kv_use=max((replica["kv_use"] for replica in replicas), default=0.0),
        replicas=Counter(STATES[ReplicaState(replica["state"])] for replica in replicas),
        restarts=sum(replica["restarts"] for replica in replicas),
    )


STATES = {
    ReplicaState.NEW: "starting",
    ReplicaState.STARTING: "starting",
    ReplicaState.READY: "ready",
    ReplicaState.UPDATING: "ready",
    ReplicaState.DRAINING: "draining",
    ReplicaState.DOWN: "lost",
}
"""As they are exported."""
