"""When a model server is asked again, and when it is left alone."""

from __future__ import annotations

import asyncio
import time

import pytest

from rollcage.rollout.outcome import Cancelled, Evidence, PolicyError
from rollcage.rollout.policies import retry
from rollcage.rollout.policies.retry import Gate, retried


class Server:
    """Fails with each of `faults`, then answers. Knows when it was asked, and by how many at once."""

    def __init__(self, *faults: PolicyError, seconds: float = 0.0) -> None:
        self.faults = list(faults)
        self.asked: list[float] = []
        self.most = 0
        self.reached = asyncio.Event()
        self._now = 0
        self._seconds = seconds

    async def __call__(self) -> str:
        self.asked.append(time.monotonic())
        self.reached.set()
        self._now += 1
        self.most = max(self.most, self._now)
        await asyncio.sleep(self._seconds)
        self._now -= 1
        if self.faults:
            raise self.faults.pop(0)
        return "answer"


class NoticedGate(Gate):
    """Says when it was shut."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.was_shut = asyncio.Event()

    def shut_for(self, seconds: float) -> None:
        super().shut_for(seconds)
        self.was_shut.set()


def fault(error_class: str, status: int | None = None, retry_after: float | None = None) -> PolicyError:
    return PolicyError(error_class, error_class, Evidence(error_class, status=status), retry_after)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_SEC", 0.01)


@pytest.mark.parametrize(
    "passing",
    [
        fault("rate_limited", 429),
        fault("policy_unavailable", 503),
        fault("policy_unavailable"),
        fault("policy_error", 500),
        fault("policy_timeout", 504),
        fault("policy_timeout", 408),
    ],
    ids=str,
)
async def test_what_another_try_may_mend_is_tried_again(passing: PolicyError) -> None:
    server = Server(passing, passing, passing)
    got = await retried(server, Gate(1), within_sec=30)
    assert (got.value, got.tries) == ("answer", 4)
    assert got.waited >= 0.0


@pytest.mark.parametrize(
    "lasting",
    [
        fault("context_overflow", 400),
        fault("policy_refused", 401),
        fault("policy_error"),
        fault("policy_timeout"),
    ],
    ids=str,
)
async def test_what_another_try_cannot_mend_is_not(lasting: PolicyError) -> None:
    server = Server(lasting)
    with pytest.raises(PolicyError) as raised:
        await retried(server, Gate(1), within_sec=30)
    assert raised.value is lasting or raised.value.error_class == lasting.error_class
    assert len(server.asked) == 1


async def test_tries_end_in_time_and_the_last_failure_names_them_all() -> None:
    server = Server(fault("rate_limited", 429), *[fault("policy_unavailable", 503)] * 10_000)
    started = time.monotonic()
    with pytest.raises(PolicyError) as raised:
        await retried(server, Gate(1), within_sec=0.3)
    assert time.monotonic() - started < 5
    assert raised.value.error_class == "policy_unavailable"
    assert raised.value.evidence.message.startswith(f"{len(server.asked)} tries in ")
    assert len(server.asked) > 2


async def test_a_wait_that_the_server_asks_for_holds_for_everybody() -> None:
    gate = NoticedGate(100)
    server = Server(fault("rate_limited", 429, retry_after=0.4))
    first = asyncio.create_task(retried(server, gate, within_sec=30))
    await gate.was_shut.wait()
    others = [asyncio.create_task(retried(server, gate, within_sec=30)) for _ in range(20)]
    await asyncio.gather(first, *others)
    refused, *later = sorted(server.asked)
    assert min(later) - refused >= 0.4
    assert max(later) - min(later) > 0.02  # spread, not all at the moment when the gate opens


async def test_a_wait_longer_than_there_is_time_for_ends_the_turn_and_is_handed_on() -> None:
    gate = Gate(2)
    server = Server(fault("rate_limited", 429, retry_after=800))
    for tries in (1, 1):  # the second does not even ask
        with pytest.raises(PolicyError) as raised:
            await retried(server, gate, within_sec=5)
        assert raised.value.error_class == "rate_limited"
        assert raised.value.retry_after_sec == pytest.approx(800, abs=60)
        assert len(server.asked) == tries


async def test_a_wait_until_midnight_does_not_shut_the_gate_for_so_long() -> None:
    gate = Gate(1)
    with pytest.raises(PolicyError):
        await retried(Server(fault("rate_limited", 429, retry_after=86_400)), gate, within_sec=5)
    assert 800 < gate.opens_in <= 900


async def test_no_more_requests_are_out_than_there_are_slots() -> None:
    server, gate = Server(seconds=0.02), Gate(3)
    got = await asyncio.gather(*(retried(server, gate, within_sec=5) for _ in range(12)))
    assert server.most == 3
    assert max(answered.waited for answered in got) >= 0.04
    assert all(answered.seconds < answered.waited + 1 for answered in got)


async def test_a_request_that_is_called_off_gives_its_slot_back() -> None:
    gate = Gate(1)
    slow = Server(seconds=60)
    waiting = asyncio.create_task(retried(slow, gate, within_sec=5))
    await slow.reached.wait()
    waiting.cancel()
    async with asyncio.timeout(5):
        assert (await retried(Server(), gate, within_sec=5)).value == "answer"


async def test_nobody_waits_at_a_gate_that_is_called_off_and_answers_under_way_are_let_be() -> None:
    gate = NoticedGate(3)
    slow = Server(seconds=0.2)
    answered = asyncio.create_task(retried(slow, gate, within_sec=1000))
    await slow.reached.wait()
    refused = Server(fault("rate_limited", 429, retry_after=800))
    waiting = asyncio.create_task(retried(refused, gate, within_sec=1000))
    await gate.was_shut.wait()
    gate.call_off("enough")
    async with asyncio.timeout(60):
        for late in (waiting, asyncio.create_task(retried(Server(), gate, within_sec=1000))):
            with pytest.raises(Cancelled, match="enough"):
                await late
        assert (await answered).value == "answer"
    assert len(refused.asked) == 1
