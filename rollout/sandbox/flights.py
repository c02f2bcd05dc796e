"""Single flight: all who ask for the same thing while it is made wait for the same making of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from copy import copy
from typing import Any, Generic, TypeVar

from rollcage.rollout.outcome import BY_NAME, BuildError, Domain

T = TypeVar("T")


class Flights(Generic[T]):
    """What is being made, by key. One who is cancelled leaves the others theirs. A failure in the task's domain is
    remembered and given again; of others nothing is kept."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[T]] = {}
        self._failures: dict[str, BuildError] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._under_way

    async def join(self, key: str, make: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, bool]:
        """What `make` gives, and whether this call is the one that had it made. Raises what `make` raises, a
        `BuildError` of its own to each."""
        if key in self._failures:
            raise copy(self._failures[key])
        flight = self._under_way.get(key)
        first = flight is None
        if flight is None:
            flight = self._under_way[key] = asyncio.create_task(make())
            flight.add_done_callback(lambda done: self._landed(key, done))
        try:
            return await asyncio.shield(flight), first
        except BuildError as error:
            raise copy(error) from error

    async def close(self) -> None:
        """Cancel what is under way and wait for it."""
        flights = list(self._under_way.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)

    def _landed(self, key: str, flight: asyncio.Task[T]) -> None:
        del self._under_way[key]
        error = None if flight.cancelled() else flight.exception()
        if isinstance(error, BuildError) and BY_NAME[error.error_class].domain is Domain.TASK:
            self._failures[key] = error
