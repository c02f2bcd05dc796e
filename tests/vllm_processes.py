"""The processes of vLLM's engines, and engines that are slower than they are."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

RUNS_SEC, HELD_SEC = 0.02, 0.2


def engines(below: int | None = None) -> list[psutil.Process]:
    """vLLM's engines below this process, or the one with this number."""
    return [child for child in psutil.Process(below).children(recursive=True) if "EngineCore" in _name(child)]


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
