"""Which task a stream draws next, and how many groups it may have open. Pure: it has no clock and reads no file.

Every task has a place on a line; the one with the lowest place is drawn and moves on. Draw `d` of a task of weight
`w` lies at `(d + u) / w`, where `u` in [0, 1) comes from the seed, the task's name and `d`. So tasks of one weight
are drawn once each, in another order each time, before any is drawn again; a task of twice the weight is drawn
twice as often, evenly; and the same seed, weights and draws give the same order in every run.

Invariants:

- Draws of a task are numbered from 0 without a gap.
- Other weights count from the next draw on: what is left of the way to a task's next draw is stretched, and what
  it was drawn too often or too seldom before is not made up for.
- A task of weight 0 and one that was taken out (`drop`) are not drawn.

A draw costs O(log tasks), new weights O(tasks).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heapreplace
from types import MappingProxyType
from typing import NamedTuple

from rollcage.rollout.curriculum import check_weights

MAX_LAG_GROUPS = 64
"""Groups that a stream may be ahead of its slowest reader: a few batches of most trainers."""


@dataclass(frozen=True)
class StreamPlan:
    """What a job of `mode: stream` is to draw. `draws`: of all tasks together, those of earlier drivers too; None:
    until the trainer has enough. `weights` by task name; 1 for a task that is not named. `drawn`: how often a run that
    is gone on with has drawn each task."""

    max_lag_groups: int = MAX_LAG_GROUPS
    draws: int | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    drawn: Mapping[str, int] = field(default_factory=dict)


class Draw(NamedTuple):
    """Draw number `draw`, from 0, of this task."""

    task: str
    draw: int


class Stream:
    """The draws of one job. `tasks` are names; `draws`, `weights` and `drawn` are those of `StreamPlan`.

    Raises `ValueError` for weights of unknown tasks, that are no weights, or that leave nothing to draw.
    """

    def __init__(
        self,
        tasks: Collection[str],
        *,
        seed: int = 0,
        draws: int | None = None,
        weights: Mapping[str, float] = MappingProxyType({}),
        drawn: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self._seed = seed
        self._limit = draws
        self._dropped: set[str] = set()
        self._weights: dict[str, float] = dict.fromkeys(sorted(tasks), 1.0)
        self._weights |= check_weights(self._weights, weights)
        self._drawn = {task: drawn.get(task, 0) for task in self._weights}
        self.total = sum(self._drawn.values())
        """Draws of all tasks so far, those of earlier drivers too."""
        self._at = 0.0
        self._places: dict[str, float] = {}
        self._line: list[tuple[float, str]] = []
        self._take_places()

    def _take_places(self) -> None:
        """Where each task stands after what has been drawn. Whoever is behind (its weight was raised) does not catch
        up."""
        for task, weight in self._weights.items():
            if weight and (drawn := self._drawn[task]):
                self._at = max(self._at, (drawn - 1 + self._chance(task, drawn - 1)) / weight)
        for task, weight in self._weights.items():
            drawn = self._drawn[task]
            place = (drawn + self._chance(task, drawn)) / weight if weight else math.inf
            self._places[task] = max(self._at, place)
        self._line_up(self._places)

    @property
    def ended(self) -> bool:
        """True where nothing is left to draw: the limit is reached, or every task is out or of weight 0."""
        return (self._limit is not None and self.total >= self._limit) or self.starved

    @property
    def starved(self) -> bool:
        """True where every task is out or of weight 0."""
        return not self._next()

    @property
    def weights(self) -> Mapping[str, float]:
        """The weight of every task that may be drawn."""
        return {task: weight for task, weight in self._weights.items() if task not in self._dropped}

    def draw(self) -> Draw | None:
        """The next draw; None where it has `ended`."""
        if self.ended:
            return None
        self._at, task = self._line[0]
        number = self._drawn[task]
        self._drawn[task] += 1
        self.total += 1
        way = 1.0 - self._chance(task, number) + self._chance(task, number + 1)
        self._places[task] = self._at + way / self._weights[task]
        heapreplace(self._line, (self._places[task], task))
        return Draw(task, number)

    def drop(self, task: str) -> None:
        """Draw this task no more."""
        self._dropped.add(task)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """From now on these tasks have these weights, and the others those that they have. Raises `ValueError`, and
        changes nothing, for unknown tasks, for what is no weight, and where nothing would be left to draw."""
        new = check_weights(self._weights, weights)
        for task, weight in new.items():
            old, self._weights[task] = self._weights[task], weight
            if not weight:
                self._places[task] = math.inf
            elif not old:
                self._places[task] = self._at + self._chance(task, self._drawn[task]) / weight
            else:
                self._places[task] = self._at + (self._places[task] - self._at) * old / weight
        self._line_up(self._places)

    def _line_up(self, places: Mapping[str, float]) -> None:
        self._line = [(place, task) for task, place in places.items() if place < math.inf]
        heapify(self._line)

    def _next(self) -> bool:
        while self._line and self._line[0][1] in self._dropped:
            heappop(self._line)
        return bool(self._line)

    def _chance(self, task: str, draw: int) -> float:
        name = f"{self._seed}/{task}/{draw}".encode()
        return int.from_bytes(blake2b(name, digest_size=6).digest()) / 2**48


def left_over(
    ended: Iterable[tuple[str, str, int, int]], samples: Mapping[str, int]
) -> tuple[dict[str, int], frozenset[tuple[str, str, int, int]]]:
    """For a stream that is gone on with: how often each task was drawn, and the rollouts of those draws that are still
    to be run. `ended`: (agent, task, draw, sample) of the rollouts that are not; `samples` by the agent's label."""
    seen: dict[tuple[str, int], set[tuple[str, int]]] = defaultdict(set)
    drawn: dict[str, int] = {}
    for agent, task, draw, sample in ended:
        drawn[task] = max(drawn.get(task, 0), draw + 1)
        seen[task, draw].add((agent, sample))
    wanted = {(agent, sample) for agent, count in samples.items() for sample in range(count)}
    return drawn, frozenset(
        (agent, task, draw, sample)
        for task, count in drawn.items()
        for draw in range(count)
        for agent, sample in wanted - seen.get((task, draw), set())
    )


def room(max_lag_groups: int, *, committed: int, acknowledged: int, open_groups: int) -> int:
    """How many more groups may be opened: those that no reader has taken yet, and those that are under way, are
    together at most `max_lag_groups`."""
    return max(0, max_lag_groups - max(0, committed - acknowledged) - open_groups)
