"""From the tables of a task.toml to what they say. Which files there are is `task_files.py`'s.

Unknown keys are ignored, as Harbor does. What rollcage does not do is a problem of class `unsupported`.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import date, time
from pathlib import PurePosixPath
from typing import Any

from rollcage.rollout.allowlist import read_entry
from rollcage.rollout.task_model import Artifact, Environment, Healthcheck, NetworkPolicy, Verifier
from rollcage.rollout.task_toml import LONGEST_SEC, Table

NETWORK_MODES = ("public", "no-network", "allowlist")
MAIN_SERVICE = "main"

LEAST_CPUS = 0.01
"""The kernel's smallest share: a millisecond of each tenth of a second."""
MOST_CPUS = 100_000.0
LEAST_MB = {"memory_mb": 6, "storage_mb": 1}
"""An engine refuses a memory limit below 6 MiB."""
MOST_MB = 1 << 30
"""A pebibyte: far below where an engine's 64-bit count of bytes overflows."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([GMK])(?:i?B)?\s*", re.IGNORECASE)
_MB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_TASK_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")


def unsupported(table: Table, key: str | None, what: str, remedy: str) -> None:
    """Note that the task asks for something that rollcage does not do (yet)."""
    table.problem(key, what, remedy, "unsupported")


def read_environment(table: Table) -> Environment:
    """`[environment]`, or `[verifier.environment]`, without its build context."""
    system = (table.text("os", "linux") or "linux").lower()
    if system != "linux":
        unsupported(table, "os", f'is "{system}"', "only Linux containers can be run")
    gpus = table.count("gpus", 0) or 0
    if gpus:
        unsupported(
            table, "gpus", f"is {gpus}", "sandboxes get no GPU yet: set it to 0 if the task can do without"
        )
    for key, what in (
        ("tpu", "asks for a TPU"),
        ("mcp_servers", "asks for MCP servers beside the agent"),
        ("skills_dir", "asks for skills to be given to the agent"),
    ):
        if table.values.get(key):
            unsupported(
                table, key, what, "rollcage does not do this: leave the key out if the task can do without"
            )
    workdir = table.text("workdir")
    if workdir is not None and not workdir.startswith("/"):
        table.problem("workdir", f'must be an absolute path, not "{workdir}"', f'write "/{workdir}"')
    elif workdir is not None and _is_too_long(workdir):
        table.problem("workdir", "is longer than a path can be", "write a shorter one")
    allow_internet = table.flag("allow_internet")
    network = read_network(table)
    if network is None:
        network = NetworkPolicy("no-network" if allow_internet is False else "public")
    return Environment(
        context=None,
        docker_image=table.text("docker_image"),
        build_timeout_sec=table.seconds("build_timeout_sec", 600.0),
        cpus=table.number("cpus", None, above=0, least=LEAST_CPUS, most=MOST_CPUS),
        memory_mb=_megabytes(table, "memory_mb", "memory"),
        storage_mb=_megabytes(table, "storage_mb", "storage"),
        gpus=gpus,
        env=table.mapping("env"),
        healthcheck=read_healthcheck(table),
        workdir=workdir,
        network_mode=network.mode,
        allowed_hosts=network.allowed_hosts,
    )


def _is_too_long(path: str) -> bool:
    return len(path.encode()) > 4095 or any(len(part.encode()) > 255 for part in path.split("/"))


def read_network(table: Table) -> NetworkPolicy | None:
    """`network_mode` and `allowed_hosts` of an environment, an agent or a verifier; None where the table sets
    none."""
    mode = table.choice("network_mode", NETWORK_MODES, None)
    hosts = table.strings("allowed_hosts")
    if mode == "allowlist":
        return NetworkPolicy(mode, _read_allowed_hosts(table, hosts))
    if hosts:
        table.problem(
            "allowed_hosts",
            "only goes with an allowlist",
            'leave it out, or write network_mode = "allowlist"',
        )
    return None if mode is None else NetworkPolicy(mode)


def _read_allowed_hosts(table: Table, hosts: tuple[str, ...]) -> tuple[str, ...]:
    found = set()
    for host in hosts:
        try:
            entry = read_entry(host)
        except ValueError as error:
            table.problem(
                "allowed_hosts", f"has an entry that is none: {error}", "correct it, or leave it out"
            )
            continue
        if ":" in entry:
            unsupported(table, "allowed_hosts", f'has "{host}"', "sandboxes have no IPv6: leave it out")
        found.add(entry)
    return tuple(sorted(found))


def read_healthcheck(table: Table) -> Healthcheck | None:
    """The `healthcheck` of an environment or a step."""
    if "healthcheck" not in table:
        return None
    check = table.table("healthcheck")
    command = check.text("command")
    if command is None:
        if "command" not in check:
            check.problem(
                "command", "is missing", "write the command that ends with status 0 once all is well"
            )
        return None
    default = Healthcheck(command)
    return Healthcheck(
        command=command,
        interval_sec=check.number("interval_sec", default.interval_sec, least=0, most=LONGEST_SEC) or 0.0,
        timeout_sec=check.seconds("timeout_sec", default.timeout_sec),
        start_period_sec=check.number("start_period_sec", default.start_period_sec, least=0, most=LONGEST_SEC)
        or 0.0,
        start_interval_sec=check.number(
            "start_interval_sec", default.start_interval_sec, least=0, most=LONGEST_SEC
        )
        or 0.0,
        retries=check.count("retries", default.retries, least=1) or default.retries,
    )


def read_verifier(table: Table, task: Verifier | None = None) -> Verifier:
    """`[verifier]`, or a step's verifier, which inherits from the `task`'s. Its environment comes later."""
    base = task or Verifier()
    network = read_network(table)
    user = table.user()
    collect = tuple(_read_collect(hook) for hook in table.tables("collect"))
    return replace(
        base,
        timeout_sec=table.seconds("timeout_sec", base.timeout_sec),
        env={**base.env, **table.mapping("env", shell=True)},
        user=base.user if user is None else user,
        network_mode=base.network_mode if network is None else network.mode,
        allowed_hosts=base.allowed_hosts if network is None else network.allowed_hosts,
        collect=(*base.collect, *collect),
    )


def _read_collect(table: Table) -> dict[str, Any]:
    command = table.text("command")
    if command is None and "command" not in table:
        table.problem("command", "is missing", "write the command to be run")
    timeout = table.seconds("timeout_sec", 60.0)
    service = _service(table)
    return {"command": command, "service": service, "timeout_sec": timeout, "user": table.user()}


def read_verifier_mode(table: Table, default: str) -> str:
    """`shared` or `separate`: what the table says, else separate where it has an environment of its own."""
    mode = table.choice("environment_mode", ("shared", "separate"), None)
    if "environment" not in table:
        return mode or default
    if mode == "shared":
        table.problem(
            "environment_mode", 'is "shared", and there is an environment of its own', "leave out one of them"
        )
    return "separate"


def read_artifacts(table: Table) -> tuple[Artifact, ...]:
    """`artifacts` of a task or a step: paths, or tables with `source`."""
    values = table.values.get("artifacts", [])
    if not isinstance(values, list):
        table.problem("artifacts", "must be a list", 'write artifacts = ["/path"]')
        return ()
    artifacts = []
    for index, value in enumerate(values):
        row = value if isinstance(value, dict) else {"source": value}
        entry = Table(row, (*table.path, "artifacts", index), table.document)
        source, destination = entry.text("source"), entry.text("destination")
        service = _service(entry)
        if source is None:
            if "source" not in entry:
                entry.problem("source", "is missing", "write the path inside the sandbox")
            continue
        for key, path in (("source", source), ("destination", destination or "")):
            if ".." in PurePosixPath(path).parts:
                entry.problem(key, f'must not hold "..": "{path}"', "write the path itself")
        if destination is not None and (destination.startswith("/") or "\\" in destination):
            entry.problem("destination", "must be a relative path with forward slashes", "leave out the /")
        if service != MAIN_SERVICE and not source.startswith("/"):
            entry.problem("source", "of another service must be an absolute path", f'write "/{source}"')
        artifacts.append(Artifact(source, destination, entry.strings("exclude"), service))
    return tuple(artifacts)


def _service(table: Table) -> str:
    """One of the task's services; `task_compose.py` says whether it is there."""
    return (table.text("service", MAIN_SERVICE) or MAIN_SERVICE).strip()


