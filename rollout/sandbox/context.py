"""A build context: which files `.dockerignore` leaves, their digest, and the tar that the builder gets."""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rollcage.rollout.outcome import BuildError, Evidence

FILES_DIR = "context"
"""Where the context's own files stand in the tar. The lowered Dockerfile stands beside this folder, so that
`COPY . /app` brings what the task's author put there and nothing of ours."""

INLINE_DIR = "inline"
"""Where files stand that were not in the context: heredocs, and copies with another mode."""


@dataclass(frozen=True)
class InlineFile:
    """A file (or, with neither `body` nor `source`, a directory) that lowering adds, under `INLINE_DIR`.

    `mode` None: as the source has it.
    """

    path: str
    mode: int | None
    body: bytes | None = None
    source: Path | None = None


@dataclass(frozen=True)
class Context:
    """`entries` are the POSIX paths, sorted, that are left of `root`; `ignored` are those that are not."""

    root: Path
    entries: tuple[str, ...]
    ignored: frozenset[str] = frozenset()
    _set: frozenset[str] = field(default_factory=frozenset, repr=False)

    @classmethod
    def read(cls, root: Path, dockerfile: str = "Dockerfile") -> Context:
        """Walk `root`. `<dockerfile>.dockerignore` goes before `.dockerignore`, as in BuildKit. Raises
        `BuildError` (`task_malformed`) where that cannot be read."""
        ignore = _ignore_rules(root, dockerfile)
        entries: list[str] = []
        ignored: list[str] = []
        for path in _walk(root):
            (ignored if ignore(path) else entries).append(path)
        return cls(root, tuple(sorted(entries)), frozenset(ignored), frozenset(entries))

    def find(self, pattern: str) -> list[str]:
        """The entries that one COPY source names: `pattern` is relative and clean, "" for the whole context.
        Only a pattern with wildcards may name several. Raises `ValueError` for one that is none."""
        if not pattern:
            return [""]
        if has_wildcards(pattern):
            rule = _go_pattern(pattern)
            return [entry for entry in self.entries if rule.fullmatch(entry)]
        if self._holds(pattern):
            return [pattern]
        if "\0" in pattern:
            return []
        real = os.path.relpath(os.path.realpath(self.root / pattern), os.path.realpath(self.root))
        return [pattern] if not real.startswith("..") and self._holds(real) else []

    def under(self, path: str) -> list[str]:
        """The entries below a directory; its own path is not among them."""
        return [entry for entry in self.entries if not path or entry.startswith(path + "/")]

    def digest(self) -> str:
        """sha256 (hex) over paths, kinds, permission bits and bytes."""
        total = hashlib.sha256()
        for entry in self.entries:
            path = self.root / entry
            info = path.lstat()
            if stat.S_ISLNK(info.st_mode):
                kind, content = "link", os.readlink(path).encode()
            elif stat.S_ISREG(info.st_mode):
                with path.open("rb") as file:
                    kind, content = "file", hashlib.file_digest(file, "sha256").digest()
            else:
                kind, content = "other", b""
            line = f"{entry}\0{kind}\0{stat.S_IMODE(info.st_mode):o}\0".encode("utf-8", "surrogateescape")
            total.update(line + content + b"\0")
        return total.hexdigest()

    def _holds(self, path: str) -> bool:
        return path in self._set or any(entry.startswith(path + "/") for entry in self.entries)


def write_tar(target: IO[bytes], context: Context, dockerfile: bytes, inline: Iterable[InlineFile]) -> None:
    """The tar for the builder: `Dockerfile`, the context below `FILES_DIR`, and the inline files. Everything
    is owned by root; sockets and pipes are left out, as Docker's client does."""
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as tar:
        _add_bytes(tar, "Dockerfile", 0o644, dockerfile)
        top = tarfile.TarInfo(FILES_DIR)
        top.type, top.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(top)
        for entry in context.entries:
            _add_path(tar, f"{FILES_DIR}/{entry}", context.root / entry, None)
        for item in inline:
            if item.body is not None:
                _add_bytes(tar, item.path, item.mode or 0o644, item.body)
            elif item.source is not None:
                _add_path(tar, item.path, item.source, item.mode)
            else:
                folder = tarfile.TarInfo(item.path)
                folder.type, folder.mode = tarfile.DIRTYPE, item.mode or 0o755
                tar.addfile(folder)


