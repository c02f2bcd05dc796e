"""A job goes on whatever becomes of its engine or its host: every rollout ends well, and nothing is left."""

from __future__ import annotations

import asyncio
import io
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from attempts import OneHost, Site, nothing_of, until
from private_dockerd import IMAGE, PrivateEngine
from rich.console import Console

from rollcage.cluster.actors import connected, start_host
from rollcage.cluster.decisions import TaskKey
from rollcage.cluster.driver import Driver
from rollcage.cluster.host import HostLost, HostSpec
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import AgentPlan, JobPlan
from rollcage.cluster.progress import JobProgress
from rollcage.rollout.arrow import read_attempts, read_rollouts
from rollcage.rollout.outcome import BY_NAME, Domain
from rollcage.rollout.sandbox.pool import SandboxSettings

pytestmark = [pytest.mark.docker, pytest.mark.timeout(180)]

Record = Callable[[str, str], None]


async def test_the_engine_is_stopped_and_started_under_20_rollouts(
    private_engine: Callable[..., PrivateEngine], record: Record, tmp_path: Path
) -> None:
    """CASES 12."""
    engine = private_engine()
    settings = SandboxSettings(docker_host=engine.url, pids=64, insecure_network=True, least_disk_mb=0)
    here = Site(settings, tmp_path, IMAGE)
    await here.host.open()
    task = here.task(solution="sleep 1\necho 42 >/app/answer\n")
    key = TaskKey(task.name, task.digest)
    plan = JobPlan("test-faults", (AgentPlan("oracle", "oracle", samples=20),), {key: task}, concurrency=8)
    ledger = Ledger.create(tmp_path / "run", {"job": plan.job})
    progress = JobProgress(20, Console(file=io.StringIO()))
    driving = asyncio.create_task(Driver(plan, ledger, OneHost(here.host), progress).run())

    async def eight_run() -> bool:
        assert not driving.done(), await driving
        return len(await here.engine.call("list", lambda api: api.containers())) == 8

    await until(eight_run)
    await asyncio.to_thread(engine.stop)
    await asyncio.to_thread(engine.start)
    async with asyncio.timeout(90):
        await driving
    await ledger.finish({})
    rollouts = Counter(read_rollouts(tmp_path / "run", ["outcome"])["outcome"].to_pylist())
    assert rollouts == {"passed": 20}
    classes = Counter(read_attempts(tmp_path / "run", ["error_class"])["error_class"].to_pylist())
    del classes[None]
    record("restart", classes.most_common(1)[0][0])
    assert {BY_NAME[name].domain for name in classes} == {Domain.INFRA}
    await nothing_of(here.host.name, engine.url)
    assert engine.left() == []


@asynccontextmanager
async def ray() -> AsyncIterator[str]:
    with connected(num_cpus=1):
        from ray import nodes

        yield nodes()[0]["NodeID"]


@pytest.mark.ray
async def test_a_hosts_process_is_killed(record: Record, tmp_path: Path) -> None:
    """CASES 27. The host in its place removes what it has left."""
    here = Site(SandboxSettings(pids=64, insecure_network=True), tmp_path, "debian:bookworm-slim")
    task = here.task(solution="sleep 600\n")
    async with ray() as node:
        spec = HostSpec("test-faults", here.host._spec.sandbox)
        lost = await start_host(node, spec)
        assert (await lost.prepare(task)).error_class is None
        attempt = asyncio.create_task(lost.run(here.spec(task), None))
        await here.host.open()
        await until(lambda: _of(here, lost.name))
        children = psutil.Process().children(recursive=True)
        [actor] = [one for one in children if any("ray::HostActor" in word for word in one.cmdline())]
        actor.kill()
        with pytest.raises(HostLost) as raised:
            await attempt
        record("host_lost", raised.value.error_class)
        again = await start_host(node, spec, after=lost.name)
        record("host_killed", "; ".join(await _of(here, lost.name)) or "nothing left")
        await again.close()
        await here.host.close()
    for host in (lost.name, again.name, here.host.name):
        await nothing_of(host, None)


async def _of(here: Site, host: str) -> list[str]:
    label = {"label": f"rollcage.host={host}"}
    found = await here.engine.call("list", lambda api: api.containers(all=True, filters=label))
    return [name for one in found for name in one["Names"]]
