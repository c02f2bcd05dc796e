"""The docker-compose.yaml of an old Terminal-Bench task: its one service as a Harbor environment has it.

What one container cannot show of it is named in `Service.left_out`; a file with several services stays one, whose
`client` is called `main`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollcage.rollout.compose_variables import rename_variables

CLIENT = "client"
HARNESS = {
    "T_BENCH_TEST_DIR": "/tests",
    "T_BENCH_CONTAINER_LOGS_PATH": "/logs",
    "T_BENCH_CONTAINER_AGENT_LOGS_PATH": "/agent-logs",
    "T_BENCH_TASK_DOCKER_NAME_PREFIX": "task",
    "T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME": "task",
    "T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME": "task",
    "COMPOSE_PROJECT_NAME": "task",
}
"""What Terminal-Bench's harness sets for the file. Its two paths on the host are missing: only volumes use them."""

_HOST_LOGS = ("T_BENCH_TASK_LOGS_PATH", "T_BENCH_TASK_AGENT_LOGS_PATH")
_NO_MEANING = frozenset(
    {
        "build", "image", "container_name", "tty", "stdin_open", "restart", "labels", "logging", "init", "expose",
        "ports", "pull_policy", "platform", "networks", "hostname", "stop_grace_period", "stop_signal",
        "depends_on", "profiles",
    }
)  # fmt: skip
"""Keys that say nothing about what happens inside one container, or that are read elsewhere."""

_KEPT = frozenset({"extra_hosts", "shm_size", "tmpfs"})

_VARIABLE = re.compile(r"\$(?:(\$)|\{(\w+)(?:(:?[-?])([^}]*))?\}|(\w+))")
_IDLE = re.compile(
    r"(/bin/)?(ba)?sh|cat|(sh -c |bash -c )?(exec )?(sleep (infinity|inf|\d+\w?)|tail -f /dev/null)"
)
_TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", re.IGNORECASE)
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass
class Service:
    """One service. Paths are as in the file, relative to the task. `mounts` are (path of the task, path inside).

    `left_out`: key and reason, for what a single container of ours does not do. `kept`: keys that only a
    docker-compose.yaml can say.
    """

    context: str = "."
    dockerfile: str = "Dockerfile"
    args: dict[str, str] = field(default_factory=dict)
    image: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    workdir: str | None = None
    user: str | int | None = None
    cpus: float | None = None
    memory_mb: int | None = None
    gpus: int = 0
    network_mode: str | None = None
    healthcheck: dict[str, Any] | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    kept: dict[str, Any] = field(default_factory=dict)


def only_service(compose: Mapping[str, Any]) -> Service | None:
    """The one service of the file, whatever its name; None where there are several.

    Raises `ValueError` where the file has no services, or is not what compose takes.
    """
    services = compose.get("services")
    if not isinstance(services, dict) or not all(isinstance(value, dict) for value in services.values()):
        raise ValueError("services must be a table of services")
    if not services:
        raise ValueError("there are no services")
    return _service(next(iter(services.values()))) if len(services) == 1 else None


def as_harbor(compose: Mapping[str, Any]) -> dict[str, Any]:
    """The file of several services with `client` renamed to `main`, and the harness's variables filled in."""
    services = dict(compose["services"])
    client = CLIENT if CLIENT in services else next(iter(services))
    harbor: dict[str, Any] = {}
    for name, service in services.items():
        service = dict(service)
        if name == client:
            service.pop("image", None) if "build" in service else None
            service.pop("container_name", None)
            volumes = [v for v in service.pop("volumes", None) or [] if not _is_log_volume(v)]
            service |= {"volumes": volumes} if volumes else {}
            name = "main"
        for key in ("depends_on", "links"):
            if isinstance(others := service.get(key), list):
                service[key] = ["main" if other == client else other for other in others]
            elif isinstance(others, dict):
                service[key] = {("main" if other == client else other): how for other, how in others.items()}
        if service.get("network_mode") == f"service:{client}":
            service["network_mode"] = "service:main"
        if name == "main" and not service.get("network_mode"):
            service["networks"] = _with_alias(service.get("networks"), client)
        harbor[name] = _deep(service)
    return {**{key: _deep(value) for key, value in compose.items() if key != "services"}, "services": harbor}


def _with_alias(networks: Any, name: str) -> dict[str, Any]:
    """The networks of the agent's service, on each of which it keeps the name that the others know."""
    if not isinstance(networks, dict):
        networks = dict.fromkeys(networks or ["default"])
    return {
        network: {**(how or {}), "aliases": [*((how or {}).get("aliases") or []), name]}
        for network, how in networks.items()
    }


def mounted_files(compose: Mapping[str, Any]) -> set[str]:
    """The files and folders of the task that any service mounts, as paths in the task."""
    found: set[str] = set()
    for service in compose["services"].values():
        for volume in service.get("volumes") or []:
            source = volume.get("source") if isinstance(volume, dict) else str(volume).partition(":")[0]
            if str(source).startswith("."):
                found.add(os.path.normpath(resolve(str(source))))
    return found


def resolve(text: str) -> str:
    """The harness's variables filled in; others stay, written `${NAME}` or `${NAME:-default}`."""

    def replacement(match: re.Match[str]) -> str:
        dollar, braced, operator, default, plain = match.groups()
        name = braced or plain
        if dollar:
            return "$"
        if name in HARNESS:
            return HARNESS[name]
        return f"${{{name}:-{default}}}" if operator and "-" in operator else f"${{{name}}}"

    return _VARIABLE.sub(replacement, text)


