"""Memory and CPUs of a host are waited for, in order, and never lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox import admission as admission_module
from rollcage.rollout.sandbox.admission import MIB, Admission, Need


def whole() -> Admission:
    return Admission(Need(memory_mb=1000, cpus=4))


async def test_who_does_not_fit_waits_until_somebody_leaves() -> None:
    admission = whole()
    await admission.admit(Need(600))
    second = asyncio.create_task(admission.admit(Need(600)))
    await asyncio.sleep(0)
    assert (second.done(), admission.waiting) == (False, 1)
    admission.release(Need(600))
    await second
    assert admission.used == Need(600)


async def test_cpus_are_counted_as_memory_is() -> None:
    admission = whole()
    await admission.admit(Need(10, 3))
    assert not admission.admit_now(Need(10, 2))
    assert admission.admit_now(Need(10, 1))


async def test_a_small_one_does_not_overtake_a_big_one() -> None:
    admission = whole()
    await admission.admit(Need(600))
    big = asyncio.create_task(admission.admit(Need(900)))
    await asyncio.sleep(0)
    small = asyncio.create_task(admission.admit(Need(100)))
    await asyncio.sleep(0)
    assert not small.done()
    assert not admission.admit_now(Need(1))
    admission.release(Need(600))
    await asyncio.gather(big, small)


async def test_one_past_the_whole_host_runs_alone() -> None:
    admission = whole()
    await admission.admit(Need(5000, 64))
    other = asyncio.create_task(admission.admit(Need(1)))
    await asyncio.sleep(0)
    assert not other.done()
    admission.release(Need(5000, 64))
    await other


async def test_who_holds_one_gets_a_second_at_once() -> None:
    admission = whole()
    await admission.admit(Need(1000))
    waiting = asyncio.create_task(admission.admit(Need(1)))
    await asyncio.sleep(0)
    await admission.admit(Need(500), at_once=True)
    admission.release(Need(1000))
    await waiting
    assert admission.used == Need(501)


async def test_those_who_are_called_off_take_nothing_with_them() -> None:
    """Hundreds that come, go and are cancelled in any order: in the end nothing is in use and nobody waits."""
    rng = random.Random(7)
    admission = whole()
    admitted = 0

    async def one() -> None:
        nonlocal admitted
        need = Need(rng.choice([10, 300, 700, 1500]), rng.choice([0, 1, 4]))
        await admission.admit(need)
        admitted += 1
        try:
            assert admission.used.memory_mb <= 1500
            await asyncio.sleep(rng.random() / 200)
        finally:
            admission.release(need)

    tasks = [asyncio.create_task(one()) for _ in range(300)]
    for task in rng.sample(tasks, 120):
        await asyncio.sleep(rng.random() / 500)
        task.cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks, return_exceptions=True)
    assert admission.waiting == 0
    assert (round(admission.used.memory_mb, 6), round(admission.used.cpus, 6)) == (0, 0)
    assert admitted >= 180


async def test_a_wait_asks_for_what_is_held_in_advance() -> None:
    asked = []
    admission = Admission(Need(100, 1), make_room=lambda: asked.append(1))
    await admission.admit(Need(100))
    assert not asked
    waiting = asyncio.create_task(admission.admit(Need(100)))
    await asyncio.sleep(0)
    assert asked
    waiting.cancel()


async def test_a_disk_that_fills_up_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "DISK_POLL_SEC", 0.01)
    free = [500 * MIB, 500 * MIB, 2000 * MIB]
    admission = Admission(
        Need(100, 1), free_disk=lambda: free.pop(0) if len(free) > 1 else free[0], least_disk_mb=1000
    )
    await admission.admit(Need(1))
    assert free == [2000 * MIB]


async def test_a_disk_that_stays_full_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_module, "DISK_POLL_SEC", 0.01)
    monkeypatch.setattr(admission_module, "DISK_WAIT_SEC", 0.05)
    admission = Admission(Need(100, 1), free_disk=lambda: 5 * MIB, least_disk_mb=1000)
    with pytest.raises(SandboxError, match=r"5 MiB left.*least_disk_mb asks for 1000") as raised:
        await admission.admit(Need(1))
    assert raised.value.error_class == "disk_full"
    assert admission.used == Need()
