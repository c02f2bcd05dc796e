"""Sandboxes in another runtime than the engine's own, on an engine that has one."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from private_dockerd import IMAGE, PrivateEngine

from rollcage.cluster.host import HostSpec, SandboxHost
from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.base import SandboxSpec
from rollcage.rollout.sandbox.container import start_sandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.pool import SandboxSettings

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

RELOAD_SEC = 20.0


def register(engine: PrivateEngine, name: str, path: Path) -> None:
    (engine.root / "none.json").write_text(json.dumps({"runtimes": {name: {"path": str(path)}}}))
    engine.freeze(signal.SIGHUP)  # which has it read its configuration again
    until = time.monotonic() + RELOAD_SEC
    while name not in engine.api.info()["Runtimes"]:
        assert time.monotonic() < until
        time.sleep(0.05)


async def test_a_runtime_that_is_registered_is_used_and_another_ends_the_job_at_its_start(
    engine: PrivateEngine, tmp_path: Path
) -> None:
    # Another program as far as the engine knows, which leaves a sign that it was it.
    other, used = tmp_path / "other", tmp_path / "used"
    other.write_text(f'#!/bin/sh\necho "$@" >>{used}\nexec {shutil.which("runc")} "$@"\n')
    other.chmod(0o755)
    register(engine, "other", other)
    client = Engine(engine.url)
    spec = SandboxSpec(image=IMAGE, name="rollcage-test-runtime", pids=64, runtime="other")
    sandbox = await start_sandbox(client, spec)
    assert (await (await sandbox.shell(0)).run("echo here")).stdout == b"here\n"
    await sandbox.remove()
    client.close()
    assert " create " in used.read_text()
    settings = SandboxSettings(docker_host=engine.url, runtime="kata")
    with pytest.raises(SandboxError, match=r"no runtime 'kata' \(it has .*other.*runc"):
        await SandboxHost(HostSpec("test-host", settings)).open()
