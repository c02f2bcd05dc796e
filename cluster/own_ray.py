"""A Ray that a job has started itself, seen from outside: by its processes, which no signal that ends them passes by.

Nothing here imports ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import psutil

from rollcage.cluster.errors import CouldNotRun

OWN = {"gcs_server", "raylet"}
"""The processes without which there is no Ray; nothing starts them again."""

LOOK_SEC = 0.5
"""Between two looks whether they are there."""

START_LOOK_SEC = 0.1
"""The same while they are started. One that ends at once is to be seen before Ray has taken note of its end."""

STUCK_SEC = 3.0
"""As long as a start may go on one of whose processes is gone. Ray finds out after a minute, and exits then."""

ENDED = (
    "Ray has ended on this machine under the job: something has killed its gcs_server or raylet (the kernel, where "
    "memory ran out?)"
)


class Connection:
    """To Ray. `processes` are those of a Ray that this process has started."""

    def __init__(self, processes: Sequence[psutil.Process] = ()) -> None:
        self._processes = processes

    @property
    def below(self) -> list[psutil.Process]:
        """What its processes have started: workers, agents."""
        found = []
        for one in self._processes:
            with suppress(psutil.NoSuchProcess):
                found += one.children(recursive=True)
        return found

    def ended(self) -> bool:
        """Whether a Ray that was started here is over, by a signal to all of a job's processes, say. Its actors are
        gone then, or about to go, and calls of it may wait for ever. A cluster that was joined may always come back.
        """
        return any(map(_is_over, self._processes))

    async def until_ended(self) -> None:
        """Return once it has."""
        while not self.ended():  # noqa: ASYNC110 -- Ray waits for its processes itself, and tells nobody
            await asyncio.sleep(LOOK_SEC)

    @asynccontextmanager
    async def needed(self) -> AsyncIterator[None]:
        """For what waits for an actor to start, which may be for ever where Ray has ended: `CouldNotRun` is raised
        inside the block then."""
        me = asyncio.current_task()
        assert me is not None
        over = False

        async def watch() -> None:
            nonlocal over
            await self.until_ended()
            over = True
            me.cancel()

        watching = asyncio.create_task(watch())
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:  # a call may have failed of it meanwhile
            if over and me.uncancel() == 0:
                raise CouldNotRun(ENDED) from error
            raise
        finally:
            watching.cancel()


def own_processes() -> list[psutil.Process]:
    """Those of the Ray that this process has started. An earlier one's, which nobody has waited for, are over."""
    return [one for one in _found() if not _is_over(one)]


async def until_stuck() -> None:
    """Return once a Ray that is being started here cannot come up any more: it had a process that is gone."""
    before, seen = await asyncio.to_thread(_found), set[psutil.Process]()
    while not any(map(_is_over, seen)):
        await asyncio.sleep(START_LOOK_SEC)
        seen.update(await asyncio.to_thread(_found))
        seen.difference_update(before)
    await asyncio.sleep(STUCK_SEC)


def _found() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if _name(child) in OWN]


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def _is_over(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
