"""The build context of an old Terminal-Bench task, as the directory `environment/` of a Harbor task."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import shutil
from collections.abc import Collection
from pathlib import Path

from rollcage.rollout.terminal_bench_compose import Service

HARNESS_FILES = frozenset({"task.yaml", "docker-compose.yaml"})
TEST_FILES = frozenset({"tests", "run-tests.sh"})
SOLUTION_FILES = frozenset({"solution.sh", "solution.yaml"})
"""A task's directory is its build context as well. These are left out of it unless the Dockerfile names them."""

_COPY = re.compile(r"^\s*(?:COPY|ADD)\s+(.*)$", re.IGNORECASE)


def copy_context(
    source: Path, target: Path, service: Service, notes: list[str], mounted: Collection[str] = ()
) -> None:
    """Write `target` with a Dockerfile and all that it copies; mounts of the task's files become copies. `mounted`
    are files that a docker-compose.yaml mounts.

    Notes say what the agent will see of tests or solution. Raises `ValueError` where the context is outside of
    the task, `OSError` where it cannot be copied.
    """
    context = Path(os.path.normpath(source / service.context))
    if context != source and not context.is_relative_to(source):
        raise ValueError(f"the build context {service.context} is outside of the task")
    dockerfile = Path(os.path.normpath(context / service.dockerfile))
    text = dockerfile.read_text("utf-8-sig") if service.image is None and dockerfile.is_file() else None
    if service.image is not None:
        text = f"FROM {service.image}\n"
    asked = _copied(text or "")
    if context == source:
        asked |= {os.path.normpath(path) for path, _ in service.mounts} | set(mounted)
    target.mkdir()
    for entry in sorted(context.iterdir()):
        if context != source or _goes_along(entry.name, asked):
            _copy(entry, target / entry.name)
    copied = {entry.name for entry in target.iterdir()} if context == source else set()
    for names, what in ((TEST_FILES, "the tests"), (SOLUTION_FILES, "the solution")):
        if names & copied:
            notes.append(f"its image holds {what}, as it did in Terminal-Bench: the agent can read them")
    if text is not None:
        (target / "Dockerfile").write_text(_with_args(text, service) + _mounts(source, target, service))


def _copied(dockerfile: str) -> set[str]:
    """The sources of COPY and ADD, normalised; `.` is everything."""
    sources: set[str] = set()
    for line in re.sub(r"\\\s*\n", " ", dockerfile).split("\n"):
        match = _COPY.match(line)
        if match is None:
            continue
        words = match[1].strip()
        try:
            parts = json.loads(words) if words.startswith("[") else shlex.split(words, comments=True)
        except ValueError:
            continue  # The builder will say what is wrong with it.
        if any(part.startswith("--from") for part in parts):
            continue
        plain = [part for part in parts if not part.startswith("--")]
        sources |= {os.path.normpath(part.lstrip("/") or ".") for part in plain[:-1]}
    return sources


def _goes_along(name: str, asked: set[str]) -> bool:
    if name not in HARNESS_FILES | TEST_FILES | SOLUTION_FILES:
        return True
    if any(fnmatch.fnmatch(name, path.split("/")[0]) for path in asked if path != "."):
        return True
    # With a copy of everything, tests may be run from there; nothing needs the solution there.
    return "." in asked and name in TEST_FILES


def _with_args(dockerfile: str, service: Service) -> str:
    """The build's arguments as the defaults of the Dockerfile's own ARG lines."""
    for name, value in service.args.items():
        pattern = re.compile(rf"^(\s*ARG\s+{re.escape(name)})(=.*)?$", re.IGNORECASE | re.MULTILINE)
        quoted = json.dumps(value)
        dockerfile = pattern.sub(lambda match, quoted=quoted: f"{match[1]}={quoted}", dockerfile)  # type: ignore[misc]
    return dockerfile if dockerfile.endswith("\n") else dockerfile + "\n"


def _mounts(source: Path, target: Path, service: Service) -> str:
    """Instructions that put what was mounted where it was seen."""
    lines: list[str] = []
    for path, inside in service.mounts:
        below = os.path.normpath(path)
        origin = source / below
        if not os.path.lexists(origin):
            lines.append(f"RUN mkdir -p {shlex.quote(inside)}")
            continue
        if not os.path.lexists(target / below):
            _copy(origin, target / below)
        inside = inside.rstrip("/") + "/" if origin.is_dir() else inside
        lines.append(f"COPY {json.dumps([below, inside])}")
    return "".join(
        f"{line}\n" for line in (["", "# Mounted by docker-compose.yaml"] if lines else []) + lines
    )


def _copy(origin: Path, target: Path) -> None:
    if origin.is_dir() and not origin.is_symlink():
        shutil.copytree(origin, target, symlinks=True, dirs_exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(origin, target, follow_symlinks=False)
