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
_CONTROL = re.compile(r"(?:C-|\^)([@-_a-z?])")
_META = re.compile(r"M-(.+)", re.DOTALL)


def key(name: str, *, application: bool = False) -> bytes | None:
    """The bytes of a key: `Enter`, `Up`, `F5`, `C-c` or `^c`, `M-x`, `C-Space`, `q`; None for a name of no key.

    `application`: the program has asked for its own codes of the cursor keys, as vim and less do.
    """
    name = _OTHER_NAMES.get(name, name)
    if name in _FIXED:
        return _FIXED[name]
    if name in _CURSOR:
        return (b"\x1bO" if application else b"\x1b[") + _CURSOR[name]
    if name == "C-Space":
        return b"\0"
    if len(name) == 1:
        return name.encode()
    if control := _CONTROL.fullmatch(name):
        return b"\x7f" if control[1] == "?" else bytes([ord(control[1].upper()) & 0x1F])
    if meta := _META.fullmatch(name):
        inner = key(meta[1], application=application)
        return None if inner is None else b"\x1b" + inner
    return None
