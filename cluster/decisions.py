"""What the scheduler is asked about and what it answers: keys, decisions, ends. Plain values, no behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from rollcage.rollout.outcome import Outcome


class TaskKey(NamedTuple):
    """One task. Two tasks of one name but other files are two tasks."""

    name: str
    digest: str


class GroupKey(NamedTuple):
    """All samples of one draw of a task by one agent of one job."""

    job: str
    agent: str
    task: str
    task_digest: str
    draw: int = 0


class RolloutKey(NamedTuple):
    """One rollout. `job` is unique among all that share a host, `agent` among the job's agents."""

    job: str
    agent: str
    task: str
    task_digest: str
    sample: int
    draw: int = 0

    @property
    def group(self) -> GroupKey:
        """The group that it belongs to."""
        return GroupKey(*self[:4], self.draw)

    @property
    def place(self) -> tuple[str, str, int, int]:
        """What tells it from the job's others: agent, task, draw, sample."""
        return self.agent, self.task, self.draw, self.sample

    @property
    def task_key(self) -> TaskKey:
        """Its task."""
        return TaskKey(self.task, self.task_digest)


class Assignment(NamedTuple):
    """Run attempt `number` (from 1) of this rollout on this host; the task's image is ready there.

    `attempt_id` is the same in any run that gets this far with this rollout: letters, digits and one dash.
    """

    key: RolloutKey
    number: int
    host: str
    attempt_id: str


class Preparation(NamedTuple):
    """Make the task's image ready on this host. `number` counts the task's preparations from 1."""

    task: TaskKey
    number: int
    host: str
    preparation_id: str


class RolloutEnd(NamedTuple):
    """The one outcome of a rollout.

    `attempts` were dispatched for it. `attempt_id` is the one that decided; None where none did: the task was
    quarantined or the job cancelled while the rollout waited.
    """

    key: RolloutKey
    outcome: Outcome
    error_class: str | None
    attempts: int
    attempt_id: str | None


@dataclass(frozen=True)
class Ended:
    """What follows from the end of an attempt.

    `error_class` is the attempt's own, as the outcome table knows it. Either the rollout is over (`final`; see
    `Scheduler.finished`) or it is due again at `retry_at`. `quarantined` is the task that was taken out of
    the job because of this attempt.
    """

    attempt: Assignment
    error_class: str | None
    final: bool
    retry_at: float | None = None
    quarantined: TaskKey | None = None


@dataclass(frozen=True)
class Prepared:
    """What follows from the end of a preparation: ready, due again at `retry_at`, given up on this host only,
    or (`quarantined`) given up altogether."""

    preparation: Preparation
    ready: bool
    retry_at: float | None = None
    quarantined: TaskKey | None = None


@dataclass(frozen=True)
class Counts:
    """Where everything is. At any time `dispatched == ended + in_flight`, and
    `rollouts == waiting + delayed + in_flight + sum(outcomes.values())`.

    `late` counts reports about attempts and preparations that had ended before. `quarantined` has each task's error
    class; it is a view, not a copy. Asking for counts costs the same however large the job is.
    """

    rollouts: int
    waiting: int
    delayed: int
    in_flight: int
    dispatched: int
    ended: int
    late: int
    outcomes: Mapping[Outcome, int]
    groups: int
    groups_open: int
    groups_done: int
    preparing: int
    quarantined: Mapping[TaskKey, str]
