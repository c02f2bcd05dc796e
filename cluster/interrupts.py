"""Ctrl-C and SIGTERM: the first Ctrl-C calls off what runs, the second hurries it, SIGTERM does both at once.

All of them clean up. Ray's own processes do not see a terminal's Ctrl-C, so hosts and policies are there for
that; a SIGTERM to the whole process group ends them with this process, which then does it by itself.
What must not be cut short, Ray's own start and end, is waited for in `Interrupts.held`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)

TAKE_BACK_SEC = 0.02
"""How long a signal may be another's, where that one has taken it."""


class Interrupts:
    """Inside the block a signal cancels the block's task, or does what `then` says. Enter it in a coroutine.
    `count` is how many signals came."""

    def __init__(self, say: Callable[[str], None]) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.count = 0
        self._say = say
        self.then(task.cancel, "interrupted: cleaning up")

    def then(self, call_off: Callable[[], object], first: str) -> None:
        """From now on a signal calls `call_off` instead; the first one says `first`."""
        self._call_off, self._first = call_off, first

    async def held(self, work: asyncio.Future[T]) -> T:
        """What `work` gives, waited for to its end: a signal meanwhile is told at once and calls off then.

        Ray takes SIGTERM in C where it starts, and gives it back to the kernel where it ends, so it is taken
        again and again.
        """
        call_off, before = self._call_off, self.count
        self._call_off = lambda: None
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=TAKE_BACK_SEC)
                self._take()
        finally:
            self._call_off = call_off
        if self.count > before:
            call_off()
        return work.result()

    def __enter__(self) -> Self:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._take()
        return self

    def _take(self) -> None:
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, self._interrupted, number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _interrupted(self, number: signal.Signals) -> None:
        self.count += 1
        if number is signal.SIGTERM:
            self._say("terminated: cancelling what runs and cleaning up")
            self._call_off()
        elif self.count == 1:
            self._say(self._first)
        else:
            self._say("interrupted again: cancelling what runs and cleaning up")
        self._call_off()
