"""Removes what dead workers left on an engine: by our labels and their deadlines, and nothing else.

Containers, volumes and networks are ours where they have `rollcage.host`, images where they have
`rollcage.build`. One that lacks the label is never touched, whatever its name.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from functools import partial
from typing import Any

import psutil
import requests
from docker.errors import APIError, NotFound

from rollcage.rollout.sandbox import firewall
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.threads import in_thread

HOST_LABEL = "rollcage.host"
JOB_LABEL = "rollcage.job"
DEADLINE_LABEL = "rollcage.deadline"
"""Unix seconds, whole, after which a container or a network is nobody's any more."""

GRACE_SEC = 30
"""PID 1 ends by itself at its deadline, and says so: nobody gets ahead of it."""

BUILD_LABEL = "rollcage.build"
"""On images that a host's builds made, finished or not: that host."""

REPOSITORY = "rollcage/env"
"""The name of every image that we build; its tag is the digest of what it was built from."""

KILLED_STEP_SEC = 10.0
"""The engine kills and removes a build's container within a second or two, unless it is very busy."""

LONGEST_BUILD_SEC = 24 * 3600.0
"""An unfinished image of another host is left over once it is older than any build."""


SETTLE_SEC, SETTLE_LOOKS = 0.5, 10
"""How often a dead host is looked after again: see `reap_dead`."""

CLOCK_SEC = 5
"""A process's start is computed from the boot's, which moves a little when the clock is set."""

MACHINES_OWN = 0xEFFFFFFC
"""The first namespace of processes: PROC_PID_INIT_INO of the kernel's include/linux/proc_ns.h."""

_NAME = re.compile(r"(.*)-(\d+)-([0-9a-f]+)-[0-9a-f]{4}")


_stuck: set[str] = set()
"""Ids of networks: see `stuck_networks`."""


@dataclass(frozen=True)
class Reaped:
    """How many of each were removed, or could not be."""

    containers: int = 0
    networks: int = 0
    images: int = 0
    volumes: int = 0

    def plus(self, other: Reaped) -> Reaped:
        return Reaped(*map(sum, zip(astuple(self), astuple(other), strict=True)))


async def reap(
    engine: Engine, *, host: str | None, job: str | None, now: float, images: bool = False
) -> Reaped:
    """Remove containers past their deadline at `now` (Unix seconds), and those of this host and job (of both
    where both are given; none but those past their deadline where neither is). Then networks and unfinished
    images: this host's, and of any other those past their deadline. Volumes go as the containers do. With
    `images`, finished ones too: those that this host built (None: that any did) and no container uses.

    What is gone already, or in use, is no error. Raises `SandboxError`.
    """
    containers = await engine.call(
        "list containers", lambda api: api.containers(all=True, filters={"label": HOST_LABEL})
    )
    removed = 0
    for container in containers:
        if _is_due(container.get("Labels") or {}, host, job, now):
            removed += await _remove(
                engine, "remove a container", partial(_remove_container, container["Id"])
            )
    volumes = await _remove_volumes(engine, host, job, now)
    networks = await remove_networks(engine, host, now=now)
    unfinished = await remove_dangling_images(engine, host, now=now)
    finished = await _remove_built_images(engine, host) if images else 0
    return Reaped(removed, networks, unfinished + finished, volumes)


def host_name() -> str:
    """A new host's name. It says whose the host is: this machine's or container's, and which process of it."""
    return f"{_machine()}-{os.getpid()}-{_start(os.getpid()):x}-{uuid.uuid4().hex[:4]}"


async def reap_dead(engine: Engine, *, now: float, settle_sec: float = SETTLE_SEC) -> Reaped:
    """Remove what is past its deadline at `now`, and everything of hosts whose process on this machine is gone.

    The engine may still be busy with what a host asked before it was killed: where anything of one was there, look
    again after `settle_sec` until nothing is, `SETTLE_LOOKS` times at most. Raises `SandboxError`.
    """
    total = await reap(engine, host=None, job=None, now=now)
    for _ in range(SETTLE_LOOKS):
        dead = await dead_hosts(engine)
        if not dead:
            break
        for host in sorted(dead):
            steps = await engine.call("remove a build's containers", partial(_remove_build_containers, host))
            found = await reap(engine, host=host, job=None, now=now)
            total = total.plus(found).plus(Reaped(containers=steps))
        await asyncio.sleep(settle_sec)
    return total


