"""A sandbox's storage budget, measured: Docker's own quota needs a filesystem that few hosts have.

The engine walks the container's writable layer, which takes time in proportion to its files. So the watch looks
again soon only where something grows. No single file can pass the budget meanwhile (`fsize`, see `hostconfig`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.engine import Engine

FIRST_SEC, SHORTEST_SEC, LONGEST_SEC = 5.0, 5.0, 60.0
COST_RATIO = 50
"""At most one part in so many of a sandbox's life is spent on measuring it."""


class StorageWatch:
    """Measures until stopped. Past `limit_bytes` it sets `exceeded` and awaits `stop_processes`, and again where more
    is written then, until `close_case`.

    `used_bytes` is the last measurement. It needs a running event loop from its making.
    """

    def __init__(
        self,
        engine: Engine,
        container_id: str,
        limit_bytes: int,
        stop_processes: Callable[[], Awaitable[None]],
        *,
        first_sec: float = FIRST_SEC,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.exceeded = False
        self._closed = False
        self._engine = engine
        self._id = container_id
        self._stop_processes = stop_processes
        self._first_sec = first_sec
        self._task = asyncio.create_task(self._watch())

    def close_case(self) -> None:
        """Whoever has exceeded it is done, and noted: what the verifier writes on top is no reason to stop it."""
        self._closed = self.exceeded

    async def stop(self) -> None:
        """Measure no more."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _watch(self) -> None:
        interval, allowed = self._first_sec, self.limit_bytes
        while True:
            await asyncio.sleep(interval)
            began, before = time.monotonic(), self.used_bytes
            # An engine that fails now may answer the next time; of a sandbox that is gone, whoever uses it is told.
            with suppress(SandboxError):
                self.used_bytes = await self._measure()
                if self.used_bytes > allowed and not self._closed:
                    self.exceeded = True
                    await self._stop_processes()
                    # What is there may stay; who goes on writing is stopped again.
                    allowed = self.used_bytes + self.limit_bytes // 10
            grown = self.used_bytes - before > self.limit_bytes // 100
            interval = SHORTEST_SEC if grown else min(LONGEST_SEC, 2 * interval)
            interval = max(interval, COST_RATIO * (time.monotonic() - began))

    async def _measure(self) -> int:
        """Bytes in the container's writable layer."""
        found = await self._engine.call(
            "measure a container",
            lambda api: api.containers(all=True, size=True, filters={"id": self._id}),
        )
        return int(found[0].get("SizeRw") or 0) if found else 0
