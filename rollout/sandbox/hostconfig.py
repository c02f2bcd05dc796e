"""What a sandbox's container is made with: limits, hardening, and nothing of the image's own start.

Capabilities: all are dropped, then `KEPT_CAPABILITIES` are given. Against the engine's default set, MKNOD and
SETPCAP are gone. What stays is what the everyday tools of a root user need: apt-get and dpkg (CHOWN,
DAC_OVERRIDE, FOWNER, FSETID, SETFCAP), useradd, su and services that drop root (SETUID, SETGID, AUDIT_WRITE),
kill, chroot, low ports, and ping (NET_RAW: Debian's has it as a file capability and does not start without).
New privileges are off: a setuid program such as sudo gives a user nothing.

System calls are filtered (`seccomp.py`), so that PID 1, which is ours, is out of an agent's reach.

A task written for a larger machine gets the processors that there are: an engine refuses more. `memory_mb` is where
the kernel kills; `memory_reservation_mb`, below it, is what the kernel tries to leave a sandbox when memory runs short.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from rollcage.rollout.sandbox.base import SandboxSpec
from rollcage.rollout.sandbox.link import supervisor_argv
from rollcage.rollout.sandbox.seccomp import security_option
from rollcage.rollout.sandbox.traits import EngineTraits

KEPT_CAPABILITIES = (
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "NET_RAW",
    "SETFCAP",
    "SETGID",
    "SETUID",
    "SYS_CHROOT",
)

NO_RESOLVER = ("192.0.2.53",)
"""`SandboxSpec.dns` on a network without a way out: nobody's address (RFC 5737), which the engine's own DNS cannot
reach from there. Left to choose, it would ask the machine's resolvers, and those at a loopback address from the
machine's own network namespace: names would leave after all (CVE-2024-29018)."""

NO_NAMES = {"DnsSearch": ["."], "DnsOptions": ["timeout:1", "attempts:1", "ndots:1"]}
"""With `NO_RESOLVER`. The engine's DNS gives no answer at all where it reaches no resolver, so that programs wait for
one second, not for twice five. It answers at once to a name without a dot where `ndots` is set."""

OOM_SCORE_ADJ = 500
"""When the host runs out of memory, sandboxes die before what serves them. Their own processes stand at
1000, so that PID 1 is the last to go within one."""

MASKED_PATHS = (
    "/proc/1/mem",
    "/proc/1/task/1/mem",
    "/proc/asound",
    "/proc/acpi",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
)
"""The engine's own list, and the memory of PID 1, which an agent that is root could otherwise write."""

MIB = 1 << 20

LEAST_MB = 6
"""No engine takes a smaller limit, nor a smaller reserve."""


def container_config(spec: SandboxSpec, traits: EngineTraits) -> dict[str, Any]:
    """The body of the container-create request of an engine with these traits."""
    config: dict[str, Any] = {
        "Image": spec.image,
        "Entrypoint": supervisor_argv(spec.deadline_sec),
        "Cmd": [],
        "User": "0",
        "Env": [f"{name}={value}" for name, value in spec.env.items()],
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "Labels": {"rollcage.deadline": str(int(time.time() + spec.deadline_sec)), **spec.labels},
        # The image's own would be an exec of the engine every few seconds.
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": _host_config(spec, traits),
    }
    if spec.workdir is not None:
        config["WorkingDir"] = spec.workdir
    if spec.hostname is not None:
        config["Hostname"] = spec.hostname
    if spec.volumes:
        config["Volumes"] = {path: {} for path in spec.volumes}
    if spec.aliases:
        endpoint = {"Aliases": list(spec.aliases)}
        config["NetworkingConfig"] = {"EndpointsConfig": {spec.network: endpoint}}
    return config


def _host_config(spec: SandboxSpec, traits: EngineTraits) -> dict[str, Any]:
    host: dict[str, Any] = {
        "PidsLimit": spec.pids,
        "NetworkMode": spec.network,
        "Dns": list(spec.dns),
        "Init": False,
        "AutoRemove": False,
        "LogConfig": {"Type": "none", "Config": {}},
        "OomScoreAdj": OOM_SCORE_ADJ,
        "SecurityOpt": ["no-new-privileges"],
        "CapDrop": ["ALL"],
        "CapAdd": list(KEPT_CAPABILITIES),
        "MaskedPaths": list(MASKED_PATHS),
        # No limit on open files: an engine refuses one above its own, which it does not tell.
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
    }
    if spec.dns == NO_RESOLVER:
        host.update(NO_NAMES)
    if traits.seccomp:
        host["SecurityOpt"].append(security_option(podman=traits.podman))
    if spec.memory_mb is not None:
        # The same for memory and swap: no swap.
        host["Memory"] = host["MemorySwap"] = spec.memory_mb * MIB
    if spec.memory_reservation_mb is not None:
        reserved = min(spec.memory_reservation_mb, spec.memory_mb or sys.maxsize)
        host["MemoryReservation"] = max(reserved, LEAST_MB) * MIB
    if spec.cpus is not None:
        host["NanoCpus"] = round(min(spec.cpus, traits.cpus or spec.cpus) * 1e9)
    if spec.storage_mb is not None:
        limit = spec.storage_mb * MIB
        host["Ulimits"].append({"Name": "fsize", "Soft": limit, "Hard": limit})
    if spec.runtime is not None:
        host["Runtime"] = spec.runtime
    if spec.binds:
        host["Binds"] = list(spec.binds)
    if spec.tmpfs:
        host["Tmpfs"] = dict(spec.tmpfs)
    if spec.extra_hosts:
        host["ExtraHosts"] = list(spec.extra_hosts)
    if spec.shm_mb is not None:
        host["ShmSize"] = spec.shm_mb * MIB
    return host
