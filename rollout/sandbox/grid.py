"""The screen of a terminal as text: pyte's, with what that lacks.

Colours and other attributes are left out. Memory is bounded whatever is written.
"""

from __future__ import annotations

from collections import defaultdict, deque
from copy import copy
from functools import lru_cache
from unicodedata import normalize

from pyte import charsets, modes
from pyte.screens import Char, Cursor, Savepoint, Screen, StaticDefaultDict, wcwidth

CELL_CHARACTERS = 8
"""At most so many characters in one cell: a character and what combines with it."""
REPLY_BYTES = 256
"""Of answers to what programs ask the terminal, kept until they are taken."""

_BLANK = Char(" ")
_LETTERS = {chr(code): Char(chr(code)) for code in range(0x20, 0x7F)}

Row = StaticDefaultDict[int, Char]


class Grid(Screen):
    """pyte's `Screen` with an alternate screen, lines that scroll out kept as text in `history` (not those of the
    alternate screen), characters of any width, one saved cursor, and a resize that keeps the cursor's line."""

    def __init__(self, columns: int, rows: int, history_lines: int) -> None:
        self.history: deque[str] = deque(maxlen=history_lines)
        self.replies = b""
        self._main: _Main | None = None
        self._last = ""
        super().__init__(columns, rows)

    @property
    def alternate(self) -> bool:
        """The alternate screen is shown, as by vim and less."""
        return self._main is not None

    @property
    def application_keys(self) -> bool:
        """A program has asked for the cursor keys' other codes."""
        return 1 << 5 in self.mode

    def text(self, y: int) -> str:
        """One row without the blanks at its end."""
        row = self.buffer.get(y)
        return self._text(row) if row else ""

    def reset(self) -> None:
        """See `Screen.reset`."""
        self._main = None
        self.savepoints.clear()
        super().reset()

    def draw(self, data: str) -> None:
        """Write at the cursor."""
        charset = self.g1_charset if self.charset else self.g0_charset
        if charset is not charsets.LAT1_MAP:
            data = data.translate(charset)
        self._last = data[-1:]
        if not data.isascii() or modes.IRM in self.mode:
            for character in data:
                self._draw_one(character)
            return
        at = 0
        while at < len(data):
            self._wrap(1)
            x = self.cursor.x
            part = data[at : at + self.columns - x]
            self.buffer[self.cursor.y].update(zip(range(x, self.columns), map(_cell, part), strict=False))
            self.cursor.x = x + len(part)
            at += len(part)

    def repeat(self, count: int = 1) -> None:
        """Write the last character again, at most as often as a line has room."""
        self.draw(self._last * min(max(count, 1), self.columns))

    def index(self) -> None:
        """Move down, or scroll: what leaves the top goes into the history."""
        _, bottom = self.margins or (0, self.lines - 1)
        if self.cursor.y == bottom:
            self._scroll(1)
        else:
            self.cursor_down()

    def reverse_index(self) -> None:
        """Move up, or scroll the other way."""
        top, _ = self.margins or (0, 0)
        if self.cursor.y == top:
            self._scroll(-1)
        else:
            self.cursor_up()

    def cursor_up(self, count: int | None = None) -> None:
        """As far as the region's top, or the screen's where the cursor is above the region."""
        top, _ = self.margins or (0, 0)
        self.cursor.y = max(self.cursor.y - (count or 1), top if self.cursor.y >= top else 0)

    def cursor_down(self, count: int | None = None) -> None:
        """As far as the region's bottom, or the screen's where the cursor is below the region."""
        _, bottom = self.margins or (0, self.lines - 1)
        end = bottom if self.cursor.y <= bottom else self.lines - 1
        self.cursor.y = min(self.cursor.y + (count or 1), end)

    def scroll_up(self, count: int = 1) -> None:
        """Scroll the region; the cursor stays."""
        self._scroll(max(count, 1))

    def scroll_down(self, count: int = 1) -> None:
        """Scroll the region the other way."""
        self._scroll(-max(count, 1))

    def insert_lines(self, count: int | None = None) -> None:
        """At the cursor's, which goes to its start."""
        self._move_from_cursor(-(count or 1))

    def delete_lines(self, count: int | None = None) -> None:
        """From the cursor's on."""
        self._move_from_cursor(count or 1)

    def set_region(self, top: int = 0, bottom: int | None = None) -> None:
        """Scroll only these rows, counted from 1; without a number, all. The cursor goes home."""
        self.set_margins(top or None, bottom or None)
        self.cursor_position()

    def next_line(self) -> None:
        """To the start of the next line."""
        self.carriage_return()
        self.index()

    def tabs(self, count: int = 1) -> None:
        """Some tab stops on."""
        for _ in range(min(max(count, 1), self.columns)):
            self.tab()

    def tabs_back(self, count: int = 1) -> None:
        """Some tab stops back."""
        for _ in range(min(max(count, 1), self.columns)):
            self.cursor.x = max((stop for stop in self.tabstops if stop < self.cursor.x), default=0)

    def erase_in_display(self, how: int = 0, *args: int, **kwargs: bool) -> None:
        """See `Screen.erase_in_display`; 3 empties the history."""
        if how == 3:
            self.history.clear()
        below, above = how in (0, 2), how in (1, 2)
        for y in [y for y in self.buffer if (below and y > self.cursor.y) or (above and y < self.cursor.y)]:
            del self.buffer[y]
        self.erase_in_line(how)

    def erase_in_line(self, how: int = 0, private: bool = False) -> None:
        """See `Screen.erase_in_line`."""
        row, x = self.buffer[self.cursor.y], self.cursor.x
        right, left = how in (0, 2), how in (1, 2)
        for place in [place for place in row if (right and place >= x) or (left and place <= x)]:
            del row[place]

    def save_cursor(self) -> None:
        """Into the one place that there is."""
        super().save_cursor()
        del self.savepoints[:-1]

    def restore_cursor(self) -> None:
        """As often as one likes."""
        super().restore_cursor()
        if self.savepoints:
            return
        self.save_cursor()

    def switch(self, numbers: list[int], on: bool, *, private: bool) -> None:
        """Set or reset modes, of which these are known: insert, newline; application cursor keys, wrap, cursor,
        the alternate screen's."""
        for number in numbers:
            if private and number in (47, 1047, 1049):
                self._switch_screen(on, with_cursor=number == 1049)
            elif private and number == 1048:
                self.save_cursor() if on else self.restore_cursor()
            elif number in ((1, 7, 25) if private else (4, 20)):
                change = self.set_mode if on else self.reset_mode
                change(number, private=private)

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        """Rows that the cursor's needs room from go out at the top, others at the bottom."""
        lines, columns = lines or self.lines, columns or self.columns
        gone = max(0, self.cursor.y - lines + 1)
        if not self.alternate:
            self.history.extend(self.text(y) for y in range(gone))
        kept = {y - gone: row for y, row in self.buffer.items() if gone <= y < gone + lines}
        self.buffer.clear()
        self.buffer.update(kept)
        for row in kept.values():
            for x in [x for x in row if x >= columns]:
                del row[x]
        self.lines, self.columns, self.margins = lines, columns, None
        self.tabstops = set(range(8, columns, 8))
        self.cursor.y -= gone
        self.cursor.x = min(self.cursor.x, columns - 1)
        self.dirty.clear()

    def write_process_input(self, data: str) -> None:
        """An answer for the program."""
        if len(self.replies) < REPLY_BYTES:
            self.replies += data.encode()

    def _draw_one(self, character: str) -> None:
        width = wcwidth(character)
        if width == 0:
            self._combine(character)
        if width <= 0:
            return
        self._wrap(width)
        if modes.IRM in self.mode:
            self.insert_characters(width)
        row, x = self.buffer[self.cursor.y], self.cursor.x
        row[x] = _cell(character)
        if width == 2 and x + 1 < self.columns:
            row[x + 1] = _cell("")
        self.cursor.x = min(x + width, self.columns)

    def _wrap(self, width: int) -> None:
        if self.cursor.x + width <= self.columns:
            return
        if modes.DECAWM in self.mode:
            self.carriage_return()
            self.index()
        else:
            self.cursor.x = max(0, self.columns - width)

    def _combine(self, character: str) -> None:
        row = self.buffer[self.cursor.y]
        x = self.cursor.x - 1
        if x > 0 and row[x].data == "":
            x -= 1
        if x >= 0 and len(row[x].data) < CELL_CHARACTERS:
            row[x] = _cell(normalize("NFC", row[x].data + character))

    def _scroll(self, count: int) -> None:
        top, bottom = self.margins or (0, self.lines - 1)
        count = min(count, bottom - top + 1)
        if top == 0 and not self.alternate:
            self.history.extend(self.text(y) for y in range(count))
        self._move(top, bottom, count)

    def _move_from_cursor(self, count: int) -> None:
        top, bottom = self.margins or (0, self.lines - 1)
        if top <= self.cursor.y <= bottom:
            self._move(self.cursor.y, bottom, count)
            self.carriage_return()

    def _move(self, top: int, bottom: int, count: int) -> None:
        """Move rows up, or down; what leaves these bounds is gone."""
        rows = [(y, self.buffer.pop(y)) for y in list(self.buffer) if top <= y <= bottom]
        self.buffer.update((y - count, row) for y, row in rows if top <= y - count <= bottom)

    def _switch_screen(self, on: bool, *, with_cursor: bool) -> None:
        main = self._main
        if on and main is None:
            self._main = _Main(self.buffer, self.lines, self.columns, copy(self.cursor), self.savepoints)
            self.buffer = defaultdict(lambda: Row(_BLANK))
            self.savepoints = []
        elif not on and main is not None:
            lines, columns, cursor = self.lines, self.columns, self.cursor
            self._main = None
            self.buffer, self.lines, self.columns = main.buffer, main.lines, main.columns
            self.cursor, self.savepoints = main.cursor, main.savepoints
            if (lines, columns) != (main.lines, main.columns):
                self.resize(lines, columns)
            if not with_cursor:
                self.cursor = cursor
        self.margins = None

    def _text(self, row: Row) -> str:
        cells = [row[x].data for x in range(min(max(row) + 1, self.columns))]
        text = "".join(cells)
        if len(text) != len(cells) or not text.isascii():
            # Of a wide character that was half written over, nothing is shown.
            wide = [bool(cell) and wcwidth(cell[0]) == 2 for cell in cells]
            whole = [
                is_wide and following == ""
                for is_wide, following in zip(wide, [*cells[1:], None], strict=True)
            ]
            parts = []
            for x, cell in enumerate(cells):
                hole = (wide[x] and not whole[x]) or (cell == "" and not (x and whole[x - 1]))
                parts.append(" " if hole else cell)
            text = "".join(parts)
        return text.rstrip(" ")


class _Main:
    """What the alternate screen hides."""

    def __init__(
        self,
        buffer: dict[int, Row],
        lines: int,
        columns: int,
        cursor: Cursor,
        savepoints: list[Savepoint],
    ) -> None:
        self.buffer = buffer
        self.lines = lines
        self.columns = columns
        self.cursor = cursor
        self.savepoints = savepoints


@lru_cache(maxsize=1 << 14)
def _other_cell(data: str) -> Char:
    return Char(data)


def _cell(data: str) -> Char:
    return _LETTERS.get(data) or _other_cell(data)
