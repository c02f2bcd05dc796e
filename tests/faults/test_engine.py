"""An engine that has no networks, no bridge, no disk, no time or no life left."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attempts import given, site, until
from docker.types import IPAMConfig, IPAMPool
from private_dockerd import IMAGE, PrivateEngine

from rollcage.rollout.outcome import RolloutError, SandboxError
from rollcage.rollout.sandbox import networks
from rollcage.rollout.sandbox.engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

Record = Callable[[str, str], None]


def subnet(text: str) -> IPAMConfig:
    return IPAMConfig(pool_configs=[IPAMPool(subnet=text)])


async def refused(engine: Engine, doing: str, request: Callable[[Any], Any]) -> RolloutError:
    with pytest.raises(SandboxError) as caught:
        await engine.call(doing, request)
    return caught.value


async def test_no_network_is_left_to_an_engine_and_none_is_needed(
    private_engine: Callable[..., PrivateEngine],
    record: Record,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CASES 1, 2 and 4. The whole of our range is taken by another tenant, too, and waited for."""
    monkeypatch.setattr(networks, "RETRY_SEC", 0.2)
    engine = private_engine(pool="10.253.0.0/23")
    tenant = [engine.api.create_network(f"tenant-{number}")["Id"] for number in range(2)]
    async with site(tmp_path, IMAGE, docker_host=engine.url, network_cidr="10.236.77.0/24") as here:
        record("pool", given(await refused(here.engine, "create a network", _ask_for_one)))
        task = here.task(network="public")
        record("pool_rollout", given(await here.attempt(task)))
        overlap = subnet("10.253.0.128/25")
        error = await refused(
            here.engine, "create a network", lambda api: api.create_network("tenant-over", ipam=overlap)
        )
        record("overlap", given(error))
        assert await here.left() == []
    taken = [
        engine.api.create_network(f"tenant-{number}", ipam=subnet(f"10.236.77.{number * 128}/25"))["Id"]
        for number in range(2)
    ]
    async with site(tmp_path, IMAGE, docker_host=engine.url, network_cidr="10.236.77.0/24") as here:
        waiting = asyncio.create_task(here.attempt(here.task(network="public")))

        async def one_waits() -> bool:
            return bool(here.pool.networks.capacity().waiting)

        await until(one_waits)
        await asyncio.sleep(0.5)
        assert not waiting.done()
        for network in taken:
            engine.api.remove_network(network)
        record("range", given(await waiting))
        assert await here.left() == []
    for network in tenant:
        engine.api.remove_network(network)
    assert engine.left() == []


def _ask_for_one(api: Any) -> None:
    api.create_network("tenant-more")


async def test_the_bridge_that_rollouts_share_is_deleted(
    engine: PrivateEngine, record: Record, tmp_path: Path
) -> None:
    """CASES 3."""
    async with site(tmp_path, IMAGE, docker_host=engine.url) as here:
        task = here.task(network="public")
        assert given(await here.attempt(task)) == "passed"
        [bridge] = here.pool.networks._bridges
        engine.remove_bridge(bridge.interface)
        record("bridge", given(await here.attempt(task)))
        assert await here.left() == []
    assert engine.left() == []


async def test_an_engine_that_stands_still(
    engine: PrivateEngine, record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 13. What it is asked meanwhile it does when it goes on: that is removed, too."""
    async with site(tmp_path, IMAGE, docker_host=engine.url) as here:
        began = asyncio.Event()

        async def run(context: Any) -> None:
            began.set()
            await context.shell.run("sleep 1; echo 42 >/app/answer")

        task = here.task()
        working = asyncio.create_task(here.attempt(task, here.agent(run)))
        await began.wait()
        here.emitted = lambda line: engine.freeze() if line.startswith("sandbox of") else None
        monkeypatch.setattr(here.engine.api, "timeout", 1.0)
        try:
            record("frozen", given(await here.attempt(task)))
        finally:
            engine.thaw()
        monkeypatch.undo()
        record("frozen_agent", given(await working))
    assert engine.left() == []


async def test_a_containers_shim_is_killed(engine: PrivateEngine, record: Record, tmp_path: Path) -> None:
    async with site(tmp_path, IMAGE, docker_host=engine.url) as here:

        async def run(context: Any) -> None:
            [shim] = engine.shims(context.sandbox.id)
            shim.kill()
            await context.shell.run("sleep 60")

        record("shim", given(await here.attempt(here.task(), here.agent(run))))
        assert await here.left() == []
    assert engine.left() == []
    assert engine.shims() == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MB in a file."""
    image, place = tmp_path / "disk.img", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    mounted = subprocess.run(
        ["mount", "-o", "loop", image, place], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no loopback disk can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


async def test_the_engines_disk_is_full(
    private_engine: Callable[..., PrivateEngine], small_disk: Path, record: Record, tmp_path: Path
) -> None:
    """CASES 11."""
    engine = private_engine(data=small_disk / "docker")
    try:
        async with site(tmp_path, IMAGE, docker_host=engine.url) as here:
            task = here.task()
            assert given(await here.attempt(task)) == "passed"
            big = {"big": os.urandom(80 << 20)}
            hog = here.task(dockerfile=f"{here.dockerfile}COPY big /big\n", context=big)
            record("disk_build", given(await here.prepared(hog)))
            full = small_disk / "ballast"
            with full.open("wb") as file, pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(1 << 16))
                    file.flush()
            record("disk_start", given(await here.attempt(task)))
            full.unlink()
            assert given(await here.attempt(task)) == "passed"
            assert await here.left() == []
        assert engine.left() == []
    finally:
        engine.close()