def read_min_reward(table: Table) -> float | dict[str, float] | None:
    """A step's `min_reward`: a floor for the reward, or one for each key."""
    value = table.values.get("min_reward")
    if not isinstance(value, dict):
        return table.number("min_reward", None)
    floors = table.table("min_reward")
    return {key: floor for key in floors.values if (floor := floors.number(key, None)) is not None}


def read_name(root: Table, directory: str) -> str:
    """`[task].name`, or the directory's."""
    if "task" not in root:
        return directory
    task = root.table("task")
    name = task.text("name")
    if name is None:
        if "name" not in task and task.values:
            task.problem("name", "is missing", 'write name = "org/name"')
        return directory
    if not _TASK_NAME.fullmatch(name) or ".." in name:
        task.problem(
            "name", f'must be "org/name", not "{name}"', "use letters, digits, hyphens, underscores and dots"
        )
    return name


def read_metadata(root: Table) -> dict[str, Any]:
    """`[metadata]` as JSON can hold it: dates and times become ISO 8601 text, NaN and infinities None."""
    metadata = _plain(dict(root.table("metadata").values))
    assert isinstance(metadata, dict)
    return metadata


def check_version(root: Table) -> None:
    """Refuse a schema that is newer than what is known here. Older tasks call it `version`."""
    key = "schema_version" if "schema_version" in root else "version"
    major = re.match(r"(\d+)", str(root.values.get(key, "1")))
    if major and int(major[1]) > 1:
        unsupported(root, key, f"is {root.values[key]}", "versions 1.x are known")


def _megabytes(table: Table, key: str, old_key: str) -> int | None:
    """MiB, from `memory_mb = 2048` or from the older `memory = "2G"`."""
    least = LEAST_MB[key]
    now = table.count(key, None, least=least, most=MOST_MB)
    if old_key not in table:
        return now
    size = table.values[old_key]
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    old = int(float(match[1]) * _MB[match[2].upper()]) if match else 0
    if old < 1:
        table.problem(old_key, f'must be a size such as "2G" or "512M", not {size!r}', f"write {key} = 2048")
        return now
    if not least <= old <= MOST_MB:
        table.problem(old_key, f"is {old} MiB, not {least:,} to {MOST_MB:,}", f"write {key} = 2048")
        return now
    if now is not None and now != old:
        table.problem(old_key, f"({old} MiB) and {key} ({now} MiB) differ", f"leave {old_key} out")
    return now or old


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