async def dead_hosts(engine: Engine) -> set[str]:
    """The hosts that have something on the engine, and whose process on this machine is gone. Nothing is said of
    hosts of other machines. Raises `SandboxError`."""
    owners = await engine.call("list what there is of ours", _owners)
    return {host for hosts in owners.values() for host in hosts if _is_dead(host)}


async def left_over(engine: Engine) -> Reaped:
    """What dead hosts of this machine have left on the engine, networks that it will not remove among it. Raises
    `SandboxError`."""
    owners = await engine.call("list what there is of ours", partial(_owners, stuck=True))
    dead = {host for hosts in owners.values() for host in hosts if _is_dead(host)}
    return Reaped(**{kind: sum(host in dead for host in hosts) for kind, hosts in owners.items()})


def _owners(api: Any, *, stuck: bool = False) -> dict[str, list[str]]:
    """By kind, the host of everything that is some host's; with `stuck`, of networks that cannot be removed too."""
    ours, built = {"label": HOST_LABEL}, {"label": BUILD_LABEL}
    found = {
        "containers": api.containers(all=True, filters=ours),
        "networks": [one for one in api.networks(filters=ours) if stuck or one["Id"] not in _stuck],
        "volumes": api.volumes(filters=ours).get("Volumes") or [],
    }
    owners = {
        kind: [(one.get("Labels") or {}).get(HOST_LABEL, "") for one in of] for kind, of in found.items()
    }
    # A sandbox has its image's labels too, and that image may be another host's, which is long gone.
    builds = {
        "containers": api.containers(all=True, filters=built),
        "images": api.images(filters={**built, "dangling": True}),
    }
    for kind, of in builds.items():
        labels = [one.get("Labels") or {} for one in of]
        owners.setdefault(kind, []).extend(
            label.get(BUILD_LABEL, "") for label in labels if HOST_LABEL not in label
        )
    return owners


async def jobs_on(engine: Engine) -> set[str]:
    """The jobs that have containers there. Raises `SandboxError`."""
    wanted = {"label": JOB_LABEL}
    containers = await engine.call("list containers", lambda api: api.containers(all=True, filters=wanted))
    return {(found.get("Labels") or {}).get(JOB_LABEL, "") for found in containers} - {""}


async def hosts_of(engine: Engine, job: str) -> set[str]:
    """The hosts that have containers of this job. Raises `SandboxError`."""
    wanted = {"label": f"{JOB_LABEL}={job}"}
    containers = await engine.call("list containers", lambda api: api.containers(all=True, filters=wanted))
    return {(found.get("Labels") or {}).get(HOST_LABEL, "") for found in containers} - {""}


def _machine() -> str:
    """Where a process's number means the same. A container that shares its machine's name (`--network host`) or has
    been given one has numbers of its own: to it, processes outside would all seem dead."""
    return socket.gethostname()[:40] + _namespace()


def _namespace() -> str:
    """Of the numbers of processes; empty for the machine's own."""
    try:
        number = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return ""
    return "" if number == MACHINES_OWN else f"-p{number}"


def _start(pid: int) -> int:
    """Unix seconds at which a process started. Raises `psutil.NoSuchProcess`."""
    return int(psutil.Process(pid).create_time())


def _is_dead(host: str) -> bool:
    name = _NAME.fullmatch(host)
    if name is None or name[1] != _machine():
        return False
    try:
        return abs(_start(int(name[2])) - int(name[3], 16)) > CLOCK_SEC
    except psutil.NoSuchProcess:
        return True


async def remove_networks(engine: Engine, host: str | None, *, now: float) -> int:
    """Remove networks to which nothing is attached: this host's, and any past their deadline; then the rules for
    networks that are gone. Returns how many networks."""
    networks = await engine.call("list networks", lambda api: api.networks(filters={"label": HOST_LABEL}))
    removed = 0
    for network in networks:
        if _is_due(network.get("Labels") or {}, host, None, now):
            removed += await _remove(engine, "remove a network", partial(_remove_network, network["Id"]))
    await in_thread(firewall.sweep)
    return removed


