"""Prompts: files beside this one that a user may replace, by a text or by a file of their own.

`{name}` is a placeholder. Other braces are text: `{"a": 1}`, `${HOME}`, `{}`. A text that reads like a placeholder and
is none is written with doubled braces: `awk '{{print}}'` becomes `awk '{print}'`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

_BRACES = re.compile(r"\{\{(?P<literal>[A-Za-z_]\w*)\}\}|(?<!\$)\{(?P<name>[A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Prompt:
    """A prompt's text, checked. It is False where it is empty."""

    text: str

    def __bool__(self) -> bool:
        return bool(self.text)

    def filled(self, values: Mapping[str, str]) -> str:
        """The text with each placeholder's value. What stands in a value is not looked at."""

        def fill(found: re.Match[str]) -> str:
            return values[found["name"]] if found["name"] else f"{{{found['literal']}}}"

        return _BRACES.sub(fill, self.text)


def load_prompt(
    option: str,
    given: str | None,
    default: str,
    *,
    known: Collection[str] = (),
    needed: Collection[str] = (),
    may_be_empty: bool = False,
) -> Prompt:
    """The prompt that an agent's `option` gives: a text, or the path of a file that ends in `.md` or `.txt`. None: the
    file `default` beside this module. `needed` are placeholders that must be there, `known` more that may.

    Raises `ValueError` that names file and line where the file cannot be read, a placeholder is not known, or one
    that is needed is missing.
    """
    text, place = _text(option, given, default)
    if not text and may_be_empty:
        return Prompt("")
    names = {*known, *needed}
    shown = ", ".join(f"{{{name}}}" for name in sorted(names)) or "it has none"
    found: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        for name in filter(None, (match["name"] for match in _BRACES.finditer(line))):
            if name not in names:
                remedy = f"known: {shown}; write {{{{{name}}}}} where these braces are meant"
                raise ValueError(f"{place}:{number}: {{{name}}} is no placeholder of {option} ({remedy})")
            found.add(name)
    if missing := sorted(set(needed) - found):
        said = f"{option} has no {{{missing[0]}}}, and the policy would not be told of it"
        raise ValueError(f"{place}:{max(1, len(text.splitlines()))}: {said} (put it where it belongs)")
    return Prompt(text.strip())


def _text(option: str, given: str | None, default: str) -> tuple[str, str]:
    """A prompt's text, and what its place is called."""
    if given is not None and not (given.endswith((".md", ".txt")) and "\n" not in given):
        return given.rstrip(), option
    path = Path(__file__).parent / default if given is None else Path(given)
    try:
        return path.read_text(encoding="utf-8").rstrip(), str(path)
    except OSError as error:
        said = f"{option}: {path} cannot be read: {error.strerror}"
        raise ValueError(f"{said} (a value that ends in .md or .txt is a file)") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: {option} is no UTF-8 text (save it as UTF-8)") from error
