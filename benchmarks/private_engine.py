"""A Docker Engine of a benchmark's own, with the engine's default address pools, in a network namespace of its own.

Pools, bridges and rules of the machine's own engine are untouched, and what the benchmark breaks is its own.
Needs root, `dockerd` and `iptables`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import docker
from docker.errors import DockerException

INSIDE = "ROLLCAGE_BENCH_NETNS"
NEW_SYSFS = """
set -e
kept=$(mktemp -d)
mount --rbind /sys/fs/cgroup "$kept"
mount -t sysfs sysfs /sys
mount --rbind "$kept" /sys/fs/cgroup
umount --lazy "$kept"
rmdir "$kept"
exec "$@"
"""
"""/sys/class/net shows the interfaces of the namespace in which it was mounted; the cgroups stay."""
START_SEC = 60.0
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


def enter_network_namespace() -> None:
    """Start this very command again in a network namespace of its own, with nothing in it but loopback.

    Ends the benchmark, with the remedy, where that cannot be done.
    """
    if os.environ.get(INSIDE):
        _loopback_up()
        return
    missing = [name for name in ("unshare", "dockerd", "iptables") if shutil.which(name) is None]
    if missing or os.geteuid() != 0:
        need = (
            f"these commands: {' '.join(missing)} (apt-get install docker.io iptables)" if missing else "root"
        )
        raise SystemExit(f"An engine in a network namespace of its own needs {need}")
    os.environ[INSIDE] = "1"
    os.execvp(
        "unshare", ["unshare", "--net", "--mount", "sh", "-c", NEW_SYSFS, "sh", sys.executable, *sys.argv]
    )


@contextmanager
def private_engine(root: Path, image: str) -> Iterator[str]:
    """An engine with its files in `root`, that has `image` of the machine's own engine; its `DOCKER_HOST`.
    Everything of it is gone afterwards."""
    address = f"unix://{root}/docker.sock"
    # Where the machine has a containerd for all, containers are kept apart in it by these namespaces.
    apart = [
        f"--containerd-namespace=bench-{os.getpid()}",
        f"--containerd-plugins-namespace=bench-p-{os.getpid()}",
    ]
    places = [f"--{name}={root / name}" for name in ("data-root", "exec-root")]
    command = ["dockerd", "--host", address, "--pidfile", f"{root}/pid", *places, *apart]
    with (root / "dockerd.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        api = _answering(address, process, root / "dockerd.log")
        _copy_image(image, api)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _unmount(root)


def _answering(address: str, process: subprocess.Popen[bytes], log: Path) -> docker.APIClient:
    until = time.monotonic() + START_SEC
    while True:
        try:
            return docker.APIClient(base_url=address, version="auto", timeout=300)
        except DockerException as error:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"dockerd did not come up:\n{log.read_text()[-2000:]}") from error
            time.sleep(0.1)


def _copy_image(image: str, target: docker.APIClient) -> None:
    source = docker.from_env().api
    try:
        target.load_image(source.get_image(image))
    except DockerException as error:
        raise SystemExit(f"{image} could not be copied from the machine's own engine: {error}") from error
    finally:
        source.close()


def _unmount(root: Path) -> None:
    """What dockerd has left mounted below `root`, so that it can be removed."""
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((place for place in mounts if place.startswith(f"{root}/")), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False)


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(control, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
