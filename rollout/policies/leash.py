"""Ties the lives of child processes to ours.

An engine's processes do not notice that the process which started them was killed: they go on, with their
memory, and with the answers that they were at. A shell that waits on a pipe from us does notice, and kills them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

_WAIT_AND_KILL = 'cat >/dev/null; kill -9 "$@" 2>/dev/null'


class Leash:
    """While it is held, the processes `pids` are killed when ours ends, in whatever way."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _WAIT_AND_KILL, "rollcage-leash", *map(str, pids)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def drop(self) -> None:
        """Let go of the processes without killing them; for when they have ended."""
        self._shell.kill()
        self._shell.wait()
        if self._shell.stdin is not None:
            self._shell.stdin.close()
