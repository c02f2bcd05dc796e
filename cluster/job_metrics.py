"""A job's part in the cluster's metrics: it starts the exporter, and tells it what the driver counts.

    metrics = JobMetrics.start(config.metrics, job, say)
    ...
    async with metrics.told(driver, ledger, served):
        await driver.run()
    await metrics.close(ray_ends=True)

Nothing here ends a job: an exporter that does not start is said once, and the job goes on uncounted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from rollcage.cluster.config_model import MetricsConfig
from rollcage.cluster.driver import Driver
from rollcage.cluster.exporter import ANSWER_SEC, ExporterConfig, start_exporter, telling
from rollcage.cluster.ledger import Ledger
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
        self._failed = False
        self._replicas: tuple[str, ...] = ()
        self._announcing: asyncio.Task[None] | None = None
        if config.enabled:
            made = exporter_config(config)
            self.vllm = {"host": made.host, "user": made.user, "password": made.password}
            self.exporter = start_exporter(made)
            self._announcing = asyncio.create_task(self._announce())

    async def _announce(self) -> None:
        try:
            async with asyncio.timeout(START_SEC):
                address, failure = await self.exporter.address.remote()
                targets = await self.exporter.targets.remote()
        except (RayError, TimeoutError) as error:
            self._say(f"no metrics: the exporter did not start: {error or 'it does not answer'}")
            return
        if failure:
            self._failed = True
            self._say(f"no metrics: {failure}")
            return
        found = f"; for Prometheus: {targets}" if targets else ""
        top = "" if address == f"127.0.0.1:{PORT}" else f" --url http://{address}/metrics"
        self._say(f"metrics: {address}/metrics (`rollcage top{top}`){found}")

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
            with suppress(
                OSError, ValueError, TypeError
            ):  # readers replace their files whole; the driver says it
                reached = await asyncio.to_thread(acknowledgements, ledger.location)
                taken = acknowledged(reached)
                there = committed + driver.groups_committed
                driver.counts.feed(taken, max(0, there - taken) if reached else there, len(reached))
            return driver.counts.snapshot()

        try:
            async with telling(self.exporter, self._job, snapshot):
                yield
        finally:
            self._tell_of_replicas({})

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
        if self._failed:
            ray.kill(self.exporter)  # the next job may have other settings
        elif self.exporter is not None and ray_ends:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(ANSWER_SEC):
                    await self.exporter.close.remote()


def _look_at(name: str, policy: ServedPolicy, driver: Driver) -> None:
    replicas = policy.status()
    states: dict[str, int] = {}
    for replica in replicas:
        state = STATES.get(replica["state"], "lost")
        states[state] = states.get(state, 0) + 1
    driver.counts.policy(
        name,
        version=policy.version,
        running=sum(replica["running"] for replica in replicas),
        waiting=sum(replica["waiting"] for replica in replicas),
        kv_use=max((replica["kv_use"] for replica in replicas), default=0.0),
        replicas=states,
        restarts=sum(replica["restarts"] for replica in replicas),
    )


STATES = {
    "new": "starting",
    "starting": "starting",
    "ready": "ready",
    "updating": "ready",
    "draining": "draining",
    "down": "lost",
}
"""A replica's states (`replica_protocol.ReplicaState`) as they are exported."""
