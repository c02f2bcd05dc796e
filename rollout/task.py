"""Tasks in the Harbor format: what they say, and what is wrong with them.

`check_task` reads one directory and collects every problem with file, line and remedy; `load_task` raises where
there is any; `find_tasks` finds directories below paths and globs. A task with problems never stops the others.

Its parts: `task_model` (the data), `task_toml` and `toml_lines` (TOML with line numbers), `task_config` (the sections),
`task_files`, `task_compose` and `task_steps` (what is there), `task_find`, `task_env`, `digest`.
"""

from __future__ import annotations

import os
import traceback
from dataclasses import replace
from pathlib import Path

from rollcage.rollout.digest import task_digest
from rollcage.rollout.task_compose import check_services, with_context
from rollcage.rollout.task_config import (
    check_version,
    read_artifacts,
    read_environment,
    read_metadata,
    read_name,
)
from rollcage.rollout.task_env import hide_values, missing_env, redactor, referenced_env, resolve_env
from rollcage.rollout.task_files import (
    check_kinds,
    check_own_links,
    check_tests,
    ignore_patterns,
    read_instruction,
)
from rollcage.rollout.task_find import find_tasks, name_apart
from rollcage.rollout.task_model import (
    Artifact,
    Environment,
    Healthcheck,
    Problem,
    Step,
    Task,
    Verifier,
    problems_error,
)
from rollcage.rollout.task_steps import read_steps
from rollcage.rollout.task_toml import Table, read_toml

__all__ = [
    "Artifact",
    "Environment",
    "Healthcheck",
    "Problem",
    "Step",
    "Task",
    "Verifier",
    "check_task",
    "find_tasks",
    "hide_values",
    "ignore_patterns",
    "load_task",
    "missing_env",
    "name_apart",
    "near_misses",
    "redactor",
    "referenced_env",
    "resolve_env",
    "task_digest",
]


def load_task(path: Path) -> Task:
    """Read the task at `path`.

    Raises `TaskError` where there is any problem, with all of them in its evidence: `unsupported` where that is
    all that they are, else `task_malformed`. `RolloutError` (`internal_error`) where they cannot be told.
    """
    task, problems = check_task(path)
    if task is not None:
        return task
    raise problems_error(problems)


def check_task(path: Path) -> tuple[Task | None, list[Problem]]:
    """The task at `path`, and all that is wrong with it. The task is None exactly where something is.

    Files are named as `path` has them, in the order in which they were looked at.
    """
    problems: list[Problem] = []
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = str(path).encode("utf-8", "backslashreplace").decode()
        return None, [Problem(shown, None, "has a name that is not UTF-8", "rename the directory")]
    if not path.is_dir():
        there = "is not a directory" if os.path.lexists(path) else "does not exist"
        return None, [Problem(str(path), None, there, "give the path of a task's directory")]
    if (path / "task.yaml").is_file() and not os.path.lexists(path / "task.toml"):
        message, remedy = "is an old Terminal-Bench task", "make a Harbor task of it: rollcage tasks import"
        return None, [Problem(str(path / "task.yaml"), None, message, remedy)]
    _, task = _read(path, problems)
    problems = list(dict.fromkeys(problems))
    return (None if problems else task), problems


def near_misses(path: Path) -> list[Problem]:
    """Keys of the task's task.toml that are ignored and look like ones that are known. They are no problems."""
    root, task = _read(path, [])
    return root.near_misses() if root is not None and task is not None else []


def _read(path: Path, problems: list[Problem]) -> tuple[Table | None, Task | None]:
    """Its task.toml, and the task where that could be read to its end; what is wrong is noted."""
    root: Table | None = None
    task: Task | None = None
    try:
        check_own_links(path, problems)
        check_kinds(path, problems)
        if problems:
            return None, None
        root = read_toml(path / "task.toml", problems)
        if root is None:
            _check_without_toml(path, problems)
        else:
            task = _read_task(path, root, problems)
    except (OSError, UnicodeError) as error:
        problems.append(_unreadable(path, error))
    except Exception as error:  # noqa: BLE001 -- whatever a task's files make of us, it is said of that task alone
        problems.append(_unforeseen(path, error))
    return root, task


def _read_task(path: Path, root: Table, problems: list[Problem]) -> Task:
    check_version(root)
    environment = read_environment(root.table("environment"))
    environment = with_context(environment, path / "environment", problems)
    steps, network = read_steps(root, path, environment, problems)
    check_services(root, environment)
    return Task(
        name=read_name(root, path.resolve().name),
        path=path,
        digest=task_digest(path),
        environment=replace(environment, network_mode=network.mode, allowed_hosts=network.allowed_hosts),
        steps=steps,
        multi_step_reward_strategy=root.choice("multi_step_reward_strategy", ("mean", "final"), "mean")
        or "mean",
        solution_env=root.table("solution").mapping("env", shell=True),
        keywords=root.table("task").strings("keywords"),
        metadata=read_metadata(root),
        artifacts=read_artifacts(root),
    )


def _check_without_toml(path: Path, problems: list[Problem]) -> None:
    """What can be said while task.toml cannot be read: it may name an image, and it may have steps."""
    if not os.path.lexists(path / "steps"):
        read_instruction(path / "instruction.md", problems)
        check_tests(path / "tests", None, problems)


def _unforeseen(path: Path, error: Exception) -> Problem:
    *_, last = traceback.extract_tb(error.__traceback__)
    said = str(error)[:200]
    message = f"cannot be checked: {type(error).__name__} in {Path(last.filename).name}:{last.lineno}: {said}"
    remedy = "this is a fault of Rollcage: report it, with the task's files"
    return Problem(str(path), None, message, remedy, "internal_error")


def _unreadable(path: Path, error: OSError | UnicodeError) -> Problem:
    if isinstance(error, OSError):
        return Problem(
            str(error.filename or path), None, f"cannot be read: {error.strerror}", "make it readable"
        )
    return Problem(str(path), None, f"holds text that is not UTF-8: {error}", "save its files as UTF-8")
