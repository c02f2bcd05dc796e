"""Keys by tmux's names, as the bytes that an xterm sends for them."""

from __future__ import annotations

import re

_FIXED = {
    "Enter": b"\r", "Tab": b"\t", "BTab": b"\x1b[Z", "Escape": b"\x1b", "Space": b" ", "BSpace": b"\x7f",
    "DC": b"\x1b[3~", "IC": b"\x1b[2~", "PPage": b"\x1b[5~", "NPage": b"\x1b[6~",
    "F1": b"\x1bOP", "F2": b"\x1bOQ", "F3": b"\x1bOR", "F4": b"\x1bOS", "F5": b"\x1b[15~", "F6": b"\x1b[17~",
    "F7": b"\x1b[18~", "F8": b"\x1b[19~", "F9": b"\x1b[20~", "F10": b"\x1b[21~", "F11": b"\x1b[23~",
    "F12": b"\x1b[24~",
}  # fmt: skip
_CURSOR = {"Up": b"A", "Down": b"B", "Right": b"C", "Left": b"D", "Home": b"H", "End": b"F"}
_OTHER_NAMES = {
    "Delete": "DC", "Insert": "IC", "PageUp": "PPage", "PgUp": "PPage", "PageDown": "NPage", "PgDn": "NPage",
}  # fmt: skip
_BY_NAME = {name.lower(): name for name in (*_FIXED, *_CURSOR)} | {
    other.lower(): name for other, name in _OTHER_NAMES.items()
}
_CONTROL = re.compile(r"(?:[Cc]-|\^)(.)")
_MODIFIED = re.compile(r"((?:[CMScms]-)+)(.+)", re.DOTALL)
_PARTS = re.compile(rb"\x1b(?:\[(\d+)~|[O\[]([A-DFHP-S]))")


def key(name: str, *, application: bool = False) -> bytes | None:
    """The bytes of a key: `Enter`, `Up`, `F5`, `C-c` or `^c`, `M-x`, `C-Left`, `C-Space`, `q`; None for a name of no
    key. As in tmux, the case of names is not looked at, and that of characters is.

    `application`: the program has asked for its own codes of the cursor keys, as vim and less do.
    """
    if len(name) == 1:
        return name.encode("utf-8", "replace")
    known = _BY_NAME.get(name.lower())
    if known in _CURSOR:
        return (b"\x1bO" if application else b"\x1b[") + _CURSOR[known]
    if known is not None:
        return _FIXED[known]
    if control := _CONTROL.fullmatch(name):
        return _control(control[1])
    if modified := _MODIFIED.fullmatch(name):
        return _modified({letter.upper() for letter in modified[1][::2]}, modified[2])
    return None


def _modified(modifiers: set[str], name: str) -> bytes | None:
    """A key with `C`ontrol, `M`eta or `S`hift held: xterm's number for them in its code, or else what the modifiers
    make of a character."""
    plain = key(name)
    if plain is not None and (parts := _PARTS.fullmatch(plain)):
        code = 1 + ("S" in modifiers) + 2 * ("M" in modifiers) + 4 * ("C" in modifiers)
        number, letter = parts.groups()
        return b"\x1b[%b;%d%b" % (number or b"1", code, letter or b"~")
    if "S" in modifiers:
        return b"\x1b[Z" if modifiers == {"S"} and plain == b"\t" else None
    if "C" in modifiers:
        plain = _control("@" if plain == b" " else name)
    return plain if plain is None or "M" not in modifiers else b"\x1b" + plain


def _control(character: str) -> bytes | None:
    """What a character is with Control held; None for one that has no such code, or a longer text."""
    if character == "?":
        return b"\x7f"
    return bytes([ord(character.upper()) & 0x1F]) if re.fullmatch("[@-_a-z]", character) else None
