"""The files of a task: what must be there, what they hold, and which of them go into the sandbox."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from pathspec import GitIgnoreSpec

from rollcage.rollout.digest import IGNORED
from rollcage.rollout.task_model import Problem
from rollcage.rollout.task_toml import read_text

TEST_SCRIPT = "test.sh"
SOLVE_SCRIPT = "solve.sh"
IGNORE_FILE = ".harborignore"
CONTEXT_FILES = ("Dockerfile", ".dockerignore", "Dockerfile.dockerignore", "docker-compose.yaml", ".env")
INSTRUCTION_BYTES = 4 << 20
"""More text than any model reads; a file past it is something else under that name."""

_KINDS = (
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

_CANARY = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)


def strip_canary(text: str) -> str:
    """The text without the canary lines at its head, `<!-- ... -->` or `# ...`, and the blank lines behind them.

    Canaries keep a benchmark out of training data. Only leading lines go: a later one is the author's text.
    """
    lines = text.split("\n")
    start = 0
    while start < len(lines) and _CANARY.fullmatch(lines[start].strip()):
        start += 1
    while start < len(lines) and not lines[start].strip():
        start += 1
    return "\n".join(lines[start:])


def read_instruction(path: Path, problems: list[Problem]) -> str:
    """What the agent is told. Empty, and a problem, where it cannot be read or says nothing."""
    text = read_text(path, problems, INSTRUCTION_BYTES)
    if text is None:
        return ""
    instruction = strip_canary(text)
    if not instruction.strip():
        problems.append(Problem(str(path), None, "says nothing", "write what the agent is to do"))
    return instruction


def check_build_context(directory: Path, dockerfile: str, problems: list[Problem]) -> None:
    """There must be a directory with a Dockerfile that can be read."""
    file = directory / dockerfile
    if not os.path.lexists(directory):
        remedy = f"write {directory.name}/{dockerfile}, or set docker_image"
        problems.append(Problem(str(directory), None, "is missing", remedy))
    elif not directory.is_dir():
        problems.append(Problem(str(directory), None, "is not a directory", f"put a {dockerfile} into one"))
    elif read_text(file, problems) == "":
        problems.append(Problem(str(file), None, "is empty", "write a line FROM ..."))


def has_own_image(directory: Path) -> bool:
    """Whether `tests/` says what the verifier's own image is made of."""
    return (directory / "Dockerfile").is_file() or compose_file(directory) is not None


def compose_file(directory: Path) -> Path | None:
    """A `docker-compose.yml` is not the environment's: it belongs to what the task is about."""
    file = directory / "docker-compose.yaml"
    return file if file.is_file() else None


def check_tests(own: Path, shared: Path | None, problems: list[Problem]) -> None:
    """There must be a `test.sh` in the step's own tests or in those that all steps share, and it must be sent."""
    directory = own if shared is None or os.path.lexists(own / TEST_SCRIPT) else shared
    script = directory / TEST_SCRIPT
    if not os.path.lexists(script):
        problems.append(Problem(str(script), None, "is missing", "write the script that leaves the reward"))
    elif not script.is_file():
        problems.append(
            Problem(str(script), None, "is not a file", "write the script that leaves the reward")
        )
    elif GitIgnoreSpec.from_lines(ignore_patterns(directory)).match_file(TEST_SCRIPT):
        remedy = f"take {TEST_SCRIPT} out of the patterns"
        problems.append(Problem(str(directory / IGNORE_FILE), None, f"leaves {TEST_SCRIPT} out", remedy))


def check_links(root: Path, directory: Path, problems: list[Problem]) -> None:
    """Nothing that is sent into a sandbox may be a link to a place outside of the task, or a ring of links."""
    check_link(root, directory, problems)
    for folder, folders, files in os.walk(directory):
        for name in sorted([*folders, *files]):
            check_link(root, Path(folder, name), problems)


def check_link(root: Path, path: Path, problems: list[Problem]) -> None:
    """Where `path` is a link, it leads to something inside of the task."""
    if not path.is_symlink():
        return
    try:
        target = path.resolve(strict=False)
        path.stat()
    except FileNotFoundError:
        pass
    except (OSError, RuntimeError):
        problems.append(Problem(str(path), None, "is a link that leads back to itself", "remove it"))
        return
    if not target.is_relative_to(root.resolve()):
        message = f"is a link to {os.readlink(path)}, outside of the task"
        problems.append(Problem(str(path), None, message, "put the file itself there"))


def check_kinds(root: Path, problems: list[Problem]) -> None:
    """A task is files, folders and links: a pipe, a socket or a device can neither be copied nor be sent. Those in
    folders that are not part of a task (`digest.IGNORED`) are left out."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in IGNORED)
        for name in sorted(set(files) - IGNORED):
            mode = os.lstat(os.path.join(folder, name)).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
                kind = next((word for is_it, word in _KINDS if is_it(mode)), "of a kind that nobody knows")
                said = f"is {kind}, and a task is files, folders and links"
                remedy = "remove it, or make it in the Dockerfile"
                problems.append(Problem(str(Path(folder, name)), None, said, remedy))


def check_own_links(root: Path, problems: list[Problem]) -> None:
    """The files that are read on this machine must be the task's own. Other links in a build context are left to the
    builder, which puts them into the image as they are and follows none out of the context."""
    context = root / "environment"
    for name in ("task.toml", "instruction.md", "trajectory.json"):
        check_link(root, root / name, problems)
    for path in (context, *(context / name for name in CONTEXT_FILES)):
        check_link(root, path, problems)


def ignore_patterns(directory: Path) -> tuple[str, ...]:
    """What of `tests/` or `solution/` is not sent into the sandbox: gitignore patterns, relative to `directory`.

    Those of its `.harborignore`, then those of the ones further down, which hold for their folder and win; the
    `.harborignore` files themselves are never sent.
    Raises `OSError` or `UnicodeDecodeError` where one cannot be read.
    """
    patterns: list[str] = []
    for folder, folders, files in os.walk(directory):
        folders.sort()
        if IGNORE_FILE not in files:
            continue
        below = Path(folder).relative_to(directory).as_posix()
        for line in Path(folder, IGNORE_FILE).read_text("utf-8-sig").splitlines():
            if line.strip() and not line.startswith("#"):
                patterns.append(line if below == "." else _below(below, line))
    return (*patterns, IGNORE_FILE)


def _below(folder: str, pattern: str) -> str:
    """The pattern as it must be written from further up: anchored where it held a slash, anywhere below else."""
    sign, pattern = ("!", pattern[1:]) if pattern.startswith("!") else ("", pattern)
    folder = re.sub(r"([\\*?\[])", r"\\\1", folder)
    anchored = "/" in pattern.rstrip("/")
    return f"{sign}/{folder}/{pattern.lstrip('/')}" if anchored else f"{sign}/{folder}/**/{pattern}"
