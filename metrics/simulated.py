"""Hosts and jobs that nothing is behind, so that an exporter has something to show: for tests, benchmarks and for
looking at dashboards without a cluster. Every family gets values; what they are is made up but the same each time.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from rollcage.metrics.counts import Counts
from rollcage.metrics.definitions import FAMILIES, Family, Kind, Sender
from rollcage.metrics.exporter import Exporter


def simulate(
    exporter: Exporter, *, hosts: int = 4, jobs: int = 1, policies: int = 1, agents: int = 1, ticks: int = 1
) -> None:
    """Let that many sources send `ticks` snapshots each."""
    for _ in zip(range(ticks), ticking(exporter, hosts, jobs, policies, agents), strict=False):
        pass


def ticking(
    exporter: Exporter, hosts: int = 4, jobs: int = 1, policies: int = 1, agents: int = 1
) -> Iterator[None]:
    """At each step every source counts something in each of its series and sends a snapshot."""
    chance = random.Random(0)
    names = {
        "agent": [f"agent-{n}" for n in range(agents)],
        "policy": [f"policy-{n}" for n in range(policies)],
    }
    sources = [(f"host-{n}", Counts(Sender.HOST, {"host": [f"host-{n}"]})) for n in range(hosts)]
    sources += [(f"job-{n}", Counts(Sender.JOB, {**names, "job_id": [f"job-{n}"]})) for n in range(jobs)]
    while True:
        for source, counts in sources:
            for family in FAMILIES:
                if family.sender is counts.sender:
                    for labels in family.series(counts.declared):
                        _count(counts, family, labels, chance)
            if counts.sender is Sender.JOB:
                begun, ended = (counts.value(f"attempts_{name}") for name in ("dispatched", "ended"))
                counts.add("attempts_dispatched", amount=max(0.0, ended + 8 - begun))
                counts.set("attempts_in_flight", counts.value("attempts_dispatched") - ended)
                counts.set("attempts_abandoned", 0)
            exporter.accept(source, counts.snapshot(), incarnation="1")
        yield


def _count(counts: Counts, family: Family, labels: tuple[str, ...], chance: random.Random) -> None:
    if family.kind is Kind.HISTOGRAM:
        counts.observe(family.name, chance.choice(family.buckets), *labels)
    elif family.kind is Kind.COUNTER:
        counts.add(family.name, *labels, amount=chance.randint(1, 9))
    elif family.name == "host_up":
        counts.set(family.name, 1, *labels)
    else:
        counts.set(family.name, chance.random() if family.unit == "ratio" else chance.randint(1, 99), *labels)
