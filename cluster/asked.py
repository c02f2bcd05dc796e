"""What a server answers before a job is begun, and what is said while it does not answer."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rich.console import Console

from rollcage.rollout.outcome import PolicyError

T = TypeVar("T")

Say = Callable[[str], None]

WORD_SEC = 2.0
"""A server that is there answers sooner; who waits for longer is told so."""

LOOK_SEC = 3.0
"""How long a look at the server's port may take."""

WRONG_URL = "nothing answers there: start the server, or correct `base_url`"


def teller(console: Console) -> Say:
    """Prints lines there, each as it stands."""

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    return say


def answer_of(
    work: Coroutine[Any, Any, T], url: str, *, within_sec: float, say: Say = lambda _line: None
) -> T:
    """What `work`, which asks the server at `url` for about `within_sec`, returns. `say` is told where it does not
    answer at once. Ctrl-C calls it off; where an event loop runs, it needs a thread of its own and goes on."""
    told = _told(work, url, within_sec, say)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(told)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, told).result()


def remedy(fault: PolicyError) -> str:
    """What to do about a server that failed, in brackets and behind a space; empty where it said something itself."""
    silent = fault.error_class == "policy_unavailable" and fault.evidence.status is None
    return f" ({WRONG_URL})" if silent else ""


async def _told(work: Coroutine[Any, Any, T], url: str, within_sec: float, say: Say) -> T:
    telling = asyncio.create_task(_tell(url, within_sec, say))
    try:
        return await work
    finally:
        telling.cancel()
        await asyncio.wait({telling})


async def _tell(url: str, within_sec: float, say: Say) -> None:
    await asyncio.sleep(WORD_SEC)
    say(
        f"{url} does not answer yet{await _why(url)}: waiting for it, up to {within_sec:.0f} s (Ctrl-C ends that)"
    )


async def _why(url: str) -> str:
    """Why no connection can be had, in brackets; empty where one can, and where a proxy stands before the server."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme in getproxies() and not proxy_bypass(host):
        return ""
    try:
        async with asyncio.timeout(LOOK_SEC):
            _, writer = await asyncio.open_connection(
                host, parts.port or (443 if parts.scheme == "https" else 80)
            )
    except OSError as error:
        known = error.errno is not None and error.errno > 0
        said = os.strerror(error.errno or 0) if known else error.strerror or str(error) or "no connection"
        return f" ({said})"
    writer.close()
    return ""
