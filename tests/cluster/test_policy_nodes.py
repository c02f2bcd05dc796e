"""Policy replicas on several nodes: one that is gone, and a process that no longer answers. Engines are fake."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from fake_engine import GATE
from ray.cluster_utils import Cluster
from serving import serving, until

from rollcage.cluster import supervised
from rollcage.cluster.actors import WORKER_NICENESS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    """A head without a GPU, and two nodes with one each."""
    head = {
        "num_cpus": 1,
        "include_dashboard": False,
        # A node that is gone refuses each of five checks: they need not be 3 s apart.
        "_system_config": {"health_check_period_ms": 500, "worker_niceness": WORKER_NICENESS},
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


async def test_a_replica_whose_node_is_gone_is_placed_anew_and_one_that_is_silent_started_again(
    nodes: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "ANSWER_SEC", 4.0)
    async with serving(tmp_path, replicas=1, num_gpus=1.0, retry_sec=120.0) as p:
        pid = await p.who("s")
        silent = asyncio.ensure_future(p.turn("s", GATE))
        await until(lambda: len(p.noted("turns")) == 2)
        os.kill(pid, signal.SIGSTOP)
        (tmp_path / "gate").touch()
        pid, before = (await silent).ids[0], pid
        assert pid != before
        await until(lambda: not psutil.pid_exists(before))

        raylet = next(p for p in psutil.Process(pid).parents() if p.name() == "raylet")
        node = next(n for n in nodes.worker_nodes if n.all_processes["raylet"][0].process.pid == raylet.pid)
        await asyncio.to_thread(nodes.remove_node, node, False)
        await until(lambda: not psutil.pid_exists(pid))
        made = await p.turn("s")
        assert made.ids[0] != pid
        assert made.queue_seconds > 0.0
        await until(lambda: p.served.status()[0]["restarts"] == 2)
        assert p.served.status()[0]["state"] == "ready"