def _deep(value: Any) -> Any:
    if isinstance(value, str):
        return rename_variables(value, HARNESS)
    if isinstance(value, list):
        return [_deep(item) for item in value]
    if isinstance(value, dict):
        return {key: _deep(item) for key, item in value.items()}
    return value


def _service(raw: Mapping[str, Any]) -> Service:
    service = Service()
    for key, value in raw.items():
        reader = _READERS.get(key)
        if reader is not None:
            reader(service, value)
        elif key in _KEPT:
            service.kept[key] = _deep(value)
        elif key not in _NO_MEANING and not key.startswith("x-"):
            service.left_out[key] = "is not done for a task of one container"
    _build(service, raw)
    return service


def _build(service: Service, raw: Mapping[str, Any]) -> None:
    build = raw.get("build")
    if build is None:
        if not isinstance(raw.get("image"), str):
            raise ValueError("the service has neither build nor image")
        service.image = resolve(raw["image"])
        return
    if isinstance(build, str):
        build = {"context": build}
    if not isinstance(build, dict):
        raise ValueError("build must be a path or a table")
    service.context = resolve(str(build.get("context", ".")))
    service.dockerfile = resolve(str(build.get("dockerfile", "Dockerfile")))
    service.args = _pairs(build.get("args", {}))
    for key in build.keys() - {"context", "dockerfile", "args", "tags", "labels", "cache_from", "pull"}:
        service.left_out[f"build.{key}"] = "is not done"


def _pairs(value: Any) -> dict[str, str]:
    """`environment` and `args`: a table, or a list of `KEY=value`; a bare KEY is the host's, or empty."""
    if isinstance(value, list):
        split = [str(item).partition("=") for item in value]
        value = {key: text if equals else None for key, equals, text in split}
    if not isinstance(value, dict):
        raise ValueError("environment and args must be tables or lists")
    pairs = {}
    for key, item in value.items():
        if isinstance(item, bool):
            item = str(item).lower()
        pairs[str(key)] = f"${{{key}:-}}" if item is None else resolve(str(item))
    return pairs


def _environment(service: Service, value: Any) -> None:
    service.env = _pairs(value)


def _volumes(service: Service, value: Any) -> None:
    for volume in value if isinstance(value, list) else [value]:
        if _is_log_volume(volume):
            continue
        if isinstance(volume, dict):
            source, target = volume.get("source"), volume.get("target")
        else:
            source, _, rest = str(volume).partition(":")
            target = rest.split(":")[0]
        if not target or not source or not str(source).startswith((".", "/", "~")):
            continue  # A volume that starts with what the image has there: as if it were not.
        if str(source).startswith("."):
            service.mounts.append((resolve(str(source)), resolve(str(target))))
        else:
            service.left_out["volumes"] = f"mount {source} of the host, which no sandbox sees"


def _is_log_volume(volume: Any) -> bool:
    return any(name in str(volume) for name in _HOST_LOGS)


def _command(service: Service, value: Any) -> None:
    text = value if isinstance(value, str) else shlex.join(map(str, value or []))
    if not _IDLE.fullmatch(text.strip().replace("'", "").replace('"', "")):
        service.left_out["command"] = f"({text[:60]}) is not run: a sandbox's first process only waits"


def _entrypoint(service: Service, value: Any) -> None:
    if value:
        service.left_out["entrypoint"] = "is not run: a sandbox's first process only waits"


def _workdir(service: Service, value: Any) -> None:
    service.workdir = resolve(str(value))


def _user(service: Service, value: Any) -> None:
    name = str(value).partition(":")[0]
    service.user = int(name) if name.isdigit() else name


def _deploy(service: Service, value: Any) -> None:
    resources = (value or {}).get("resources") or {}
    limits = resources.get("limits") or {}
    if "cpus" in limits:
        _cpus(service, limits["cpus"])
    if "memory" in limits:
        _memory(service, limits["memory"])
    for device in (resources.get("reservations") or {}).get("devices") or []:
        count = device.get("count", 1)
        service.gpus += count if isinstance(count, int) else 1


def _cpus(service: Service, value: Any) -> None:
    service.cpus = float(value)


def _memory(service: Service, value: Any) -> None:
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ValueError(f"the memory limit {value!r} is not a size")
    service.memory_mb = max(1, int(float(match[1]) * _BYTES[match[2].lower()] / (1 << 20)))


def _network(service: Service, value: Any) -> None:
    if value == "none":
        service.network_mode = "no-network"
    elif value not in {"bridge", "default"}:
        service.left_out["network_mode"] = f"({value}) is not done"


def _healthcheck(service: Service, value: Any) -> None:
    test = value.get("test")
    if value.get("disable") or test in (None, ["NONE"], "NONE"):
        return
    if isinstance(test, list):
        test = test[1] if test[0] == "CMD-SHELL" else shlex.join(map(str, test[1:]))
    check: dict[str, Any] = {"command": resolve(test)}
    for theirs, ours in (
        ("interval", "interval_sec"),
        ("timeout", "timeout_sec"),
        ("start_period", "start_period_sec"),
        ("start_interval", "start_interval_sec"),
    ):
        if theirs in value:
            parts = _TIME.findall(str(value[theirs]))
            check[ours] = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    if "retries" in value:
        check["retries"] = int(value["retries"])
    service.healthcheck = check


_READERS = {
    "environment": _environment,
    "volumes": _volumes,
    "command": _command,
    "entrypoint": _entrypoint,
    "working_dir": _workdir,
    "user": _user,
    "deploy": _deploy,
    "cpus": _cpus,
    "mem_limit": _memory,
    "network_mode": _network,
    "healthcheck": _healthcheck,
}
