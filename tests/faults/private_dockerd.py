"""A Docker Engine of a test's own, to be broken: in a network namespace of its own, so that no bridge, pool or rule
of the machine's own engine is touched. Starts in about two seconds; needs root, `dockerd` and `iptables`."""

from __future__ import annotations

import ctypes
import fcntl
import io
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import docker
import psutil
from docker.errors import DockerException

START_SEC = 60.0
STOP_SEC = 1.0
"""What a service manager in a hurry gives the engine before it kills it."""

IMAGE = "rollcage-test/busybox:faults"

_HOLDER = """\
import fcntl, socket, struct, sys
with socket.socket() as s:
    fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
print("up", flush=True)
sys.stdin.read()
"""
_OWN_RESOLVER = """\
mount --bind "$0" /etc/resolv.conf
# A containerd that serves the whole machine does not see the mounts of this namespace: dockerd is to start its own.
[ ! -d /run/containerd ] || mount -t tmpfs tmpfs /run/containerd
exec "$@"
"""
_CLONE_NEWNET = 0x40000000
_SIOCBRDELBR, _SIOCSIFFLAGS = 0x89A1, 0x8914


def missing() -> str | None:
    """Why no private engine can be had here; None where one can."""
    programs = [name for name in ("dockerd", "iptables", "unshare", "nsenter") if shutil.which(name) is None]
    if os.geteuid() != 0:
        return "a private dockerd needs root"
    return f"a private dockerd needs {' and '.join(programs)}" if programs else None


