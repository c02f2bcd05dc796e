"""A terminal in a Docker sandbox: a TTY of the engine, and its screen kept on our side.

What the TTY prints is emulated as it comes, in slices between which the event loop goes on. Nothing more is read
meanwhile, so that a program which floods its terminal waits for it, as it would for a real one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.base import (
    NEW_OUTPUT_BYTES,
    TERMINAL_COLUMNS,
    TERMINAL_ROWS,
    Screen,
    TerminalOutput,
)
from rollcage.rollout.sandbox.emulator import Emulator
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.keys import key
from rollcage.rollout.sandbox.output import HeadTail
from rollcage.rollout.sandbox.shell import START_SEC, Owner
from rollcage.rollout.sandbox.tty import Tty, open_tty, read_some

TERM = "xterm-256color"
SLICE_SEC = 0.002
"""Of emulation, before others have as much: no flood takes more than half of the event loop."""
LOOK_SEC = 0.01
"""At most so often a condition on the screen is looked at."""
SETTLE_SEC = 0.5
"""For the screen to catch up with what has been read."""
SEND_SEC = 5.0
"""For the stream to take keys."""
SEND_BYTES = 1 << 20
"""Of keys in one call."""
UNSENT_BYTES = 1 << 16
"""Of keys that no program has read, before more are refused."""
END_SEC = 5.0
"""From killing a terminal's shell to the end of its stream."""
LARGEST = 1000
"""Columns or rows."""


