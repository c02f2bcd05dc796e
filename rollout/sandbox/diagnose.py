"""Whether an engine is fit to hold sandboxes, for `rollcage doctor`: one line for each thing, with a remedy.

Nothing is changed but for one container that is started and removed. What only the engine's own machine can
tell (its disk, its rules) is asked where the engine is on this machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from docker.errors import ImageNotFound

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox import firewall
from rollcage.rollout.sandbox.ceilings import ceilings
from rollcage.rollout.sandbox.engine import Engine, is_local
from rollcage.rollout.sandbox.networks import LEASES_PER_BRIDGE
from rollcage.rollout.sandbox.pool import capacity_of
from rollcage.rollout.sandbox.reaper import DEADLINE_LABEL, HOST_LABEL
from rollcage.rollout.sandbox.settings import SandboxSettings
from rollcage.rollout.sandbox.subnets import Ranges, routes, subnets
from rollcage.rollout.sandbox.threads import in_thread
from rollcage.rollout.sandbox.traits import traits_of

BASE_IMAGE = "debian:bookworm-slim"

FREE_DISK_BYTES = 10 << 30
FEW_SANDBOXES = 100
FREE_MEMORY_BYTES = 2 << 30

ENGINE_POOLS = (*((f"172.{second}.0.0/16", 16) for second in range(17, 32)), ("192.168.0.0/16", 20))
"""The address pools of an engine that was given none, as (base, prefix of a network): 31 networks in all.
https://docs.docker.com/engine/network/#automatic-subnet-allocation"""

RANGES = Ranges()

SLOW_DRIVERS = frozenset({"vfs", "devicemapper", "aufs"})

BUILDX = tuple(
    Path(folder, "docker-buildx")
    for folder in (
        Path.home() / ".docker/cli-plugins",
        "/usr/local/lib/docker/cli-plugins",
        "/usr/local/libexec/docker/cli-plugins",
        "/usr/lib/docker/cli-plugins",
        "/usr/libexec/docker/cli-plugins",
    )
)


@dataclass(frozen=True)
class Check:
    """One thing looked at. `said`: what was found. `remedy`: what to do, empty where it is well."""

    name: str
    ok: bool
    said: str
    remedy: str = ""


async def diagnose(engine_or_url: Engine | str | None = None) -> list[Check]:
    """Look at an engine: a running `Engine`, its URL, or (None) the one where `DOCKER_HOST` and the usual socket
    say. Never raises for what it finds; without an engine, the first check says so and is the only one."""
    if isinstance(engine_or_url, Engine):
        return await _diagnose(engine_or_url)
    try:
        engine = await asyncio.to_thread(Engine, engine_or_url)
    except SandboxError as error:
        remedy = (
            "start it (systemctl start docker, or dockerd), or set DOCKER_HOST; look at the socket's rights"
        )
        return [Check("engine", False, error.message, remedy)]
    try:
        return await _diagnose(engine)
    finally:
        engine.close()


