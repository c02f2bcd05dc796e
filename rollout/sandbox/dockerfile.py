"""Dockerfiles as BuildKit reads them: instructions, heredocs and stages, each with its line.

`parse` takes the text apart and refuses what is no Dockerfile, before a build is spent on it. The line
rules are BuildKit's (https://docs.docker.com/reference/dockerfile/): a heredoc's body begins after its
instruction's last line, belongs to RUN, COPY and ADD alone, and nothing in it is ever an instruction.

    Dockerfile -> global ARGs, stages -> instructions -> heredocs
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from rollcage.rollout.outcome import BuildError, Evidence
from rollcage.rollout.sandbox.words import WordError, split_raw, unquoted

HEREDOC_KEYWORDS = frozenset({"RUN", "COPY", "ADD"})
KEYWORDS = HEREDOC_KEYWORDS | {
    "ARG", "CMD", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "MAINTAINER", "ONBUILD",
    "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR",
}  # fmt: skip

_SPACES = re.compile(r"[\t\v\f\r ]+")
_DIRECTIVE = re.compile(r"#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(.+?)\s*$")
_PLAIN_FRONTEND = re.compile(
    r"(?:docker\.io/)?docker/dockerfile(?:-upstream)?(?::[\w.-]+)?(?:@sha256:[0-9a-f]{64})?"
)
_HEREDOC = re.compile(r"(\d*)<<(-?)\s*([^<]*)", re.ASCII)
_STAGE_NAME = re.compile(r"[a-z][a-z0-9_.-]*")


class DockerfileError(BuildError):
    """What is wrong with a Dockerfile and where. `line` and `column` count from 1."""

    def __init__(
        self, error_class: str, file: str, line: int, column: int, problem: str, remedy: str
    ) -> None:
        self.file, self.line, self.column, self.problem, self.remedy = file, line, column, problem, remedy
        message = f"{file}:{line}:{column}: {problem} ({remedy})"
        super().__init__(error_class, message, Evidence(message, said_by="task files"))

    def __reduce__(self) -> tuple[Any, ...]:
        return DockerfileError, (
            self.error_class, self.file, self.line, self.column, self.problem, self.remedy,
        )  # fmt: skip


@dataclass(frozen=True)
class Heredoc:
    """`body` is as it stands in the file; `content` is without the leading tabs that `<<-` takes away.

    `quoted`: the delimiter has quotes, so the builder expands nothing. `line`: that of the body's first line.
    """

    name: str
    quoted: bool
    strip_tabs: bool
    body: str
    line: int

    @property
    def content(self) -> str:
        return re.sub(r"(?m)^\t+", "", self.body) if self.strip_tabs else self.body


@dataclass(frozen=True)
class Instruction:
    """One instruction. `flags` are the leading `--name=value` words, `rest` what follows them with lines
    joined, `json` its value where that is a JSON array of strings. `source` is the text as written.
    `trigger` is what an ONBUILD holds."""

    keyword: str
    flags: tuple[str, ...]
    rest: str
    line: int
    column: int
    source: str
    json: tuple[str, ...] | None = None
    heredocs: tuple[Heredoc, ...] = ()
    trigger: Instruction | None = None

    @property
    def words(self) -> list[str]:
        """The arguments of COPY, ADD and FROM."""
        return list(self.json) if self.json is not None else _SPACES.split(self.rest)

    @property
    def verbatim(self) -> str:
        """The text as written, with line feeds alone and none at its end."""
        return self.source.replace("\r\n", "\n").rstrip("\n")

    def flag(self, name: str) -> str | None:
        """The value of `--name=value`, "true" for a bare `--name`, None where it is not given."""
        for flag in self.flags:
            key, _, value = flag.removeprefix("--").partition("=")
            if key == name:
                return value if "=" in flag else "true"
        return None


@dataclass(frozen=True)
class Stage:
    """`base` and `platform` are as written, variables and all."""

    start: Instruction
    base: str
    name: str | None
    platform: str | None
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True)
class Dockerfile:
    """`global_args` are the ARGs before the first FROM; `syntax` is what `# syntax=` asks for."""

    file: str
    escape: str
    global_args: tuple[Instruction, ...]
    stages: tuple[Stage, ...]
    syntax: str | None = None

    def error(self, at: Instruction, problem: str, remedy: str, *, token: str = "") -> DockerfileError:
        """A `dockerfile_parse` at this instruction, at `token` where it stands in its text."""
        return self.error_at(*place(at, token), problem, remedy)

    def error_at(self, line: int, column: int, problem: str, remedy: str) -> DockerfileError:
        return DockerfileError("dockerfile_parse", self.file, line, column, problem, remedy)

    def unsupported(self, at: Instruction, problem: str, remedy: str, token: str = "") -> DockerfileError:
        line, column = place(at, token)
        return DockerfileError("unsupported", self.file, line, column, problem, remedy)


def place(at: Instruction, token: str = "") -> tuple[int, int]:
    """(line, column) of `token` within an instruction, from 1; of the instruction where it is not found."""
    for offset, text in enumerate(at.source.splitlines()):
        if token and (found := text.find(token)) >= 0:
            return at.line + offset, found + 1
    return at.line, at.column


def key_values(at: Instruction, escape: str) -> list[tuple[str, str]]:
    """The pairs of ENV and LABEL, values still quoted. Raises `WordError`."""
    words = _words(at.rest, escape)
    if not words:
        raise WordError(f"{at.keyword} needs a name and a value")
    if "=" not in words[0]:
        parts = _SPACES.split(at.rest, maxsplit=1)
        if len(parts) < 2:
            raise WordError(f"{at.keyword} {parts[0]} has no value")
        return [(parts[0], parts[1])]
    pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in words]
    for word, (key, _) in zip(words, pairs, strict=True):
        if "=" not in word or not key:
            raise WordError(f"{word!r} is not name=value")
    return pairs


def arg_values(at: Instruction, escape: str) -> list[tuple[str, str | None]]:
    """The names of an ARG with their defaults, still quoted. Raises `WordError`."""
    words = _words(at.rest, escape)
    if not words or any(word.startswith("=") for word in words):
        raise WordError("ARG needs a name")
    return [(word.partition("=")[0], word.partition("=")[2] if "=" in word else None) for word in words]


def parse(text: str, *, file: str = "Dockerfile") -> Dockerfile:
    """Take a Dockerfile apart. Raises `DockerfileError` (`dockerfile_parse`) at the first thing wrong."""
    reader = _Reader(text.removeprefix("\ufeff"), file)
    global_args: list[Instruction] = []
    stages: list[Stage] = []
    last: Instruction | None = None
    while (at := reader.next(last)) is not None:
        last = at
        if at.keyword == "FROM":
            stages.append(_stage(at, reader))
        elif stages:
            stages[-1] = replace(stages[-1], instructions=(*stages[-1].instructions, at))
        elif at.keyword == "ARG":
            global_args.append(at)
        else:
            raise reader.error(
                at, f"{at.keyword} comes before any FROM", "begin with FROM; only ARG may stand before it"
            )
    if not stages:
        raise DockerfileError(
            "dockerfile_parse", file, max(reader.at, 1), 1, "there is no FROM", "begin with FROM and an image"
        )
    return Dockerfile(file, reader.escape, tuple(global_args), tuple(stages), reader.syntax)


def _stage(at: Instruction, reader: _Reader) -> Stage:
    words = at.words
    name = None
    if len(words) == 3 and words[1].lower() == "as":
        name = words[2].lower()
        if not _STAGE_NAME.fullmatch(name):
            raise reader.error(
                at,
                f"{words[2]!r} cannot name a stage",
                "begin with a letter; letters, digits and -_. may follow",
                words[2],
            )
    elif len(words) != 1 or not words[0]:
        raise reader.error(
            at, "FROM takes an image, or an image AS a name", "write FROM image or FROM image AS name"
        )
    return Stage(at, words[0], name, at.flag("platform"), ())


@dataclass
class _Reader:
    """Lines to instructions. `at` is the index of the next line."""

    text: str
    file: str
    escape: str = "\\"
    syntax: str | None = None
    at: int = 0
    _lines: list[str] = field(default_factory=list)
    _directives: set[str] | None = field(default_factory=set)

    def __post_init__(self) -> None:
        self._lines = re.findall(r"[^\n]*\n|[^\n]+", self.text)

    def error(self, at: Instruction, problem: str, remedy: str, token: str = "") -> DockerfileError:
        line, column = place(at, token)
        return DockerfileError("dockerfile_parse", self.file, line, column, problem, remedy)

    def next(self, last: Instruction | None) -> Instruction | None:
        """The next instruction with its heredocs, None at the end. `last` is the one before it."""
        while self.at < len(self._lines):
            start = self.at
            raw = self._take()
            line = raw.lstrip()
            self._directive(line, start)
            if line.startswith("#"):
                continue
            line, ended = self._continued(line)
            if ended and not line.strip():
                continue
            parts = [line]
            while not ended and self.at < len(self._lines):
                more = self._take()
                if more.strip() and not more.lstrip().startswith("#"):
                    more, ended = self._continued(more)
                    parts.append(more)
            source = "".join(self._lines[start : self.at])
            column = len(raw) - len(raw.lstrip()) + 1
            at = self._instruction("".join(parts), start + 1, column, source, last)
            return self._with_heredocs(at, "".join(parts))
        return None

    def _take(self) -> str:
        line = self._lines[self.at].rstrip("\r\n")
        self.at += 1
        return line

    def _directive(self, line: str, index: int) -> None:
        if self._directives is None:
            return
        match = _DIRECTIVE.match(line)
        key = match[1].lower() if match else ""
        if match is None or key not in ("syntax", "escape", "check"):
            self._directives = None
            return
        if key in self._directives:
            raise DockerfileError(
                "dockerfile_parse", self.file, index + 1, 1, f"# {key}= is given twice", "keep one of them"
            )
        self._directives.add(key)
        if key == "syntax":
            self.syntax = match[2]
            if not _PLAIN_FRONTEND.fullmatch(match[2]):
                raise DockerfileError(
                    "unsupported",
                    self.file,
                    index + 1,
                    line.find(match[2]) + 1,
                    f"# syntax={match[2]} is no Dockerfile of Docker's",
                    "write a plain Dockerfile, or build the image yourself and set docker_image",
                )
        if key == "escape":
            if match[2] not in ("\\", "`"):
                raise DockerfileError(
                    "dockerfile_parse",
                    self.file,
                    index + 1,
                    line.find(match[2]) + 1,
                    f"{match[2]!r} cannot be the escape character",
                    "it is a backslash or a backtick",
                )
            self.escape = match[2]

    def _continued(self, line: str) -> tuple[str, bool]:
        """The line without its continuation sign, and whether the instruction ends with it."""
        mark = re.escape(self.escape)
        match = re.search(rf"(?:(?<=[^{mark}])|^){mark}[ \t]*$", line)
        return (line[: match.start()], False) if match else (line, True)

    def _instruction(
        self, line: str, number: int, column: int, source: str, last: Instruction | None
    ) -> Instruction:
        parts = _SPACES.split(line.strip(), maxsplit=1)
        flags, rest = _flags(parts[1], self.escape) if len(parts) == 2 else ((), "")
        at = Instruction(parts[0].upper(), flags, rest.strip(), number, column, source)
        if at.keyword not in KEYWORDS:
            raise self.error(at, f"unknown instruction {parts[0]}", _what_was_meant(at.keyword, last))
        at = replace(at, json=self._json(at))
        try:
            self._check(at)
            if at.keyword == "ONBUILD":
                at = replace(at, trigger=self._trigger(at))
        except WordError as error:
            raise self.error(at, str(error), f"see the reference for {at.keyword}") from None
        return at

    def _json(self, at: Instruction) -> tuple[str, ...] | None:
        text = at.rest
        if at.keyword == "HEALTHCHECK":
            text = text.partition(" ")[2].strip()
        if at.keyword not in ("ADD", "CMD", "COPY", "ENTRYPOINT", "HEALTHCHECK", "RUN", "SHELL", "VOLUME"):
            return None
        try:
            value = json.loads(text) if text.startswith("[") else None
        except ValueError:
            return None
        if not isinstance(value, list):
            return None
        if not all(isinstance(item, str) for item in value):
            raise self.error(
                at, f"the array after {at.keyword} holds more than strings", "put each item in double quotes"
            )
        return tuple(value)

    def _check(self, at: Instruction) -> None:
        if not at.rest and at.keyword not in ("CMD", "ENTRYPOINT", "RUN"):
            raise self.error(at, f"{at.keyword} has no arguments", "complete it or take it out")
        if at.keyword in ("COPY", "ADD") and len(at.words) < 2:
            raise self.error(at, f"{at.keyword} has no destination", f"write {at.keyword} source destination")
        if at.keyword in ("ENV", "LABEL"):
            key_values(at, self.escape)
        if at.keyword == "ARG":
            arg_values(at, self.escape)
        if at.keyword == "SHELL" and not at.json:
            raise self.error(at, "SHELL is not a JSON array", 'write SHELL ["/bin/bash", "-c"]')
        if at.keyword == "HEALTHCHECK":
            kind = at.rest.split()[0].upper()
            if kind not in ("NONE", "CMD"):
                raise self.error(at, f"unknown kind of HEALTHCHECK {kind}", "write HEALTHCHECK CMD or NONE")

    def _trigger(self, at: Instruction) -> Instruction:
        trigger = self._instruction(at.rest, at.line, at.column, at.source, None)
        if trigger.keyword in ("ONBUILD", "FROM", "MAINTAINER"):
            raise self.error(at, f"ONBUILD cannot hold {trigger.keyword}", "take it out")
        return trigger

    def _with_heredocs(self, at: Instruction, line: str) -> Instruction:
        holder = at.trigger or at
        if holder.keyword not in HEREDOC_KEYWORDS or holder.json is not None or "<<" not in line:
            return at
        try:
            words = split_raw(line)
        except WordError:
            return at
        heredocs = []
        for word in words:
            match = _HEREDOC.fullmatch(word)
            found = heredoc_name(word)
            if match is None or found is None:
                continue
            name, quoted = found
            strip_tabs = bool(match[2])
            end = self._end_of_heredoc(name, strip_tabs)
            if end is None:
                if "$((" in line and re.fullmatch(r"[\w$]+\)+.*", name):
                    continue  # a shift in shell arithmetic: `$((1 << 4))`
                raise self._never_closed(at, word, name)
            body = "".join(self._lines[self.at : end])
            heredocs.append(Heredoc(name, quoted, strip_tabs, body, self.at + 1))
            self.at = end + 1
        if at.trigger is not None:
            at = replace(at, trigger=replace(at.trigger, heredocs=tuple(heredocs)))
        return replace(at, heredocs=tuple(heredocs))

    def _end_of_heredoc(self, name: str, strip_tabs: bool) -> int | None:
        for index in range(self.at, len(self._lines)):
            line = self._lines[index].rstrip("\r\n")
            if (line.lstrip("\t") if strip_tabs else line) == name:
                return index
        return None

    def _never_closed(self, at: Instruction, word: str, name: str) -> DockerfileError:
        remedy = f"put {name} on a line of its own, with nothing before or after it"
        if sign := re.search(r"[;|&>()]", name):
            remedy = f"put a space between {name[: sign.start()]} and {sign[0]!r}"
        elif any(line.strip() == name for line in self._lines[self.at :]):
            remedy = f"the line that holds {name} has spaces around it: take them away"
        return self.error(
            at, f"the heredoc <<{name} that starts here is never closed", remedy, word.split()[0]
        )


def heredoc_name(word: str) -> tuple[str, bool] | None:
    """(delimiter, whether it is quoted) where this word opens a heredoc, otherwise None."""
    match = _HEREDOC.fullmatch(word)
    if match is None or not match[3]:
        return None
    try:
        return unquoted(match[3])
    except WordError:
        return None


def _what_was_meant(keyword: str, last: Instruction | None) -> str:
    if last is not None and "<<" in last.rest and last.keyword in HEREDOC_KEYWORDS:
        return "is this a heredoc's body? `<<` must begin a word: put a space before it"
    if close := get_close_matches(keyword, KEYWORDS, n=1, cutoff=0.75):
        return f"{close[0]} is meant?"
    if last is not None:
        return (
            f"if it continues the {last.keyword} of line {last.line}, end the line before it with a backslash"
        )
    return "begin with FROM"


def _flags(text: str, escape: str) -> tuple[tuple[str, ...], str]:
    """Leading words that begin with `--`, unquoted, and the text after them."""
    flags = []
    at = 0
    while match := re.compile(r"\s*(?=--)").match(text, at):
        at = match.end()
        word, quote = "", ""
        while at < len(text) and (quote or not text[at].isspace()):
            char = text[at]
            if char == quote:
                quote = ""
            elif not quote and char in "'\"":
                quote = char
            else:
                if char == escape:
                    at += 1
                word += text[at : at + 1]
            at += 1
        if word == "--":
            break
        flags.append(word)
    return tuple(flags), text[at:].lstrip()


def _words(text: str, escape: str) -> Sequence[str]:
    """Words apart at spaces outside quotes; quotes and escapes stay."""
    mark = re.escape(escape)
    word = rf"(?:{mark}[\s\S]|'[^']*(?:'|$)|\"(?:{mark}[\s\S]|[^\"{mark}])*(?:\"|{mark}?$)|[^\s])+"
    return [found.removesuffix(escape) if found == escape else found for found in re.findall(word, text)]
