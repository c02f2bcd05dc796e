"""Copies of tasks on a host, so that what an attempt runs is what its task's digest says, whatever becomes of the
task's own directory while the job runs.

A copy counts only once its own digest is the task's. What a host that was killed has left of its copies is removed by
the next one, and by `rollcage gc`: see `scratch.py`.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tarfile
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

from rollcage.cluster.scratch import TASKS, make_scratch, remove_scratch
from rollcage.rollout.outcome import BuildError, Evidence, RolloutError, TaskError
from rollcage.rollout.task import Environment, Task, load_task, task_digest

MOST_NAMED = 3
"""Files that a message names."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class TaskCopies:
    """The copies of one host, below the machine's directory for temporary files. Its calls are made in threads."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock = -1
        self._opening = threading.Lock()

    def take(self, task: Task, files: bytes | None = None) -> Task | None:
        """The task as a copy on this machine: of `files` (see `pack_task`) where they were sent, else of what is at
        its path. None where that is not what its digest says, so that its files must be sent.

        Raises `TaskError` (`task_malformed`) where the files that were sent are not what the digest says, or cannot
        be copied, and `BuildError` (`disk_full`) where there is no room for them.
        """
        if files is None and not task.path.is_dir():
            return None
        # Its own name, because a task without a name has its directory's.
        place = Path(tempfile.mkdtemp(dir=self._open())) / (task.path.resolve().name or "task")
        try:
            if files is None:
                shutil.copytree(task.path, place, symlinks=True, ignore=_special)
            else:
                with tarfile.open(fileobj=io.BytesIO(files)) as tar:
                    tar.extractall(place, filter="tar")
            if task_digest(place) == task.digest:
                return _named_as_given(replace(load_task(place), digest=task.digest), place, task.path)
        except (OSError, shutil.Error, tarfile.TarError) as error:
            _remove(place.parent)
            raise _not_copied(task, error) from error
        except RolloutError as error:
            _remove(place.parent)
            raise _as_given(error, place, task.path) from None
        _remove(place.parent)
        if files is None:
            return None
        said = f"the files of {task.name} were changed while the job ran: they are not those that it was planned with"
        where = f"{task.path}: {said} (digest {task.digest}); run the job again for the task as it is now"
        raise TaskError("task_malformed", said, Evidence(where, "task files"))

    def close(self) -> None:
        """Remove the copies."""
        if self._root is not None:
            remove_scratch(self._root, self._lock)
            self._root = None

    def _open(self) -> Path:
        with self._opening:
            if self._root is None:
                self._root, self._lock = make_scratch(TASKS)
            return self._root


def pack_task(task: Task) -> bytes:
    """The task's directory as a tar, for a host that does not have it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(task.path, arcname=".")
    return buffer.getvalue()


def _not_copied(task: Task, error: Exception) -> TaskError | BuildError:
    if _is_full(error):
        said = f"no room in {tempfile.gettempdir()} for a copy of {task.name}"
        return BuildError("disk_full", said, Evidence(f"{said}: {error}"))
    said = f"the files of {task.name} cannot be copied: {_why(error)}"
    return TaskError("task_malformed", said, Evidence(f"{task.path}: {said}", "task files"))


def _why(error: Exception) -> str:
    """`shutil` says of many files, each (from, to, why), in the words of a tuple."""
    if not isinstance(error, shutil.Error):
        return str(error)
    files: list[tuple[str, str, str]] = error.args[0]
    more = f"; and {len(files) - MOST_NAMED} more" if len(files) > MOST_NAMED else ""
    return "; ".join(f"{source}: {why}" for source, _, why in files[:MOST_NAMED]) + more


def _special(folder: str, names: list[str]) -> list[str]:
    """What is neither file, folder nor link: no task has such (`check_task`), but a tool's own folder may."""
    modes = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}
    return [name for name, mode in modes.items() if not _is_of_tasks(mode)]


def _is_of_tasks(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _named_as_given(task: Task, copy: Path, given: Path) -> Task:
    """The task with what problems name of it as its user has it, where the copy's own path says nothing to anybody."""

    def named(one: Environment | None) -> Environment | None:
        if one is None or one.compose is None:
            return one
        file = given / Path(one.compose.file).relative_to(copy)
        return replace(one, compose=replace(one.compose, file=str(file)))

    steps = tuple(
        replace(step, verifier=replace(step.verifier, environment=named(step.verifier.environment)))
        for step in task.steps
    )
    return replace(task, environment=named(task.environment) or task.environment, steps=steps)


def _as_given(error: RolloutError, copy: Path, given: Path) -> RolloutError:
    def renamed(text: str) -> str:
        return text.replace(str(copy), str(given))

    return type(error)(error.error_class, renamed(error.message), error.evidence.mapped(renamed))


def _is_full(error: Exception) -> bool:
    if isinstance(error, shutil.Error):
        # Of each file that could not be copied, `copytree` keeps no more than the text of the error.
        said = [str(why) for _, _, why in error.args[0]]
        return any(why.startswith(f"[Errno {number}]") for why in said for number in _FULL)
    return isinstance(error, OSError) and error.errno in _FULL


def _remove(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
