"""How many requests may be on one engine at once, by the use of its KV cache: a pure state machine.

A window of concurrent requests follows what the engine measures, never a constant:

    kv use below 0.6    the window grows in proportion, at most doubled, where it is what holds requests back
    0.6 to 0.8          it grows by one
    0.8 to 0.9          it holds
    from 0.9 on         it shrinks below what runs: nothing is aborted, but new requests wait until use falls

Requests in the engine's own queue say the same thing earlier: from 0.6 on they wait for cache, and the window shrinks
to what is in the batch; below, they wait for a place in the batch or for prefills before them, and it holds.

vLLM takes more than fits and then preempts: what it had computed of an answer is thrown away and computed again, and
prefixes that later turns need are evicted. Requests that wait here cost nothing.

Invariants:

- Requests are admitted in the order in which they came. The one exception, a request that must run alone among its
  kind, is passed only until the one of its kind before it has ended.
- With nothing running the first one goes, whatever was measured: there is no deadlock.
"""

from __future__ import annotations

from collections import OrderedDict

GROW_BELOW = 0.6
HOLD_FROM = 0.8
SHED_FROM = 0.9

FIRST_WINDOW = 32
"""Before anything was measured. A large engine has outgrown it after a measurement or two."""

SHED_TO = 0.9
"""What a window shrinks to at each measurement, as a part of what runs."""


class KvAdmission:
    """Which of an engine's requests may begin. Callers name requests by ids of their own."""

    def __init__(self) -> None:
        self.window = FIRST_WINDOW
        self.running: set[str] = set()
        self._waiting: OrderedDict[str, bool] = OrderedDict()
        self._alone: str | None = None
        self._held_back = False
        self._paused = False

    @property
    def waiting(self) -> int:
        """Requests that have not been admitted yet."""
        return len(self._waiting)

    def request(self, request_id: str, *, alone: bool = False) -> None:
        """A request has come. Of those with `alone`, at most one runs at a time. Raises `ValueError` for an id that is
        here already."""
        if request_id in self.running or request_id in self._waiting:
            raise ValueError(f"request {request_id!r} is here already")
        self._waiting[request_id] = alone

    def admit(self) -> list[str]:
        """The requests that may begin now, in order. Due after every other call."""
        admitted: list[str] = []
        if self._paused:
            return admitted
        for request_id, alone in list(self._waiting.items()):
            if self.running and len(self.running) >= self.window:
                self._held_back = True
                break
            if alone and self._alone is not None:
                continue
            del self._waiting[request_id]
            self.running.add(request_id)
            self._alone = request_id if alone else self._alone
            admitted.append(request_id)
        return admitted

    def ended(self, request_id: str) -> None:
        """A request has ended or been called off, admitted or not."""
        self._waiting.pop(request_id, None)
        self.running.discard(request_id)
        if self._alone == request_id:
            self._alone = None

    def measured(self, kv_use: float, queued: int = 0) -> None:
        """The engine's cache is in use by this much, 0 to 1, and so many requests are in its own queue."""
        held_back, self._held_back = self._held_back, False
        if kv_use >= SHED_FROM:
            self.window = max(1, min(self.window, int(len(self.running) * SHED_TO)))
        elif queued:
            if kv_use >= GROW_BELOW:
                self.window = max(1, min(self.window, len(self.running) - queued))
        elif held_back and kv_use < GROW_BELOW:
            factor = min(2.0, HOLD_FROM / max(kv_use, HOLD_FROM / 2))
            self.window = max(self.window + 1, int(self.window * factor))
        elif held_back and kv_use < HOLD_FROM:
            self.window += 1

    def pause(self) -> None:
        """Admit nothing until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Admit again."""
        self._paused = False
