"""Waiting for what runs in a thread, and cannot be called off there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def to_its_end(work: asyncio.Future[T]) -> T:
    """What `work` gives. Cancelled, wait for its end all the same: it may have made something that must be
    removed."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        if not work.cancelled():
            work.exception()
        raise


async def in_thread(function: Callable[..., T], *args: object) -> T:
    """Run `function(*args)` in a thread, to its end."""
    return await to_its_end(asyncio.ensure_future(asyncio.to_thread(function, *args)))
