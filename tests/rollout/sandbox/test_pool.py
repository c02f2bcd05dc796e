"""Sandboxes that are there before they are asked for, and gone without anybody waiting."""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox import container as container_module
from rollcage.rollout.sandbox import maker as maker_module
from rollcage.rollout.sandbox import pool as pool_module
from rollcage.rollout.sandbox import warm as warm_module
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.images import BuiltImage
from rollcage.rollout.sandbox.pool import Expected, SandboxPool, SandboxSettings
from rollcage.rollout.task import Environment

pytestmark = pytest.mark.docker

ENVIRONMENT = Environment(
    context=None, docker_image="debian:bookworm-slim", memory_mb=64, network_mode="no-network"
)
OTHER = dataclasses.replace(ENVIRONMENT, env={"OTHER": "1"})


class Pool(SandboxPool):
    """A pool with what tests ask of it."""

    picture: BuiltImage

    async def get(self, environment: Environment = ENVIRONMENT, **settings: Any) -> Any:
        attempt = uuid.uuid4().hex[:12]
        return await self.acquire(self.picture, environment, attempt_id=attempt, **settings)

    def await_next(self, *environments: Environment) -> None:
        self.expect([Expected(self.picture, environment) for environment in environments])

    async def stocked(self, count: int) -> None:
        """Wait until so many are ready."""
        await until(lambda: len(self.stock) == count)

    async def containers(self) -> list[Any]:
        label = f"rollcage.host={self.host}"
        found: list[Any] = await self.engine.call(
            "list containers", lambda api: api.containers(all=True, filters={"label": label})
        )
        return found


async def until(condition: Callable[[], bool]) -> None:
    """Wait for it, half a minute at most."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise TimeoutError


MakePool = Callable[..., Any]


@pytest.fixture
async def make_pool(engine: Engine) -> AsyncIterator[MakePool]:
    pools: list[Pool] = []

    async def make(**settings: Any) -> Pool:
        host = f"test-pool-{uuid.uuid4().hex[:8]}"
        pool = Pool(engine, SandboxSettings(**{"pids": 64, **settings}), host=host, job="test")
        pool.picture = await pool.image(ENVIRONMENT, "a task")
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        await pool.close()
        assert await pool.containers() == []


class TestWarm:
    async def test_one_that_was_started_ahead_is_handed_out(self, make_pool: MakePool) -> None:
        pool = await make_pool(warm=1)
        pool.await_next(ENVIRONMENT)
        await pool.stocked(1)
        (ahead,) = await pool.containers()
        sandbox = await pool.get()
        assert sandbox.id == ahead["Id"]
        assert (await (await sandbox.shell()).run("echo here")).stdout == b"here\n"
        assert (pool.stock.handed_out, pool.cold_starts) == (1, 0)

    async def test_the_stock_is_filled_up_again(self, make_pool: MakePool) -> None:
        pool = await make_pool(warm=1)
        pool.await_next(ENVIRONMENT)
        for _ in range(3):
            await pool.stocked(1)
            await pool.get()
        assert pool.stock.handed_out == 3

    async def test_no_more_than_warm_are_started(self, make_pool: MakePool) -> None:
        pool = await make_pool(warm=2)
        pool.await_next(OTHER, OTHER, OTHER, ENVIRONMENT)
        await pool.stocked(2)
        await pool.get(ENVIRONMENT)
        assert pool.stock.handed_out == 0, "only the first two were expected"

    async def test_another_task_does_not_get_it(self, make_pool: MakePool) -> None:
        pool = await make_pool(warm=1)
        pool.await_next(OTHER)
        await pool.stocked(1)
        sandbox = await pool.get(ENVIRONMENT)
        assert (await (await sandbox.shell()).run("echo [$OTHER]")).stdout == b"[]\n"

    @pytest.mark.parametrize("way", ["kill", "rm", "pause"])
    async def test_a_dead_one_is_never_handed_out(self, make_pool: MakePool, way: str) -> None:
        pool = await make_pool(warm=1)
        pool.await_next(ENVIRONMENT)
        await pool.stocked(1)
        (ahead,) = await pool.containers()
        deeds = {
            "kill": lambda api: api.kill(ahead["Id"]),
            "rm": lambda api: api.remove_container(ahead["Id"], force=True),
            "pause": lambda api: api.pause(ahead["Id"]),
        }
        await pool.engine.call(way, deeds[way])
        pool.await_next()
        sandbox = await pool.get()
        assert sandbox.id != ahead["Id"]
        assert (await (await sandbox.shell()).run("echo here")).stdout == b"here\n"
        assert pool.stock.found_dead == 1

    async def test_one_with_too_little_time_left_is_not_handed_out(self, make_pool: MakePool) -> None:
        pool = await make_pool(warm=1, deadline_sec=100.0)
        pool.await_next(ENVIRONMENT)
        await pool.stocked(1)
        sandbox = await pool.get(least_sec=4000.0)
        assert pool.stock.handed_out == 0
        assert int(sandbox.spec.labels["rollcage.deadline"]) > time.time() + 3900

    async def test_what_is_not_expected_any_more_goes(
        self, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(warm_module, "LINGER_SEC", 0.1)
        pool = await make_pool(warm=1)
        pool.await_next(ENVIRONMENT)
        await pool.stocked(1)
        pool.await_next()
        await pool.stocked(0)
        await pool.drained()
        assert await pool.containers() == []

    async def test_it_gives_way_to_who_waits(self, make_pool: MakePool) -> None:
        """Room for two: a held one, and one that is either ahead or somebody's."""
        pool = await make_pool(warm=1, admit_memory_mb=128)
        held = await pool.get()
        pool.await_next(OTHER)
        await pool.stocked(1)
        async with asyncio.timeout(30):
            second = await pool.get()
        assert second.id != held.id
        assert len(pool.stock) == 0

    async def test_a_start_that_fails_is_left_to_who_needs_it(self, make_pool: MakePool) -> None:
        pool = await make_pool(warm=1)
        missing = dataclasses.replace(pool.picture, id=f"sha256:{'0' * 64}")
        pool.expect([Expected(missing, ENVIRONMENT)])
        await asyncio.sleep(0.3)
        assert len(pool.stock) == 0
        assert (await pool.get()).id


