"""Tasks in the Harbor format: what they say, and what is wrong with them.

`load_task` reads one directory; `find_tasks` finds directories below paths and globs. Whatever is wrong is a
`Problem` with file, line and remedy; a task with problems never stops the others.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a task. `line` counts from 1, None where there is none.

    `error_class` is `task_malformed` or `unsupported`.
    """

    file: str
    line: int | None
    message: str
    remedy: str
    error_class: str = "task_malformed"

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.message} ({self.remedy})"


@dataclass(frozen=True)
class Healthcheck:
    """Run in the sandbox until it passes. Seconds throughout."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


@dataclass(frozen=True)
class Environment:
    """What the task's sandbox is made of.

    `context` is the build context (the directory `environment/`), None where `docker_image` is used as it is.
    `memory_mb` and `storage_mb` are MiB, None where the task sets none. `env` may hold `${VAR}` and
    `${VAR:-default}`, resolved by `resolve_env`.
    """

    context: Path | None
    docker_image: str | None = None
    dockerfile: str = "Dockerfile"
    build_timeout_sec: float = 600.0
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int = 0
    env: dict[str, str] = field(default_factory=dict)
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: str = "public"
    allowed_hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verifier:
    """How the task is verified. `environment` is set where the verifier has an image of its own."""

    timeout_sec: float = 600.0
    env: dict[str, str] = field(default_factory=dict)
    user: str | int | None = None
    environment: Environment | None = None
    collect: tuple[dict[str, Any], ...] = ()
    network_mode: str | None = None
    """None: as the environment's."""


@dataclass(frozen=True)
class Step:
    """One step of a task. A task without `[[steps]]` has exactly one, called `main`, at the task's root.

    `tests` and `solution` are directories on this machine; `solution` is None where there is none.
    `workdir` holds files to be put into the task's workdir before the step (its `setup.sh` is run).
    `min_reward`: below it the later steps are not run; a dict gives a floor for each reward key.
    """

    name: str
    instruction: str
    tests: Path
    solution: Path | None
    agent_timeout_sec: float | None = None
    agent_user: str | int | None = None
    verifier: Verifier = field(default_factory=Verifier)
    workdir: Path | None = None
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None


@dataclass(frozen=True)
class Task:
    """One task, read and checked. `digest` is the sha256 (hex) of its files; see `task_digest`."""

    name: str
    path: Path
    digest: str
    environment: Environment
    steps: tuple[Step, ...]
    multi_step_reward_strategy: str = "mean"
    solution_env: dict[str, str] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    artifacts: tuple[Any, ...] = ()
