"""The screen that a terminal's output makes: the same however it is cut, and bounded whatever it is."""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcage.rollout.sandbox.emulator import Emulator
from rollcage.rollout.sandbox.keys import key

COLUMNS, ROWS, HISTORY = 20, 6, 30
ESC = "\x1b"
PIECES = st.sampled_from(
    [piece.encode() for piece in (
        "hello world ", "\r\n", "\n", "\t", "\b", "é", "日本", "\u0301", "\u200d", "²", "1", ";", "H", "J", "K",
        "m", "q",
        "\x0e", "\x0f", "\x18", "\x07", ESC, f"{ESC}[", f"{ESC}]0;", f"{ESC}P", f"{ESC}\\", f"{ESC}(0", f"{ESC}7",
        f"{ESC}8", f"{ESC}c", f"{ESC}M", f"{ESC}D", f"{ESC}[?1049h", f"{ESC}[?1049l", f"{ESC}[?47h", f"{ESC}[2;4r",
        f"{ESC}[r", f"{ESC}[4h", f"{ESC}[?7l", f"{ESC}[3b", f"{ESC}[3S", f"{ESC}[2T", f"{ESC}[6n", f"{ESC}[>c",
        f"{ESC}[5;9H", f"{ESC}[2L", f"{ESC}[M", f"{ESC}[3@", f"{ESC}[2P", f"{ESC}[4X", f"{ESC}[Z", f"{ESC}[2J",
        f"{ESC}[3J", f"{ESC}[1K", f"{ESC}[!p", f"{ESC}[?6h", f"{ESC}[?3h", f"{ESC}[99999999999L",
    )]
    + [b"\xff", b"\xc3", b"\xe6\x97", b"\x9b"]
)  # fmt: skip
OUTPUT = st.lists(st.one_of(PIECES, st.binary(max_size=4)), max_size=80).map(b"".join)
PLAIN = st.sampled_from(
    [
        b"a line\r\n",
        b"\r\n",
        b"\x1b[31mred\x1b[m\r\n",
        b"tab\tx\r\n",
        b"lf\n",
        "日\r\n".encode(),
        b"\r",
        b"\b",
    ]
)


def emulated(*parts: bytes, columns: int = COLUMNS, rows: int = ROWS) -> Emulator:
    emulator = Emulator(columns, rows, history_lines=HISTORY)
    for part in parts:
        emulator.put(part)
        while emulator.work(1.0):
            pass
    return emulator


def seen(emulator: Emulator) -> tuple[list[str], list[str], int, int]:
    grid = emulator.grid
    return emulator.lines(), list(grid.history), grid.cursor.x, grid.cursor.y


@settings(max_examples=300, deadline=None)
@given(output=OUTPUT, cuts=st.lists(st.integers(0, 500), max_size=6))
def test_the_screen_does_not_depend_on_how_output_is_cut(output: bytes, cuts: list[int]) -> None:
    whole = emulated(output)
    at = [0, *sorted(cuts), len(output)]
    assert seen(emulated(*(output[start:end] for start, end in pairwise(at)))) == seen(whole)
    assert 0 <= whole.grid.cursor.y < ROWS
    assert 0 <= whole.grid.cursor.x <= COLUMNS


