"""The agent's clock, on a clock that the test moves."""

from __future__ import annotations

import asyncio

import pytest

from rollcage.rollout.clock import AgentClock


class Time:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def test_it_runs_while_the_agent_works(time: Time) -> None:
    clock = AgentClock(10.0, time)
    time.now += 4.0
    assert (clock.used, clock.remaining, clock.infra_seconds) == (4.0, 6.0, 0.0)
    time.now += 60.0
    assert (clock.used, clock.remaining) == (64.0, 0.0)


def test_it_stands_still_while_others_make_the_agent_wait(time: Time) -> None:
    clock = AgentClock(10.0, time)
    time.now += 1.0
    with clock.held():
        time.now += 500.0
        assert (clock.used, clock.infra_seconds) == (1.0, 500.0)
    time.now += 2.0
    assert (clock.used, clock.remaining, clock.infra_seconds) == (3.0, 7.0, 500.0)


def test_generation_is_the_agents_own_time_and_the_queue_before_it_is_not(time: Time) -> None:
    clock = AgentClock(10.0, time)
    with clock.held():
        time.now += 30.0
    clock.charge(4.0)
    assert (clock.used, clock.infra_seconds) == (4.0, 26.0)


def test_more_is_never_charged_than_time_has_passed(time: Time) -> None:
    clock = AgentClock(100.0, time)
    time.now += 1.0
    with clock.held():
        time.now += 3.0
    clock.charge(50.0)
    assert (clock.used, clock.infra_seconds) == (4.0, 0.0)
    clock.charge(-50.0)
    assert (clock.used, clock.infra_seconds) == (4.0, 0.0)


def test_an_overcharged_turn_takes_nothing_from_the_next_wait(time: Time) -> None:
    clock = AgentClock(100.0, time)
    with clock.held():
        time.now += 3.0
    clock.charge(50.0)
    with clock.held():
        time.now += 20.0
    assert (clock.used, clock.infra_seconds) == (3.0, 20.0)


def test_it_is_let_go_when_the_wait_ends_in_an_error(time: Time) -> None:
    clock = AgentClock(10.0, time)
    with pytest.raises(OSError, match="gone"), clock.held():
        time.now += 5.0
        raise OSError("gone")
    time.now += 1.0
    assert (clock.used, clock.infra_seconds) == (1.0, 5.0)


def test_it_cannot_be_held_twice_at_once(time: Time) -> None:
    clock = AgentClock(10.0, time)
    with clock.held():
        with pytest.raises(RuntimeError, match="already held"), clock.held():
            pass
        time.now += 5.0
    assert clock.infra_seconds == 5.0


async def test_it_expires_when_the_limit_is_used_up() -> None:
    async with asyncio.timeout(10):
        await AgentClock(0.05).expired()


async def test_it_never_expires_without_a_limit() -> None:
    expired = asyncio.ensure_future(AgentClock(None).expired())
    assert not (await asyncio.wait([expired], timeout=0.05))[0]
    expired.cancel()


async def test_it_does_not_expire_while_it_is_held(time: Time) -> None:
    clock = AgentClock(1.0, time)
    expired = asyncio.ensure_future(clock.expired())
    with clock.held():
        await asyncio.sleep(0)
        time.now += 100.0
        assert not (await asyncio.wait([expired], timeout=0.05))[0]
    time.now += 0.5
    assert not (await asyncio.wait([expired], timeout=0.05))[0]
    time.now += 0.6
    clock.charge(0.0)  # wakes it, as any turn does
    async with asyncio.timeout(10):
        await expired


async def test_a_charge_that_uses_the_limit_up_expires_it_at_once(time: Time) -> None:
    clock = AgentClock(60.0, time)
    expired = asyncio.ensure_future(clock.expired())
    with clock.held():
        time.now += 61.0
    await asyncio.sleep(0)
    assert not expired.done()
    clock.charge(60.5)
    async with asyncio.timeout(10):
        await expired
