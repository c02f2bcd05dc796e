"""The services of a docker-compose.yaml, once they have been read: plain data. `compose.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MAIN = "main"
"""The agent's own service, as Harbor calls it."""

UNLIMITED = -1
"""As a ulimit."""

Condition = Literal["service_started", "service_healthy", "service_completed_successfully"]


@dataclass(frozen=True)
class Dependency:
    """What must be so of another service before this one starts. One that is not `required` may be missing."""

    service: str
    condition: Condition = "service_started"
    required: bool = True


@dataclass(frozen=True)
class Check:
    """A service's healthcheck. Seconds throughout; None: what the image says, else the engine's default.

    `argv` is empty where there is to be none, whatever the image says.
    """

    argv: tuple[str, ...] | None = None
    interval_sec: float | None = None
    timeout_sec: float | None = None
    start_period_sec: float | None = None
    retries: int | None = None


@dataclass(frozen=True)
class Mount:
    """Something that a service sees at `target`.

    With `volume`, a volume of the rollout's own, which other services may see too. Else `source` is a file or
    folder of the task, or `content` a text, that is copied there. Else an empty volume of the service alone.
    """

    target: str
    volume: str | None = None
    source: Path | None = None
    content: str | None = None
    read_only: bool = False


@dataclass(frozen=True)
class Service:
    """One service, variables replaced. Paths of the task are absolute paths of this machine.

    Its image: `image` as it is, or what is built of `context`, `dockerfile`, `build_args` and `target`; neither:
    the task's own (`main` only). `aliases` are names by which the others reach it. `network` is `none`,
    `service:NAME` for that service's own, or empty for the rollout's. `env` values are final. `memory_mb` and
    `shm_mb` are MiB. `ulimits` are (soft, hard), each maybe `UNLIMITED`. None: nothing is said.
    """

    name: str
    line: int
    image: str | None = None
    context: Path | None = None
    dockerfile: str = "Dockerfile"
    build_args: dict[str, str] = field(default_factory=dict)
    target: str | None = None
    entrypoint: tuple[str, ...] | None = None
    command: tuple[str, ...] | None = None
    env: dict[str, str] = field(default_factory=dict)
    depends: tuple[Dependency, ...] = ()
    check: Check | None = None
    workdir: str | None = None
    user: str | None = None
    hostname: str | None = None
    aliases: tuple[str, ...] = ()
    network: str = ""
    networks: tuple[str, ...] = ()
    mounts: tuple[Mount, ...] = ()
    tmpfs: dict[str, str] = field(default_factory=dict)
    extra_hosts: tuple[str, ...] = ()
    cpus: float | None = None
    memory_mb: int | None = None
    shm_mb: int | None = None
    pids: int | None = None
    capabilities: tuple[str, ...] = ()
    read_only: bool = False
    init: bool = False
    tty: bool = False
    stdin_open: bool = False
    restart: str = "no"
    stop_signal: str | None = None
    ulimits: dict[str, tuple[int, int]] = field(default_factory=dict)
    sysctls: dict[str, str] = field(default_factory=dict)
