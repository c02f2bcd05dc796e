"""The host's end of one supervised shell: frames go down, output and statements come up.

At the other end is `supervisor.sh`. Its child takes blocks: texts that it evaluates, each behind a line that
numbers the child. A child that has just been forked is `plain`: nothing but our own text has run in it, in the
memory of a process that is older than the agent. `become` replaces it by the agent's shell, which runs
`shell_loop.sh` and takes frames, one a command.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files

from rollcage.rollout.sandbox.base import OUTPUT_BYTES
from rollcage.rollout.sandbox.output import STDERR, STDOUT, HeadTail, Scanner, demultiplex

INTERRUPT, CLEAR, REPORT = 43, 44, 45
"""Signals that a supervisor has traps for: real-time ones, which no program sends by habit. Sent from inside
they do no more than an agent could do without them: end its own command, or all its own processes."""

_BOOT = (
    'unset BASH_ENV ENV; export rc_text="$1" rc_loop="$2" rc_seconds="$3"; '
    "command -v bash >/dev/null && exec bash -c 'eval \"$rc_text\"' bash; "
    "exec /bin/sh -c 'eval \"$rc_text\"' sh"
)
"""The scripts come as arguments and become variables, because a shell reads a pipe byte by byte, and because an
agent that lists processes is to see short lines."""

_MARKS = 1 << 40
"""Commands are numbered from here, as a soft limit in KiB on the resident set: far above any memory, because
GNU sort, for one, looks at it."""
_STATUS = re.compile(rb"[0-9]{1,3}")
_STATEMENT = re.compile(rb"ready \d+ (bash|sh)|ended \d+ \d+ \d+ [01]|interrupted|oom \d+")
_STAND_INS = tuple(bytes([byte]) for byte in (*range(0x1E, 0x0D, -1), *range(8, 1, -1)))


def supervisor_argv(seconds: float | None) -> list[str]:
    """The program that a link has at its other end, with stdin open and no TTY. With `seconds` it is PID 1 and
    ends by itself after these."""
    limit = "" if seconds is None else str(max(1, round(seconds)))
    return ["/bin/sh", "-c", _BOOT, "sh", _script("supervisor.sh"), _script("shell_loop.sh"), limit]


def quoted(data: bytes) -> bytes:
    """`data`, which holds no newline, as one word of a frame. A shell's strings hold no NUL: it is left out."""
    return b"'" + data.replace(b"\0", b"").replace(b"'", b"'\\''") + b"'"


def _command(text: bytes) -> bytes:
    """The part of a frame, which is one line, that sets `rc_command`."""
    if b"\n" not in text:
        return b"rc_command=" + quoted(text)
    stand_in = next((byte for byte in _STAND_INS if byte not in text), None)
    if stand_in is None:
        return b"rc_command=" + quoted(text).replace(b"\n", b"'\"$rc_newline\"'")
    return b"rc_command=%b; rc_join '%b'" % (quoted(text.replace(b"\n", stand_in)), stand_in)


class LinkClosed(Exception):
    """The stream has ended: the supervisor, its container or the engine is gone."""


@dataclass
class Command:
    """One command in hand. `exit_code` is None where it did not end by itself, `shell_ended` where the shell
    ended before both streams were complete."""

    word: bytes
    number: int
    exit_code: int | None = None
    shell_ended: bool = False
    shell_exit_code: int | None = None
    stdout: HeadTail | None = None
    stderr: HeadTail | None = None

    @property
    def done(self) -> bool:
        """Both streams are complete."""
        return self.stdout is not None and self.stderr is not None


