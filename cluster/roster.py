"""The rollouts that a scheduler was given, with their groups and tasks: all that have not ended, and a memory of the
last that have."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import count

from rollcage.cluster.decisions import GroupKey, RolloutKey, TaskKey
from rollcage.cluster.placement import Placement
from rollcage.cluster.state import GroupState, RolloutState, TaskState

REMEMBERED = 10_000
"""Rollouts that have ended and are still known, so that a second report about an attempt is told from one about an
attempt that was never dispatched."""


class Roster:
    """Who is there. Rollouts and groups are numbered in the order in which they came, and `placement` has them by these
    numbers. `rollouts` and `groups` count all that were ever given and not withdrawn."""

    def __init__(self, placement: Placement) -> None:
        self.rollouts = self.groups = 0
        self.tasks: dict[TaskKey, TaskState] = {}
        self.by_id: dict[str, RolloutState] = {}
        self.live: dict[GroupKey, GroupState] = {}
        self.forgotten: OrderedDict[str, int] = OrderedDict()
        """Attempts of the last rollouts that ended, by id."""
        self._placement = placement
        self._indices, self._orders = count(), count()

    def take_in(
        self, rollouts: Iterable[RolloutKey], earlier: Mapping[RolloutKey, Sequence[str]]
    ) -> list[GroupState]:
        """Take rollouts in, whole groups; `earlier` are the error classes of attempts that they have had. Returns the
        groups. Raises `ValueError`, and takes none, for one that was given before, or whose group was."""
        given = list(rollouts)
        keys = {_rollout_id(key): key for key in given}
        if len(keys) < len(given):
            raise ValueError(f"this rollout was given twice: {Counter(given).most_common(1)[0][0]}")
        for id_, key in keys.items():
            if key.group in self.live or id_ in self.forgotten:
                raise ValueError(f"this rollout, or its group, was given before: {key}")
        groups: dict[GroupKey, GroupState] = {}
        for id_, key in keys.items():
            group = groups.get(key.group)
            if group is None:
                group = groups[key.group] = GroupState(key.group, next(self._orders), self.task(key.task_key))
                self.groups += 1
            rollout = RolloutState(key, id_, next(self._indices), len(group.rollouts), group)
            self.rollouts += 1
            for error_class in earlier.get(key, ()):
                rollout.attempts += 1
                rollout.failures[error_class] = rollout.failures.get(error_class, 0) + 1
            self.by_id[id_] = self._placement.rollouts[rollout.index] = rollout
            group.rollouts.append(rollout)
            group.unended += 1
            if not group.task.unended:
                group.task.delayed = False  # the timer of a task that nothing waits for is not kept
            group.task.rollouts += 1
            group.task.unended += 1
            group.task.fresh += 1
        for key_, group in groups.items():
            self.live[key_] = self._placement.groups[group.order] = group.task.groups[group.order] = group
        return list(groups.values())

    def take_back(self) -> list[GroupState]:
        """Let go of the groups of which no rollout was begun, as if they had never been given. Returns them."""
        unopened = [group for group in self.live.values() if group.opened is None]
        for group in unopened:
            self.rollouts -= len(group.rollouts)
            self.groups -= 1
            group.task.rollouts -= len(group.rollouts)
            group.task.unended -= group.unended
            group.task.fresh -= group.unended
            self._remove(group)
        return unopened

    def forget(self, group: GroupState) -> None:
        """Let go of a group that is over; its rollouts are remembered for a while."""
        self._remove(group)
        for ended in group.rollouts:
            self.forgotten[ended.id] = ended.attempts
        while len(self.forgotten) > REMEMBERED:
            self.forgotten.popitem(last=False)

    def check_was_dispatched(self, attempt_id: str) -> None:
        """Raises `KeyError` for an attempt of no rollout that is known, or that it never had."""
        rollout_id, _, number = attempt_id.rpartition("-")
        rollout = self.by_id.get(rollout_id)
        attempts = self.forgotten.get(rollout_id, 0) if rollout is None else rollout.attempts
        if not number.isdecimal() or not 0 < int(number) <= attempts:
            raise KeyError(attempt_id)

    def task(self, key: TaskKey) -> TaskState:
        """The task of this name, which is made where it is new."""
        task = self.tasks.get(key)
        if task is None:
            task = self.tasks[key] = TaskState(key, len(self._placement.tasks))
            self._placement.tasks.append(task)
        return task

    def _remove(self, group: GroupState) -> None:
        del self.live[group.key], self._placement.groups[group.order], group.task.groups[group.order]
        for rollout in group.rollouts:
            del self.by_id[rollout.id], self._placement.rollouts[rollout.index]


def _rollout_id(key: RolloutKey) -> str:
    name = key if key.draw else key[:-1]  # a batch job's ids do not depend on there being draws
    return blake2b("\0".join(map(str, name)).encode(), digest_size=8).hexdigest()
