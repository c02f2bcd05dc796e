"""Ties the lives of an engine's processes, and what they leave, to ours.

An engine's processes do not notice that the process which started them was killed: they go on, with their
memory, and with the answers that they were at. A shell that waits on a pipe from us does notice, and kills them. It is
nobody's child, for Ray kills the children of an actor that it ends.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_WAIT_AND_KILL = r"""
exec 3<&0 </dev/null
scratch=$1; shift
{
    shared=
    while read -r file <&3; do
        [ "$file" ] || exit
        shared="$shared $file"
    done
    kill -9 "$@"
    [ "$scratch" ] || exit
    for round in 1 2 3 4 5 6 7 8 9 10; do
        found=
        for process in /proc/[0-9]*; do
            grep -qzxF "TMPDIR=$scratch" "$process/environ" || continue
            found=1
            [ $round -lt 8 ] && grep -qF multiprocessing.resource_tracker "$process/cmdline" && continue
            kill -STOP "${process#/proc/}"
            shared="$shared $(grep -oE '/dev/shm/(psm_|sem[.]mp-|vllm_dist_)[^ ]+' "$process/maps")"
            kill -9 "${process#/proc/}"
        done
        [ "$found" ] || break
        sleep 0.1
    done
    set -f
    rm -f $shared
    rm -rf "$scratch"
} >/dev/null 2>&1 &
"""
"""A line names a file to be removed, an empty one means that all is let go of, and the pipe's end that we are gone.
What a process starts while the others are killed is found in the next round; one that is stopped makes nothing new
between the look at what it has and its end. Python's own process that removes what the others leave is let do so: it
knows also what somebody else's processes had who was faster with killing them."""

PULL_SEC = 60.0
"""What `Leash.pull` waits at most: on a busy machine a round over all processes takes seconds."""

_SHARED = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_dist_)\S+")
"""Names of Python's `multiprocessing`, and of the memory by which vLLM's workers on a CPU share tensors."""


class Leash:
    """While it is held, the processes `pids`, and those whose TMPDIR is `scratch`, are killed when ours ends, in
    whatever way; then `scratch` is removed, and the shared memory that those had."""

    def __init__(self, pids: Iterable[int] = (), *, scratch: Path | None = None) -> None:
        self._scratch = scratch
        over, theirs = os.pipe()  # the shell's end of it is closed when the shell has ended
        self._over = open(over, "rb", buffering=0)  # noqa: SIM115
        try:
            with subprocess.Popen(
                ["/bin/sh", "-c", _WAIT_AND_KILL, "rollcage-leash", str(scratch or ""), *map(str, pids)],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=(theirs,),
            ) as shell:
                self._held, shell.stdin = shell.stdin, None
        finally:
            os.close(theirs)

    def also(self, files: Iterable[Path]) -> None:
        """Remove these too: once a process is dead, what it had can no longer be seen."""
        self._tell("".join(f"{file}\n" for file in files))

    def drop(self) -> None:
        """Let go of the processes without killing them; for when they have ended."""
        self._tell("\n")
        if self._held is not None:
            with suppress(BrokenPipeError):
                self._held.close()
        self._over.close()

    def pull(self) -> None:
        """Kill what it holds now, with all that this leaves, and wait for that; it must have a `scratch`. Raises
        `TimeoutError` where that is still there after `PULL_SEC`, or its shell was killed before it was done."""
        assert self._scratch is not None, "its end is the sign"
        if self._held is not None:
            self._held.close()
        ended = select.poll()
        ended.register(self._over, select.POLLIN | select.POLLHUP)
        done = bool(ended.poll(PULL_SEC * 1000))
        self._over.close()
        if self._scratch.exists():
            why = "its shell was killed" if done else f"not done within {PULL_SEC:g} s"
            raise TimeoutError(f"processes of an engine, or {self._scratch}, are still there: {why}")

    def _tell(self, lines: str) -> None:
        if self._held is not None and not self._held.closed:
            with suppress(BrokenPipeError):  # somebody killed the shell
                self._held.write(lines.encode())
                self._held.flush()


def shared_memory(pid: int) -> set[Path]:
    """Files of shared memory and semaphores that a process has, which outlive it where it is killed. Empty where there
    is no such process."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {Path(found) for found in _SHARED.findall(maps)}
