"""Files for the `tools` agent: read, written and edited by commands in the agent's own shell.

So everything is done as the agent's user, from the shell's directory, with what any image has (a shell, and
`cat head tail mkdir mktemp rm` of coreutils or busybox), and what changes a file is a command that can be repeated.
Programs are called by `command`, so that functions of the agent's of the same names are not in the way.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePosixPath

from rollcage.rollout.agents.observation import OutputCap, observation
from rollcage.rollout.sandbox.base import OUTPUT_BYTES, CommandResult

EDIT_BYTES = OUTPUT_BYTES
"""The longest file that `edit` takes: it comes to us whole."""

SHOWN_AROUND = 3
"""Lines shown before and behind an edit."""

_NONE, _NO_FILE, _UNREADABLE = 13, 14, 15
_PROBLEMS = {
    _NONE: "there is no such file",
    _NO_FILE: "it is no regular file",
    _UNREADABLE: "it may not be read",
}

_LINE = re.compile(rb"[^\n]*\n|[^\n]+")

Run = Callable[[str, int], Awaitable[CommandResult]]
"""Runs a command, keeping so many bytes of its output."""


class FileProblem(Exception):
    """Why a file could not be read, written or edited, in words for the policy."""


async def read_file(
    run: Run, path: str, first: int, last: int | None, *, max_bytes: int, cap: OutputCap
) -> str:
    """The file's lines from `first` to `last`, numbered, as many as `cap` and `max_bytes` let. Raises `FileProblem`."""
    if last is not None and last < first:
        raise FileProblem(f"end_line {last} is before start_line {first}")
    word = shell_word(path)
    window = "" if last is None else f" | command head -n {last - first + 2}"
    # `|| :`, because a shell with `pipefail` counts it against `tail` that its reader has had enough.
    command = (
        f"({_checks(word)}; command tail -n +{first} {word}{window} | command head -c {max_bytes + 1} || :)"
    )
    data = _output(await run(command, 2 * max_bytes + 2), path, cap)
    if b"\0" in data:
        raise FileProblem(f"{path} is a binary file")
    if not data:
        return "[the file is empty]" if first == 1 else f"[the file has no line {first}]"
    lines, more = _lines(data), len(data) > max_bytes
    if more:  # the last line is not whole
        lines = lines[:-1] or [lines[0].decode("utf-8", "ignore").encode() + b"[... this line is cut ...]"]
    if last is not None and len(lines) > last - first + 1:
        lines, more = lines[: last - first + 1], True
    return _numbered(lines, first, cap, more=more, ends=True)


async def write_file(run: Run, path: str, content: str, cap: OutputCap) -> str:
    """Write the file. Raises `FileProblem`."""
    word, parent = shell_word(path), str(PurePosixPath(path).parent)
    make = "" if parent in (".", "/", "~") else f"command mkdir -p {shell_word(parent)} && "
    _output(await run(f"{make}command printf %s {_quoted(content)} >|{word}", OUTPUT_BYTES), path, cap)
    size = len(content.encode())
    return f"[{path} is written: {size} byte{'' if size == 1 else 's'}]"


async def edit_file(
    look: Run, run: Run, path: str, old: str, new: str, *, everywhere: bool, cap: OutputCap
) -> str:
    """Replace `old` by `new`; `look` runs what changes nothing. In a file whose every line ends with CRLF, the lines
    of both do too. Raises `FileProblem`, with the number of matches where they are too many."""
    if not old or old == new:
        said = (
            "old_string is empty: write_file makes files"
            if not old
            else "new_string is the same: nothing to do"
        )
        raise FileProblem(said)
    word = shell_word(path)
    data = _output(
        await look(f"({_checks(word)}; command head -c {EDIT_BYTES + 1} {word})", 2 * EDIT_BYTES + 2),
        path,
        cap,
    )
    if len(data) > EDIT_BYTES:
        raise FileProblem(f"{path} is longer than {EDIT_BYTES} bytes: edit it by a command")
    before, after = old.encode(), new.encode()
    if _has_crlf(data) and b"\r" not in before + after:
        before, after = before.replace(b"\n", b"\r\n"), after.replace(b"\n", b"\r\n")
    starts = _matches(data, before)
    if not starts:
        raise FileProblem(
            f"old_string is not in {path}: it must be the same to every space, without line numbers"
        )
    at = [data.count(b"\n", 0, start) + 1 for start in starts]
    if len(starts) > 1 and not everywhere:
        places = ", ".join(map(str, at[:10])) + (", ..." if len(at) > 10 else "")
        remedy = "give more of what is around it, or set replace_all"
        raise FileProblem(f"old_string is in {path} {len(starts)} times, at lines {places}: {remedy}")
    start, end = starts[0], starts[-1] + len(before)
    middle = data[start:end].replace(before, after)
    _output(await run(_splice(word, start, end, len(data), middle, path), OUTPUT_BYTES), path, cap)
    if len(starts) > 1:
        return f"[{path} is edited: {len(starts)} replacements]"
    changed = data[:start] + middle + data[end:]
    lines = _lines(changed)
    first = max(1, at[0] - SHOWN_AROUND)
    part = lines[first - 1 : at[0] + after.count(b"\n") + SHOWN_AROUND]
    if not part:
        return f"[{path} is empty now]"
    ends = first - 1 + len(part) == len(lines)
    return f"[{path} is edited]\n{_numbered(part, first, cap, more=False, ends=ends)}"


