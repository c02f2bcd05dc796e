"""What a run that is gone on with holds already, counted for Prometheus."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from rollcage.cluster.ledger_rows import Group
from rollcage.metrics.job_counts import JobCounts
from rollcage.rollout.arrow import Location, read_batches
from rollcage.rollout.feed_heads import VALID


class _Samples:
    """A group's rollouts: rewards of the valid ones, and how many have ended while it was to have so many."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.ended: Counter[int] = Counter()

    def closed(self) -> Iterable[int]:
        """The sizes at which it was whole. A job that goes on may ask for more samples: it is then whole twice."""
        total = 0
        for size, ended in sorted(self.ended.items()):
            total += ended
            if total >= size:
                yield size


def count_earlier(
    location: Location, counts: JobCounts, to_run: Collection[Group]
) -> dict[Group, list[float]]:
    """Have `counts` begin where the run is. Returns the rewards of the valid rollouts of groups that are `to_run`.
    Raises what `read_batches` does."""
    groups: dict[Group, _Samples] = defaultdict(_Samples)
    for agent, task, draw, outcome, size, reward in _rows(
        location, "rollouts", ("agent", "task", "draw", "outcome", "group_size", "reward")
    ):
        samples = groups[agent, task, draw]
        samples.ended[size] += 1
        if outcome in VALID:
            samples.rewards.append(reward or 0.0)
    ending = ("attempt_id", "agent", "outcome", "error_class")
    closed = (
        (group[0], samples.rewards[:size], size)
        for group, samples in groups.items()
        for size in samples.closed()
    )
    counts.resumed(
        _rows(location, "attempts", ending), _rows(location, "rollouts", (*ending, "attempts")), closed
    )
    return {group: groups[group].rewards for group in to_run if group in groups}


def _rows(location: Location, table: str, columns: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for batch in read_batches(location, table, columns):
        yield from zip(*(batch[name].to_pylist() for name in columns), strict=True)
