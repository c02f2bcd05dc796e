"""What a task is, once it has been read: plain data. `task.py` reads it, and is where to import it from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollcage.rollout.outcome import Evidence, RolloutError, TaskError

if TYPE_CHECKING:
    from rollcage.rollout.compose import Compose


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a task. `line` counts from 1, None where there is none.

    `error_class` is `task_malformed` or `unsupported`; `internal_error` where reading the task failed in a way that
    nobody foresaw.
    """

    file: str
    line: int | None
    message: str
    remedy: str
    error_class: str = "task_malformed"

    def __str__(self) -> str:
        place = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{place}: {self.message} ({self.remedy})"


def problems_error(problems: Sequence[Problem]) -> RolloutError:
    """All problems as one `TaskError`: `unsupported` where that is all that they are, else `task_malformed`. One that
    is nobody's but ours, `internal_error`, is a `RolloutError`."""
    malformed = [problem for problem in problems if problem.error_class == "task_malformed"]
    first = (malformed or problems)[0]
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    evidence = Evidence(message="\n".join(map(str, problems)), said_by="task files")
    kind = RolloutError if first.error_class == "internal_error" else TaskError
    return kind(first.error_class, f"{first}{more}", evidence)


@dataclass(frozen=True)
class NetworkPolicy:
    """What a sandbox reaches: `public`, `no-network`, or an `allowlist` of hosts (`allowlist.py`), in order and
    each once."""

    mode: str
    allowed_hosts: tuple[str, ...] = ()


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
    `${VAR:-default}`, resolved by `resolve_env`. `network_mode` is what everything in this sandbox runs with:
    where the task's agent and verifier override it, both with the same mode, it is that one. With `compose` the
    sandbox is one of several containers, and the file has the last word on what it is made of
    (`compose.image_environment`). `build_args` and `target` are the build's own.
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
    build_args: dict[str, str] = field(default_factory=dict)
    target: str | None = None
    compose: Compose | None = None


@dataclass(frozen=True)
class Artifact:
    """A file or directory of the sandbox that is kept. `exclude` are patterns for what is below it; `service`
    says in which of the task's containers it is."""

    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str = "main"


@dataclass(frozen=True)
class Verifier:
    """How the task is verified. `environment` is set where the verifier has a sandbox of its own.

    `collect` holds the commands that are run before a separate verifier starts, in the agent's sandbox or in
    another of the task's services: `command`, `service`, `timeout_sec`, `user`.
    """

    timeout_sec: float = 600.0
    env: dict[str, str] = field(default_factory=dict)
    user: str | int | None = None
    environment: Environment | None = None
    collect: tuple[dict[str, Any], ...] = ()
    network_mode: str | None = None
    """None: as the environment's."""
    allowed_hosts: tuple[str, ...] = ()
    tests_in_image: bool = False
    """The verifier's own image has `/tests` already: nothing is uploaded."""


@dataclass(frozen=True)
class Step:
    """One step of a task. A task without `[[steps]]` has exactly one, called `main`, at the task's root.

    `tests` and `solution` are directories on this machine; `solution` is None where there is none.
    `shared_tests` goes to `/tests` first and `tests` over it; None where the step has no tests of its own, or
    the task none that its steps share. The script is `/tests/test.sh` in every case.
    `workdir` holds files to be put into the task's workdir before the step (its `setup.sh` is run).
    `min_reward`: below it the later steps are not run; a dict gives a floor for each reward key.
    `artifacts` come on top of the task's.
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
    shared_tests: Path | None = None
    artifacts: tuple[Artifact, ...] = ()


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
    artifacts: tuple[Artifact, ...] = ()

    @property
    def network_modes(self) -> frozenset[str]:
        """What its sandboxes ask of the host's networks, the verifiers' own among them."""
        own = (step.verifier.environment for step in self.steps)
        return frozenset(one.network_mode for one in (self.environment, *own) if one is not None)
