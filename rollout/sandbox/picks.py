"""`COPY --parents` and `COPY --exclude` of files in the context: which entries, and below which paths they come out.

As BuildKit has it (https://docs.docker.com/reference/dockerfile/#copy---parents and #copy---exclude): with parents a
pattern may hold `**`, what it matches keeps its path below the pivot `/./`, and directories come with all that is in
them. Patterns to leave out are those of a `.dockerignore`, relative to the source that is copied.
"""

from __future__ import annotations

import posixpath
import re

from rollcage.rollout.sandbox.context import Context, has_wildcards, ignore_patterns

Picked = dict[str, str]
"""Path below the destination -> entry of the context."""


def with_parents(context: Context, word: str, excludes: list[str]) -> Picked | None:
    """What `--parents` takes of one source, by its path below the destination. None where a source without
    wildcards is not there. Raises `ValueError` for a pattern that is none."""
    pivot, sign, pattern = word.partition("/./")
    if not sign:
        pivot, pattern = "", word
    pivot = posixpath.normpath("/" + pivot).lstrip("/")
    pattern = posixpath.normpath("/" + pattern).lstrip("/")
    start = pivot + "/" if pivot else ""
    rule = ignore_patterns([pattern]) if pattern else None
    leave = ignore_patterns(excludes)
    found: Picked = {}
    for entry in context.under(pivot):
        path = entry.removeprefix(start)
        if (rule is None or rule(path)) and not leave(path):
            for parent in _parents(path):
                found.setdefault(parent, start + parent)
            found[path] = entry
    return found if found or has_wildcards(word) else None


def without(context: Context, entry: str, excludes: list[str]) -> Picked:
    """What is left of one source, file or directory, below its own path. A file goes by its name."""
    leave = ignore_patterns(excludes)
    below = context.under(entry)
    start = entry + "/" if entry else ""
    if not below and entry and not (context.root / entry).is_dir():
        name = posixpath.basename(entry)
        return {} if leave(name) or leave(entry) else {name: entry}
    return {path: start + path for path in (found.removeprefix(start) for found in below) if not leave(path)}


def _parents(path: str) -> list[str]:
    return [path[: match.start()] for match in re.finditer("/", path)]
