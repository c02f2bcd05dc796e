"""On a machine whose resolver is at a loopback address, no query of a sandbox without internet gets there."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
from private_dockerd import IMAGE, PrivateEngine

from rollcage.rollout.compose import read_compose
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.pool import SandboxPool
from rollcage.rollout.sandbox.settings import SandboxSettings
from rollcage.rollout.task import Environment

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

COMPOSE = f"""
services:
  db: {{image: '{IMAGE}', command: sleep 100}}
  beside: {{image: '{IMAGE}', command: sleep 100, network_mode: 'service:db'}}
"""


def heard(resolver: socket.socket) -> bytes:
    """The queries that have come."""
    found = []
    try:
        while True:
            found.append(resolver.recv(2048))
    except BlockingIOError:
        return b"".join(found)


def ask_as_a_tenant(private: PrivateEngine, command: str) -> None:
    """Run a command in a container of somebody else's, on a network with a way out."""
    api = private.api
    api.create_network("tenant")
    limits = api.create_host_config(network_mode="tenant", pids_limit=32)
    made = api.create_container(IMAGE, ["sh", "-c", f"{command}; true"], host_config=limits)["Id"]
    api.start(made)
    api.wait(made)
    api.remove_container(made)
    api.remove_network("tenant")


async def test_names_of_a_task_without_internet_stay_in_it(
    private_engine: Callable[..., PrivateEngine], tmp_path: Path
) -> None:
    private = private_engine(resolver="127.0.0.1")
    resolver = private.hear("127.0.0.1", 53)
    resolver.setblocking(False)
    engine = Engine(private.url)
    pool = SandboxPool(engine, SandboxSettings(pids=100), host=f"test-{uuid4().hex[:8]}", job="test")
    environment = Environment(
        context=None, docker_image=IMAGE, network_mode="no-network", build_timeout_sec=60.0
    )
    (tmp_path / "docker-compose.yaml").write_text(COMPOSE)
    read = read_compose(tmp_path / "docker-compose.yaml", environment, [])
    environment = Environment(**{**vars(environment), "compose": read})
    try:
        ask_as_a_tenant(private, "timeout 2 nslookup tenant.example")
        assert b"\6tenant" in heard(resolver), "this resolver is not asked at all"
        sandbox = await pool.acquire(await pool.image(environment, "test"), environment, attempt_id="test")
        shell = await sandbox.shell()
        assert (await shell.run("nslookup db", timeout=30)).exit_code == 0
        assert (await shell.run("timeout 2 nslookup main-secret.example", timeout=30)).exit_code != 0
        for name in ("db", "beside"):
            said = await sandbox.service(name).run(f"timeout 2 nslookup {name}-secret.example", timeout=30)
            assert said.exit_code != 0, said.text
        assert heard(resolver) == b""
        await pool.release(sandbox)
        await pool.drained()
    finally:
        await pool.close()
        resolver.close()