async def remove_dangling_images(engine: Engine, host: str | None, *, now: float | None = None) -> int:
    """Remove untagged images that builds left: this host's, and any that are too old to be in the making.
    Must not run while this host builds. Returns how many."""
    images = await engine.call(
        "list images", lambda api: api.images(filters={"label": BUILD_LABEL, "dangling": True})
    )
    before = (time.time() if now is None else now) - LONGEST_BUILD_SEC
    removed = 0
    for image in images:
        mine = host is not None and (image.get("Labels") or {}).get(BUILD_LABEL) == host
        if mine or image["Created"] < before:
            removed += await _remove(engine, "remove an image", partial(_remove_image, image["Id"]))
    return removed


async def _remove_built_images(engine: Engine, host: str | None) -> int:
    label = BUILD_LABEL if host is None else f"{BUILD_LABEL}={host}"
    images = await engine.call("list images", lambda api: api.images(filters={"label": label}))
    tags = [
        tag for image in images for tag in image.get("RepoTags") or [] if tag.startswith(f"{REPOSITORY}:")
    ]
    return sum([await _remove(engine, "remove an image", partial(_remove_image, tag)) for tag in tags])


def wait_for_build_containers(api: Any, *, host: str) -> None:
    """Block until the containers of this host's builds are gone, `KILLED_STEP_SEC` at most for each. Sandboxes
    have their image's labels too, and a host label of their own."""
    for container in api.containers(all=True, filters={"label": f"{BUILD_LABEL}={host}"}):
        if HOST_LABEL not in (container.get("Labels") or {}):
            try:
                api.wait(container["Id"], timeout=KILLED_STEP_SEC, condition="removed")
            except (NotFound, requests.exceptions.RequestException):
                continue


def _remove_build_containers(host: str, api: Any) -> int:
    """Remove the containers of steps of this host's builds; how many."""
    removed = 0
    for container in api.containers(all=True, filters={"label": f"{BUILD_LABEL}={host}"}):
        if HOST_LABEL not in (container.get("Labels") or {}):
            try:
                api.remove_container(container["Id"], force=True, v=True)
                removed += 1
            except APIError as error:
                if error.status_code not in (404, 409):
                    raise
    return removed


def _is_due(labels: Mapping[str, str], host: str | None, job: str | None, now: float) -> bool:
    deadline = labels.get(DEADLINE_LABEL, "")
    if deadline.isdecimal() and int(deadline) + GRACE_SEC < now:
        return True
    if host is None and job is None:
        return False
    return host in (None, labels.get(HOST_LABEL)) and job in (None, labels.get(JOB_LABEL))


def _remove_container(container_id: str, api: Any) -> None:
    api.remove_container(container_id, force=True, v=True)


async def _remove_volumes(engine: Engine, host: str | None, job: str | None, now: float) -> int:
    """Those of tasks of several containers; anonymous ones go with their containers."""
    found = await engine.call("list volumes", lambda api: api.volumes(filters={"label": HOST_LABEL}))
    removed = 0
    for volume in found.get("Volumes") or []:
        if _is_due(volume.get("Labels") or {}, host, job, now):
            removed += await _remove(engine, "remove a volume", partial(_remove_volume, volume["Name"]))
    return removed


def _remove_volume(name: str, api: Any) -> None:
    api.remove_volume(name)


def _remove_network(network_id: str, api: Any) -> None:
    try:
        api.remove_network(network_id)
    except APIError as error:
        if error.status_code == 403 and not api.inspect_network(network_id).get("Containers"):
            _stuck.add(network_id)
        raise


def stuck_networks() -> int:
    """How many networks this process has met that the engine will not remove, though nothing is attached to them: it
    has lost count of their endpoints (https://github.com/moby/moby/issues/42119), and counts anew when it starts."""
    return len(_stuck)


def _remove_image(image: str, api: Any) -> None:
    api.remove_image(image)


async def _remove(engine: Engine, doing: str, remove: Callable[[Any], None]) -> int:
    """1 where it was removed; 0 where it is gone, going, or in use."""

    def attempt(api: Any) -> int:
        try:
            remove(api)
        except NotFound:
            return 0
        except APIError as error:
            # An image that two remove at a time is a 500 to one of them: moby's image/store.go, Delete.
            if error.status_code in (403, 409) or "unrecognized image ID" in str(error.explanation):
                return 0
            raise
        return 1

    return await engine.call(doing, attempt)
