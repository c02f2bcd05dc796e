"""What a finished, killed or running run says of itself, for those who do it again: its job, its tasks, its rollouts.

Nothing here writes to the run.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import ValidationError

from rollcage.cluster.config import JobConfig
from rollcage.cluster.decisions import TaskKey
from rollcage.cluster.errors import InputError
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.plan_tasks import make_plan
from rollcage.rollout.arrow import Location, RunError, read_attempts, read_batches
from rollcage.rollout.kept_states import PASSED
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.schema import SchemaVersionError
from rollcage.rollout.task import Task

KEY = ("agent", "task", "draw", "sample")

MOST_NAMED = 10
"""Rollouts, or tasks, that a message names."""


@dataclass(frozen=True)
class RecordedTask:
    """A task as the run knew it. `path` is empty where it could not be read."""

    name: str
    digest: str
    path: str


@dataclass(frozen=True)
class RecordedRun:
    """`job` is what `job.json` holds, `config` the job's settings in it."""

    location: Location
    job: Mapping[str, Any]
    config: JobConfig
    tasks: Mapping[str, RecordedTask]

    @property
    def path(self) -> str:
        """An absolute path, or a URI."""
        return self.location.path if self.location.local else self.location.name

    @property
    def finished(self) -> bool:
        """Its job came to an end of its own: it was not killed, and does not go on."""
        return self.location.read_json("summary.json") is not None

    def rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """The ended rollouts, one dictionary each, in the order in which they were written. Raises as `batches`."""
        for batch in self.batches((*KEY, *columns)):
            yield from batch.to_pylist()

    def batches(
        self, columns: Sequence[str] | None = None, table: str = "rollouts"
    ) -> Iterator[pa.RecordBatch]:
        """The same as Arrow, or the attempts. Raises `InputError` where the run's files cannot be read."""
        try:
            yield from read_batches(self.location, table, columns)
        except (RunError, SchemaVersionError, pa.ArrowException) as error:
            raise InputError(str(error)) from error


def open_run(path: str | Path, journal: Path | None = None) -> RecordedRun:
    """`journal`: of a run at a URI, where that is not what its job says, nor the default. Raises `InputError` where
    there is no run, or none that this version can do again."""
    try:
        location = Location(path)
        job = location.read_json("job.json") if location.exists() else None
        if job is None:
            raise InputError(f"{path}: there is no run here with a job.json")
        config = JobConfig.model_validate(job["config"])
        if location.local is None and (place := journal or config.journal) is not None:
            location = Location(path, journal=place)
        tasks = {
            task["task"]: RecordedTask(task["task"], task["digest"], task["path"]) for task in job["tasks"]
        }
    except (RunError, OSError) as error:
        raise InputError(str(error)) from error
    except (ValidationError, KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}/job.json is not of a job that this version can do again: {error}"
        ) from error
    return RecordedRun(location, job, config, tasks)


def check_output(run: RecordedRun, output: Path | None) -> None:
    """Raise `InputError` where a new run may not be written to `output`, before anything is begun."""
    if output is None:
        return
    inside = Path(os.path.realpath(output)).is_relative_to(os.path.realpath(run.path))
    if inside and run.location.local:
        raise InputError(
            f"--output {output} is in the run itself, which is not changed: name another directory"
        )
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output} is no directory: name another one")
    if Location.of(output).exists():
        raise InputError(f"--output {output} holds a run already: name another directory")


def kept_states(run: str | Path | Location) -> str:
    """How many of a run's rollouts have a saved state, and why the others have none; for people."""
    kept, reasons = 0, Counter[str]()
    for batch in read_batches(run, "rollouts", ("extra",)):
        for extra in batch["extra"].to_pylist():
            state = json.loads(extra).get("state") or {}
            kept += bool(state.get("images"))
            reasons.update(set((state.get("missing") or {}).values()) - {PASSED})
    said = f"{kept} rollouts have saved states (`rollcage regrade`, `rollcage gc --states`)"
    return said + "".join(f"; {count} have none: {reason}" for reason, count in reasons.items())


def plan_again(run: RecordedRun, config: JobConfig, names: Sequence[str]) -> JobPlan:
    """A plan of `config` for the run's tasks of these names, from their recorded paths, as they are now and under the
    names that they had. Raises `InputError` for those that are gone, cannot be loaded any more, or need variables that
    are not set: a job may leave tasks out for that, but one that is done again had all of these."""
    wanted = [run.tasks[name] for name in dict.fromkeys(names)]
    gone = [f"{task.name}: {task.path}" for task in wanted if not Path(task.path).is_dir()]
    if gone:
        raise InputError("tasks of the run are not where they were:\n  " + "\n  ".join(gone))
    paths = {"tasks": [task.path for task in wanted], "skip_unready": False}
    plan = make_plan(config.model_copy(update=paths), leave_out="with --task")
    if plan.broken:
        said = "\n".join(f"{broken.key.name}: {broken.evidence.message}" for broken in plan.broken)
        raise InputError(f"tasks of the run cannot be loaded any more:\n{said}")
    plan, known = renamed(run, plan), {task.name for task in wanted}
    tasks = {key: task for key, task in plan.tasks.items() if key.name in known}
    return replace(plan, tasks=tasks, stream=None)


