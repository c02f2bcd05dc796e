"""One suite that any sandbox must pass. A sandbox joins it by one entry in `KINDS`.

Cheap cases share one sandbox of a kind, whose processes are stopped in between; those that spend it have their own.
What a kind lacks stands in its `lacks`, by the name of the case and the reason: such a case must fail there, so
that the list cannot rot.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
import pytest_asyncio

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.base import Sandbox, SandboxSpec, Shell
from rollcage.rollout.sandbox.container import start_sandbox
from rollcage.rollout.sandbox.engine import Engine

IMAGE = "debian:bookworm-slim"
LABELS = {"rollcage.host": "test-conformance"}
SERVICE_SEC = 30.0

Start = Callable[..., Awaitable[Sandbox]]


@dataclass(frozen=True)
class Kind:
    """`server` is a fixture that gives what `start` and `kill` take first. `start` makes a sandbox of a spec; `kill`
    ends one from outside, behind its back."""

    server: str
    start: Callable[[Any, SandboxSpec], Awaitable[Sandbox]]
    kill: Callable[[Any, Sandbox], Awaitable[None]]
    marks: tuple[pytest.MarkDecorator, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)


async def kill_container(engine: Engine, sandbox: Sandbox) -> None:
    await engine.call("kill a container", lambda api: api.kill(sandbox.id))


PODMAN_LACKS = {
    "test_a_link_to_nowhere_is_not_taken_for_nothing": "its archive call follows links: 404, as for no file",
}

KINDS = {
    "docker": Kind("docker_engine", start_sandbox, kill_container, (pytest.mark.docker,)),
    "podman": Kind(
        "podman_engine", start_sandbox, kill_container, (pytest.mark.docker, pytest.mark.podman), PODMAN_LACKS
    ),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "kind" in metafunc.fixturenames:
        kinds = [pytest.param(name, marks=kind.marks, id=name) for name, kind in KINDS.items()]
        metafunc.parametrize("kind", kinds, scope="session", indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not isinstance(item, pytest.Function) or item.path.parent != Path(__file__).parent:
            continue
        callspec = getattr(item, "callspec", None)
        if callspec is None or "kind" not in callspec.params:
            continue
        reason = KINDS[callspec.params["kind"]].lacks.get(item.originalname)
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))


@pytest.fixture
def kinds() -> Mapping[str, Kind]:
    return KINDS


@pytest.fixture(scope="session")
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest, kind: Kind) -> Any:
    return request.getfixturevalue(kind.server)


@pytest_asyncio.fixture(loop_scope="session")
async def start(kind: Kind, server: Any) -> AsyncIterator[Start]:
    """Start sandboxes; they are removed after the test."""
    made: list[Sandbox] = []

    async def make(**settings: Any) -> Sandbox:
        made.append(await _start(kind, server, **settings))
        return made[-1]

    yield make
    await asyncio.gather(*(sandbox.remove() for sandbox in made))


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def shared(kind: Kind, server: Any) -> AsyncIterator[list[Sandbox]]:
    sandboxes = [await _start(kind, server)]
    yield sandboxes
    for sandbox in sandboxes:
        await sandbox.remove()


@pytest_asyncio.fixture(loop_scope="session")
async def sandbox(kind: Kind, server: Any, shared: list[Sandbox]) -> AsyncIterator[Sandbox]:
    """The shared sandbox: nothing runs in it, `/tmp` is empty. One that a case has broken is replaced."""
    try:
        await shared[-1].stop_processes()
        await shared[-1].exec(["sh", "-c", "rm -rf /tmp/* /tmp/.[!.]*"])
    except SandboxError:
        shared.append(await _start(kind, server))
    yield shared[-1]


@pytest_asyncio.fixture(loop_scope="session")
async def shell(sandbox: Sandbox) -> Shell:
    """Root's shell in the shared sandbox."""
    return await sandbox.shell()


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def podman_engine() -> Iterator[Engine]:
    """A podman service of our own, with its own storage, that has the image. `ROLLCAGE_TEST_PODMAN=yes` asks for it,
    and installs podman where it is missing."""
    if os.environ.get("ROLLCAGE_TEST_PODMAN") != "yes":
        pytest.skip("podman: takes two minutes more, for which ROLLCAGE_TEST_PODMAN=yes asks")
    if os.getuid() != 0:
        pytest.skip("podman: needs root here, for limits on what a sandbox may use")
    if shutil.which("podman") is None:
        _install_podman()
    folder = Path(tempfile.mkdtemp(prefix="rc-podman-"))  # short: its sockets lie deep in it
    command, environment = _podman(folder)
    with (folder / "log").open("wb") as log:
        address = f"unix://{folder}/socket"
        # Its monitors leave a file `oom` in the directory that they are started in.
        service = subprocess.Popen(
            [*command, "system", "service", "--time", "0", address],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            engine = _connected(address, service, folder / "log")
            yield engine
            engine.close()
        finally:
            subprocess.run(
                [*command, "rm", "--all", "--force"], env=environment, capture_output=True, check=False
            )
            service.kill()
            service.wait()
            _end_monitors(folder)
            subprocess.run(
                ["umount", "--lazy", folder / "root" / "overlay"], capture_output=True, check=False
            )
            shutil.rmtree(folder, ignore_errors=True)


def _end_monitors(folder: Path) -> None:
    """podman has one for each exec, and lets them live for minutes."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.name() == "conmon" and f"{folder}/runc" in process.cmdline():
                process.kill()


async def _start(kind: Kind, server: Any, **settings: Any) -> Sandbox:
    name = f"rollcage-conformance-{uuid4().hex[:12]}"
    return await kind.start(
        server, SandboxSpec(**{"image": IMAGE, "name": name, "pids": 128, "labels": LABELS, **settings})
    )


def _install_podman() -> None:
    if shutil.which("apt-get") is None:
        pytest.skip("podman: not installed, and no apt-get to install it")
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "podman"]
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(install, env=environment, capture_output=True, text=True, timeout=200, check=False)
    if done.returncode != 0:
        pytest.skip(f"podman: cannot be installed: {done.stderr.strip().splitlines()[-1:]}")


def _podman(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The command line and environment of a podman that shares nothing with the machine's own.

    It asks for a limit on open files that not every machine grants, also to root: its runtime is told what is.
    """
    runtime = folder / "runc"
    runtime.write_text(f"#!{sys.executable}\n{_RUNTIME}")
    runtime.chmod(stat.S_IRWXU)
    nested = subprocess.run(["stat", "-f", "-c", "%T", folder], capture_output=True, text=True, check=True)
    settings = {
        "root": folder / "root",
        "runroot": folder / "run",
        "tmpdir": folder / "tmp",
        "runtime": runtime,
        "cgroup-manager": "cgroupfs",
        "events-backend": "none",
        "storage-driver": "vfs" if "overlay" in nested.stdout else "overlay",
    }
    (folder / "containers.conf").write_text("[containers]\n")
    return (
        ["podman", *(f"--{name}={value}" for name, value in settings.items())],
        {**os.environ, "CONTAINERS_CONF": str(folder / "containers.conf")},
    )


_RUNTIME = """
import json, os, resource, shutil, sys
for name, value in zip(sys.argv, sys.argv[1:]):
    path = {"--bundle": f"{value}/config.json", "--process": value}.get(name)
    if path is None:
        continue
    with open(path) as file:
        config = json.load(file)
    for limit in config.get("process", config).get("rlimits") or []:
        most = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if most != resource.RLIM_INFINITY:
            limit.update(hard=min(limit["hard"], most), soft=min(limit["soft"], most))
    with open(path, "w") as file:
        json.dump(config, file)
runc = shutil.which("runc") or "/usr/sbin/runc"
os.execv(runc, [runc, *sys.argv[1:]])
"""


def _connected(address: str, service: subprocess.Popen[bytes], log: Path) -> Engine:
    """Raises where the service does not come up; skips where its containers do not run on this machine."""
    until = time.monotonic() + SERVICE_SEC
    while True:
        try:
            engine = Engine(address)
            break
        except SandboxError:
            if service.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"podman's service: {log.read_text()[-1000:]}") from None
            time.sleep(0.05)
    docker = Engine()
    engine.api.load_image(docker.api.get_image(IMAGE))
    docker.close()
    try:
        asyncio.run(_probe(engine))
    except SandboxError as error:
        pytest.skip(f"podman: its containers do not run here: {error.message}")
    return engine


async def _probe(engine: Engine) -> None:
    await (await _start(KINDS["podman"], engine)).remove()
