"""The names of the temporary directories that belong to one process (`rollout/scratch.py`)."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollcage.rollout import scratch
from rollcage.rollout.scratch import VLLM, make_scratch, remove_scratch

__all__ = ["RAY", "TASKS", "make_scratch", "ray_files", "remove_abandoned", "remove_scratch"]

TASKS, RAY = "rollcage-tasks-", "rollcage-ray-"


SOCKETS_BELOW = 20
"""Characters of a path below which Ray's sockets fit: a socket's path has at most 107, and 86 are Ray's and ours."""


@contextmanager
def ray_files() -> Iterator[Path]:
    """A directory for the files of a Ray that this process starts; gone with the block, and with it what processes
    have left that were killed: a host's, too."""
    place, lock = make_scratch(RAY, _short_temp())
    try:
        yield place
    finally:
        remove_scratch(place, lock)
        remove_abandoned()


def _short_temp() -> str:
    """The directory for temporary files, or /tmp where Ray's sockets would be too deep in that one."""
    return found if len(found := tempfile.gettempdir()) <= SOCKETS_BELOW else "/tmp"


def remove_abandoned() -> None:
    """Remove the directories of processes on this machine that are gone."""
    scratch.remove_abandoned((TASKS, RAY, VLLM))
