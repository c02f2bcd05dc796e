"""The system calls that a sandbox is refused: an engine's usual filter, and what reaches PID 1 besides.

PID 1 is ours (`supervisor.sh`), and an agent that is root has its user id, so that the kernel would let it trace
PID 1 and write its memory. Against that:

- `ptrace` is refused the two requests that take hold of a process that runs already, PTRACE_ATTACH and PTRACE_SEIZE.
  A program that is started to be traced asks for it itself (PTRACE_TRACEME), and its children follow
  (PTRACE_O_TRACE*): `gdb PROGRAM`, `strace -f COMMAND` work; `gdb -p`, `strace -p` do not.
- What reads or changes another process's memory, descriptors or pages is refused (so `py-spy dump` does not work),
  and `prlimit64` sets the caller's own limits only: PID 1 with a limit on its CPU time would be killed by the kernel,
  which looks as if it had been killed from outside.

The rest is what engines refuse a container without capabilities: namespaces and mounts, keyrings, kernel interfaces
with a history (bpf, perf, userfaultfd, io_uring), and the administration of the machine. A call that is in neither
list is refused, too; to one that is newer than all of them runc answers ENOSYS, so that a C library does without.

Engines read a profile's JSON in the request. podman wants the name of a file on its own machine: `security_option`.
"""

from __future__ import annotations

import atexit
import json
import os
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

REFUSED = {
    "other processes": """
        kcmp migrate_pages move_pages pidfd_getfd process_madvise process_vm_readv process_vm_writev
    """,
    "namespaces and mounts": """
        fsconfig fsmount fsopen fspick listmount mount mount_setattr move_mount open_tree open_tree_attr pivot_root
        setns statmount umount umount2 unshare
    """,
    "keyrings": "add_key keyctl request_key",
    "kernel interfaces": """
        bpf fanotify_init fanotify_mark io_uring_enter io_uring_register io_uring_setup lookup_dcookie
        open_by_handle_at perf_event_open quotactl quotactl_fd syslog userfaultfd
    """,
    "the machine": """
        acct clock_settime clock_settime64 delete_module finit_module init_module ioperm iopl kexec_file_load
        kexec_load reboot setdomainname sethostname settimeofday stime swapoff swapon vhangup
    """,
}
"""By what they would reach; answered with EPERM, as the kernel does for want of a capability."""

EPERM, ENOSYS = 1, 38

_PTRACE_ATTACH, _PTRACE_SEIZE = 16, 0x4206
_OTHER_PTRACE = (17, 18, 19, 24, 30, 31, 32, 33, *range(0x4200, _PTRACE_SEIZE))
"""Requests between the two. A filter compares one argument once, so that "other than both" is an enumeration."""
_NEW_NAMESPACES = 0x7E020000
"""The flags of clone that make one."""
_PERSONALITIES = (0x0, 0x8, 0x20000, 0x20008, 0xFFFFFFFF)
"""Linux, a 32-bit machine's, a 2.6 kernel's, and the question which it is; not what turns address randomisation off."""
_AF_VSOCK = 40
"""The way from a virtual machine to its host, which no network rule sees."""


@cache
def profile() -> str:
    """The filter as JSON, in the form of https://docs.docker.com/engine/security/seccomp/."""
    return json.dumps(
        {
            "defaultAction": "SCMP_ACT_ERRNO",
            "defaultErrnoRet": EPERM,
            "archMap": [
                {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]},
                {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]},
            ],
            "syscalls": [
                _allow(*allowed()),
                _allow_where("ptrace", "LT", _PTRACE_ATTACH),
                *(_allow_where("ptrace", "EQ", request) for request in _OTHER_PTRACE),
                _allow_where("ptrace", "GT", _PTRACE_SEIZE),
                _allow_where("prlimit64", "EQ", 0),
                _allow_where("prlimit64", "EQ", 0, index=2),
                _allow_where("clone", "MASKED_EQ", _NEW_NAMESPACES),
                *(_allow_where("personality", "EQ", value) for value in _PERSONALITIES),
                _allow_where("socket", "NE", _AF_VSOCK),
                # Its arguments are behind a pointer, which a filter does not follow: C libraries then use clone.
                _refuse(ENOSYS, "clone3"),
                _refuse(EPERM, *" ".join(REFUSED.values()).split()),
            ],
        },
        separators=(",", ":"),
    )


@cache
def allowed() -> tuple[str, ...]:
    """The system calls that are allowed whatever their arguments."""
    lines = files(__package__).joinpath("syscalls.txt").read_text(encoding="utf-8").splitlines()
    return tuple(name for line in lines if not line.startswith("#") for name in line.split())


def security_option(*, podman: bool) -> str:
    """The filter as one of a container's `SecurityOpt`."""
    return f"seccomp={_profile_file() if podman else profile()}"


@cache
def _profile_file() -> Path:
    """A file that holds the filter, for as long as this process lives."""
    handle, name = tempfile.mkstemp(prefix="rollcage-seccomp-", suffix=".json")
    with os.fdopen(handle, "w") as file:
        file.write(profile())
    path = Path(name)
    atexit.register(path.unlink, missing_ok=True)
    return path


def _allow(*names: str) -> dict[str, Any]:
    return {"names": list(names), "action": "SCMP_ACT_ALLOW"}


def _allow_where(name: str, operator: str, value: int, *, index: int = 0) -> dict[str, Any]:
    """Allow a call where its argument number `index` compares so with `value`; several such rules are alternatives."""
    # The value of MASKED_EQ is a mask, and valueTwo what must be left.
    argument = {"index": index, "op": f"SCMP_CMP_{operator}", "value": value, "valueTwo": 0}
    return {**_allow(name), "args": [argument]}


def _refuse(errno: int, *names: str) -> dict[str, Any]:
    return {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": errno}
