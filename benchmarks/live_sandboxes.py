"""Many live sandboxes with internet at once: each is started, has a command run in it while all others live, and goes.

Started by `SandboxPool` as a job's are, on shared bridges. Every sandbox must answer its command with its own number
and have a default route; one that does not is lost. Memory is what `MemAvailable` has lost (containers, shims, the
engine, this process) and, of it, what the containers' cgroups use. Afterwards no container and no network may be
left. A machine's limits that are too low are named before anything is started.

    python benchmarks/live_sandboxes.py [--sandboxes 1000] [--at-once 16] [--spare-gib 6]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
from oracle_task import write_task

from rollcage.rollout.outcome import RolloutError
from rollcage.rollout.sandbox.base import Sandbox
from rollcage.rollout.sandbox.ceilings import ceilings
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.pool import SandboxPool, SandboxSettings
from rollcage.rollout.task import load_task

RESERVE_MB = 16
"""What each counts for in admission: an idle sandbox uses about 5 MiB."""
MIB, GIB = 1 << 20, 1 << 30
COMMAND = 'grep -c "00000000" /proc/net/route; grep -om1 "containers/[0-9a-f]*" /proc/self/mountinfo; echo %d'


async def run(sandboxes: int, at_once: int, spare: int, scratch: Path) -> None:
    engine = Engine()
    host = f"bench-{uuid.uuid4().hex[:8]}"
    settings = SandboxSettings(pids=64, deadline_sec=3600.0, memory_reserve_mb=RESERVE_MB)
    pool = SandboxPool(engine, settings, host=host, job=host)
    task = load_task(write_task(scratch / "task", network_mode="public"))
    turns, took, lost = asyncio.Semaphore(at_once), list[float](), list[str]()
    stop = asyncio.Event()

    async def start(number: int) -> Sandbox | None:
        async with turns:
            if stop.is_set() or psutil.virtual_memory().available < spare:
                stop.set()
                return None
            started = time.monotonic()
            try:
                sandbox = await pool.acquire(image, task.environment, attempt_id=f"{host}-{number}")
            except RolloutError as error:
                lost.append(f"{number}: {error.error_class}: {error}")
                return None
            took.append(time.monotonic() - started)
            if len(took) % max(1, sandboxes // 10) == 0:
                rate = len(took) / (time.monotonic() - began)
                free = psutil.virtual_memory().available / GIB
                print(f"  {len(took):5} live, {rate:.2f} starts/s, {free:.1f} GiB available", flush=True)
            return sandbox

    async def command(number: int, sandbox: Sandbox) -> float:
        began = time.monotonic()
        try:
            shell = await sandbox.shell()
            result = await shell.run(COMMAND % number, timeout=120)
            said = result.text.split()
            if (
                result.exit_code != 0
                or said[:1] == ["0"]
                or said[1:] != [f"containers/{sandbox.id}", str(number)]
            ):
                lost.append(f"{number}: its command said {result.text!r}")
        except RolloutError as error:
            lost.append(f"{number}: {error.error_class}: {error}")
        return time.monotonic() - began

    try:
        image = await pool.image(task.environment, task.name)
        before = psutil.virtual_memory().available
        began = time.monotonic()
        made = await asyncio.gather(*map(start, range(sandboxes)))
        starting = time.monotonic() - began
        live = {number: sandbox for number, sandbox in enumerate(made) if sandbox is not None}
        if stop.is_set():
            print(f"stopped at {len(live)}: less than {spare / GIB:.0f} GiB of memory are available")
        began = time.monotonic()
        commands = await asyncio.gather(*(command(*item) for item in live.items()))
        commanding = time.monotonic() - began
        memory = before - psutil.virtual_memory().available
        states = await asyncio.gather(*(sandbox.state() for sandbox in live.values()))
        running = sum(state.running for state in states)
        used = sum(filter(None, map(cgroup_bytes, (sandbox.id for sandbox in live.values()))))
        networks = await engine.call("list networks", lambda api: api.networks(filters=labelled(host)))
        leases = pool.networks.leases
    finally:
        began = time.monotonic()
        await pool.close()
        removing = time.monotonic() - began
        containers = await engine.call("list", lambda api: api.containers(all=True, filters=labelled(host)))
        left = await engine.call("list networks", lambda api: inspected(api, host))
        engine.close()
    count = max(1, len(live))
    print(
        f"{running} of {sandboxes} live at once, {len(lost)} lost, {leases} leases on {len(networks)} bridges"
    )
    print(
        f"started in {starting:.1f} s: {len(took) / starting:.2f} starts/s, p50 {statistics.median(took):.2f} s"
    )
    print(
        f"a command in each, all at once: {commanding:.2f} s, p50 {1000 * statistics.median(commands):.0f} ms"
    )
    print(
        f"memory: {memory / GIB:.2f} GiB of the machine, {memory / MIB / count:.1f} MiB a sandbox; "
        f"{used / MIB / count:.1f} MiB of it in its cgroup"
    )
    print(f"removed in {removing:.1f} s; left: {len(containers)} containers, {len(left)} networks")
    for text in lost[:10]:
        print(f"lost: {text}")
    for network in left:
        # Engines miscount a network's endpoints at times, and then keep it until they are started anew:
        # https://github.com/moby/moby/issues/42119
        print(f"left: the network {network['Name']}, with {len(network['Containers'] or {})} containers")
    if lost or containers or left or running != sandboxes:
        raise SystemExit(1)


def labelled(host: str) -> dict[str, list[str]]:
    return {"label": [f"rollcage.host={host}"]}


def inspected(api: Any, host: str) -> list[dict[str, Any]]:
    """This benchmark's networks, with the containers that the engine sees on them."""
    return [api.inspect_network(network["Id"]) for network in api.networks(filters=labelled(host))]


def cgroup_bytes(container: str) -> int | None:
    """What a container's memory cgroup uses: version 1 or 2, with either driver of the engine."""
    for root, name in ("memory", "memory.usage_in_bytes"), ("", "memory.current"):
        for place in (f"docker/{container}", f"system.slice/docker-{container}.scope"):
            path = Path("/sys/fs/cgroup") / root / place / name
            if path.exists():
                return int(path.read_text())
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sandboxes", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=16, help="starts at once")
    parser.add_argument("--spare-gib", type=float, default=6.0, help="stop starting below so much available")
    options = parser.parse_args()
    for text in [c.remedy(options.sandboxes) for c in ceilings() if c.sandboxes < options.sandboxes]:
        print(f"too low: {text}")
    with tempfile.TemporaryDirectory(prefix="rollcage-bench-") as scratch:
        asyncio.run(run(options.sandboxes, options.at_once, int(options.spare_gib * GIB), Path(scratch)))


if __name__ == "__main__":
    main()
