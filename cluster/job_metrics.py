"""A job's part in the cluster's metrics: it starts the exporter, and tells it what the driver counts.

    metrics = JobMetrics(config.metrics, job, say, ray_ends=True)
    ...
    async with metrics.told(driver, ledger, served):
        await driver.run()
    await metrics.close()

Nothing here ends a job: an exporter that does not start is said once, and the job goes on uncounted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray.exceptions import RayError

from rollcage.cluster.config_model import MetricsConfig
from rollcage.cluster.driver import Driver
from rollcage.cluster.exporter import ExporterConfig, ExporterPlace, start_exporter
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.replica_protocol import ReplicaState
from rollcage.cluster.telling import AFTER_SEC, telling
from rollcage.metrics.counts import Snapshot
from rollcage.metrics.job_counts import JobCounts
from rollcage.metrics.serving import PORT
from rollcage.rollout.feed_files import acknowledged, acknowledgements
from rollcage.rollout.location import state_directory

if TYPE_CHECKING:
    from rollcage.cluster.policies import ServedPolicy

FINAL_SEC = 30.0
"""How long an exporter that outlives the job may take to hear of its end: nothing follows that, and the job would be
taken for a silent one."""

PARTING_SEC = 10.0
"""And one that ends with the job, and may have a state to keep."""

START_SEC = 60.0
"""How long the exporter may take to say where it is."""


SETTINGS = {"host": "listen", "port": "listen", "password": "password_env"}
"""What of `ExporterConfig` is called otherwise in a job's settings."""


def exporter_config(config: MetricsConfig) -> ExporterConfig:
    """As the actor takes it. The password's variable is set (`config_model.MetricsConfig.password`)."""
    host, _, port = (config.listen or "127.0.0.1:").rpartition(":")

    def path(given: str | None) -> Path | None:
        return None if given is None else Path(given).expanduser()

    return ExporterConfig(
        state=path(config.state),
        targets=path(config.targets) or state_directory() / "targets",
        host=host.strip("[]"),
        port=int(port) if port else None,
        user=config.user,
        password=config.password(),
        certificate=path(config.certificate),
        key=path(config.key),
        exemplars=config.exemplars,
    )