class PrivateEngine:
    """`pool`: the range of its address pools, of which each network takes a /24. `data`: where its images and
    containers are, for an engine on a disk of its own. `resolver`: the one that it finds in /etc/resolv.conf, in the
    place of the machine's."""

    def __init__(
        self,
        *,
        pool: str = "10.253.0.0/16",
        data: Path | None = None,
        image: bool = True,
        resolver: str | None = None,
    ) -> None:
        # Short, for the path of a socket has at most 107 characters.
        self.root = Path(tempfile.mkdtemp(prefix="rc-faults-", dir="/tmp"))
        self.url = f"unix://{self.root}/docker.sock"
        self.namespace = f"rollcage-test-{secrets.token_hex(4)}"
        self.data = data or self.root / "data"
        self._pool = pool
        self._resolver = resolver
        self._process: subprocess.Popen[bytes] | None = None
        self._holder = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", _HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._holder.stdout is not None
        try:
            assert self._holder.stdout.readline() == b"up\n"
            self.api: Any = self.start()
            if image:
                self.api.import_image_from_data(busybox(), *IMAGE.split(":"))
        except BaseException:
            self.close()
            raise

    def start(self) -> Any:
        """Start it, again too, and wait until it answers; a client."""
        settings = {
            "host": self.url,
            "data-root": self.data,
            "exec-root": self.root / "exec",
            "pidfile": self.root / "pid",
            "config-file": self.root / "none.json",
            # A containerd that serves the whole machine keeps containers apart by these.
            "containerd-namespace": self.namespace,
            "containerd-plugins-namespace": f"{self.namespace}-plugins",
            "bip": "10.252.0.1/24",
            "default-address-pool": f"base={self._pool},size=24",
            "max-download-attempts": 1,
        }
        (self.root / "none.json").write_text("{}")
        command = ["dockerd", *(f"--{name}={value}" for name, value in settings.items())]
        if self._resolver is not None:
            (self.root / "resolv.conf").write_text(f"nameserver {self._resolver}\n")
            command = [
                "unshare",
                "--mount",
                "sh",
                "-c",
                _OWN_RESOLVER,
                str(self.root / "resolv.conf"),
                *command,
            ]
        log = self.root / "log"
        with log.open("ab") as out:
            self._process = subprocess.Popen(self._inside(command), stdout=out, stderr=out)
        until = time.monotonic() + START_SEC
        while True:
            try:
                return docker.APIClient(base_url=self.url, version="auto", timeout=30)
            except DockerException as error:
                if self._process.poll() is not None or time.monotonic() > until:
                    raise AssertionError(f"dockerd did not come up:\n{log.read_text()[-2000:]}") from error
                time.sleep(0.05)

    def stop(self) -> None:
        """End it as a service manager in a hurry does."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_SEC)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            for process in self._containerd():
                process.kill()
                process.wait(10)
        self._process = None

    def freeze(self, signal_number: int = signal.SIGSTOP) -> None:
        """Stop every thread of it; `thaw` has it go on."""
        assert self._process is not None
        self._process.send_signal(signal_number)

    def thaw(self) -> None:
        self.freeze(signal.SIGCONT)

    def shims(self, container_id: str = "") -> list[psutil.Process]:
        """The processes between containerd and this container, or all of this engine's containers."""
        return [
            process
            for process in psutil.process_iter(["cmdline"])
            if self.namespace in (line := process.info["cmdline"] or [])
            and "containerd-shim" in line[0]
            and (not container_id or container_id in line)
        ]

    def run(self, *command: str) -> None:
        """Run a command in its network namespace."""
        subprocess.run(self._inside(command), check=True, capture_output=True)

    def listen(self, address: str = "127.0.0.1") -> socket.socket:
        """A socket that listens in its network namespace, at a port that the kernel chooses."""
        return self._in_namespace(lambda: socket.create_server((address, 0), backlog=64))

    def hear(self, address: str, port: int) -> socket.socket:
        """A socket for datagrams in its network namespace."""

        def bind() -> socket.socket:
            heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            heard.bind((address, port))
            return heard

        return self._in_namespace(bind)

    def remove_bridge(self, name: str) -> None:
        """Delete a bridge under it, as a network script does that does not know of Docker."""

        def remove() -> None:
            with socket.socket() as control:
                request = struct.pack("16sh14x", name.encode(), 0)
                fcntl.ioctl(control, _SIOCSIFFLAGS, request)  # down
                fcntl.ioctl(control, _SIOCBRDELBR, name.encode() + b"\0")

        self._in_namespace(remove)

    def left(self) -> list[str]:
        """What is on it but its own networks and images with a name."""
        found = [name for one in self.api.containers(all=True) for name in one["Names"]]
        found += [one["Name"] for one in self.api.networks() if one["Name"] not in ("bridge", "host", "none")]
        found += [one["Name"] for one in self.api.volumes().get("Volumes") or []]
        return found + [one["Id"] for one in self.api.images(filters={"dangling": True})]

    def close(self) -> None:
        """End it, its containers, and remove its files."""
        if self._process is not None:
            self.freeze(signal.SIGCONT)
        self.stop()
        ending = [*self._containerd(), *self.shims()]
        within = [child for shim in ending for child in _children(shim)]
        for process in (*ending, *within):
            if process.is_running():
                process.kill()
        psutil.wait_procs([*ending, *within], 10)
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait()
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for mount in sorted((place for place in mounts if place.startswith(f"{self.root}/")), reverse=True):
            subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
        shutil.rmtree(self.root, ignore_errors=True)

    def _containerd(self) -> list[psutil.Process]:
        """Its own, where the machine has none that serves all."""
        pid = self.root / "exec/containerd/containerd.pid"
        if not pid.exists() or not psutil.pid_exists(number := int(pid.read_text())):
            return []
        return [psutil.Process(number)]

    def _inside(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", f"--net=/proc/{self._holder.pid}/ns/net", *command]

    def _in_namespace(self, work: Any) -> Any:
        """What `work` gives in the namespace: in a thread that ends with it, for a thread has one of its own."""
        result: list[Any] = []
        libc = ctypes.CDLL(None, use_errno=True)

        def enter() -> None:
            with open(f"/proc/{self._holder.pid}/ns/net") as namespace:
                if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            result.append(work())

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        return result[0]


@cache
def busybox() -> bytes:
    """A tar of a root directory that holds busybox, its links and little else."""
    with tempfile.TemporaryDirectory() as scratch:
        program = shutil.which("busybox") or _download(Path(scratch))
        applets = subprocess.run([program, "--list"], check=True, capture_output=True, text=True).stdout
        files = {"etc/passwd": b"root:x:0:0:root:/root:/bin/sh\n", "etc/group": b"root:x:0:\n"}
        with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w") as tar:
            for folder, mode in (("bin", 0o755), ("etc", 0o755), ("root", 0o700), ("tmp", 0o1777)):
                entry = tarfile.TarInfo(folder)
                entry.type, entry.mode = tarfile.DIRTYPE, mode
                tar.addfile(entry)
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))
            tar.add(program, "bin/busybox", filter=_executable)
            for applet in set(applets.split()) - {"busybox"}:
                entry = tarfile.TarInfo(f"bin/{applet}")
                entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(entry)
    return packed.getvalue()


def _download(folder: Path) -> str:
    subprocess.run(["apt-get", "download", "busybox-static"], cwd=folder, check=True, capture_output=True)
    (package,) = folder.glob("busybox-static*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    return next(str(path) for path in folder.glob("**/bin/busybox"))


def _executable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mode, entry.uid, entry.gid = 0o755, 0, 0
    return entry


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
