"""Sandboxes of three kinds of image: with bash, with dash alone, and with nothing but busybox."""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import built_images
import pytest

from rollcage.rollout.sandbox.base import SandboxSpec
from rollcage.rollout.sandbox.container import DockerSandbox, start_sandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.networks import NetworkLease, Networks

BASE = "debian:bookworm-slim"
LABELS = {"rollcage.host": "test-sandbox"}
KINDS = ("bash", "dash", "busybox")

MakeSandbox = Callable[..., Awaitable[DockerSandbox]]


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def build_image(engine: Engine) -> Iterator[Callable[[str], str]]:
    """Build an image from a Dockerfile's text; its id. Removed at the end."""
    tags: list[str] = []

    def build(dockerfile: str) -> str:
        tags.append(f"rollcage-test/sandbox:{uuid4().hex[:12]}")
        return built_images.build_image(engine.api, tags[-1], dockerfile, labels=LABELS)

    yield build
    for tag in tags:
        engine.api.remove_image(tag, force=True, noprune=True)  # two at once would meet at its parents


@pytest.fixture(scope="session")
def busybox_image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image that holds busybox, its links and nothing else."""
    program = _static_busybox(tmp_path_factory.mktemp("busybox"))
    listed = subprocess.run([program, "--list"], check=True, capture_output=True, text=True)
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w") as tar:
        for folder, mode in (("bin", 0o755), ("etc", 0o755), ("root", 0o700), ("tmp", 0o1777)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        tar.add(program, "bin/busybox", filter=_executable)
        for applet in set(listed.stdout.split()) - {"busybox"}:
            entry = tarfile.TarInfo(f"bin/{applet}")
            entry.type, entry.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(entry)
    tag = uuid4().hex[:12]
    engine.api.import_image_from_data(packed.getvalue(), repository="rollcage-test/busybox", tag=tag)
    yield f"rollcage-test/busybox:{tag}"
    engine.api.remove_image(f"rollcage-test/busybox:{tag}", force=True)


@pytest.fixture(scope="session")
def images(build_image: Callable[[str], str], busybox_image: str) -> dict[str, str]:
    """Image by kind of shell."""
    without_bash = f"FROM {BASE}\nRUN rm -f /bin/bash /usr/bin/bash\n"
    return {"bash": BASE, "dash": build_image(without_bash), "busybox": busybox_image}


@pytest.fixture
async def make_sandbox(engine: Engine) -> AsyncIterator[MakeSandbox]:
    """Start sandboxes; they are removed after the test."""
    made: list[DockerSandbox] = []

    async def make(image: str = BASE, **settings: Any) -> DockerSandbox:
        name = f"rollcage-test-{uuid4().hex[:12]}"
        spec = SandboxSpec(**{"image": image, "name": name, "pids": 128, "labels": LABELS, **settings})
        made.append(await start_sandbox(engine, spec))
        return made[-1]

    yield make
    for sandbox in made:
        await sandbox.remove()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def sandbox(make_sandbox: MakeSandbox, images: dict[str, str], kind: str) -> DockerSandbox:
    """One sandbox of each kind."""
    return await make_sandbox(images[kind])


def _static_busybox(folder: Path) -> str:
    if installed := shutil.which("busybox"):
        return installed
    subprocess.run(["apt-get", "download", "busybox-static"], cwd=folder, check=True, capture_output=True)
    (package,) = folder.glob("busybox-static*.deb")
    subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    return next(str(path) for path in folder.glob("**/bin/busybox"))


def _executable(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mode, entry.uid, entry.gid = 0o755, 0, 0
    return entry


def _tar(files: dict[str, tuple[bytes, int]]) -> io.BytesIO:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, (content, mode) in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    packed.seek(0)
    return packed


@dataclass(frozen=True)
class Outside:
    """What stands for the internet: a network namespace behind this machine, with servers that say `outside`.
    `address` and `other` are public, `private` is not; each has HTTP on port 80, TCP on 53, and UDP on 53, whose
    datagrams are kept in the file `heard`."""

    address: str
    other: str
    private: str
    heard: Path


OUTSIDE_SERVER = """
import http.server, socket, sys, threading
class Say(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"outside")
    def log_message(self, *_): pass
for port in (80, 53):
    server = http.server.ThreadingHTTPServer(("0.0.0.0", port), Say)
    threading.Thread(target=server.serve_forever, daemon=True).start()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("0.0.0.0", 53))
