"""One scrape of the exporter, over HTTP on loopback, with 64 simulated hosts. Reach: p95 <= 50 ms.

    python benchmarks/metrics.py [--hosts 64] [--jobs 4] [--policies 8] [--agents 2] [--scrapes 100]

Printed beside it: bytes and samples of a scrape, and what one snapshot costs (made, taken in, written to the state).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

from rollcage.metrics.exporter import Exporter
from rollcage.metrics.serving import serve
from rollcage.metrics.simulated import simulate


def milliseconds(seconds: list[float]) -> str:
    """Median and 95th percentile."""
    p95 = statistics.quantiles(seconds, n=20)[-1]
    return f"p50 {1000 * statistics.median(seconds):.1f} ms, p95 {1000 * p95:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("hosts", 64), ("jobs", 4), ("policies", 8), ("agents", 2), ("scrapes", 100)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as state:
        exporter = Exporter(Path(state))
        sources = {name: getattr(options, name) for name in ("hosts", "jobs", "policies", "agents")}
        began = time.perf_counter()
        simulate(exporter, **sources, ticks=3)
        snapshots = 3 * (options.hosts + options.jobs)
        each = (time.perf_counter() - began) / snapshots
        server = serve(exporter, port=0)
        taken, worked, text = [], [], b""
        try:
            for _ in range(options.scrapes):
                began, before = time.perf_counter(), time.process_time()
                with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
                    text = answer.read()
                taken.append(time.perf_counter() - began)
                worked.append(time.process_time() - before)
        finally:
            server.close()
    samples = sum(not line.startswith(b"#") for line in text.splitlines())
    print(f"{options.hosts} hosts, {options.jobs} jobs, {options.policies} policies, {options.agents} agents")
    print(
        f"a scrape of {samples:,} samples, {len(text):,} bytes: {milliseconds(taken)} (reach: p95 <= 50 ms)"
    )
    print(f"its time on the processor, both sides: {milliseconds(worked)}")
    print(f"a snapshot made, sent and kept: {1000 * each:.1f} ms")


if __name__ == "__main__":
    main()
