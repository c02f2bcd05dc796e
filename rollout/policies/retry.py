"""Trying a model server again: when, how long, and never all at once.

`retried` makes one request until it is answered, or its failure is one that another try cannot mend, or its time for
tries is over. The last failure decides the class, and its evidence says how many tries there were.

All requests of one policy in one process pass one `Gate`. It bounds how many are out at once, and a server that
asks for a pause (`Retry-After`) shuts it for all of them: a storm is not answered by a storm. When it opens
again, those who waited go out spread over as long again as they were asked to wait. Once it is called off nobody
waits at it any more.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from rollcage.rollout.outcome import Cancelled, PolicyError

FIRST_PAUSE_SEC = 0.5
LONGEST_PAUSE_SEC = 30.0
"""A pause is drawn evenly from 0 to a bound that doubles with each try from the first of these to the second ("full
jitter": https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/)."""

LONGEST_SPREAD_SEC = 10.0

LONGEST_SHUT_SEC = 900.0
"""No server's `Retry-After` keeps all requests back for longer: some answer with the seconds until midnight."""

T = TypeVar("T")


@dataclass(frozen=True)
class Answered(Generic[T]):
    """What `retried` got. `seconds`: of the try that was answered; `waited`: all the time before it, earlier tries
    included."""

    value: T
    seconds: float
    waited: float
    tries: int


class Gate:
    """What one policy's requests in one event loop pass on their way out: at most `slots` at once, and none before the
    server's own `Retry-After` is over. Holds no thread and no task."""

    def __init__(self, slots: int, *, jitter: Callable[[], float] = random.random) -> None:
        self.slots = asyncio.Semaphore(slots)
        self.jitter = jitter
        self._opens_at = 0.0
        self._spread = 0.0
        self._over = asyncio.Event()
        self._why = ""

    def shut_for(self, seconds: float) -> None:
        """Let no request out for so long, `LONGEST_SHUT_SEC` at most. The longest wait that was asked for holds."""
        seconds = min(seconds, LONGEST_SHUT_SEC)
        opens_at = time.monotonic() + seconds
        if opens_at > self._opens_at:
            self._opens_at = opens_at
            self._spread = min(seconds, LONGEST_SPREAD_SEC)

    def call_off(self, why: str) -> None:
        """No request is to be tried again: whoever waits now, or would, gets `Cancelled` with `why`."""
        self._why = self._why or why
        self._over.set()

    async def wait(self, seconds: float) -> None:
        """Wait before a try. Raises `Cancelled` as soon as that is called off."""
        try:
            async with asyncio.timeout(seconds):
                await self._over.wait()
        except TimeoutError:
            return
        raise Cancelled(self._why)

    @property
    def opens_in(self) -> float:
        """Seconds until a request may go out; 0 where it may now."""
        return max(0.0, self._opens_at - time.monotonic())

    @property
    def pause(self) -> float:
        """Seconds that one request is to wait: until the gate is open, and its own part of the spread."""
        opens_in = self.opens_in
        return opens_in + self._spread * self.jitter() if opens_in else 0.0


async def retried(call: Callable[[], Awaitable[T]], gate: Gate, *, within_sec: float) -> Answered[T]:
    """What `call` returns, once it does.

    `call` makes one request, and names its failure as a `PolicyError`. Another try begins at most `within_sec` after
    the first failure (or after the gate was first found shut), and never where the server asks for a longer
    wait than is left. Raises the last `PolicyError`; that of a gate which stays shut is `rate_limited`. Raises
    `Cancelled` where it waits at a gate that is called off.
    """
    begun = time.monotonic()
    until: float | None = None
    tries = 0
    while True:
        if pause := gate.pause:
            until = until or time.monotonic() + within_sec
            if time.monotonic() + gate.opens_in > until:
                raise _shut(gate, tries, time.monotonic() - begun)
            await gate.wait(pause)
            continue
        async with gate.slots:
            if gate.opens_in:  # shut while this one waited for its slot
                continue
            tries += 1
            started = time.monotonic()
            try:
                value = await call()
                return Answered(value, time.monotonic() - started, started - begun, tries)
            except PolicyError as error:
                fault = error
        now = time.monotonic()
        until = until or now + within_sec
        asked = fault.retry_after_sec or 0.0
        if asked:
            gate.shut_for(asked)
        if not worth_another_try(fault) or now + asked > until:
            raise _with_tries(fault, tries, now - begun) from fault
        pause = min(LONGEST_PAUSE_SEC, FIRST_PAUSE_SEC * 2.0 ** min(tries - 1, 16)) * gate.jitter()
        if now + pause > until:
            raise _with_tries(fault, tries, now - begun) from fault
        await gate.wait(pause)


def worth_another_try(fault: PolicyError) -> bool:
    """Whether the same request may be answered later: the server was not there, asked for patience, or failed on its
    side. A request that ran out of our own time is not: it would again."""
    if fault.error_class in ("rate_limited", "policy_unavailable"):
        return True
    status = fault.evidence.status
    return (
        fault.error_class in ("policy_error", "policy_timeout")
        and status is not None
        and (status >= 500 or status == 408)
    )


def _with_tries(fault: PolicyError, tries: int, seconds: float) -> PolicyError:
    if tries == 1:
        return fault
    said = f"{fault.message} (the last of {tries} tries in {seconds:.0f} s)"
    evidence = replace(
        fault.evidence, message=f"{tries} tries in {seconds:.0f} s: {fault.evidence.message}", seconds=seconds
    )
    return PolicyError(fault.error_class, said, evidence, fault.retry_after_sec)


def _shut(gate: Gate, tries: int, seconds: float) -> PolicyError:
    said = (
        f"the model server asks for a wait of {gate.opens_in:.0f} s more, longer than a turn is tried again"
    )
    return _with_tries(
        PolicyError("rate_limited", said, retry_after_sec=gate.opens_in), max(tries, 1), seconds
    )
