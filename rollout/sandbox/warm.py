"""Sandboxes that are started ahead, for the rollouts that come next.

The scheduler says which they are (`expect`, in its order). One task keeps that many of each in stock while nobody
waits for room, so that the start of a container, a fifth of a second, is not on a rollout's way. What is in stock
gives way as soon as somebody has to wait, and one that has died meanwhile is never handed out.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rollcage.rollout.outcome import RolloutError

T = TypeVar("T")

LIFE_SEC = 600.0
"""One that nobody took for so long is replaced. Its PID 1 lives longer by as much."""

LINGER_SEC = 5.0
"""What is not expected any more is kept so long: the rollout that it was for may be on its way."""

FAILED_SEC = 10.0
"""After a start that failed, the next try. Rollouts start their own meanwhile and say what is wrong."""


@dataclass
class _Kept(Generic[T]):
    held: T
    since: float
    unwanted_since: float | None = None


class Stock(Generic[T]):
    """What is kept ready, by key. `start` makes one more, or None where there is no room for it now; `drop` takes one
    back, `alive` looks whether one may still be handed out."""

    def __init__(
        self,
        start: Callable[[Hashable], Awaitable[T | None]],
        alive: Callable[[T], Awaitable[bool]],
        drop: Callable[[T], None],
    ) -> None:
        self.handed_out = 0
        self.found_dead = 0
        self._start = start
        self._alive = alive
        self._drop = drop
        self._wanted: list[Hashable] = []
        self._kept: dict[Hashable, list[_Kept[T]]] = {}
        self._changed = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._paused_until = 0.0

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def expect(self, keys: Sequence[Hashable]) -> None:
        """These are wanted next, in this order, one for each time that a key is named."""
        self._wanted = list(keys)
        self._changed.set()
        if keys and (self._keeper is None or self._keeper.done()):
            self._keeper = asyncio.create_task(self._keep())

    async def take(self, key: Hashable, fit: Callable[[T], bool] = lambda _held: True) -> T | None:
        """The oldest one that is alive and fits; None where there is none."""
        while kept := self._kept.get(key):
            one = kept.pop(0)
            self._changed.set()
            try:
                if fit(one.held):
                    if await self._alive(one.held):
                        self.handed_out += 1
                        return one.held
                    self.found_dead += 1
            except BaseException:
                self._drop(one.held)
                raise
            self._drop(one.held)
        return None

    def give_way(self) -> None:
        """Drop everything, and start nothing for a while: somebody waits for the room."""
        self._paused_until = time.monotonic() + LINGER_SEC
        for kept in self._kept.values():
            while kept:
                self._drop(kept.pop().held)

    async def close(self) -> None:
        """Start no more, and drop what is there."""
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        self.give_way()

    async def _keep(self) -> None:
        while True:
            self._changed.clear()
            now = time.monotonic()
            self._drop_stale(now)
            missing = None if now < self._paused_until else self._missing()
            if missing is not None and await self._add(missing):
                continue
            try:
                async with asyncio.timeout(LINGER_SEC / 2):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _add(self, key: Hashable) -> bool:
        try:
            held = await self._start(key)
        except RolloutError:
            # Who needs one will meet the same and say so in its record.
            self._paused_until = time.monotonic() + FAILED_SEC
            return False
        if held is None:
            self._paused_until = time.monotonic() + LINGER_SEC
            return False
        if time.monotonic() < self._paused_until:
            self._drop(held)
            return False
        self._kept.setdefault(key, []).append(_Kept(held, time.monotonic()))
        return True

    def _missing(self) -> Hashable | None:
        have = {key: len(kept) for key, kept in self._kept.items()}
        for key in self._wanted:
            if not have.get(key):
                return key
            have[key] -= 1
        return None

    def _drop_stale(self, now: float) -> None:
        wanted = Counter(self._wanted)
        for key, kept in list(self._kept.items()):
            for index, one in enumerate(list(kept)):
                if index < wanted[key]:
                    one.unwanted_since = None
                elif one.unwanted_since is None:
                    one.unwanted_since = now
                lingered = one.unwanted_since is not None and now - one.unwanted_since > LINGER_SEC
                if lingered or now - one.since > LIFE_SEC:
                    kept.remove(one)
                    self._drop(one.held)
            if not kept:
                del self._kept[key]
