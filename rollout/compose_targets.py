"""Where a service may have a volume, a tmpfs or files of the task: not where the engine or Rollcage has its own."""

from __future__ import annotations

import posixpath
import re

from rollcage.rollout.compose_model import MAIN
from rollcage.rollout.compose_yaml import Place

ENGINE_FILES = ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
"""The engine mounts its own over these."""

KERNEL = ("/proc", "/sys", "/dev")
OURS = ("/tests", "/logs/agent", "/logs/artifacts", "/logs/verifier", "/solution")
"""What is put there or made anew in `main` while an attempt runs: it cannot be another's mount."""

_FLAGS = frozenset(
    {
        "defaults", "ro", "rw", "suid", "nosuid", "dev", "nodev", "exec", "noexec", "sync", "async", "dirsync", "mand",
        "nomand", "atime", "noatime", "diratime", "nodiratime", "relatime", "norelatime", "strictatime",
        "nostrictatime",
    }
)  # fmt: skip
_OPTION = re.compile(
    r"size=\d{1,18}[kKmMgG%]?|(nr_blocks|nr_inodes)=\d{1,18}[kKmMgG]?|mode=[0-7]{1,4}|[ug]id=\d{1,9}"
)
"""Those that an engine takes (moby: pkg/mount, `MergeTmpfsOptions`), with values that a kernel takes."""


def check_target(place: Place, service: str, target: str, *, copied: bool = False) -> None:
    """Note what is wrong with a mount at `target`. `copied`: files, which are copied there before the start."""
    if not target.startswith("/"):
        place.problem(f"mounts at {target!r}", "write an absolute path")
        return
    target = posixpath.normpath("/" + target.lstrip("/"))
    if target == "/":
        place.problem("mounts at /, over everything", "mount a folder further down")
    elif target in ENGINE_FILES:
        remedy = "write extra_hosts or hostname, or take it out"
        place.unsupported(f"mounts at {target}, which is the engine's own", remedy)
    elif _within(target, KERNEL) and not (_within(target, ("/dev/shm",)) and not copied):
        place.unsupported(f"mounts at {target}, which is the kernel's", "mount it somewhere else")
    elif service == MAIN and not copied and (target == "/logs" or _within(target, OURS)):
        said = f"mounts at {target} of main, which Rollcage has for the tests, the solution or the logs"
        place.unsupported(said, "mount it somewhere else")


def check_tmpfs(place: Place, options: str) -> None:
    """Note an option of a tmpfs that no engine takes."""
    for option in options.split(",") if options else ():
        if option not in _FLAGS and not _OPTION.fullmatch(option):
            remedy = "write options such as size=64m, mode=1777, uid=1000, noexec"
            place.problem(f"has the tmpfs option {option[:60]!r}, which no engine takes", remedy)


def _within(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
