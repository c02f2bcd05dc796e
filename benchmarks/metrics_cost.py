"""What metrics cost on the way of a rollout: oracle rollouts with an exporter that is told, against none. Reach: <= 1%.

Runs of both are interleaved on one cluster, each kind first in turn; medians are compared. A machine's noise is larger
than what is looked for, so that beside it the time is printed that the driver spent in counting, as a share of the run.

    python benchmarks/metrics_cost.py [--rollouts 48] [--repeats 5] [--concurrency 8]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oracle_rollouts import Benchmark
from oracle_task import write_task
from rich.console import Console

from rollcage.cluster.actors import RayHosts, connected
from rollcage.cluster.config_model import MetricsConfig
from rollcage.cluster.driver import Driver
from rollcage.cluster.host import HostSpec
from rollcage.cluster.job_metrics import JobMetrics
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.progress import JobProgress
from rollcage.metrics.job_counts import JobCounts


class Clock:
    """Seconds spent in calls that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


EVENTS = ("dispatched", "attempt", "retried", "rollout", "group", "state", "committed", "feed", "snapshot")


class Measured(Benchmark):
    """The same rollouts, counted for Prometheus or not."""

    async def measure(self, rollouts: int, concurrency: int, *, counted: bool) -> tuple[float, float]:
        """Rollouts a second, and the share of the time that the driver spent in counting."""
        plan = self.plan(rollouts, concurrency)
        ledger = Ledger.create(self.runs / plan.job, {"job": plan.job})
        metrics = JobMetrics(MetricsConfig(enabled=counted), plan.job, lambda _line: None)
        hosts = RayHosts(HostSpec(plan.job), exporter=metrics.exporter)
        clock, counts = Clock(), JobCounts(plan.job, ["oracle"], [])
        for event in EVENTS:
            setattr(counts, event, clock.wrap(getattr(counts, event)))
        with JobProgress(rollouts, Console(stderr=True, quiet=True)) as progress:
            driver = Driver(plan, ledger, hosts, progress, counts)
            began = time.monotonic()
            async with metrics.told(driver, ledger, {}):
                await driver.run()
            took = time.monotonic() - began
        await metrics.close()
        await ledger.finish({})
        return self.rate(plan.job, rollouts), clock.seconds / took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--concurrency", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, connected():
        benchmark = Measured(write_task(Path(scratch) / "task"), Path(scratch))
        asyncio.run(benchmark.measure(2, 2, counted=True))
        rates: dict[bool, list[float]] = {True: [], False: []}
        shares = []
        print("repeat  counted/s  uncounted/s  the driver's counting")
        for repeat in range(options.repeats):
            made = {}
            for counted in (True, False) if repeat % 2 else (False, True):
                made[counted] = asyncio.run(
                    benchmark.measure(options.rollouts, options.concurrency, counted=counted)
                )
                rates[counted].append(made[counted][0])
            shares.append(made[True][1])
            print(
                f"{repeat:6d}  {made[True][0]:9.2f}  {made[False][0]:11.2f}  {made[True][1]:21.3%}",
                flush=True,
            )
    on, off = statistics.median(rates[True]), statistics.median(rates[False])
    print(f"median  {on:9.2f}  {off:11.2f}  {statistics.median(shares):21.3%}")
    print(f"counted rollouts are {1 - on / off:.1%} slower (reach: at most 1%)")


if __name__ == "__main__":
    main()
