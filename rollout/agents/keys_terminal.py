"""Typing into a sandbox's terminal for an agent, and what the policy is shown of it.

What is shown is terminus-2's: all that stands behind what was last shown ("New Terminal Output"), beginning with the
line that the cursor was in, as tmux has it, or the screen where a program has redrawn it ("Current Terminal Screen").
Of more than the terminal's history holds, head and tail of the output are shown.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.keys_parser import Keystrokes, is_key
from rollcage.rollout.sandbox.base import TERMINAL_COLUMNS, TERMINAL_ROWS, Screen, Terminal
from rollcage.rollout.trajectory import CommandRecord, Turn

OUTPUT_BYTES = 10_000
"""What terminus-2 shows of a turn's output, half from the head and half from the tail."""
MAX_WAIT_SEC = 60.0
"""terminus-2's for one command."""
PROMPT_SEC = 5.0
"""For a shell to show a prompt; one that has none is not waited for longer."""
QUIET_SEC = 0.1
HISTORY_LINES = 1000
"""What a terminal keeps: a history of so many lines may have lost some."""


class Keyboard:
    """One step's terminal. `records` are in the trajectory before anything is typed, so that what was under way when
    the attempt ended is seen too. Calls raise `SandboxError` when the container is gone."""

    def __init__(self, context: AgentContext, terminal: Terminal, max_wait_sec: float = MAX_WAIT_SEC) -> None:
        self._context = context
        self._terminal = terminal
        self._max_wait_sec = max_wait_sec
        self._notes: list[str] = []
        self._came: list[str] = []
        self._omitted = 0
        self._shown: str | None = None
        self._history: Sequence[str] = ()
        self._line = ""

    @classmethod
    async def open(
        cls,
        context: AgentContext,
        *,
        columns: int = TERMINAL_COLUMNS,
        rows: int = TERMINAL_ROWS,
        max_wait_sec: float = MAX_WAIT_SEC,
    ) -> Keyboard:
        """The terminal of the step's user, once its shell shows a prompt."""
        terminal = await context.sandbox.terminal(context.step.agent_user, columns=columns, rows=rows)
        keyboard = cls(context, terminal, max_wait_sec)
        await keyboard._fresh()
        return keyboard

    async def type_all(self, turn: Turn, commands: Sequence[Keystrokes]) -> None:
        """Type what a turn asks for. Nothing more is typed once the shell was found to be another: what it was meant
        for is gone."""
        for command in commands:
            if not (await self._replaced() or await self.type(turn, command)):
                continue
            if left := len(commands) - len(turn.commands):
                self._notes.append(f"[the last {left} of {len(commands)} commands were not typed]")
            return

    async def type(self, turn: Turn, command: Keystrokes) -> bool:
        """Type one command and wait. True where the shell has ended meanwhile, and the next is typed into another."""
        note = "[the attempt ended while this was waited for]"
        record = CommandRecord(command.keys, None, "", "", 0.0, note=note, keys=True)
        turn.commands.append(record)
        self._context.emit(f"> {command.keys!r}, {command.seconds:g} s")
        began = time.monotonic()
        record.note = await self._send(command.keys)
        await self._terminal.wait(min(command.seconds, self._max_wait_sec))
        new = await self._terminal.new_output()
        record.seconds = time.monotonic() - began
        record.stdout, record.omitted_bytes = new.text, new.omitted_bytes
        self._came.append(new.text)
        self._omitted += new.omitted_bytes
        notes = [note for note in (record.note, new.note) if note]
        record.note = "\n".join(notes)
        self._notes += notes
        if new.note:
            await self._fresh()
        return bool(new.note)

    async def look(self, output_bytes: int = OUTPUT_BYTES) -> str:
        """What there is to see since the last look, cut to so many bytes."""
        await self._replaced()
        screen = await self._terminal.screen()
        history = await self._terminal.history()
        shown, omitted = self._new(screen, history), 0
        if shown is None:
            shown = f"Current Terminal Screen:\n{_rows(screen.lines)}"
        elif not shown:
            omitted = self._omitted
            shown = f"New Terminal Output:\n\n{self._continued()}\n"
        notes, self._notes = self._notes, []
        self._came, self._omitted = [], 0
        self._shown, self._history = _rows((*history, *screen.lines)), history
        self._line = screen.lines[screen.row].ljust(screen.column)[: screen.column]
        return "\n".join((*notes, limited(shown, output_bytes, omitted)))

    async def screen(self, output_bytes: int = OUTPUT_BYTES) -> str:
        """The screen, as it is shown to one who has seen nothing yet."""
        self._shown = None
        return await self.look(output_bytes)

    def _new(self, screen: Screen, history: Sequence[str]) -> str | None:
        """What stands behind what was last shown. Empty: that has scrolled out of the history; None: the screen was
        redrawn, or is shown for the first time."""
        if self._shown is None:
            return None
        shown, seen = _rows((*history, *screen.lines)), self._shown.strip()
        at, full = shown.find(seen), len(history) >= HISTORY_LINES
        if at < 0 and full:
            at, seen = 0, _still_there(seen, shown)
        if at >= 0 and seen:
            new = shown[at + max(0, seen.rfind("\n")) :]
            return f"New Terminal Output:\n{new}" if new.strip() else None
        return "" if full and list(history) != list(self._history) else None

    def _continued(self) -> str:
        """What was printed, behind the line in which it began."""
        came = "\n".join(self._came)
        return came if self._line and came.startswith(self._line.rstrip()) else self._line + came

    async def _send(self, keys: str) -> str:
        """A note where nothing was typed."""
        try:
            if is_key(keys):
                await self._terminal.press(keys)
            elif keys:
                await self._terminal.send(keys)
        except ValueError as refused:
            return f"[{keys[:40]!r} was not typed: {refused}]"
        return ""

    async def _replaced(self) -> bool:
        note = (await self._terminal.screen()).note
        if note:
            self._notes.append(note)
            await self._fresh()
        return bool(note)

    async def _fresh(self) -> None:
        """Wait until a shell that has just begun shows a prompt, which nobody has typed for."""
        self._shown = None
        await self._terminal.wait(PROMPT_SEC, until=lambda screen: bool(screen.text.strip()))
        await self._terminal.wait(PROMPT_SEC, quiet=QUIET_SEC)
        await self._terminal.new_output(0)


def limited(text: str, most: int, omitted: int = 0) -> str:
    """Head and tail of a text that has more than `most` bytes, in UTF-8; `omitted` have been left out of its middle
    before."""
    data = text.encode("utf-8", "replace")
    if len(data) <= most:
        return text
    head = data[: most // 2].decode("utf-8", "ignore")
    tail = data[len(data) - most // 2 :].decode("utf-8", "ignore")
    omitted += len(data) - len(head.encode()) - len(tail.encode())
    return f"{head}\n[... output limited to {most} bytes; {omitted} interior bytes omitted ...]\n{tail}"


def _still_there(seen: str, shown: str) -> str:
    """What is left of what was seen, where its first lines are lost; empty where fewer than two are left."""
    first = shown[: shown.find("\n") + 1]
    at = seen.find(first)
    while at >= 0:
        if (at == 0 or seen[at - 1] == "\n") and shown.startswith(seen[at:]) and "\n" in seen[at:]:
            return seen[at:]
        at = seen.find(first, at + 1)
    return ""


def _rows(lines: Sequence[str]) -> str:
    """As tmux has them: every row, also the empty ones at the end."""
    return "".join(f"{line}\n" for line in lines)
