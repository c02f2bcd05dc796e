"""Directories for temporary files that are this process's alone, and are removed when it was killed.

Each is locked for as long as its process lives, before it has the name by which it is looked for; the kernel lets
go of the lock however the process ends. Processes that it starts do not inherit the lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

VLLM = "rollcage-vllm-"
"""What a vLLM engine leaves while it runs: its sockets and rendezvous files, what it compiles."""

_NEW = "rollcage-new-"


def make_scratch(prefix: str, parent: str | Path | None = None) -> tuple[Path, int]:
    """A new directory, and the descriptor that keeps it locked. Raises `OSError`."""
    made = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
    lock = os.open(made, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return made.rename(made.parent / f"{prefix}{made.name.removeprefix(_NEW)}"), lock
    except BaseException:
        os.close(lock)
        shutil.rmtree(made, ignore_errors=True)
        raise


def remove_scratch(place: Path, lock: int) -> None:
    """Remove a directory of `make_scratch`."""
    shutil.rmtree(place, ignore_errors=True)
    os.close(lock)


def remove_abandoned(prefixes: Iterable[str]) -> None:
    """Remove the directories with these prefixes of processes on this machine that are gone."""
    folders = {Path(tempfile.gettempdir()), Path("/tmp")}
    for left in (left for prefix in prefixes for folder in folders for left in folder.glob(f"{prefix}*")):
        with suppress(OSError):  # it lives, or is another user's, or was removed meanwhile
            lock = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
