"""Sandboxes of three kinds of image: with bash, with dash alone, and with nothing but busybox."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from rollcage.rollout.sandbox.base import SandboxSpec
from rollcage.rollout.sandbox.container import DockerSandbox, start_sandbox
from rollcage.rollout.sandbox.engine import Engine

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
        context = _tar({"Dockerfile": (dockerfile.encode(), 0o644)})
        tag = f"rollcage-test/sandbox:{uuid4().hex[:12]}"
        lines = engine.api.build(
            fileobj=context, custom_context=True, tag=tag, rm=True, forcerm=True, decode=True, labels=LABELS
        )
        failed = [line["error"] for line in lines if "error" in line]
        assert not failed, failed
        tags.append(tag)
        return str(engine.api.inspect_image(tag)["Id"])

    yield build
    for tag in tags:
        engine.api.remove_image(tag, force=True)


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