print("ready", flush=True)
with open(sys.argv[1], "ab", buffering=0) as heard:
    while True:
        heard.write(udp.recv(2048) + b"\\n")
"""


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """See `Outside`. Addresses are of a range for documentation, which nobody has. One test run at a time has them;
    what a killed run left is removed first."""
    if shutil.which("ip") is None:
        subprocess.run(["apt-get", "install", "-y", "-q", "iproute2"], check=True, capture_output=True)
    heard = tmp_path_factory.mktemp("outside") / "heard"
    heard.touch()
    with (Path(tempfile.gettempdir()) / "rollcage-test-outside.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_outside()
        try:
            with start_outside(Outside("198.51.100.80", "198.51.100.81", "10.77.77.80", heard)) as found:
                yield found
        finally:
            remove_outside()


OUTSIDE = "rcoutside"


def ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
    return done.stdout


def remove_outside() -> None:
    """Removes the namespace, its processes and the way to it, where they are."""
    if OUTSIDE in ip("netns", "list").split():
        for pid in ip("netns", "pids", OUTSIDE).split():
            os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", OUTSIDE)
    for line in ip("-o", "-4", "addr", "show", "to", "198.51.100.1").splitlines():
        # It may have gone with its namespace since it was listed.
        subprocess.run(["ip", "link", "del", line.split()[1]], capture_output=True, check=False)


@contextmanager
def start_outside(outside: Outside) -> Iterator[Outside]:
    ip("netns", "add", OUTSIDE)
    ip("link", "add", f"{OUTSIDE}a", "type", "veth", "peer", "name", f"{OUTSIDE}b", "netns", OUTSIDE)
    ip("addr", "add", "198.51.100.1/30", "dev", f"{OUTSIDE}a")
    ip("link", "set", f"{OUTSIDE}a", "up")
    for words in ("addr add 198.51.100.2/30 dev", "link set up dev"):
        ip("-n", OUTSIDE, *words.split(), f"{OUTSIDE}b")
    ip("-n", OUTSIDE, "link", "set", "lo", "up")
    ip("-n", OUTSIDE, "route", "add", "default", "via", "198.51.100.1")
    for address in (outside.address, outside.other, outside.private):
        ip("-n", OUTSIDE, "addr", "add", f"{address}/32", "dev", "lo")
        ip("route", "replace", f"{address}/32", "via", "198.51.100.2")
    command = ["ip", "netns", "exec", OUTSIDE, sys.executable, "-c", OUTSIDE_SERVER, str(outside.heard)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline() == "ready\n"
            yield outside
        finally:
            server.kill()


@pytest.fixture
async def make_networks(engine: Engine) -> AsyncIterator[Callable[..., Networks]]:
    """Networks of hosts; all that they made is removed after the test."""
    made: list[Networks] = []

    def make(host: str | None = None, **settings: Any) -> Networks:
        host = host or f"test-{uuid4().hex[:8]}"
        made.append(Networks(engine, host, **{"cidr": "10.233.0.0/16", **settings}))
        return made[-1]

    yield make
    for networks in made:
        await networks.close()


Join = Callable[[Networks, NetworkLease], Awaitable[DockerSandbox]]


@pytest.fixture
def join(make_networks: Callable[..., Networks], make_sandbox: MakeSandbox) -> Join:
    """Start a sandbox on a lease, as the pool does."""

    async def start(networks: Networks, lease: NetworkLease) -> DockerSandbox:
        sandbox = await make_sandbox(network=lease.name, dns=lease.dns)
        await networks.seclude(lease, sandbox.id)
        return sandbox

    return start


Reaches = Callable[..., Awaitable[str]]


@pytest.fixture
def reaches() -> Reaches:
    """What a sandbox hears at an address and port: the last line of an HTTP answer, or bash's words of why not."""

    async def look(sandbox: DockerSandbox, address: str, port: int = 80, *, within: int = 4) -> str:
        get = f"exec 3<>/dev/tcp/{address}/{port} && printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3 && tail -n 1 <&3"
        result = await (await sandbox.shell()).run(f'timeout {within} bash -c "{get}"', timeout=30)
        words = "" if result.exit_code == 124 else result.text.strip().splitlines()[-1:]
        return "nothing" if result.exit_code == 124 else "".join(words).rpartition(": ")[2]

    return look
