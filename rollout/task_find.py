"""Where the tasks are: below directories, by globs, and by names that keep them apart."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollcage.rollout.task_model import Task

CERTAIN_MARKS = ("task.toml", "instruction.md", "steps/*/instruction.md")
"""Any of these makes a directory a task, whole or broken."""

LIKELY_MARKS = (
    "environment/Dockerfile",
    "environment/docker-compose.yaml",
    "tests/test.sh",
    "solution/solve.sh",
)
"""Any of these makes a directory a (broken) task where no task is found below it. A repository that holds tasks
may well have a `tests/test.sh` of its own."""

_SKIPPED = frozenset({"__pycache__", "node_modules"})


def find_tasks(paths: Sequence[str], base: Path) -> list[Path]:
    """The directories of the tasks that `paths` name: tasks, directories of tasks at any depth, globs of both.

    Relative paths start at `base`; `~` and `**` work. A broken task is found too, so that it can be reported, and
    so is an old Terminal-Bench task: see `CERTAIN_MARKS` and `LIKELY_MARKS`. Nothing is looked for below a task,
    nor in hidden directories, `__pycache__` and `node_modules`.
    Order: as `paths`, sorted within each; a task that is found twice, also through links, counts once.

    Raises `ValueError`, naming it, for a path that does not exist or holds no task, and for a directory that
    cannot be read.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        seen: set[str] = set()
        tasks = [task for start in _expand(path, base) for task in _tasks(start, seen)]
        if not tasks:
            marks = ", ".join((*CERTAIN_MARKS[:2], *LIKELY_MARKS[::2]))
            raise ValueError(f"no task in {path!r}: no directory at or below it has any of {marks}")
        for task in sorted(tasks):
            found.setdefault(task.resolve(), task)
    return list(found.values())


def name_apart(tasks: Sequence[Task], base: Path) -> list[Task]:
    """The tasks with names that differ: those that share one are called by their path, from `base` on.

    Reports, scripts of answers and Arrow files tell tasks by their name. Two directories that are called the
    same, or two copies of a task, are two tasks all the same.
    """
    shared = {name for name, count in Counter(task.name for task in tasks).items() if count > 1}
    return [replace(task, name=_relative(task.path, base)) if task.name in shared else task for task in tasks]


def _relative(path: Path, base: Path) -> str:
    path, base = Path(os.path.abspath(path)), Path(os.path.abspath(base))
    return path.relative_to(base).as_posix() if path.is_relative_to(base) else path.as_posix()


def _expand(path: str, base: Path) -> list[Path]:
    """The paths that an argument names; a file of a task stands for its task."""
    whole = os.path.normpath(os.path.join(base, os.path.expanduser(path)))
    if os.path.lexists(whole):
        names = [whole]
    elif glob.has_magic(path):
        names = sorted(glob.glob(whole, recursive=True))
    else:
        raise ValueError(f"no such path: {path!r} (looked for {whole})")
    return [Path(name).parent if os.path.basename(name) in CERTAIN_MARKS else Path(name) for name in names]


def _tasks(directory: Path, seen: set[str]) -> list[Path]:
    """The tasks at or below `directory`; `seen` are the real paths of the directories that were looked at."""
    real = os.path.realpath(directory)
    if not directory.is_dir() or real in seen:
        return []
    seen.add(real)
    if _has(directory, CERTAIN_MARKS) or all(
        _has(directory, (mark,)) for mark in ("task.yaml", "run-tests.sh")
    ):
        return [directory]
    try:
        children = list(directory.iterdir())
    except OSError as error:
        raise ValueError(f"{directory} cannot be read: {error.strerror}") from error
    found = [
        task
        for child in children
        if not child.name.startswith(".") and child.name not in _SKIPPED
        for task in _tasks(child, seen)
    ]
    return found or ([directory] if _has(directory, LIKELY_MARKS) else [])


def _has(directory: Path, marks: Sequence[str]) -> bool:
    return any(
        any(directory.glob(mark)) if "*" in mark else os.path.lexists(directory / mark) for mark in marks
    )
