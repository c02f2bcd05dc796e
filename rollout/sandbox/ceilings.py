"""How many sandboxes at once a machine's own limits have room for, and what to raise where that is few.

What one sandbox takes was counted at 1,000 of them on Engine 20.10: a shim of a dozen threads and four processes, ten
files of dockerd and four of containerd, a keyring, an entry in the neighbour table.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path

import psutil

SYSCTLS = {
    "kernel/pid_max": 16,
    "kernel/threads-max": 16,
    "net/ipv4/neigh/default/gc_thresh3": 1,
    "kernel/keys/root_maxkeys": 1,
    "fs/file-max": 40,
}
"""Limits of /proc/sys, and how much of each a sandbox takes. Thread ids come from `pid_max` too."""

ENGINE_FILES = 12

PROC_SYS = Path("/proc/sys")


@dataclass(frozen=True)
class Ceiling:
    """A limit of this machine and how many sandboxes it has room for."""

    name: str
    value: int
    sandboxes: int
    raise_by: str
    """What raises it: a command or a setting, with a place for the number where there is one."""

    def remedy(self, sandboxes: int) -> str:
        """What makes room for so many, twice over."""
        each = max(1, self.value // max(1, self.sandboxes))
        return f"{self.name} is {self.value}: " + self.raise_by.format(2 * sandboxes * each)


def ceilings() -> list[Ceiling]:
    """This machine's, the lowest first."""
    found = []
    for name, each in SYSCTLS.items():
        path = PROC_SYS / name
        if path.exists():
            value = int(path.read_text())
            key = name.replace("/", ".")
            found.append(Ceiling(key, value, value // each, f"sysctl -w {key}={{}}"))
    for process in psutil.process_iter(["name"]):
        name = process.info["name"]
        if name in ("dockerd", "containerd"):
            try:
                files, _ = process.rlimit(resource.RLIMIT_NOFILE)
            except (psutil.AccessDenied, psutil.NoSuchProcess):
                continue
            if files >= 0:
                limit = Ceiling(
                    f"{name}'s open files", files, files // ENGINE_FILES, "LimitNOFILE={} in its unit"
                )
                found.append(limit)
    return sorted(found, key=lambda ceiling: ceiling.sandboxes)
