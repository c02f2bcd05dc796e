"""Rollouts and tasks that wait for a time: for a retry, or for a preparation to be tried again."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from rollcage.cluster.state import RolloutState, State, TaskState

Waiting = RolloutState | TaskState


class Timers:
    """When which of them is due, the earliest first. A timer means nothing any more once what it was set for has moved
    on: that is told by the number of attempts or preparations at which it was set."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Waiting, int]] = []
        self._set = 0

    def set(self, due: float, waiting: Waiting, number: int) -> None:
        """Have `waiting`, at this number of attempts or preparations, be due then."""
        self._set += 1
        heappush(self._heap, (due, self._set, waiting, number))

    def next_at(self) -> float | None:
        """When the next is due; None where nothing waits for the time."""
        while self._heap and not _still_waits(*self._heap[0][2:]):
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def due(self, now: float) -> Iterator[Waiting]:
        """Those that are due, each once."""
        while self._heap and self._heap[0][0] <= now:
            _, _, waiting, number = heappop(self._heap)
            if _still_waits(waiting, number):
                yield waiting


def _still_waits(waiting: Waiting, number: int) -> bool:
    """True where a timer set at this number of attempts or preparations still means something."""
    if isinstance(waiting, TaskState):
        return waiting.delayed and waiting.preparations == number and waiting.unended > 0
    return waiting.state is State.DELAYED and waiting.attempts == number