def shell_word(path: str) -> str:
    """The path as one word of a shell's command, which no program takes for an option. `~/` is the home directory.
    Raises `FileProblem` where it is empty."""
    if not path:
        raise FileProblem("the path is empty")
    if path == "~" or path.startswith("~/"):
        return f'"$HOME"{_quoted(path[1:])}'
    return _quoted(f"./{path}" if path.startswith("-") else path)


def _numbered(lines: Sequence[bytes], first: int, cap: OutputCap, *, more: bool, ends: bool) -> str:
    """Lines of a file from number `first` on as a policy reads them, as many as `cap` lets, and what must be known
    beside them. `more`: others follow. `ends`: the last is the file's."""
    shown: list[str] = []
    left = cap.tokens
    for number, line in enumerate(lines, first):
        text = line.decode("utf-8", "replace").rstrip("\r\n")
        numbered = f"{number:6}\t{text}"
        if left is not None:
            left -= cap.count(numbered + "\n")
            if left < 0:
                shown = shown or [cap.cut(numbered)]
                break
        shown.append(numbered)
    notes: list[str] = []
    if more or len(shown) < len(lines):
        notes.append(f"[more lines follow, from {first + len(shown)} on]")
    elif ends and not lines[-1].endswith(b"\n"):
        notes.append("[there is no newline at the end of the file]")
    data = b"".join(lines)
    if _has_crlf(data):
        notes.append("[the lines end with CRLF]")
    if not _is_text(data):
        notes.append("[not UTF-8: other bytes are shown as \ufffd]")
    return "\n".join([*shown, *notes])


def _checks(word: str) -> str:
    checks = (("e", _NONE), ("f", _NO_FILE), ("r", _UNREADABLE))
    return "; ".join(f"command [ -{test} {word} ] || command exit {status}" for test, status in checks)


def _output(result: CommandResult, path: str, cap: OutputCap) -> bytes:
    """stdout of a command that went well. Raises `FileProblem`."""
    if result.exit_code == 0 and not result.note:
        return result.stdout
    if result.exit_code in _PROBLEMS:
        raise FileProblem(f"{path}: {_PROBLEMS[result.exit_code]}")
    raise FileProblem(observation(result, cap))


def _splice(word: str, start: int, end: int, size: int, middle: bytes, path: str) -> str:
    """A command that puts `middle` in the place of the bytes from `start` to `end` and leaves the file's owner and
    mode as they are."""
    if b"\0" in middle or not _is_text(middle):
        raise FileProblem(f"between the matches in {path} is what is no text: edit it by a command")
    parts = [
        f"command head -c {start} {word}" if start else "",
        f"command printf %s {_quoted(middle.decode())}" if middle else "",
        f"command tail -c +{end + 1} {word}" if end < size else "",
    ]
    pieces = " && ".join(filter(None, parts)) or ":"
    return (
        f'(t=$(command mktemp) && {{ {pieces}; }} >|"$t" && command cat "$t" >|{word}; s=$?; '
        'command rm -f "$t"; command exit $s)'
    )


def _lines(data: bytes) -> list[bytes]:
    return [line[0] for line in _LINE.finditer(data)]


def _matches(data: bytes, part: bytes) -> list[int]:
    starts: list[int] = []
    at = data.find(part)
    while at >= 0:
        starts.append(at)
        at = data.find(part, at + len(part))
    return starts


def _has_crlf(data: bytes) -> bool:
    return b"\r\n" in data and data.count(b"\n") == data.count(b"\r\n")


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