class Link:
    """One stream to a supervisor. `lock` is held by whoever has something running on it.

    `command` is the command in hand; one that is still there when the lock is free was abandoned.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.lock = asyncio.Lock()
        self.command: Command | None = None
        self.owner: object = None
        """Whose environment the shell has."""
        self.plain = True
        self.exposed = False
        """A plain child, whose memory is a copy of its parent's, has stood beside an agent's processes: one of them may
        have read the secret there, and then a statement is nobody's word."""
        self.closed = False
        self.ready = False
        self.pid = 0
        self.has_bash = False
        self.interrupts = 0
        self.clears = 0
        self.reports = 0
        self.oom_kills = 0
        self._number = 1
        self._ended = {STDOUT: 0, STDERR: 0}
        self._mark = _MARKS
        self._key = secrets.token_hex(16).encode()
        self._scanners = {
            stream: Scanner(self._key, partial(self._hear, stream)) for stream in (STDOUT, STDERR)
        }
        self._waiters: list[asyncio.Future[None]] = []
        self._writer = writer
        self._reading = asyncio.create_task(self._read(reader))

    async def introduce(self) -> None:
        """Tell the supervisor the secret that it speaks with."""
        await self._send(self._key + b"\n")

    async def become_shell(self) -> None:
        """Have the plain child replace itself with the agent's shell."""
        block = f"rollcage {self._number}\nrc_become\n\n"
        self.plain = False
        self.owner = None
        await self._send(block.encode())

    async def put(self, text: str, output_bytes: int = OUTPUT_BYTES) -> Command:
        """Have our own `text`, which holds no empty line, evaluated in whatever the child is. The caller has
        the lock."""
        command = self.begin(output_bytes)
        if not self.plain:
            await self.send_frame(command, text.encode("utf-8", "surrogateescape"))
            return command
        statement = f"printf '%s %s\\n' {command.word.decode()} $rc_code"
        block = f"rollcage {self._number}\n{text}\nrc_code=$?\n{statement}\n{statement} >&2\n\n"
        await self._send(block.encode("utf-8", "surrogateescape"))
        return command

    async def ask(self, text: str, output_bytes: int = OUTPUT_BYTES) -> Command:
        """`put`, and wait until it is done."""
        command = await self.put(text, output_bytes)
        await self.until(lambda: command.done)
        self.command = None
        return command

    def begin(self, output_bytes: int = OUTPUT_BYTES) -> Command:
        """Take a command in hand. Output that has come since the last one will be the new one's."""
        self.command = command = Command(secrets.token_hex(16).encode(), self._number)
        for scanner in self._scanners.values():
            scanner.words = [self._key, command.word]
            scanner.sink = scanner.sink.resized(output_bytes)
        return command

    async def send_frame(self, command: Command, text: bytes, stdin: bytes = b"") -> None:
        """Send a command to the agent's shell. `stdin` is text of the frame that sets `rc_in`."""
        self._mark += 1
        mark = b"command ulimit -S -m %d 2>/dev/null || :" % self._mark
        given = stdin or b"rc_in=/dev/null"
        await self._send(b"rc_nonce=%b; %b; %b; %b\n" % (command.word, mark, given, _command(text)))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that the other end says. Raises `LinkClosed`."""
        while not condition():
            if self.closed:
                raise LinkClosed
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def unread(self) -> bytes:
        """Output that no command has taken."""
        return b"".join(scanner.sink.bytes() for scanner in self._scanners.values())

    async def close(self) -> None:
        """Let go of the stream: also where others hold a copy of its socket, as docker-py does for a while."""
        if not self.closed:
            with suppress(OSError):
                self._writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        self._writer.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _send(self, data: bytes) -> None:
        if self.closed:
            raise LinkClosed
        self._writer.write(data)
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise LinkClosed from error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            await demultiplex(reader, self._feed)
        finally:
            for stream, scanner in self._scanners.items():
                scanner.flush()
                if self.command is not None and getattr(self.command, _name(stream)) is None:
                    self.command.exit_code = None
                    self.command.shell_ended = True
                    self._complete(self.command, stream)
            self.closed = True
            self._wake()

    def _feed(self, stream: int, data: bytes) -> None:
        if scanner := self._scanners.get(stream):
            scanner.feed(data)

    def _hear(self, stream: int, word: bytes, rest: bytes) -> None:
        # An agent can learn a command's word, and says with it what it likes.
        command = self.command
        if word == self._key and _STATEMENT.fullmatch(rest):
            kind, *values = rest.decode().split()
            if kind == "ended":
                self._hear_end(command, stream, *map(int, values))
            elif stream == STDOUT:
                self._hear_word(kind, values)
        elif command is not None and word == command.word and _STATUS.fullmatch(rest):
            command.exit_code = int(rest)
            self._complete(command, stream)
        self._wake()

    def _hear_end(
        self, command: Command | None, stream: int, number: int, status: int, kills: int, cleared: int
    ) -> None:
        # The two streams are apart. Until both have brought this end, what the shell printed before it, the
        # ends of its commands among it, may still come, and must not be taken for the next command's output.
        if command is not None and number >= command.number and getattr(command, _name(stream)) is None:
            command.exit_code = None
            command.shell_ended = True
            command.shell_exit_code = status
            self._complete(command, stream)
        self._ended[stream] = number
        if min(self._ended.values()) >= self._number:
            self._number += 1
            self.plain = True
            self.owner = None
            self.oom_kills = kills
            self.clears += cleared
            self.exposed |= not cleared

    def _hear_word(self, kind: str, values: list[str]) -> None:
        if kind == "ready":
            self.ready = True
            self.pid, self.has_bash = int(values[0]), values[1] == "bash"
        elif kind == "interrupted":
            self.interrupts += 1
        elif kind == "oom":
            self.oom_kills = int(values[0])
            self.reports += 1

    def _complete(self, command: Command, stream: int) -> None:
        scanner = self._scanners[stream]
        setattr(command, _name(stream), scanner.sink)
        scanner.sink = HeadTail()
        scanner.words = [self._key]

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _name(stream: int) -> str:
    return "stdout" if stream == STDOUT else "stderr"


@cache
def _script(name: str) -> str:
    """A script of this package without its comments and empty lines."""
    lines = files(__package__).joinpath(name).read_text(encoding="utf-8").splitlines()
    kept = [line.strip() for line in lines]
    return "".join(f"{line}\n" for line in kept if line and not line.startswith("#"))
