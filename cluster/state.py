"""The scheduler's own picture of rollouts, groups, tasks and hosts, and the queues that decide who is next.

A host holds two heaps: `open`, waiting rollouts of groups that have begun, in the order in which the groups
were opened; and `fresh`, groups that have not, in the job's order. A rollout stands in the heap of every host
that may run it. Entries are never removed but found to be stale: an entry of `open` counts while its rollout
waits for the same attempt number, one of `fresh` while its group is unopened and has rollouts left. What has ended is
forgotten, so that an entry may also lead nowhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush
from typing import TypeVar

from rollcage.cluster.decisions import Assignment, GroupKey, Preparation, RolloutKey, TaskKey

T = TypeVar("T", int, tuple[int, int, int, int])

OpenEntry = tuple[int, int, int, int]
"""(the group's opening number, the rollout's place in its group, attempts so far, the rollout's index)"""


def smallest(heap: Sequence[T], count: int) -> Iterator[T]:
    """The `count` smallest entries of a heap, in order, which stays as it is: O(count log count)."""
    edge: list[tuple[T, int]] = [(heap[0], 0)] if heap else []
    for _ in range(min(count, len(heap))):
        entry, at = heappop(edge)
        yield entry
        for child in (2 * at + 1, 2 * at + 2):
            if child < len(heap):
                heappush(edge, (heap[child], child))


class State(Enum):
    """Where a rollout is."""

    WAITING = "waiting"
    DELAYED = "delayed"
    IN_FLIGHT = "in flight"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class TaskState:
    """A task. `groups` are those that have not ended, by order; `rollouts` counts all that it was ever given. `fresh`
    counts rollouts of its unopened groups, `ahead` how many of them the scheduler counts as
    prepared. `stranded` are waiting rollouts that no ready host may run. `delayed` holds while a preparation
    waits for its retry. `refused` are hosts that its preparation was given up on, `avoid` names of hosts where
    one failed. `suspicions` counts rollouts that gave up over the task's verifier. `queued` is the rank of its entry
    among the tasks in need of a preparation."""

    key: TaskKey
    order: int
    groups: dict[int, GroupState] = field(default_factory=dict)
    rollouts: int = 0
    unended: int = 0
    fresh: int = 0
    ahead: int = 0
    ready: set[Host] = field(default_factory=set)
    preparing: set[Host] = field(default_factory=set)
    refused: set[Host] = field(default_factory=set)
    avoid: set[str] = field(default_factory=set)
    failures: dict[str, int] = field(default_factory=dict)
    suspicions: int = 0
    stranded: list[RolloutState] = field(default_factory=list)
    preparations: int = 0
    delayed: bool = False
    queued: int | None = None
    quarantined: str | None = None

    @property
    def in_need(self) -> bool:
        """True where a preparation is what its rollouts wait for, and none is under way."""
        if not self.unended or self.preparing or self.delayed:
            return False
        return bool(self.stranded or (self.fresh and not self.ready))


@dataclass(slots=True, eq=False)
class GroupState:
    """A group. `opened` is its opening number, None before its first attempt. `suspected`: a rollout gave up over the
    task's verifier."""

    key: GroupKey
    order: int
    task: TaskState
    rollouts: list[RolloutState] = field(default_factory=list)
    unended: int = 0
    opened: int | None = None
    suspected: bool = False


@dataclass(slots=True, eq=False)
class RolloutState:
    """A rollout. `failures` counts its attempts' error classes, `avoid` names hosts that failed it."""

    key: RolloutKey
    id: str
    index: int
    place: int
    group: GroupState
    state: State = State.WAITING
    attempts: int = 0
    attempt: Assignment | None = None
    failures: dict[str, int] = field(default_factory=dict)
    avoid: set[str] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Host:
    """A host that is up. A host that comes back is a new one. `strikes` counts its failures in a row."""

    name: str
    capacity: int
    attempts: set[str] = field(default_factory=set)
    preparations: dict[str, Preparation] = field(default_factory=dict)
    ready: set[TaskState] = field(default_factory=set)
    open: list[OpenEntry] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    strikes: int = 0

    @property
    def has_room(self) -> bool:
        """True where one more attempt may run here."""
        return len(self.attempts) < self.capacity

    @property
    def load(self) -> float:
        """How full it is, for comparing hosts. Failures weigh like attempts: a host that fails at once would
        otherwise always be the emptiest."""
        return (len(self.attempts) + self.strikes) / self.capacity if self.capacity else float("inf")

    def next_open(self, rollouts: Mapping[int, RolloutState]) -> OpenEntry | None:
        """The first rollout of an open group that waits for this host."""
        while self.open:
            entry = self.open[0]
            rollout = rollouts.get(entry[3])
            if rollout is not None and rollout.state is State.WAITING and rollout.attempts == entry[2]:
                return entry
            heappop(self.open)
        return None

    def next_fresh(self, groups: Mapping[int, GroupState]) -> int | None:
        """The first unopened group that waits for this host."""
        while self.fresh:
            group = groups.get(self.fresh[0])
            if group is not None and group.opened is None and group.unended:
                return group.order
            heappop(self.fresh)
        return None
