"""Hosts and jobs that nothing is behind, so that an exporter has something to show: for tests, benchmarks and for
looking at dashboards without a cluster. Every family gets values; what they are is made up but the same each time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import count

from rollcage.metrics.counts import Counts, Labels
from rollcage.metrics.definitions import FAMILIES, NONE, Family, Kind, Sender
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
    """At each step every source counts something, at the first one in each of its series, and sends a snapshot."""
    chance = random.Random(0)
    names = {
        "agent": [f"agent-{n}" for n in range(agents)],
        "policy": [f"policy-{n}" for n in range(policies)],
    }
    sources = [(f"host-{n}", Counts(Sender.HOST, {"host": [f"host-{n}"]})) for n in range(hosts)]
    sources += [(f"job-{n}", Counts(Sender.JOB, {**names, "job_id": [f"job-{n}"]})) for n in range(jobs)]
    for tick in count():
        for source, counts in sources:
            for family in FAMILIES:
                if family.sender is counts.sender:
                    for labels in family.series(counts.declared):
                        _count(counts, family, labels, chance, tick)
            if counts.sender is Sender.JOB:
                _agree(counts)
            exporter.accept(source, counts.snapshot(), incarnation="1")
        yield


def _count(counts: Counts, family: Family, labels: Labels, chance: random.Random, tick: int) -> None:
    if family.kind is Kind.HISTOGRAM:
        quick = family.buckets[: 2 * len(family.buckets) // 3]
        counts.observe(family.name, chance.choice(quick if tick else family.buckets), *labels)
    elif family.kind is Kind.COUNTER:
        grown = _amount(family.name, labels, chance)
        if family.name == "attempts" and (grown or not tick):
            [job] = counts.declared["job_id"]
            which = f"{chance.getrandbits(48):012x}-1"
            counts.example(family.name, *labels, job_id=job, attempt_id=which)
        counts.add(family.name, *labels, amount=grown if tick else max(1, grown))
    else:
        counts.set(family.name, _gauge(family, labels, chance, tick), *labels)


def _amount(name: str, labels: Labels, chance: random.Random) -> int:
    """How much a series counts in a tick: most attempts go well."""
    if name in ("rollouts", "attempts") and labels[:3] in _WELL:
        return chance.randint(20, 40)
    if name == "policy_tokens":
        return chance.randint(2000, 3000) if labels[0] == "prompt" else chance.randint(200, 1500)
    if name == "groups" and labels[0] == "complete":
        return chance.randint(5, 9)
    if name == "image_builds" and not labels[0].endswith("fault"):
        return chance.randint(1, 9)
    if name in _RARE:
        return int(chance.random() < 0.05)
    return chance.randint(1, 9)


_WELL = {(outcome, NONE, NONE) for outcome in ("passed", "failed")}
_RARE = {
    "rollouts", "attempts", "retries", "tasks_quarantined", "groups", "groups_zero_variance", "image_builds",
    "infra_lost_seconds", "policy_malformed_turns", "policy_replica_restarts", "resources_reaped",
}  # fmt: skip


def _gauge(family: Family, labels: Labels, chance: random.Random, tick: int) -> float:
    """What a gauge is at a tick."""
    match family.name, labels:
        case (name, _) if name.endswith("timestamp_seconds"):
            return time.time() - (3600 if "started" in name else 1)
        case "host_up" | "feed_readers", _:
            return 1
        case "network_capacity", _:
            return 100
        case "bridge_ports", _:
            return 1023
        case "bridge_ports_in_use", _:
            return chance.randint(100, 300)
        case "network_leases", _:
            return chance.randint(20, 60)
        case "resources_leaked", _:
            return 0
        case "disk_free_bytes", _:
            return chance.randint(180, 200) * 2.0**30
        case "policy_replicas", (state, _):
            return 2 if state == "ready" else 0
        case "policy_version" | "feed_acknowledged_groups", _:
            return tick
    return chance.random() if family.unit == "ratio" else chance.randint(1, 9)


def _agree(counts: Counts) -> None:
    """What follows from the attempts and rollouts that were counted."""
    now = counts.snapshot().values
    ended, rollouts = (sum(now[name].values()) for name in ("attempts", "rollouts"))
    counts.set("attempts_ended", ended)
    counts.set("attempts_in_flight", 8)
    counts.set("attempts_dispatched", ended + 8)
    counts.set("attempts_abandoned", 0)
    [job] = counts.declared["job_id"]
    counts.set("job_rollouts_ended", rollouts, job)
    counts.set("job_rollouts", max(20_000, rollouts), job)
