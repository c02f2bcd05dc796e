"""The agent's clock: it runs while the agent thinks and acts, and stands still while others make it wait.

So load cannot make timeouts: time in a policy's queue, in a retry or for the host is recorded as lost to
infra instead. A request to the policy is made with the clock held, and only the generation is charged:

    with clock.held():
        completion = await ...
    clock.charge(completion.generate_seconds)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf


class AgentClock:
    """Counts an agent's own seconds against a limit (`None`: no limit).

    `infra_seconds` are the seconds during which it was held, less those that were charged.
    """

    def __init__(self, limit_sec: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self.limit_sec = inf if limit_sec is None else limit_sec
        self._now = now
        self._started = now()
        self._held_since: float | None = None
        self._held_seconds = 0.0
        self._charged = 0.0
        self._moved = asyncio.Event()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stand still inside the block. Not reentrant: an agent waits for one thing at a time."""
        if self._held_since is not None:
            raise RuntimeError("the agent's clock is already held")
        self._held_since = self._now()
        try:
            yield
        finally:
            self._held_seconds += self._now() - self._held_since
            self._held_since = None
            self._moved.set()

    def charge(self, seconds: float) -> None:
        """Charge the agent for seconds during which the clock was held (generation is its own thinking): at most
        for all of them."""
        self._charged = min(self._charged + max(0.0, seconds), self._held_now())
        self._moved.set()

    @property
    def infra_seconds(self) -> float:
        """Seconds lost to infra so far."""
        return self._held_now() - self._charged

    @property
    def used(self) -> float:
        """Seconds charged to the agent."""
        return self._now() - self._started - self.infra_seconds

    @property
    def remaining(self) -> float:
        """Seconds left; infinite without a limit, never below 0."""
        return max(0.0, self.limit_sec - self.used)

    async def expired(self) -> None:
        """Return once the limit is used up; never while the clock is held."""
        while True:
            self._moved.clear()
            if self._held_since is not None or self.limit_sec == inf:
                await self._moved.wait()
            elif self.remaining <= 0:
                return
            else:
                try:
                    async with asyncio.timeout(self.remaining):
                        await self._moved.wait()
                except TimeoutError:
                    continue

    def _held_now(self) -> float:
        running = 0.0 if self._held_since is None else self._now() - self._held_since
        return self._held_seconds + running