class JobMetrics:
    """See the module. `exporter` is the actor, None where nothing is counted. `vllm` says how vLLM's own metrics are
    served (`ReplicaSettings.metrics`)."""

    def __init__(
        self,
        config: MetricsConfig,
        job: str,
        say: Callable[[str], None],
        *,
        ray_ends: bool = False,
        ended: Callable[[], bool] = lambda: False,
    ) -> None:
        """Ray must be there. `ray_ends`: with the job, and the exporter with it. `ended`: whether it has by now."""
        self.exporter: Any = None
        self.vllm: Mapping[str, Any] | None = None
        self._config = config
        self._job = job
        self._say = say
        self._said = ""
        """Why the exporter does not listen, once that was said."""
        self._targets = ""
        self._replicas: tuple[str, ...] = ()
        self._looking: dict[str, PolicyLook] = defaultdict(PolicyLook)
        self._announcing: asyncio.Task[None] | None = None
        self._ray_ends, self._ended = ray_ends, ended
        self._parting_sec = PARTING_SEC if ray_ends else FINAL_SEC
        if config.enabled:
            made = exporter_config(config)
            self.vllm = made.guard
            self.exporter = start_exporter(made)
            self._announcing = asyncio.create_task(self._announce(made))

    async def _announce(self, config: ExporterConfig) -> None:
        try:
            async with asyncio.timeout(START_SEC):
                place: ExporterPlace = await self.exporter.place.remote(config)
        except (RayError, TimeoutError) as error:
            self._say(f"no metrics: the exporter did not start: {error or 'it does not answer'}")
            return
        if place.failure:
            self._said = place.failure
            self._say(f"no metrics yet: {place.failure}")
            return
        top = "" if place.url == f"http://127.0.0.1:{PORT}/metrics" else f" --url {place.url}"
        top += f" --user {config.user}" if config.user is not None else ""
        top += f" --certificate {config.certificate}" if config.certificate is not None else ""
        targets = place.targets or f"no file of targets ({place.no_targets})"
        self._targets = place.targets
        self._say(f"metrics: {place.url} (`rollcage top{top}`); for Prometheus: {targets}")
        named = (SETTINGS.get(name, name) for name in place.others)
        if others := dict.fromkeys(name for name in named if getattr(self._config, name) is not None):
            self._say(
                "the cluster's exporter was started by another job and keeps that one's settings; it does not have "
                f"this job's metrics.{', metrics.'.join(others)}"
            )

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
                self._looking[name].look(name, policy, driver.counts)
            self._tell_of_replicas(served)
            # Readers replace their files whole; what else lies there is nobody's progress (a stream's driver says so).
            with suppress(OSError, ValueError, TypeError):
                reached = await asyncio.to_thread(acknowledgements, ledger.location)
                taken = acknowledged(reached)
                there = committed + driver.groups_committed
                driver.counts.feed(taken, max(0, there - taken) if reached else there, len(reached))
            return driver.counts.snapshot()

        try:
            async with telling(
                self.exporter,
                self._job,
                snapshot,
                final_sec=self._parting_sec,
                ended=self._ended,
                say=self._say_new,
            ):
                yield
        finally:
            self._tell_of_replicas({})

    def _say_new(self, line: str) -> None:
        if not self._said or self._said not in line:
            self._say(line)

    def _tell_of_replicas(self, served: Mapping[str, ServedPolicy]) -> None:
        """Where vLLM's own metrics are, each time: an exporter that was started again has forgotten it."""
        found = tuple(
            replica["metrics"]
            for policy in served.values()
            for replica in policy.status()
            if replica["metrics"]
        )
        if found or self._replicas:
            self._replicas = found
            with suppress(RayError):  # Ray has ended under the job
                self.exporter.set_vllm.remote(self._job, found)

    async def close(self) -> None:
        """Once nothing is told any more. Where the exporter ends with the job, no Prometheus is to look for it."""
        if self._announcing is not None:
            self._announcing.cancel()
            await asyncio.wait([self._announcing])
        if self.exporter is None:
            return
        if not self._ray_ends:
            return
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(AFTER_SEC if self._ended() else self._parting_sec):
                await self.exporter.close.remote()
        if self._targets:
            with suppress(OSError):
                await asyncio.to_thread(Path(self._targets).unlink, missing_ok=True)


class PolicyLook:
    """At one policy that vLLM serves. Replicas come and go, and their counts with them; the policy's only grow."""

    def __init__(self) -> None:
        self._restarts: dict[int, int] = {}
        self._restarted = 0
        self._was_ready = False

    def look(self, name: str, policy: ServedPolicy, counts: JobCounts) -> None:
        """Bring the policy's gauges up to date."""
        replicas = policy.status()
        for replica in replicas:
            before, now = self._restarts.get(replica["replica"], 0), replica["restarts"]
            self._restarted += now - before if now >= before else now
            self._restarts[replica["replica"]] = now
        states = Counter(STATES[ReplicaState(replica["state"])] for replica in replicas)
        self._was_ready = self._was_ready or states["ready"] > 0
        if self._was_ready and not states["ready"]:
            states = Counter({"lost": states["lost"] + states["starting"], "draining": states["draining"]})
        counts.policy(
            name,
            version=policy.version,
            running=sum(replica["running"] for replica in replicas),
            waiting=sum(replica["waiting"] for replica in replicas),
            kv_use=max((replica["kv_use"] for replica in replicas), default=0.0),
            replicas=states,
            restarts=self._restarted,
        )


STATES = {
    ReplicaState.NEW: "starting",
    ReplicaState.STARTING: "starting",
    ReplicaState.READY: "ready",
    ReplicaState.UPDATING: "ready",
    ReplicaState.DRAINING: "draining",
    ReplicaState.DOWN: "lost",
}
"""As they are exported. Where none is ready any more of a policy that was, those that start are `lost` until one is."""