def renamed(run: RecordedRun, plan: JobPlan) -> JobPlan:
    """The plan with the run's tasks under the names that they have there. Raises `InputError` where another task has
    such a name."""
    by_path = {os.path.realpath(task.path): task.name for task in run.tasks.values() if task.path}
    tasks: dict[str, Task] = {}
    for key, task in plan.tasks.items():
        name = by_path.get(os.path.realpath(task.path), key.name)
        if name in tasks:
            raise InputError(f"two tasks are called {name}: {tasks[name].path} and {task.path} (rename one)")
        tasks[name] = replace(task, name=name)
    return replace(plan, tasks={TaskKey(name, task.digest): task for name, task in tasks.items()})


def changed_tasks(run: RecordedRun, plan: JobPlan) -> list[str]:
    """Names of the plan's tasks whose files are not what they were."""
    return [key.name for key in plan.tasks if key.digest != run.tasks[key.name].digest]


@dataclass(frozen=True)
class Selection:
    """Which rollouts of a run are meant. `rollout`: the id of an attempt, as the run's files have it, or a name of
    `called`. `task`: a name or a pattern of names (fnmatch). `draw`: of a task that was drawn several times. None:
    any."""

    rollout: str | None = None
    task: str | None = None
    sample: int | None = None
    agent: str | None = None
    draw: int | None = None

    @property
    def is_one(self) -> bool:
        """A single rollout is asked for."""
        return self.rollout is not None or self.sample is not None

    def takes(self, row: Mapping[str, Any]) -> bool:
        """`row` has `attempt_id` beside the key."""
        named = self.rollout in (None, row["attempt_id"], called(row))
        task = self.task is None or row["task"] == self.task or fnmatchcase(row["task"], self.task)
        numbers = self.sample in (None, row["sample"]) and self.draw in (None, row["draw"])
        return named and task and numbers and self.agent in (None, row["agent"])


def select(run: RecordedRun, selection: Selection, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that are meant. Raises `InputError` where that is none, or several though a single one is asked for."""
    found = [row for row in rows if selection.takes(row)]
    if not found:
        raise InputError(_nothing(run, selection, rows))
    if selection.is_one and len(found) > 1:
        names = [f"{called(row)} by {row['agent']}: {row['attempt_id']}" for row in found]
        options = "--rollout, --task, --draw, --sample, --agent"
        said = f"{len(found)} rollouts are meant: choose one with {options}:\n  "
        raise InputError(said + shortened(names))
    return found


def select_uncancelled(
    run: RecordedRun, selection: Selection, rows: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], int]:
    """The rows that are meant, and how many of these are left out because they ended `cancelled`: what there is of
    them ends in the middle, for no reason that an agent would meet again. `rows` have `outcome` and `attempt_id`, empty
    where no attempt was made. Raises as `select`, and where nothing is left."""
    cancelled = sum(_was_cancelled(row) for row in rows if selection.takes(row))
    found = select(run, selection, [row for row in rows if row["attempt_id"]])
    left = [row for row in found if not _was_cancelled(row)]
    if not left:
        names = [f"{called(row)} by {row['agent']}: {row['attempt_id']}" for row in found]
        raise InputError("all that is meant ended cancelled, and is not replayed:\n  " + shortened(names))
    return left, cancelled


def called(row: Mapping[str, Any]) -> str:
    """A rollout as messages name it, and `--rollout` takes it: `task#sample`, or `task#draw.sample` behind the first
    draw."""
    return f"{row['task']}#{row['draw']}.{row['sample']}" if row["draw"] else f"{row['task']}#{row['sample']}"


def shortened(names: Sequence[str], between: str = "\n  ") -> str:
    """A list for a message."""
    more = [f"and {len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return between.join([*names[:MOST_NAMED], *more])


def _was_cancelled(row: Mapping[str, Any]) -> bool:
    return bool(row["outcome"] == Outcome.CANCELLED)


def _nothing(run: RecordedRun, selection: Selection, rows: Sequence[Mapping[str, Any]]) -> str:
    if selection.rollout is not None:
        try:
            attempts = read_attempts(run.location, ("attempt_id", *KEY)).to_pylist()
        except RunError as error:
            raise InputError(str(error)) from error
        for row in attempts:
            if row["attempt_id"] == selection.rollout:
                return (
                    f"{selection.rollout} was tried again, and only a rollout's last attempt is kept whole: "
                    f"--rollout {called(row)}"
                )
    if not rows:
        return f"{run.path} holds no rollout that an attempt was made at"
    names = [f"{called(row)} by {row['agent']}: {row['attempt_id']}" for row in rows]
    return f"{run.path} holds no such rollout; it has:\n  {shortened(names)}"
