"""One program run apart from any shell, by an `exec` of the engine.

A `sh` of the sandbox runs it and says when it is done, as the shells do: what the program leaves in the
background may hold the exec's streams open for ever.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from rollcage.rollout.sandbox.base import CommandResult
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.output import STDERR, STDOUT, HeadTail, Scanner, demultiplex

END_SEC = 2.0
"""From killing a program that ran out of time to giving up on the rest of its output."""

_RUN = (
    'rc_word=$1; shift; printf "%s pid %s\\n" "$rc_word" $$; "$@"; rc_code=$?; '
    'printf "%s code %s\\n" "$rc_word" $rc_code; printf "%s code %s\\n" "$rc_word" $rc_code >&2'
)


async def run_program(
    engine: Engine,
    container_id: str,
    argv: Sequence[str],
    settings: dict[str, Any],
    timeout: float | None,
    output_bytes: int,
) -> CommandResult:
    """Run `argv` and wait. `settings` are more arguments of docker-py's `exec_create`.

    After `timeout` seconds the program and what shares its process group are killed. `exit_code` is None then,
    and where the stream ended without a word. Raises `SandboxError`.
    """
    word = secrets.token_hex(16).encode()
    run = ["/bin/sh", "-c", _RUN, "sh", word.decode(), *argv]
    began = time.monotonic()
    made = await engine.call("create an exec", lambda api: api.exec_create(container_id, run, **settings))
    reader, writer = await engine.exec_stream(made["Id"])
    program = _Program(word, output_bytes)
    timed_out = False
    try:
        ended = asyncio.create_task(program.read(reader))
        try:
            done, _ = await asyncio.wait([ended], timeout=timeout)
            timed_out = not done
            if timed_out and program.pid:
                kill = ["/bin/sh", "-c", f"kill -9 -{program.pid}"]
                killer = await engine.call(
                    "create an exec", lambda api: api.exec_create(container_id, kill, user="0")
                )
                await engine.call("start an exec", lambda api: api.exec_start(killer["Id"]))
                await asyncio.wait([ended], timeout=END_SEC)
        finally:
            ended.cancel()
            await asyncio.wait([ended])
    finally:
        writer.close()
    return CommandResult(
        exit_code=None if timed_out else program.code,
        stdout=program.outputs[STDOUT].bytes(),
        stderr=program.outputs[STDERR].bytes(),
        seconds=time.monotonic() - began,
        timed_out=timed_out,
        omitted_bytes=sum(output.omitted for output in program.outputs.values()),
    )


class _Program:
    """What is read of one program: its process id in the sandbox, its output, its exit code."""

    def __init__(self, word: bytes, output_bytes: int) -> None:
        self.pid = 0
        self.code: int | None = None
        self.outputs = {STDOUT: HeadTail(output_bytes), STDERR: HeadTail(output_bytes)}
        self._complete: set[int] = set()
        self._done = asyncio.Event()
        self._scanners = {}
        for stream, output in self.outputs.items():
            scanner = Scanner(word, partial(self._hear, stream))
            scanner.sink = output
            self._scanners[stream] = scanner

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Read until both streams are complete, or at their end."""
        reading = asyncio.create_task(demultiplex(reader, self._feed))
        done = asyncio.create_task(self._done.wait())
        try:
            await asyncio.wait([reading, done], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            done.cancel()
            await asyncio.wait([reading, done])
            for stream, scanner in self._scanners.items():
                if stream not in self._complete:
                    scanner.flush()

    def _feed(self, stream: int, data: bytes) -> None:
        if stream in self._scanners and stream not in self._complete:
            self._scanners[stream].feed(data)

    def _hear(self, stream: int, _word: bytes, rest: bytes) -> None:
        kind, _, value = rest.partition(b" ")
        if not value.isdigit():
            return
        if kind == b"pid":
            self.pid = int(value)
            return
        self.code = int(value)
        self._complete.add(stream)
        self._scanners[stream].sink = HeadTail(0)
        if len(self._complete) == len(self._scanners):
            self._done.set()
