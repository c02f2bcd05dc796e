"""The processes of vLLM's engines, and engines that are slower than they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

NAME = "VLLM::EngineCor"
"""As much of an engine's name as the kernel keeps. The rest is looked up in its command line, if at all."""

SEEN_SEC = 120.0
"""An engine that has ended by itself is started again meanwhile."""

RUNS_SEC, HELD_SEC = 0.02, 0.2


def engines(below: int | None = None) -> list[psutil.Process]:
    """vLLM's engines below this process, or the one with this number. On a busy machine one may be missing."""
    return [
        child for child in psutil.Process(below).children(recursive=True) if _name(child).startswith(NAME)
    ]


def all_engines(
    count: int, *, below: int | None = None, but: Iterable[psutil.Process] = ()
) -> list[psutil.Process]:
    """The same, once all `count` are seen that there are beside `but`."""
    until = time.monotonic() + SEEN_SEC
    while len(found := set(engines(below)) - set(but)) != count:
        assert time.monotonic() < until, [
            (child.pid, _name(child)) for child in psutil.Process(below).children(recursive=True)
        ]
        time.sleep(0.05)
    return list(found)


@contextmanager
def slowed(processes: Iterable[psutil.Process]) -> Iterator[None]:
    """Inside, they run a tenth of the time, so that they are met at their work on a machine that is busy, too."""
    slow, over = list(processes), threading.Event()

    def hold() -> None:
        while not over.wait(RUNS_SEC):
            for process in slow:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
            over.wait(HELD_SEC)
            for process in slow:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    holding = threading.Thread(target=hold, name="slowed")
    holding.start()
    try:
        yield
    finally:
        over.set()
        holding.join()


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""
