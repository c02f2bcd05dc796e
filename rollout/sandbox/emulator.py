"""What a TTY prints, made into a screen: pyte's screen (`Grid`) behind a parser of our own.

pyte's parser keeps an unending escape sequence in memory, prints what it does not know, and fails on numbers that
a sequence does not take. This one drops all of that. Whatever bytes come, and however they are cut, the screen is
the same, memory is bounded, and a call of `work` takes no longer than it is told to.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable

from rollcage.rollout.sandbox.grid import Grid

HISTORY_LINES = 1000
SEQUENCE_CHARACTERS = 4096
"""An escape sequence longer than this is none."""
CUT_CHARACTERS = 1 << 14
"""From so much waiting output on, what would have scrolled out of the history before it is over is passed over."""

_TOKEN = re.compile(
    r"(?P<text>[^\x00-\x1f\x7f-\x9f]{1,4096})"
    r"|(?P<control>[\x00-\x1a\x1c-\x1f\x7f-\x9f])"
    r"|\x1b\[(?P<prefix>[<-?]*+)(?P<numbers>[0-;]*+)(?P<csi>[ -/]*+[@-~])"
    r"|(?P<string>\x1b[\]P^_X])"
    r"|\x1b(?P<escape>[ -/]*+[0-OQ-WYZ\\`-~])"
    r"|(?P<aborted>\x1b(?:\[[<-?]*+[0-;]*+)?+[ -/]*+(?=[^ -/@-~]))"
)
_STRING_END = re.compile(r"[\x07\x18\x1a\x1b\x9c]")
_PLAIN = re.compile(r"(?:[\x07-\x0a\x0d\x20-\x7e\xa0-\U0010ffff]+|\x1b\[[0-9;:]*m)+")
"""What only writes at the cursor and moves it to the right, to the line's start and down."""


class Emulator:
    """Takes what a TTY prints. `put` it, then call `work` until nothing is left; `grid` is the screen."""

    def __init__(self, columns: int, rows: int, *, history_lines: int = HISTORY_LINES) -> None:
        self.grid = Grid(columns, rows, history_lines)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._at = 0
        self._plain_to = 0
        self._in_string = False
        grid = self.grid
        self._controls: dict[str, Callable[[], None]] = {
            "\b": grid.backspace, "\t": grid.tab, "\n": grid.linefeed, "\v": grid.linefeed, "\f": grid.linefeed,
            "\r": grid.carriage_return, "\x0e": grid.shift_out, "\x0f": grid.shift_in,
        }  # fmt: skip
        self._escapes: dict[str, Callable[[], None]] = {
            "7": grid.save_cursor, "8": grid.restore_cursor, "D": grid.index, "E": grid.next_line,
            "H": grid.set_tab_stop, "M": grid.reverse_index, "c": grid.reset,
        }  # fmt: skip
        self._no_number: dict[str, Callable[[], None]] = {"s": grid.save_cursor, "u": grid.restore_cursor}
        self._one_number: dict[str, Callable[[int], None]] = {
            "@": grid.insert_characters, "A": grid.cursor_up, "B": grid.cursor_down, "C": grid.cursor_forward,
            "D": grid.cursor_back, "E": grid.cursor_down1, "F": grid.cursor_up1, "G": grid.cursor_to_column,
            "I": grid.tabs, "J": grid.erase_in_display, "K": grid.erase_in_line, "L": grid.insert_lines,
            "M": grid.delete_lines, "P": grid.delete_characters, "S": grid.scroll_up, "T": grid.scroll_down,
            "X": grid.erase_characters, "Z": grid.tabs_back, "`": grid.cursor_to_column, "a": grid.cursor_forward,
            "b": grid.repeat, "c": grid.report_device_attributes, "d": grid.cursor_to_line, "e": grid.cursor_down,
            "g": grid.clear_tab_stop, "n": grid.report_device_status,
        }  # fmt: skip
        self._two_numbers: dict[str, Callable[[int, int | None], None]] = {
            "H": grid.cursor_position, "f": grid.cursor_position, "r": grid.set_region,
        }  # fmt: skip

    def put(self, data: bytes) -> None:
        """Take the next bytes, wherever they were cut. What waits is the caller's to bound."""
        self._text = self._text[self._at :] + self._decoder.decode(data)
        self._at = self._plain_to = 0

    def work(self, seconds: float) -> bool:
        """Go on for about so long. True where more is left to do."""
        until = time.perf_counter() + seconds
        while self._step():
            if time.perf_counter() >= until:
                return True
        return False

    def lines(self) -> list[str]:
        """The screen's rows, each without the blanks at its end."""
        return [self.grid.text(y) for y in range(self.grid.lines)]

    def take_replies(self) -> bytes:
        """Answers that the programs wait for, to be given to them as input."""
        replies, self.grid.replies = self.grid.replies, b""
        return replies

    def _step(self) -> bool:
        text = self._text
        if self._at >= len(text):
            return False
        if self._in_string:
            end = _STRING_END.search(text, self._at)
            self._in_string = end is None
            # An escape ends a string, and begins what comes next.
            self._at = len(text) if end is None else end.end() - (end[0] == "\x1b")
            return True
        if len(text) - self._at > CUT_CHARACTERS and self._at >= self._plain_to:
            self._cut()
        token = _TOKEN.match(text, self._at)
        if token is None:
            if len(text) - self._at < SEQUENCE_CHARACTERS:
                return False
            self._at += 1
            return True
        self._at = token.end()
        kind = token.lastgroup
        if kind == "text":
            self.grid.draw(token[0])
        elif kind == "control":
            if control := self._controls.get(token[0]):
                control()
        elif kind == "csi":
            self._sequence(token["prefix"], token["numbers"], token["csi"])
        elif kind == "escape":
            self._escape(token["escape"])
        else:
            self._in_string = kind == "string"
        return True

    def _escape(self, text: str) -> None:
        if text[0] in "()" and len(text) == 2:
            self.grid.define_charset(text[1], text[0])
        elif escape := self._escapes.get(text):
            escape()

    def _sequence(self, prefix: str, numbers: str, final: str) -> None:
        if final == "m":
            return
        parts = re.split("[:;]", numbers)
        values = [min(int(part or "0"), 9999) for part in parts[:32]]
        if final in ("h", "l") and prefix in ("", "?"):
            self.grid.switch(values, final == "h", private=prefix == "?")
        elif prefix:
            return
        elif final == "!p":
            self.grid.switch([4], False, private=False)
            self.grid.switch([7, 25], True, private=True)
            self.grid.margins = None
        elif final in self._no_number:
            self._no_number[final]()
        elif final in self._one_number:
            self._one_number[final](values[0])
        elif final in self._two_numbers:
            self._two_numbers[final](values[0], values[1] if len(values) > 1 else None)

    def _cut(self) -> None:
        """Pass over lines that nobody could see any more: of what there was, nothing is left after one screen of
        line ends to reach the bottom, one to scroll out what the screen held, and a history of them."""
        plain = _PLAIN.match(self._text, self._at)
        if plain is None:
            return
        self._plain_to = end = plain.end()
        if self.grid.margins is not None:
            return
        for _ in range(2 * self.grid.lines + (self.grid.history.maxlen or 0)):
            end = self._text.rfind("\r\n", self._at, end)
            if end < 0:
                return
        self._at = end + 2
