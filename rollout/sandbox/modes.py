"""`--chmod` of COPY and ADD: octal, or the letters of chmod(1) without a umask, as BuildKit reads them."""

from __future__ import annotations

import re
from dataclasses import dataclass

SETID = 0o6000
STICKY = 0o1000
_WHO = {"u": 0o4700, "g": 0o2070, "o": 0o1007, "a": 0o7777}
_PERMISSIONS = {"r": 0o444, "w": 0o222, "x": 0o111, "s": 0o6000, "t": 0o1000}
_CLAUSE = re.compile(r"([ugoa]*)((?:[-+=](?:[rwxXst]*|[ugo]))+)")


@dataclass(frozen=True)
class Chmod:
    """A mode, or changes to one. `octal` None: `letters` has the changes."""

    octal: int | None
    letters: str = ""

    @classmethod
    def parse(cls, text: str) -> Chmod:
        """Raises `ValueError` for what is neither."""
        if re.fullmatch(r"0*[0-7]{1,4}", text):
            return cls(int(text, 8))
        if re.match(r"[0-9]", text) or not all(_CLAUSE.fullmatch(clause) for clause in text.split(",")):
            raise ValueError(f"{text!r} is neither an octal mode up to 07777 nor letters such as u+x,go-w")
        return cls(None, text)

    def of(self, mode: int, *, is_folder: bool) -> int:
        """What a file with this mode comes out with."""
        if self.octal is not None:
            return self.octal
        for clause in self.letters.split(","):
            match = _CLAUSE.fullmatch(clause)
            assert match is not None
            who = 0
            for letter in match[1] or "a":
                who |= _WHO[letter]
            for sign, letters in re.findall(r"([-+=])([^-+=]*)", match[2]):
                bits = _bits(letters, mode, is_folder) & who
                cleared = mode & ~(who & ~STICKY)
                mode = {"+": mode | bits, "-": mode & ~bits, "=": cleared | bits}[sign]
        return mode


def _bits(letters: str, mode: int, is_folder: bool) -> int:
    if letters in ("u", "g", "o"):
        own = (mode >> {"u": 6, "g": 3, "o": 0}[letters]) & 0o7
        return own << 6 | own << 3 | own
    bits = 0
    for letter in letters:
        if letter == "X":
            bits |= 0o111 if is_folder or mode & 0o111 else 0
        else:
            bits |= _PERMISSIONS[letter]
    return bits
