"""What a service of a docker-compose.yaml says of its limits, and of the walls around it.

Limits are taken. What would open a wall is not done: every container keeps the capabilities of a sandbox, or fewer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollcage.rollout.compose_model import MAIN, UNLIMITED, Dependency
from rollcage.rollout.compose_yaml import Place

BREAKS_OUT = {
    "privileged": "gives the container the host",
    "devices": "gives the container devices of the host",
    "device_cgroup_rules": "gives the container devices of the host",
    "gpus": "asks for a GPU",
    "cgroup": "shares cgroups with the host",
    "cgroup_parent": "chooses a cgroup of the host",
    "userns_mode": "shares users with the host",
    "uts": "shares the hostname with the host",
    "volumes_from": "shares all that another container has",
    "runtime": "chooses the engine's runtime, which is the job's to choose",
    "oom_kill_disable": "takes the memory limit's teeth",
    "use_api_socket": "gives the container the engine",
}

KEPT_CAPABILITIES = frozenset(
    {
        "AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "NET_BIND_SERVICE", "NET_RAW", "SETFCAP",
        "SETGID", "SETUID", "SYS_CHROOT",
    }
)  # fmt: skip
"""What every container has (`sandbox/hostconfig.py`, a test holds them together)."""

ULIMITS = (
    "core", "cpu", "data", "fsize", "locks", "memlock", "msgqueue", "nice", "nofile", "nproc", "rss", "rtprio",
    "rttime", "sigpending", "stack",
)  # fmt: skip
"""https://github.com/docker/go-units/blob/v0.5.0/ulimit.go"""

MOST_FILES = 1 << 20
"""What Linux has in fs.nr_open where nobody raised it; no process may have a higher limit, whoever it is."""

_SECURITY = re.compile(r"no-new-privileges([:=]true)?|label[:=].*")


@dataclass
class Reading:
    """A service being read. `root` is the folder of the file; `declared` are the names of volumes, networks,
    secrets and configs that the file declares, by kind."""

    name: str
    root: Path
    declared: dict[str, dict[str, Place]]
    values: dict[str, Any] = field(default_factory=dict)
    aliases: list[str] = field(default_factory=list)
    capabilities: set[str] = field(default_factory=lambda: set(KEPT_CAPABILITIES))
    depends: dict[str, Dependency] = field(default_factory=dict)

    @property
    def is_main(self) -> bool:
        return self.name == MAIN


def capabilities(reading: Reading, place: Place, key: str) -> None:
    for item in place.items():
        name = (item.text() or "").upper().removeprefix("CAP_")
        if key == "cap_drop":
            if reading.is_main:
                item.unsupported("is not done for main, whose first process needs them", "take it out")
            reading.capabilities -= KEPT_CAPABILITIES if name == "ALL" else {name}
        elif name in KEPT_CAPABILITIES:
            reading.capabilities.add(name)
        else:
            item.unsupported(f"({name}) is no capability that a sandbox may have", "take it out")


def _private(reading: Reading, place: Place) -> None:
    mode = place.text()
    if mode not in ("", "private", "none", "shareable"):
        place.unsupported(f"is {mode}", "take it out, if the task can do without")


def _security(reading: Reading, place: Place) -> None:
    for item in place.items():
        text = item.text() or ""
        if not _SECURITY.fullmatch(text):
            item.unsupported(f"({text}) loosens a sandbox", "take it out")


def _deploy(reading: Reading, place: Place) -> None:
    replicas = place.get("replicas")
    if replicas is not None and replicas.number() not in (1, None):
        replicas.unsupported("is not 1", "write one service for each")
    resources = place.get("resources")
    if resources is None:
        return
    if (limits := resources.get("limits")) is not None:
        for key, reader in (("cpus", _cpus), ("memory", _memory), ("pids", _pids)):
            if (value := limits.get(key)) is not None:
                reader(reading, value)
    if (reserved := resources.get("reservations")) and (devices := reserved.get("devices")):
        devices.unsupported("asks for devices of the host", "take it out, if the task can do without")


def _scale(reading: Reading, place: Place) -> None:
    if place.number() not in (1, None):
        place.unsupported("is not 1", "write one service for each")


def _cpus(reading: Reading, place: Place) -> None:
    reading.values["cpus"] = place.number() or None


def _memory(reading: Reading, place: Place) -> None:
    reading.values["memory_mb"] = place.mebibytes()


def _shm(reading: Reading, place: Place) -> None:
    reading.values["shm_mb"] = place.mebibytes()


def _pids(reading: Reading, place: Place) -> None:
    text = place.text()
    if text == "-1":
        return
    number = place.number()
    reading.values["pids"] = int(number) if number else None


def _ulimits(reading: Reading, place: Place) -> None:
    limits = {}
    for name, value in place.table().items():
        soft, hard = (value, value) if value.is_text else (value.get("soft"), value.get("hard"))
        low, high = _ulimit(soft), _ulimit(hard)
        if name not in ULIMITS:
            value.problem("is no ulimit", f"write one of {', '.join(ULIMITS)}", whatever_it_is=True)
        elif low is None or high is None:
            value.problem("must be a number, or soft and hard, or -1 (unlimited)", "write both")
        elif (
            not 0
            <= (sys.maxsize if low == UNLIMITED else low)
            <= (sys.maxsize if high == UNLIMITED else high)
        ):
            value.problem("has a soft limit above the hard one", "write a lower soft limit")
        elif name == "nofile" and not 0 <= high <= MOST_FILES:
            value.unsupported("is more than a kernel has", f"write at most {MOST_FILES}")
        else:
            limits[name] = (low, high)
    _not_main(reading, place)
    reading.values["ulimits"] = limits


def _ulimit(place: Place | None) -> int | None:
    """A limit, or `UNLIMITED`."""
    text = (place.text() or "").strip() if place is not None else ""
    if text == "-1":
        return UNLIMITED
    return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) else None


def _sysctls(reading: Reading, place: Place) -> None:
    _not_main(reading, place)
    for name in place.pairs():
        if not name.startswith("net."):
            place.unsupported(f"({name}) is not of the container's own network", "take it out")
    reading.values["sysctls"] = {name: value or "" for name, value in place.pairs().items()}


def _not_main(reading: Reading, place: Place) -> None:
    if reading.is_main:
        place.unsupported("is not done for main", "take it out, if the task can do without")


def _read_only(reading: Reading, place: Place) -> None:
    if place.flag():
        _not_main(reading, place)
        reading.values["read_only"] = True


LIMITS: dict[str, Callable[[Reading, Place], None]] = {
    "cpus": _cpus,
    "deploy": _deploy,
    "ipc": _private,
    "mem_limit": _memory,
    "pid": _private,
    "pids_limit": _pids,
    "read_only": _read_only,
    "scale": _scale,
    "security_opt": _security,
    "shm_size": _shm,
    "sysctls": _sysctls,
    "ulimits": _ulimits,
}