@settings(max_examples=60, deadline=None)
@given(before=OUTPUT, plain=st.lists(PLAIN, min_size=30, max_size=200), after=OUTPUT)
def test_lines_that_are_passed_over_are_not_missed(before: bytes, plain: list[bytes], after: bytes) -> None:
    flood = b"".join(plain) * 60
    little_by_little = [flood[at : at + 1000] for at in range(0, len(flood), 1000)]
    assert seen(emulated(before, flood, after)) == seen(emulated(before, *little_by_little, after))


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("-\x1b[5b|", ["------|"]),
        ("one\r\ntwo\x1b[1S", ["two"]),
        ("one\r\ntwo\x1b[1T", ["", "one", "two"]),
        ("a\x1b[3;5Hb\x1b[A\x1b[Dc", ["a", "    c", "    b"]),
        ("first\r\nsecond\x1b[1;1H\x1b[2Mx", ["x"]),
        ("日本\x1b[1;2Hx", [" x本"]),
        ("日本\x1b[1;3Hx", ["日x"]),
        ("x" * 19 + "日", ["x" * 19, "日"]),
        ("e\u0301\u0301", ["é\u0301"]),
        ("👩\u200d🚀!", ["👩\u200d🚀!"]),
        ("\x1b(0lqk\x1b(B|", ["┌─┐|"]),
        ("a\x1b]0;title\x07b\x1bP+q544e\x1b\\c\x1b[>4;2md\x1b[?25$pe", ["abcde"]),
        ("progress 1\rprogress 2", ["progress 2"]),
        ("\x1b[2;3r\x1b[6;1Hbelow\n\n\x1b[1;1Habove\x1b[9A!", ["above!", "", "", "", "", "below"]),
        ("main\x1b[?1049hother\x1b[?1049l!", ["main!"]),
        ("\x1b7\x1b[3;3H\x1b8a\x1b[3;3H\x1b8b", ["b"]),
        ("broken \x1b[12\nsequence", ["broken", "       sequence"]),
    ],
)
def test_sequences_do_what_an_xterm_does(output: str, shown: list[str]) -> None:
    lines = emulated(output.encode()).lines()
    assert "\n".join(lines).rstrip() == "\n".join(shown)


def test_a_smaller_screen_keeps_the_line_of_the_cursor() -> None:
    emulator = emulated(b"1\r\n2\r\n3\r\n4\r\n5")
    emulator.grid.resize(3, 10)
    assert emulator.lines() == ["3", "4", "5"]
    assert list(emulator.grid.history) == ["1", "2"]
    emulator.grid.resize(5, 10)
    assert emulator.lines() == ["3", "4", "5", "", ""]
    emulator = emulated(b"1\r\n2\r\n3\r\n4\r\n5\x1b[?1049hother")
    emulator.grid.resize(3, 10)
    emulator.put(b"\x1b[?1049l")
    assert not emulator.work(1.0)
    assert emulator.lines() == ["3", "4", "5"]


@pytest.mark.parametrize(
    "endless",
    [
        b"\x1b]0;" + b"x" * 2_000_000, b"\x1b[" + b"1" * 2_000_000, b"\x1b[" + b"1;" * 1_000_000,
        b"e" + "\u0301".encode() * 300_000, b"\x1b7" * 300_000, b"\x1b[6n" * 200_000, b"\x1b(" * 300_000,
        b"\x1b[9999S\r\n" * 20_000, b"\x1b[9999b" * 20_000,
    ],
    ids=["string", "number", "numbers", "combining", "saved cursors", "questions", "character sets",
         "scrolls", "repetitions"],
)  # fmt: skip
def test_what_never_ends_takes_no_memory_and_no_long_turn(endless: bytes) -> None:
    emulator = Emulator(160, 40)
    for at in range(0, len(endless), 1 << 16):
        emulator.put(endless[at : at + (1 << 16)])
        began, used = time.process_time(), 0.0
        while emulator.work(0.002):
            used = max(used, time.process_time() - began)
            began = time.process_time()
        assert used < 0.2
    assert len(emulator.take_replies()) < 300
    assert len(emulator.grid.savepoints) <= 1
    assert all(
        sys.getsizeof(cell.data) < 200 for row in emulator.grid.buffer.values() for cell in row.values()
    )
    assert len(emulator._text) < 1 << 17


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("Enter", b"\r"), ("Escape", b"\x1b"), ("Tab", b"\t"), ("BSpace", b"\x7f"), ("C-c", b"\x03"), ("^c", b"\x03"),
        ("C-Space", b"\0"), ("C-[", b"\x1b"), ("M-x", b"\x1bx"), ("M-Up", b"\x1b[1;3A"), ("Up", b"\x1b[A"),
        ("PageDown", b"\x1b[6~"), ("F5", b"\x1b[15~"), ("q", b"q"), ("é", "é".encode()), ("Entr", None), ("C-", None),
    ],
)  # fmt: skip
def test_keys_by_tmuxs_names(name: str, sent: bytes | None) -> None:
    assert key(name) == sent


def test_cursor_keys_are_what_the_program_asked_for() -> None:
    grid = emulated(b"\x1b[?1h").grid
    assert key("Up", application=grid.application_keys) == b"\x1bOA"