def has_wildcards(pattern: str) -> bool:
    return re.search(r"[*?\[]", re.sub(r"\\.", "", pattern)) is not None


def _add_bytes(tar: tarfile.TarFile, name: str, mode: int, body: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(body), mode
    tar.addfile(info, io.BytesIO(body))


def _add_path(tar: tarfile.TarFile, name: str, path: Path, mode: int | None) -> None:
    tar.inodes = {}  # type: ignore[attr-defined]  # no hard links: each name is a file of its own
    info = tar.gettarinfo(path, arcname=name)
    if info is None or not (info.isreg() or info.isdir() or info.issym()):
        return
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    info.mtime = max(0, int(info.mtime))
    if mode is not None and not info.issym():
        info.mode = mode
    if info.isreg():
        with path.open("rb") as file:
            tar.addfile(info, file)
    else:
        tar.addfile(info)


def _walk(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            yield Path(folder, name).relative_to(root).as_posix()


@dataclass(frozen=True)
class _Rules:
    """The patterns of a `.dockerignore`: the last that matches a path or one of its parents decides."""

    rules: tuple[tuple[bool, re.Pattern[str]], ...]

    def __call__(self, path: str) -> bool:
        parts = path.split("/")
        prefixes = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
        ignored = False
        for exception, rule in self.rules:
            if ignored == exception and any(rule.fullmatch(prefix) for prefix in prefixes):
                ignored = not exception
        return ignored


def _ignore_rules(root: Path, dockerfile: str) -> Callable[[str], bool]:
    for name in (f"{dockerfile}.dockerignore", ".dockerignore"):
        if (root / name).is_file():
            text = (root / name).read_text("utf-8", "surrogateescape").removeprefix("\ufeff")
            try:
                return ignore_patterns(line for line in text.splitlines() if not line.startswith("#"))
            except ValueError as error:
                said = f"{name}: {error}"
                raise BuildError("task_malformed", said, Evidence(said, said_by="task files")) from None
    return _Rules(())


def ignore_patterns(lines: Iterable[str]) -> Callable[[str], bool]:
    """Whether a path is one of those that these patterns of a `.dockerignore` name, or below one. Raises
    `ValueError` for a pattern that is none."""
    return _Rules(tuple(_rules(lines)))


def _rules(lines: Iterable[str]) -> Iterator[tuple[bool, re.Pattern[str]]]:
    for line in lines:
        pattern = line.strip()
        if not pattern:
            continue
        exception = pattern.startswith("!")
        pattern = os.path.normpath("/" + pattern.removeprefix("!").strip()).lstrip("/")
        if pattern:
            yield exception, _go_pattern(pattern, double_star=True)


_PIECES: Mapping[str, str] = {"*": "[^/]*", "?": "[^/]"}


def _go_pattern(pattern: str, *, double_star: bool = False) -> re.Pattern[str]:
    """Go's `filepath.Match` as a regular expression; with `double_star`, `**` spans folders."""
    tokens = r"\*\*/?|\\.|\[\^?(?:\\.|[^\]\\])+\]|." if double_star else r"\\.|\[\^?(?:\\.|[^\]\\])+\]|."
    result = ""
    for token in re.findall(tokens, pattern, re.DOTALL):
        if token.startswith("**"):
            result += "(?:.*/)?" if token.endswith("/") else ".*"
        elif len(token) == 2 and token[0] == "\\":
            result += re.escape(token[1])
        elif token.startswith("[") and len(token) > 1:
            result += "[" + re.sub(r"[\[&~|]|(?<=-)-", r"\\\g<0>", token[1:])
        else:
            result += _PIECES.get(token, re.escape(token))
    try:
        return re.compile(result, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no pattern: {error}") from None
