"""Ray is begun and ended in a thread of its own: no signal is raised inside it, and each is told at once.

    async with ray_in_a_thread(config.ray, interrupts) as connection:
        ...

One thread for both, for the kernel ends Ray's processes with the thread that started them. It is left behind where
Ray does not come back from its start, because its processes are gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from rollcage.cluster.config_model import RayConfig
from rollcage.cluster.errors import CouldNotRun
from rollcage.cluster.interrupts import Interrupts
from rollcage.cluster.own_ray import Connection, until_stuck
from rollcage.cluster.scratch import ray_files

T = TypeVar("T")


@asynccontextmanager
async def ray_in_a_thread(config: RayConfig, interrupts: Interrupts) -> AsyncIterator[Connection]:
    """`actors.connected`. Raises `CouldNotRun`, and `CancelledError` where a signal came meanwhile."""
    with ExitStack() as stack:
        files = stack.enter_context(ray_files()) if config.address is None else None

        def connect() -> tuple[AbstractContextManager[Connection], Connection]:
            from rollcage.cluster.actors import connected  # takes a second or two

            block = connected(config.address, num_cpus=config.num_cpus, files=files)
            return block, block.__enter__()

        thread = _Thread()
        stack.callback(thread.close)
        connecting = thread.run(connect)
        if files is not None:
            connecting = asyncio.ensure_future(_unless_stuck(connecting))
        try:
            block, connection = await interrupts.held(connecting)
        except CouldNotRun as error:
            if interrupts.count:
                raise asyncio.CancelledError from error
            raise
        try:
            await asyncio.sleep(0)  # where the job is called off that was interrupted meanwhile
            yield connection
        finally:
            await interrupts.held(thread.run(lambda: block.__exit__(None, None, None)))


async def _unless_stuck(connecting: asyncio.Future[T]) -> T:
    stuck = asyncio.create_task(until_stuck())
    both: set[asyncio.Future[Any]] = {connecting, stuck}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done():
            return connecting.result()
        raise CouldNotRun(
            "could not start Ray on this machine: its gcs_server or raylet was killed meanwhile"
        )
    finally:
        stuck.cancel()


class _Thread:
    """What it is given it does in order. The process does not wait for it."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        Thread(target=self._go, name="ray", daemon=True).start()

    def run(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """What `call` returns or raises."""
        future: Future[T] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001 -- Ray raises SystemExit, too
                future.set_exception(error)

        self._work.put(do)
        return asyncio.wrap_future(future)

    def close(self) -> None:
        """It ends after what it does."""
        self._work.put(None)

    def _go(self) -> None:
        while (do := self._work.get()) is not None:
            do()
