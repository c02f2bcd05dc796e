"""Who may have a sandbox now: memory and CPUs of a host, given out first come, first served.

What a sandbox may use at most (its kill limit) and what it counts for here (its reserve) are two things: agents
wait for a model most of the time. A host that is full is waited for and never fails a rollout.

Invariants:

- Nobody overtakes. A big need at the head waits until it fits, and one past the whole capacity until it is alone.
- Who holds a sandbox and needs another (a separate verifier) gets it at once, past the capacity if it must be:
  if it waited, all could wait for each other for ever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from rollcage.rollout.outcome import Evidence, SandboxError

DISK_WAIT_SEC = 120.0
"""How long a full disk is waited for: what others wrote goes with their sandboxes."""

DISK_POLL_SEC = 1.0

MIB = 1 << 20


@dataclass(frozen=True)
class Need:
    """What a sandbox counts for: MiB of memory and CPUs."""

    memory_mb: float = 0.0
    cpus: float = 0.0


class Admission:
    """`capacity` is what may be admitted at once. `free_disk` says how many bytes the engine's disk has left, None
    where that cannot be seen; below `least_disk_mb` MiB nobody new is admitted.

    `make_room` is called when somebody has to wait: it gives back what is held in advance.
    """

    def __init__(
        self,
        capacity: Need,
        *,
        free_disk: Callable[[], int | None] = lambda: None,
        least_disk_mb: int = 0,
        make_room: Callable[[], None] = lambda: None,
    ) -> None:
        self.capacity = capacity
        self.used = Need()
        self.free_disk = free_disk
        self._least_disk_mb = least_disk_mb
        self._make_room = make_room
        self._queue: deque[tuple[Need, asyncio.Future[None]]] = deque()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._queue)

    async def admit(self, need: Need, *, at_once: bool = False) -> None:
        """Wait for `need`, which `release` gives back. `at_once`: take it whether there is room or not.

        Raises `SandboxError` (`disk_full`) where the disk stays full for `DISK_WAIT_SEC`.
        """
        await self._room_on_disk()
        if at_once or self.admit_now(need):
            if at_once:
                self._take(need)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.append((need, turn))
        self._make_room()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(need)
            else:
                self._queue = deque(entry for entry in self._queue if entry[1] is not turn)
                self._serve()
            raise

    def admit_now(self, need: Need) -> bool:
        """Take `need` if there is room and nobody waits."""
        if self._queue or not self._fits(need):
            return False
        self._take(need)
        return True

    def release(self, need: Need) -> None:
        """Give back what was admitted, once."""
        self.used = Need(self.used.memory_mb - need.memory_mb, self.used.cpus - need.cpus)
        self._serve()

    def _serve(self) -> None:
        while self._queue and self._fits(self._queue[0][0]):
            need, turn = self._queue.popleft()
            if not turn.cancelled():
                self._take(need)
                turn.set_result(None)

    def _take(self, need: Need) -> None:
        self.used = Need(self.used.memory_mb + need.memory_mb, self.used.cpus + need.cpus)

    def _fits(self, need: Need) -> bool:
        return all(
            used + wanted <= capacity or used < _LEAST
            for used, wanted, capacity in (
                (self.used.memory_mb, need.memory_mb, self.capacity.memory_mb),
                (self.used.cpus, need.cpus, self.capacity.cpus),
            )
        )

    async def _room_on_disk(self) -> None:
        waited = 0.0
        while (free := self.free_disk()) is not None and free < self._least_disk_mb * MIB:
            self._make_room()
            if waited >= DISK_WAIT_SEC:
                said = (
                    f"the engine's disk has {free / MIB:.0f} MiB left after {waited:.0f} s of waiting, and "
                    f"sandbox.least_disk_mb asks for {self._least_disk_mb}: make room (rollcage gc --images)"
                )
                raise SandboxError("disk_full", said, Evidence(said, "rollcage"))
            await asyncio.sleep(DISK_POLL_SEC)
            waited += DISK_POLL_SEC


_LEAST = 1e-6
"""Below this nothing is in use, but for what floating point left."""
