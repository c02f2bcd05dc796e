"""A pull from a registry that stops in the middle of a layer ends: when it is told to, and by itself."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rollcage.rollout.outcome import BuildError
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.pulls import Pulls, inspect, touch

pytestmark = pytest.mark.docker


def entry(data: bytes, kind: str) -> dict[str, Any]:
    return {"mediaType": kind, "size": len(data), "digest": f"sha256:{hashlib.sha256(data).hexdigest()}"}


LAYER = uuid.uuid4().bytes * (1 << 16)
CONFIG = json.dumps(
    {
        "architecture": "amd64",
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [entry(LAYER, "")["digest"]]},
    }
).encode()
MANIFEST = json.dumps(
    {
        "schemaVersion": 2,
        "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
        "config": entry(CONFIG, "application/vnd.docker.container.image.v1+json"),
        "layers": [entry(LAYER, "application/vnd.docker.image.rootfs.diff.tar")],
    }
).encode()


class Registry(ThreadingHTTPServer):
    """Sends the beginning of a layer, sets `begun`, and stops until it is closed."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.begun, self.closing = threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def image(self) -> str:
        return f"127.0.0.1:{self.server_address[1]}/stalled:{uuid.uuid4().hex[:8]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Registry

    def do_GET(self) -> None:
        layer = False
        if "/manifests/" in self.path:
            kind, body = "application/vnd.docker.distribution.manifest.v2+json", MANIFEST
        elif self.path.endswith(entry(LAYER, "")["digest"]):
            kind, body, layer = "application/octet-stream", LAYER, True
        else:
            kind, body = "application/json", CONFIG if "/blobs/" in self.path else b"{}"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if layer else body)
        if layer:
            self.server.begun.set()
            self.server.closing.wait(60)
            self.close_connection = True

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is said."""


@pytest.fixture
def registry() -> Iterator[Registry]:
    registry = Registry()
    yield registry
    registry.closing.set()
    registry.shutdown()
    registry.server_close()


async def test_closing_ends_a_pull_at_once(engine: Engine, registry: Registry) -> None:
    pulls = Pulls(engine, lambda: False)
    waiting = asyncio.create_task(pulls.fetched(registry.image))
    assert await asyncio.to_thread(registry.begun.wait, 60)
    async with asyncio.timeout(30):
        await pulls.flights.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_registry_that_stops_sending_is_not_waited_for_for_ever(
    engine: Engine, registry: Registry
) -> None:
    pulls = Pulls(engine, lambda: False, waits_sec=(), silent_sec=2.0)
    with pytest.raises(BuildError) as caught:
        await pulls.fetched(registry.image)
    assert registry.begun.is_set()
    assert caught.value.error_class == "docker_timeout"
    assert registry.image.rpartition(":")[0] in caught.value.message


async def test_an_image_that_was_just_removed_is_not_taken_for_there(engine: Engine) -> None:
    name = f"rollcage-test/pulls:{uuid.uuid4().hex[:12]}"
    engine.api.import_image_from_data(bytes(1024), *name.split(":"))
    found = await inspect(engine, name)
    assert found is not None
    old = {**found, "Created": "2020-01-01T00:00:00Z", "Metadata": {}}
    assert await touch(engine, old, name)
    engine.api.remove_image(name)
    assert not await touch(engine, old, name)


async def test_two_spellings_of_one_image_are_fetched_once(engine: Engine) -> None:
    pulls = Pulls(engine, lambda: False)
    spellings = ("debian:bookworm-slim", "docker.io/library/debian:bookworm-slim")
    found = [asyncio.create_task(pulls.fetched(name)) for name in spellings]
    await asyncio.sleep(0)
    assert "debian:bookworm-slim" in pulls.flights
    assert len({image.id for image in await asyncio.gather(*found)}) == 1
