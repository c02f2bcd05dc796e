"""What a job tells of the policies that vLLM serves for it."""

from __future__ import annotations

from typing import Any

from rollcage.cluster.job_metrics import PolicyLook
from rollcage.metrics.job_counts import JobCounts


class Served:
    """As much of a `ServedPolicy` as is looked at."""

    version = 1

    def __init__(self) -> None:
        self.replicas: dict[int, tuple[str, int]] = {}

    def status(self) -> list[dict[str, Any]]:
        return [
            {
                "replica": number,
                "state": state,
                "restarts": restarts,
                "running": 1,
                "waiting": 0,
                "kv_use": 0.5,
            }
            for number, (state, restarts) in self.replicas.items()
        ]


def test_restarts_of_replicas_that_are_gone_stay_counted() -> None:
    counts, served, look = JobCounts("j", [], ["p"]), Served(), PolicyLook()

    def restarts(**replicas: tuple[str, int]) -> float:
        served.replicas = {int(name[1:]): replica for name, replica in replicas.items()}
        look.look("p", served, counts)  # type: ignore[arg-type]
        return counts.snapshot().values["policy_replica_restarts"]["p",]

    assert restarts(r0=("ready", 0), r1=("ready", 0)) == 0
    assert restarts(r0=("ready", 1), r1=("ready", 2)) == 3
    assert restarts(r1=("ready", 2)) == 3  # one was drained
    assert restarts(r1=("ready", 0)) == 3  # its actor was replaced
    assert restarts(r1=("ready", 1), r2=("starting", 0)) == 4


def test_a_policy_that_starts_is_not_lost_and_one_that_starts_again_is() -> None:
    counts, served, look = JobCounts("j", [], ["p"]), Served(), PolicyLook()

    def states(*replicas: str) -> dict[str, float]:
        served.replicas = {number: (state, 0) for number, state in enumerate(replicas)}
        look.look("p", served, counts)  # type: ignore[arg-type]
        found = counts.snapshot().values["policy_replicas"]
        return {state: number for (state, _), number in found.items() if number}

    assert states("new", "starting") == {"starting": 2}
    assert states("ready", "starting") == {"ready": 1, "starting": 1}
    assert states("starting", "down") == {"lost": 2}
    assert states("starting", "draining") == {"lost": 1, "draining": 1}
    assert states("ready", "starting") == {"ready": 1, "starting": 1}
