"""What a server answers before a job is begun."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


def answer_of(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. Ctrl-C calls it off; where an event loop runs, it needs a thread of its own and goes on."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
