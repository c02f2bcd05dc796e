"""Tells the cluster's exporter what a source has counted, as long as it counts."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from ray.exceptions import RayError

from rollcage.metrics.counts import Snapshot

SEND_SEC = 2.0
"""Between two snapshots of a source: less than any scrape interval in use."""

ANSWER_SEC = 10.0
"""As long as an exporter that starts again may take; a snapshot that it has not taken by then is followed by a later
one anyway."""

AFTER_SEC = 2.0
"""As long as anybody is waited for whose Ray has ended: an actor that is there still answers at once, and nobody starts
another."""

_log = logging.getLogger(__name__)


@asynccontextmanager
async def telling(
    exporter: Any,
    source: str,
    snapshot: Callable[[], Awaitable[Snapshot]],
    *,
    of: str = "",
    final_sec: float = ANSWER_SEC,
    ended: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = _log.warning,
) -> AsyncIterator[None]:
    """Inside the block the exporter is told every `SEND_SEC` what `source` has counted, and once more at its end,
    where the exporter has `final_sec` to take it. `of`: a host's job. `ended`: whether its Ray is, see `AFTER_SEC`.

    An exporter that does not answer, or refuses the source, is said, once for each reason, and harms nobody: counting
    is no reason for a job to fail.
    """
    incarnation = secrets.token_hex(8)
    said: set[str] = set()

    async def tell(*, final: bool = False) -> None:
        within = AFTER_SEC if ended() else final_sec if final else ANSWER_SEC
        try:
            async with asyncio.timeout(within):
                why = await exporter.accept.remote(source, await snapshot(), incarnation, final, of)
        except TimeoutError:
            why = f"it does not answer within {within:g} s"
        except RayError as error:
            why = f"{type(error).__name__}: {error}"
        if why and why not in said:
            said.add(why)
            say(f"what {source} has counted is not, or not wholly, with the exporter: {why}")

    async def keep_telling() -> None:
        while True:
            await tell()
            await asyncio.sleep(SEND_SEC)

    task = asyncio.create_task(keep_telling())
    try:
        yield
    finally:
        task.cancel()
        [end] = await asyncio.gather(task, return_exceptions=True)
        if not isinstance(end, asyncio.CancelledError):
            say(f"what {source} counted was no longer told to the exporter: {end!r}")
        await tell(final=True)
