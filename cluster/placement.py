"""Where rollouts may run: hosts, the tasks that are ready on them, and what is to be prepared.

A task is prepared on one host first, so that one that cannot be built is built once. It is prepared on another
host when a retry has to leave the first, when the first is gone, or when a host idles while rollouts of the
task wait for a full one. Groups are prepared in the job's order, about `ahead_limit` rollouts ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from rollcage.cluster.decisions import Preparation, TaskKey
from rollcage.cluster.state import GroupState, Host, RolloutState, State, TaskState, smallest

STALE = 4
"""Entries of a heap that are looked at for each that is wanted: some are stale."""

STRANDED, FRESH = 0, 1
"""Ranks of tasks in need: what has begun is prepared before what has not."""


class Placement:
    """The hosts' queues. `rollouts`, `groups` and `tasks` are the scheduler's own: what has not ended, by index and
    order, and every task; filled by it."""

    def __init__(self, *, open_limit: int, ahead_limit: int, build_slots: int) -> None:
        self.rollouts: dict[int, RolloutState] = {}
        self.groups: dict[int, GroupState] = {}
        self.tasks: list[TaskState] = []
        self.hosts: dict[str, Host] = {}
        self.open_groups = 0
        self._opened = 0
        self._open_limit = open_limit
        self._ahead_limit = ahead_limit
        self._build_slots = build_slots
        self._ahead = 0
        self._needy: list[tuple[int, int]] = []
        self._stranding: set[TaskState] = set()
        self._preparations = 0

    # Rollouts

    def next(self) -> tuple[RolloutState, Host] | None:
        """The rollout to run now and the least loaded host for it; opens a group where no open one can go on."""
        found = self._next_open()
        while found is None and self._open_group():
            found = self._next_open()
        return found

    def place(self, rollout: RolloutState) -> None:
        """Queue a waiting rollout of an open group on every host that may run it.

        Hosts that failed it are left out as long as there is another that is, or could be made, ready. Where
        none is ready, the rollout is stranded and its task in need.
        """
        task = rollout.group.task
        hosts = [host for host in task.ready if host.name not in rollout.avoid]
        if not hosts and task.ready and not self._could_serve(rollout):
            hosts = list(task.ready)
        for host in hosts:
            _queue(rollout, host)
        if not hosts:
            task.stranded.append(rollout)
            self._stranding.add(task)
            self.settle(task)

    def place_stranded(self, task: TaskState) -> None:
        """Place the task's stranded rollouts anew: what is ready, or could be, has changed."""
        stranded, task.stranded = task.stranded, []
        self._stranding.discard(task)
        for rollout in stranded:
            if rollout.state is State.WAITING:
                self.place(rollout)
        self.settle(task)

    def settle(self, task: TaskState) -> None:
        """Bring the task's share of what is prepared ahead, and its place among those in need, up to date."""
        ahead = task.fresh if task.ready or task.preparing else 0
        self._ahead += ahead - task.ahead
        task.ahead = ahead
        rank = STRANDED if task.stranded else FRESH
        if task.in_need and (task.queued is None or rank < task.queued):
            task.queued = rank
            heappush(self._needy, (rank, task.order))

    def offer(self, group: GroupState) -> None:
        """Have an unopened group wait for every host that is ready for its task."""
        for host in group.task.ready:
            heappush(host.fresh, group.order)

    # Hosts

    def set_host(self, name: str, capacity: int) -> None:
        """A host came up or has another capacity."""
        host = self.hosts.setdefault(name, Host(name, capacity))
        host.capacity = capacity
        if capacity <= 0:
            self._withdraw(host)
        self._place_all_stranded()

    def drop_host(self, host: Host) -> None:
        """Forget a host that is gone, once nothing runs there any more."""
        del self.hosts[host.name]
        self._withdraw(host)
        self._place_all_stranded()

    def make_ready(self, task: TaskState, host: Host) -> None:
        """The task's image is there: its rollouts may run on this host."""
        if host.capacity > 0:
            task.ready.add(host)
            host.ready.add(task)
            for group in task.groups.values():
                if group.opened is None:
                    heappush(host.fresh, group.order)
            for rollout in _waiting(task):
                if host.name not in rollout.avoid:
                    _queue(rollout, host)
        self.place_stranded(task)

    def coming(self, host: Host, limit: int) -> list[TaskKey]:
        """Tasks of the next rollouts that wait for the host, `limit` at most."""
        found: list[TaskKey] = []
        for _, _, attempts, index in smallest(host.open, limit * STALE):
            rollout = self.rollouts.get(index)
            if rollout is not None and rollout.state is State.WAITING and rollout.attempts == attempts:
                found.append(rollout.group.task.key)
        for order in smallest(host.fresh, limit) if self.open_groups < self._open_limit else ():
            group = self.groups.get(order)
            if group is not None and group.opened is None:
                found += [group.task.key] * min(group.unended, limit)
        return found[:limit]

    # Preparations

    def prepare(self, *, spread: bool) -> list[Preparation]:
        """The preparations to start now. `spread`: hosts that idle get what waits for full ones."""
        started = []
        put_back = []
        while self._needy and any(self._can_build(host) for host in self.hosts.values()):
            rank, order = self._needy[0]
            task = self.tasks[order]
            if rank == FRESH and task.in_need and self._ahead >= self._ahead_limit:
                break
            heappop(self._needy)
            if task.queued != rank:
                continue
            task.queued = None
            if not task.in_need:
                continue
            host = self._host_to_build(task)
            if host is None:
                put_back.append(task)
            else:
                started.append(self._start(task, host))
        for task in put_back:
            self.settle(task)
        if spread:
            for host in self.hosts.values():
                if self._idle(host) and (overflow := self._overflow(host)) is not None:
                    started.append(self._start(overflow, host))
        return started

    def started(self, preparation_id: str) -> bool:
        """True where this preparation was started at some time."""
        prefix, _, number = preparation_id.rpartition("-")
        return prefix == "prepare" and number.isdecimal() and 0 < int(number) <= self._preparations

    # Inside

    def _next_open(self) -> tuple[RolloutState, Host] | None:
        best = None
        for host in self.hosts.values():
            if host.has_room and (entry := host.next_open(self.rollouts)) is not None:
                rank = (entry, host.load, host.name)
                if best is None or rank < best:
                    best = rank
        return None if best is None else (self.rollouts[best[0][3]], self.hosts[best[2]])

    def _open_group(self) -> bool:
        if self.open_groups >= self._open_limit:
            return False
        waiting = (host.next_fresh(self.groups) for host in self.hosts.values() if host.has_room)
        order = min((order for order in waiting if order is not None), default=None)
        if order is None:
            return False
        group = self.groups[order]
        group.opened = self._opened
        self._opened += 1
        self.open_groups += 1
        group.task.fresh -= group.unended
        for rollout in group.rollouts:
            if rollout.state is State.WAITING:
                self.place(rollout)
        self.settle(group.task)
        return True

    def _could_serve(self, rollout: RolloutState) -> bool:
        """True where some host has not failed this rollout and has its image, or could be given it."""
        task = rollout.group.task
        return any(
            host.capacity > 0 and host not in task.refused and host.name not in rollout.avoid
            for host in self.hosts.values()
        )

    def _withdraw(self, host: Host) -> None:
        """Take the host's queues and images out of consideration."""
        tasks = list(host.ready)
        host.ready.clear()
        host.open.clear()
        host.fresh.clear()
        for task in tasks:
            task.ready.discard(host)
            task.stranded.clear()
            for rollout in _waiting(task):
                if all(other.name in rollout.avoid for other in task.ready):
                    self.place(rollout)
            self.place_stranded(task)

    def _place_all_stranded(self) -> None:
        for task in list(self._stranding):
            self.place_stranded(task)

    def _can_build(self, host: Host) -> bool:
        return host.capacity > 0 and len(host.preparations) < self._build_slots

    def _host_to_build(self, task: TaskState) -> Host | None:
        """The host with the fewest builds; None where every one that should do it has its slots full."""
        hosts = [host for host in self.hosts.values() if host.capacity > 0 and host not in task.ready]
        if task.refused.issuperset(hosts):
            task.refused.clear()
        hosts = [host for host in hosts if host not in task.refused]
        failed_rollout = task.stranded[0].avoid if task.stranded else set()
        for failed in (failed_rollout, task.avoid):
            hosts = [host for host in hosts if host.name not in failed] or hosts
        free = [host for host in hosts if self._can_build(host)]
        return min(free, key=lambda host: (len(host.preparations), host.load, host.name), default=None)

    def _idle(self, host: Host) -> bool:
        """True where the host has room, nothing to fill it and nothing on its way."""
        if not host.has_room or host.preparations or host.next_open(self.rollouts) is not None:
            return False
        return self.open_groups >= self._open_limit or host.next_fresh(self.groups) is None

    def _overflow(self, idle: Host) -> TaskState | None:
        """The first task that waits for a full host and could be made ready on the idle one."""
        waiting: list[tuple[tuple[int, int, int], TaskState, set[str]]] = []
        for host in self.hosts.values():
            if host.has_room:
                continue
            if (entry := host.next_open(self.rollouts)) is not None:
                rollout = self.rollouts[entry[3]]
                waiting.append(((0, *entry[:2]), rollout.group.task, rollout.avoid))
            if self.open_groups < self._open_limit and (order := host.next_fresh(self.groups)) is not None:
                waiting.append(((1, order, 0), self.groups[order].task, set()))
        for _, task, avoid in sorted(waiting, key=lambda item: item[0]):
            known = idle in task.ready or idle in task.preparing or idle in task.refused
            if not known and not task.delayed and idle.name not in avoid:
                return task
        return None

    def _start(self, task: TaskState, host: Host) -> Preparation:
        self._preparations += 1
        task.preparations += 1
        preparation = Preparation(task.key, task.preparations, host.name, f"prepare-{self._preparations}")
        host.preparations[preparation.preparation_id] = preparation
        task.preparing.add(host)
        self.settle(task)
        return preparation


def _queue(rollout: RolloutState, host: Host) -> None:
    opened = rollout.group.opened
    assert opened is not None
    heappush(host.open, (opened, rollout.place, rollout.attempts, rollout.index))


def _waiting(task: TaskState) -> Iterator[RolloutState]:
    """Waiting rollouts of the task's open groups."""
    for group in task.groups.values():
        if group.opened is not None and group.unended:
            for rollout in group.rollouts:
                if rollout.state is State.WAITING:
                    yield rollout