class TestRoom:
    async def test_who_finds_no_memory_waits(self, make_pool: MakePool) -> None:
        pool = await make_pool(admit_memory_mb=100)
        first = await pool.get()
        waited: list[float] = []
        second = asyncio.create_task(pool.get(waited=waited.append))
        await until(lambda: pool.waiting > 0)
        assert not second.done()
        assert waited == []
        await pool.release(first)
        assert (await second).id
        [seconds] = waited
        assert seconds > 0

    async def test_the_reserve_counts_and_not_the_limit(self, make_pool: MakePool) -> None:
        pool = await make_pool(admit_memory_mb=100, memory_reserve_mb=30)
        sandboxes = [await pool.get() for _ in range(3)]
        assert all(sandbox.spec.memory_mb == 64 for sandbox in sandboxes)

    async def test_a_verifiers_own_sandbox_does_not_wait(self, make_pool: MakePool) -> None:
        pool = await make_pool(admit_memory_mb=64)
        await pool.get()
        async with asyncio.timeout(30):
            await pool.get(role="verifier1")

    async def test_verifiers_sandboxes_do_not_wait_for_each_others_networks(
        self, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(maker_module, "HOLDING_SEC", 0.5)
        pool = await make_pool(network_cidr="10.233.247.0/26")  # two small networks
        lists = [
            dataclasses.replace(ENVIRONMENT, network_mode="allowlist", allowed_hosts=(f"192.0.2.{number}",))
            for number in range(3)
        ]
        held = [await pool.get(environment) for environment in lists[:2]]
        with pytest.raises(SandboxError) as raised:
            await pool.get(lists[2], role="verifier1")
        assert raised.value.error_class == "network_pool"
        await pool.release(held[0])
        await pool.drained()
        monkeypatch.setattr(maker_module, "HOLDING_SEC", 60.0)  # to make one takes its time
        await pool.get(lists[2], role="verifier1")

    async def test_a_start_that_fails_gives_its_room_back(self, make_pool: MakePool) -> None:
        pool = await make_pool(admit_memory_mb=64)
        good, pool.picture = pool.picture, dataclasses.replace(pool.picture, id=f"sha256:{'0' * 64}")
        for _ in range(3):
            with pytest.raises(Exception, match=r"(?i)no such image"):
                await pool.get()
        pool.picture = good
        async with asyncio.timeout(30):
            await pool.get()

    async def test_who_is_called_off_leaves_nothing(self, make_pool: MakePool) -> None:
        pool = await make_pool(admit_memory_mb=64)
        calls = [asyncio.create_task(pool.get()) for _ in range(6)]
        for number, call in enumerate(calls):
            await asyncio.sleep(0.05 * number)
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        done = [call for call in calls if not call.cancelled() and call.exception() is None]
        for call in done:
            await pool.release(call.result())
        await pool.drained()
        assert await pool.containers() == []
        assert (await pool.get()).id


class TestRemoval:
    async def test_nobody_waits_for_it(self, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
        go_on = asyncio.Event()
        remove = container_module.remove_container

        async def slow(*arguments: Any) -> None:
            await go_on.wait()
            await remove(*arguments)

        pool = await make_pool()
        sandbox = await pool.get()
        monkeypatch.setattr(container_module, "remove_container", slow)
        async with asyncio.timeout(1):
            await pool.release(sandbox)
        go_on.set()
        await pool.drained()
        assert await pool.containers() == []

    async def test_a_host_that_removes_slowly_takes_in_slowly(
        self, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go_on = asyncio.Event()
        remove = container_module.remove_container

        async def slow(*arguments: Any) -> None:
            await go_on.wait()
            await remove(*arguments)

        monkeypatch.setattr(pool_module, "MOST_REMOVALS", 1)
        pool = await make_pool()
        first, second = await pool.get(), await pool.get()
        monkeypatch.setattr(container_module, "remove_container", slow)
        await pool.release(first)
        held_up = asyncio.create_task(pool.release(second))
        await asyncio.sleep(0.05)
        assert not held_up.done()
        go_on.set()
        await held_up

    async def test_one_that_takes_too_long_is_given_up(
        self, make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        remove = container_module.remove_container

        async def never(*_arguments: Any) -> None:
            await asyncio.sleep(60)

        monkeypatch.setattr(pool_module, "REMOVAL_SEC", 0.05)
        monkeypatch.setattr(pool_module, "REMOVAL_WAITS_SEC", (0.01,))
        pool = await make_pool(admit_memory_mb=64)
        sandbox = await pool.get()
        monkeypatch.setattr(container_module, "remove_container", never)
        await pool.release(sandbox)
        async with asyncio.timeout(5):
            await pool.drained()
        (said,) = pool.failed_removals
        assert sandbox.spec.name in said
        monkeypatch.setattr(container_module, "remove_container", remove)
        assert (await pool.get()).id, "its room is given back"
        await sandbox.remove()
