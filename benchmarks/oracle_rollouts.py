"""Oracle rollouts a second, against a bare loop over the Engine's API.

The bare loop does, with docker-py in threads, what any harness must: create, start, attach, put the tests, run
them, read the reward, remove. Rollcage does all of a rollout: the agent's phase with its solution, a clean
verifier, outcome, ledger, through a Ray actor. Runs of both are interleaved; medians are compared.

    python benchmarks/oracle_rollouts.py [--rollouts 48] [--repeats 3] [--concurrency 1 4 8]
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import tarfile
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
from oracle_task import IMAGE, TEST, write_task
from rich.console import Console

from rollcage.cluster.actors import RayHosts, connected
from rollcage.cluster.decisions import TaskKey
from rollcage.cluster.driver import Driver
from rollcage.cluster.host import HostSpec
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import AgentPlan, JobPlan
from rollcage.cluster.progress import JobProgress
from rollcage.metrics.report import summarize
from rollcage.rollout.task import load_task


def one_bare(api: docker.APIClient, image: str) -> None:
    """Create, start, attach, put tests, run them, read the reward, remove."""
    config = api.create_host_config(network_mode="none", pids_limit=256, log_config={"Type": "none"})
    container = api.create_container(image, ["/bin/sh"], stdin_open=True, host_config=config)["Id"]
    try:
        api.start(container)
        stream = api.attach_socket(container, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as archive:
            for name, data, mode in (
                ("tests/test.sh", TEST.encode(), 0o755),
                ("app/answer.txt", b"42", 0o644),
            ):
                member = tarfile.TarInfo(name)
                member.size, member.mode = len(data), mode
                archive.addfile(member, io.BytesIO(data))
        api.put_archive(container, "/", tar.getvalue())
        stream._sock.sendall(b"mkdir -p /logs/verifier; /tests/test.sh; echo done\n")
        if b"done" not in stream._sock.recv(4096):
            raise SystemExit("the bare loop lost its stream")
        stream.close()
        chunks, _ = api.get_archive(container, "/logs/verifier/reward.txt")
        with tarfile.open(fileobj=io.BytesIO(b"".join(chunks))) as archive:
            reward = archive.extractfile("reward.txt")
            if reward is None or float(reward.read()) != 1.0:
                raise SystemExit("the bare loop got no reward")
    finally:
        api.remove_container(container, force=True)


def bare(image: str, rollouts: int, concurrency: int) -> float:
    api = docker.APIClient(version="auto", max_pool_size=concurrency + 2)
    started = time.monotonic()
    with ThreadPoolExecutor(concurrency) as threads:
        list(threads.map(lambda _: one_bare(api, image), range(rollouts)))
    return rollouts / (time.monotonic() - started)


class Benchmark:
    """Rollcage with its hosts kept over the runs, as in a long job."""

    def __init__(self, task_dir: Path, runs: Path) -> None:
        self.task = load_task(task_dir)
        self.runs = runs

    def plan(self, rollouts: int, concurrency: int) -> JobPlan:
        key = TaskKey(self.task.name, self.task.digest)
        agents = (AgentPlan("oracle", "oracle", samples=rollouts),)
        return JobPlan(f"bench-{uuid.uuid4().hex[:8]}", agents, {key: self.task}, concurrency=concurrency)

    async def run(self, rollouts: int, concurrency: int) -> float:
        plan = self.plan(rollouts, concurrency)
        ledger = Ledger.create(self.runs / plan.job, {"job": plan.job})
        hosts = RayHosts(HostSpec(plan.job))
        with JobProgress(rollouts, Console(stderr=True, quiet=True)) as progress:
            await Driver(plan, ledger, hosts, progress).run()
        await ledger.finish({})
        return self.rate(plan.job, rollouts)

    def rate(self, job: str, rollouts: int) -> float:
        """Rollouts a second of a run in which each has passed."""
        summary = summarize(self.runs / job)
        if summary["passed"] != rollouts:
            raise SystemExit(f"not every oracle rollout passed: {summary['by_error_class']}")
        return float(summary["rollouts_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, connected():
        benchmark = Benchmark(write_task(Path(scratch) / "task"), Path(scratch))
        asyncio.run(benchmark.run(2, 2))
        print("concurrency  rollcage/s  bare/s  ratio")
        for concurrency in options.concurrency:
            ours, theirs = [], []
            for _ in range(options.repeats):
                theirs.append(bare(IMAGE, options.rollouts, concurrency))
                ours.append(asyncio.run(benchmark.run(options.rollouts, concurrency)))
            mine, other = statistics.median(ours), statistics.median(theirs)
            print(f"{concurrency:11d}  {mine:10.2f}  {other:6.2f}  {mine / other:5.2f}", flush=True)


if __name__ == "__main__":
    main()