class DockerTerminal:
    """Implements `Terminal`. Calls may overlap.

    The object outlives its shell: whoever ended it, the next call starts a fresh one and what it returns says so.
    """

    def __init__(
        self,
        owner: Owner,
        engine: Engine,
        container_id: str,
        user: str,
        env: Mapping[str, str] | None = None,
        columns: int = TERMINAL_COLUMNS,
        rows: int = TERMINAL_ROWS,
    ) -> None:
        _check_size(columns, rows)
        self._owner = owner
        self._engine = engine
        self._id = container_id
        self._user = user
        self._env = {"TERM": TERM, **(env or {})}
        self._emulator = Emulator(columns, rows)
        self._new = HeadTail(NEW_OUTPUT_BYTES)
        self._column = 0
        self._note = ""
        self._tty: Tty | None = None
        self._started = False
        self._reading: asyncio.Task[None] | None = None
        self._behind = False
        self._printed_at = 0.0
        self._changed = asyncio.Event()
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        """Start the shell if it does not run."""
        await self._ready()

    async def send(self, keys: str | bytes) -> None:
        """See `Terminal.send`."""
        data = keys.encode("utf-8", "replace") if isinstance(keys, str) else keys
        if len(data) > SEND_BYTES:
            raise ValueError(f"{len(data)} bytes of keys in one call; at most {SEND_BYTES} are taken")
        writer = (await self._ready()).writer
        if writer.transport.get_write_buffer_size() > UNSENT_BYTES:
            raise ValueError("the terminal's program has not read the keys that were sent before")
        writer.write(data)
        # A stream that has ended says so at the next call.
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(SEND_SEC):
                await writer.drain()

    async def press(self, *names: str) -> None:
        """See `Terminal.press`."""
        application = self._emulator.grid.application_keys
        keys = {name: key(name, application=application) for name in names}
        unknown = [name for name, data in keys.items() if data is None]
        if unknown:
            raise ValueError(
                f"no key is called {unknown[0]!r}; names are tmux's, such as Enter, Up, C-c, M-x, F5"
            )
        await self.send(b"".join(keys[name] or b"" for name in names))

    async def screen(self) -> Screen:
        """See `Terminal.screen`."""
        await self._ready()
        await self._settle()
        return self._look(self._take_note())

    async def new_output(self, output_bytes: int = NEW_OUTPUT_BYTES) -> TerminalOutput:
        """See `Terminal.new_output`."""
        await self._ready()
        await self._settle()
        grid = self._emulator.grid
        new, self._new = self._new.resized(min(output_bytes, NEW_OUTPUT_BYTES)), HeadTail(NEW_OUTPUT_BYTES)
        column, self._column = self._column, grid.cursor.x
        note = self._take_note()
        text = await _as_shown(new, column, grid.columns, grid.lines)
        return TerminalOutput(text, new.omitted, note)

    async def history(self) -> Sequence[str]:
        """See `Terminal.history`."""
        await self._ready()
        await self._settle()
        return list(self._emulator.grid.history)

    async def wait(
        self,
        seconds: float,
        *,
        until: Callable[[Screen], bool] | None = None,
        quiet: float | None = None,
    ) -> bool:
        """See `Terminal.wait`."""
        await self._ready()
        began = time.monotonic()
        try:
            async with asyncio.timeout(seconds):
                while not self._ended:
                    changed = self._changed
                    if until is not None and until(self._look()):
                        return True
                    if quiet is None:
                        await changed.wait()
                    else:
                        left = max(began, self._printed_at) + quiet - time.monotonic()
                        if left <= 0:
                            return True
                        with suppress(TimeoutError):
                            await asyncio.wait_for(changed.wait(), left)
                    await asyncio.sleep(LOOK_SEC)
        except TimeoutError:
            return False
        return False

    async def resize(self, columns: int, rows: int) -> None:
        """See `Terminal.resize`."""
        _check_size(columns, rows)
        tty = await self._ready()
        grid = self._emulator.grid
        if (columns, rows) != (grid.columns, grid.lines):
            grid.resize(rows, columns)
            await tty.set_size(columns, rows)

    async def close(self) -> None:
        """See `Terminal.close`."""
        async with self._lock:
            tty = self._tty
            if tty is not None and not self._ended:
                await self._end(tty)
            await self._drop()

    async def forget(self) -> None:
        """Let go of the stream, of a shell that has been killed or will be. It is not waited for, because an
        engine holds on to a container whose terminal nobody reads."""
        if self._tty is not None:
            self._note = _replaced("all processes were stopped")
        await self._drop()

    @property
    def _ended(self) -> bool:
        return self._reading is None or self._reading.done()

    async def _ready(self) -> Tty:
        async with self._lock:
            if self._tty is not None and not self._ended:
                return self._tty
            if self._tty is not None and self._reading is not None:
                await self._reading
                if loss := await self._owner.loss():
                    raise loss
                code = await self._tty.exit_code()
                self._note = _replaced("it ended" if code is None else f"it ended with status {code}")
                await self._drop()
            grid = self._emulator.grid
            self._tty = tty = await self._open(grid.columns, grid.lines)
            self._emulator = Emulator(grid.columns, grid.lines)
            self._column = 0
            self._reading = asyncio.create_task(self._read(tty))
            return tty

    async def _open(self, columns: int, rows: int) -> Tty:
        try:
            async with asyncio.timeout(START_SEC):
                tty = await open_tty(self._engine, self._id, self._user, self._env, columns, rows)
        except TimeoutError:
            error_class = "agent_killed_sandbox" if self._started else "container_start"
            said = f"no terminal of the sandbox answers within {START_SEC:.0f} s"
            raise await self._owner.loss() or SandboxError(error_class, said) from None
        except SandboxError as error:
            if self._started and error.error_class == "container_config":
                error = SandboxError("agent_killed_sandbox", error.message, error.evidence)
            raise await self._owner.loss() or error from None
        self._started = True
        return tty

    async def _read(self, tty: Tty) -> None:
        """Emulate until the stream ends."""
        data = tty.said or await read_some(tty.reader)
        try:
            while data:
                self._new.add(data)
                self._printed_at = time.monotonic()
                self._emulator.put(data)
                self._behind = True
                while self._emulator.work(SLICE_SEC):
                    self._show(tty)
                    await asyncio.sleep(SLICE_SEC)
                self._behind = False
                self._show(tty)
                data = await read_some(tty.reader)
        finally:
            self._behind = False
            self._changed.set()

    def _show(self, tty: Tty) -> None:
        """Let those who wait look, and answer what programs ask the terminal."""
        replies = self._emulator.take_replies()
        if replies and tty.writer.transport.get_write_buffer_size() < UNSENT_BYTES:
            tty.writer.write(replies)
        self._changed.set()
        self._changed = asyncio.Event()

    def _look(self, note: str = "") -> Screen:
        grid = self._emulator.grid
        column = min(grid.cursor.x, grid.columns - 1)
        return Screen(tuple(self._emulator.lines()), grid.cursor.y, column, grid.columns, note)

    def _take_note(self) -> str:
        note, self._note = self._note, ""
        return note

    async def _settle(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_SEC):
                while self._behind:
                    await self._changed.wait()

    async def _end(self, tty: Tty) -> None:
        try:
            await tty.kill()
        except SandboxError:
            # No room for another process, or no container: `clear` needs none, or says so.
            await self._owner.clear()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=END_SEC)
        if not self._ended:
            await self._owner.clear()

    async def _drop(self) -> None:
        tty, self._tty = self._tty, None
        reading, self._reading = self._reading, None
        if tty is not None:
            tty.writer.close()
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])


async def _as_shown(new: HeadTail, column: int, columns: int, rows: int) -> str:
    """Output as it reads on an empty terminal whose cursor stands at `column`."""
    data = new.bytes()
    left_out = b"\n[... %d bytes left out ...]\n" % new.omitted
    # Whatever sequence was cut there ends, and no line runs on.
    data = data.replace(left_out, b"\x18" + left_out.replace(b"\n", b"\r\n"), 1)
    emulator = Emulator(columns, rows, history_lines=len(data) + 1)
    emulator.grid.cursor.x = min(column, columns)
    emulator.put(data)
    more = True
    while more:
        more = emulator.work(SLICE_SEC)
        await asyncio.sleep(0)
    lines = [*emulator.grid.history, *emulator.lines()]
    if not lines[0][:column].strip():
        lines[0] = lines[0][column:]
    return "\n".join(lines).rstrip("\n")


def _replaced(reason: str) -> str:
    return (
        f"[the terminal's shell was replaced because {reason}; directory and variables are as at the start]"
    )


def _check_size(columns: int, rows: int) -> None:
    if not (2 <= columns <= LARGEST and 2 <= rows <= LARGEST):
        raise ValueError(f"a terminal of {columns} columns and {rows} rows; each must be 2 to {LARGEST}")
