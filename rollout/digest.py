"""The digest of a directory's files: what makes two tasks, or two build contexts, the same."""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path

IGNORED = frozenset({".git", "__pycache__", ".DS_Store"})
"""What tools leave beside a task's files without changing the task."""


def task_digest(path: Path) -> str:
    """The sha256 (hex) of all files below `path`, in the order of their relative POSIX paths.

    Each counts with its path, its executable bit (the owner's) and its bytes; a symbolic link with its path and
    its target, and is not followed; another kind of file (a pipe, a socket) with its path and kind, and is not
    opened. Anything called `.git`, `__pycache__` or `.DS_Store` is left out, wherever it is, and nothing else.
    Empty directories, times, owners and the other mode bits do not count.

    Raises `OSError` where something cannot be read.
    """
    total = hashlib.sha256()
    for relative in sorted(_files(os.fsencode(path))):
        file = os.path.join(os.fsencode(path), relative)
        mode = os.lstat(file).st_mode
        if stat.S_ISLNK(mode):
            kind, content = b"link", hashlib.sha256(os.readlink(file))
        elif stat.S_ISREG(mode):
            kind = b"exec" if mode & stat.S_IXUSR else b"file"
            with open(file, "rb") as stream:
                content = hashlib.file_digest(stream, hashlib.sha256)
        else:
            kind, content = b"special", hashlib.sha256(b"%o" % stat.S_IFMT(mode))
        # A path holds no NUL, so no two listings of files have the same bytes.
        total.update(b"%s\0%s\0%s\0" % (relative, kind, content.digest()))
    return total.hexdigest()


def _files(root: bytes) -> list[bytes]:
    found: list[bytes] = []
    pending = [b""]
    while pending:
        folder = pending.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            for entry in entries:
                if os.fsdecode(entry.name) in IGNORED:
                    continue
                relative = os.path.join(folder, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    pending.append(relative)
                else:
                    found.append(relative)
    return found