def networks_left(pools: Iterable[tuple[str, int]], used: Iterable[ipaddress.IPv4Network]) -> int:
    """How many more networks the pools ((base, prefix of a network)) can give, beside the subnets in use."""
    taken = list(used)
    left = 0
    for text, prefix in pools:
        base = ipaddress.IPv4Network(text)
        size = 1 << (32 - prefix)
        first, last = int(base.network_address), int(base.broadcast_address)
        gone: set[int] = set()
        for other in taken:
            low, high = max(first, int(other.network_address)), min(last, int(other.broadcast_address))
            gone.update(range((low - first) // size, (high - first) // size + 1) if low <= high else ())
        left += (last - first + 1) // size - len(gone)
    return left


async def _diagnose(engine: Engine) -> list[Check]:
    try:
        info = await engine.call("ask the engine about itself", lambda api: api.info())
        version = await engine.call("ask the engine's version", lambda api: api.version())
    except SandboxError as error:
        return [Check("engine", False, error.message, "see the engine's own log (journalctl -u docker)")]
    said = f"{version.get('Version', 'unknown')} (API {version.get('ApiVersion')}) at {engine.api.base_url}"
    checks = [Check("engine", True, said), _storage(info), _limits(info), _seccomp(version, info)]
    if is_local(engine):
        checks += [_disk(info), _memory(), _capacity(info)]
    checks.append(await _iptables(engine))
    return [
        *checks,
        await _named("networks", lambda: _networks(engine, info)),
        await _named("builder", lambda: _builder(engine)),
        await _named("base image", lambda: _base_image(engine)),
        await _named("container", lambda: _container(engine)),
    ]


async def _named(name: str, look: Callable[[], Awaitable[Check]]) -> Check:
    try:
        return await look()
    except SandboxError as error:
        return Check(name, False, str(error), "see the engine's own log (journalctl -u docker)")


def _storage(info: Mapping[str, Any]) -> Check:
    driver = info.get("Driver", "unknown")
    remedy = 'set "storage-driver": "overlay2" in /etc/docker/daemon.json' if driver in SLOW_DRIVERS else ""
    return Check("storage", not remedy, f"storage driver {driver}", remedy)


def _limits(info: Mapping[str, Any]) -> Check:
    wanted = {"MemoryLimit": "memory", "CpuCfsQuota": "cpu", "PidsLimit": "pids"}
    missing = [name for key, name in wanted.items() if not info.get(key)]
    version = f"cgroup version {info.get('CgroupVersion', '1')}"
    if not missing:
        return Check("limits", True, f"{version}; memory, cpu and pids can be limited")
    remedy = "run the engine as root, or delegate these controllers to it"
    return Check("limits", False, f"{version}; no limits on {', '.join(missing)}", remedy)


def _seccomp(version: Mapping[str, Any], info: Mapping[str, Any]) -> Check:
    """Runs without, all the same: an agent that is root can then reach its own sandbox's supervisor."""
    if traits_of(version, info).seccomp:
        return Check("seccomp", True, "system calls can be filtered")
    remedy = "run it on a kernel with CONFIG_SECCOMP_FILTER, and built with seccomp"
    return Check("seccomp", False, "the engine cannot filter system calls", remedy)


def _disk(info: Mapping[str, Any]) -> Check:
    root = Path(info.get("DockerRootDir", "/var/lib/docker"))
    if not root.exists():
        return Check("disk", True, f"{root} cannot be seen from here")
    free = shutil.disk_usage(root).free
    remedy = "" if free >= FREE_DISK_BYTES else "make room there (rollcage gc, docker system df)"
    return Check("disk", not remedy, f"{free / 2**30:.1f} GiB free in {root}", remedy)


def _memory() -> Check:
    memory = psutil.virtual_memory()
    remedy = "" if memory.available >= FREE_MEMORY_BYTES else "stop what uses it, or lower the concurrency"
    said = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available"
    return Check("memory", not remedy, said, remedy)


def _capacity(info: Mapping[str, Any]) -> Check:
    """How much runs here at once. Few are no fault: the rest waits."""
    admitted = capacity_of(info, SandboxSettings())
    lowest = ceilings()[0]
    said = (
        f"sandboxes are admitted up to {admitted.memory_mb / 1024:.1f} GiB and {admitted.cpus:.0f} CPUs; "
        f"{lowest.name} ({lowest.value}) has room for {lowest.sandboxes}"
    )
    remedy = "" if lowest.sandboxes >= FEW_SANDBOXES else lowest.remedy(10 * FEW_SANDBOXES)
    return Check("capacity", not remedy, said, remedy)


async def _iptables(engine: Engine) -> Check:
    """Whether sandboxes with internet can be kept from this machine and its networks."""
    why = await in_thread(firewall.problem) if is_local(engine) else "the engine is on another machine"
    if why is None:
        return Check(
            "iptables", True, "sandboxes with internet can be kept from this machine and its networks"
        )
    said = f"only tasks without internet can be run: {why}"
    return Check("iptables", False, said, firewall.REMEDY)


async def _networks(engine: Engine, info: Mapping[str, Any]) -> Check:
    networks = await engine.call("list networks", lambda api: api.networks())
    pools = [(pool["Base"], int(pool["Size"])) for pool in info.get("DefaultAddressPools") or []]
    pools = [pool for pool in pools if ":" not in pool[0]] or list(ENGINE_POOLS)
    used = [*subnets(networks), *(routes() if is_local(engine) else ())]
    left = networks_left(pools, used)
    said = f"{left} of {networks_left(pools, ())} networks left in the engine's address pools"
    remedy = "" if left else 'docker network prune, or give the engine more "default-address-pools"'
    bridges, small = sum(1 for _ in RANGES.free_for_bridge(used)), sum(1 for _ in RANGES.free_for_small(used))
    own = f"of its own it may make {bridges} bridges of {LEASES_PER_BRIDGE} sandboxes and {small} small networks"
    return Check("networks", not remedy, f"{said}; rollcage needs none of them: {own}", remedy)


async def _builder(engine: Engine) -> Check:
    """Never a fault: Dockerfiles are lowered for the builder that every engine has."""
    ping = await engine.call("ping the engine", lambda api: api.get(api._url("/_ping")))
    kind = "BuildKit" if ping.headers.get("Builder-Version") == "2" else "the classic builder"
    buildx = "with" if any(path.exists() for path in BUILDX) else "without"
    return Check("builder", True, f"the engine prefers {kind}, {buildx} buildx here; rollcage needs neither")


async def _has_base_image(engine: Engine) -> bool:
    def look(api: Any) -> bool:
        try:
            api.inspect_image(BASE_IMAGE)
        except ImageNotFound:
            return False
        return True

    return await engine.call("look up the base image", look)


async def _base_image(engine: Engine) -> Check:
    if await _has_base_image(engine):
        return Check("base image", True, f"{BASE_IMAGE} is there")
    return Check("base image", False, f"{BASE_IMAGE} is not there", f"docker pull {BASE_IMAGE}")


async def _container(engine: Engine) -> Check:
    if not await _has_base_image(engine):
        return Check(
            "container", False, "there is no base image to start one from", f"docker pull {BASE_IMAGE}"
        )
    labels = {HOST_LABEL: f"doctor-{uuid.uuid4().hex[:8]}", DEADLINE_LABEL: str(int(time.time()) + 600)}

    def start(api: Any) -> int:
        config = api.create_host_config(network_mode="none", pids_limit=16, mem_limit="64m")
        container = api.create_container(BASE_IMAGE, ["true"], host_config=config, labels=labels)["Id"]
        try:
            api.start(container)
            return int(api.wait(container, timeout=60)["StatusCode"])
        finally:
            api.remove_container(container, force=True)

    started = time.monotonic()
    status = await engine.call("start a container", start)
    seconds = time.monotonic() - started
    if status:
        return Check(
            "container", False, f"a container ended with status {status}", "docker run " + BASE_IMAGE
        )
    return Check("container", True, f"one was created, started, awaited and removed in {seconds:.2f} s")
