"""A sign of life from a server while answers are awaited, however long they take.

A server that was stopped, or whose machine is gone, does not say so: its connections stay open and nothing comes.
Nor does one that is only slow. So while requests are out, one small question is asked now and then for all of
them. Two in a row without any answer, and the requests that are out are given up as `lost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from rollcage.rollout.outcome import PolicyError

PULSE_SEC = 30.0
"""A busy server's event loop answers late, by seconds; a minute of nothing is not that."""


@dataclass(eq=False)
class Watched:
    """One request. `clock` ends it; `lost` says that the server gave no sign of life."""

    clock: asyncio.Timeout
    lost: bool = False


class Pulse:
    """Asks `alive` every `every_sec` while anything is watched, and waits as long for the answer. `alive` raises
    `PolicyError` where none came. Holds one task while requests are out, none otherwise."""

    def __init__(self, alive: Callable[[], Awaitable[None]], *, every_sec: float = PULSE_SEC) -> None:
        self._alive = alive
        self._every_sec = every_sec
        self._watched: set[Watched] = set()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watches(self, clock: asyncio.Timeout) -> Iterator[Watched]:
        """Watch the server for the request that `clock`, already entered, bounds."""
        watched = Watched(clock)
        self._watched.add(watched)
        if self._task is None:
            self._task = asyncio.create_task(self._ask())
        try:
            yield watched
        finally:
            self._watched.discard(watched)
            if not self._watched and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _ask(self) -> None:
        missed: set[Watched] = set()
        while True:
            # A refused connection is no answer either, and takes no time: one moment's trouble ends nothing.
            await asyncio.sleep(self._every_sec / 10 if missed else self._every_sec)
            asked_for = set(self._watched)
            if await self._answers():
                missed = set()
                continue
            for watched in asked_for & missed & self._watched:
                watched.lost = True
                with suppress(RuntimeError):  # it is ending already
                    watched.clock.reschedule(asyncio.get_running_loop().time())
            missed = asked_for

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(self._every_sec):
                await self._alive()
        except (TimeoutError, PolicyError):
            return False
        return True
