"""Room is made on the engine's disk: the least recently used of our images go, and nothing that is in use or not ours.

On an engine of the tests' own, whose disk is small: nothing of the machine's is at stake.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
import time
import uuid
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import requests
from docker.errors import APIError, ImageNotFound

from rollcage.rollout.outcome import BuildError
from rollcage.rollout.sandbox import image_gc, pulls
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.image_gc import GIB, Collector, Forest, Stored, oldest_first
from rollcage.rollout.sandbox.images import BuiltImage, Images
from rollcage.rollout.sandbox.pulls import PULLED, familiar, record_of
from rollcage.rollout.task import Environment

sys.path.insert(0, str(Path(__file__).parents[2] / "faults"))  # tests are no packages

import private_dockerd
from private_dockerd import IMAGE, PrivateEngine

MB = 1 << 20
DISK_MB = 128


# Which ones go


def forest(*rows: tuple[str, str, int, str], used: tuple[str, ...] = ()) -> Forest:
    """Rows of (id, parent, size, kind): ours, theirs, or nameless."""
    images = [
        Stored(name, parent, size, () if kind == "nameless" else (name,), kind == "ours")
        for name, parent, size, kind in rows
    ]
    return Forest.of(images, used)


TREE = (
    ("base", "", 100, "theirs"),
    ("step", "base", 130, "nameless"),
    ("a", "step", 140, "ours"),
    ("b", "step", 150, "ours"),
    ("pulled", "", 500, "ours"),
    ("c", "pulled", 510, "ours"),
    ("mine-too", "base", 190, "theirs"),
)


def test_layers_that_images_share_are_counted_once() -> None:
    assert forest(*TREE).our_bytes() == (30 + 10 + 20) + (500 + 10)


def test_what_others_build_on_is_not_ours_to_count() -> None:
    rows = [*TREE, ("theirs", "step", 131, "theirs")]
    assert forest(*rows).our_bytes() == (10 + 20) + (500 + 10)


ORDER = {"a": 4.0, "b": 1.0, "c": 3.0, "pulled": 2.0}


@pytest.mark.parametrize(
    ("goal", "used", "before", "gone"),
    [
        (1, (), 9.0, ["b"]),
        (20, (), 9.0, ["b"]),
        (21, (), 9.0, ["b", "c"]),
        (31, (), 9.0, ["b", "c", "pulled"]),
        (10_000, (), 9.0, ["b", "c", "pulled", "a"]),
        (10_000, (), 3.5, ["b", "c", "pulled"]),
        (10_000, ("c", "b"), 9.0, ["a"]),
        (10_000, ("pulled",), 9.0, ["b", "c", "a"]),
        (0, (), 9.0, []),
    ],
)
def test_the_least_recently_used_go_first(
    goal: int, used: tuple[str, ...], before: float, gone: list[str]
) -> None:
    chosen = oldest_first(forest(*TREE, used=used), lambda name: ORDER[name], goal, before=before)
    assert [image.id for image in chosen] == gone


@pytest.mark.parametrize(
    ("reference", "listed"),
    [
        ("debian", "debian:latest"),
        ("docker.io/library/debian:bookworm", "debian:bookworm"),
        ("docker.io/a/b", "a/b:latest"),
        ("library/x:1", "x:1"),
        ("host:5000/library/x", "host:5000/library/x:latest"),
        ("index.docker.io/library/x:1@sha256:00", "x@sha256:00"),
    ],
)
def test_a_reference_is_known_by_the_name_that_the_engine_lists(reference: str, listed: str) -> None:
    assert familiar(reference) == listed


# On an engine


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateEngine]:
    why = private_dockerd.missing()
    if why:
        pytest.skip(why)
    disk = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(disk)], check=True)
    try:
        engine = PrivateEngine(data=disk)
        try:
            yield engine
        finally:
            engine.close()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def engine(private: PrivateEngine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The engine, with nothing on it but busybox. A use is noted each time."""
    monkeypatch.setattr(pulls, "TOUCH_SEC", -1.0)
    for container in private.api.containers(all=True):
        private.api.remove_container(container["Id"], force=True)
    for image in private.api.images():
        for tag in image.get("RepoTags") or ():
            if tag != IMAGE:
                private.api.remove_image(tag, force=True)
    engine = Engine(private.url)
    yield engine
    engine.close()


def host(engine: Engine, *, disk_mb: float | None = None, grace_sec: float = 0.0) -> Images:
    images = Images(engine, host=f"test-{uuid.uuid4().hex[:8]}", pull_waits_sec=(0.05,))
    images.collector = Collector(
        engine,
        disk_gb=disk_mb * MB / GIB if disk_mb is not None else None,
        is_held=images._is_needed,
        grace_sec=grace_sec,
        urgent_grace_sec=grace_sec,
    )
    images._pulls._make_room = images.collector.make_room
    return images


def task(tmp_path: Path, megabytes: int, text: str = f"FROM {IMAGE}\n") -> Environment:
    """An environment whose image has a layer of its own of so many MiB."""
    root = tmp_path / uuid.uuid4().hex
    root.mkdir()
    (root / "Dockerfile").write_text(f"{text}COPY big /big-{root.name}\n")
    (root / "big").write_bytes(os.urandom(megabytes * MB))
    return Environment(context=root)


async def ensure(images: Images, environment: Environment) -> BuiltImage:
    return await images.ensure(environment, task="t")


def tags(engine: Engine) -> set[str]:
    return {tag for image in engine.api.images() for tag in image.get("RepoTags") or ()}


@pytest.mark.docker
async def test_a_budget_is_kept_and_what_was_used_lately_stays(engine: Engine, tmp_path: Path) -> None:
    images = host(engine, disk_mb=25)
    environments = [task(tmp_path, 10) for _ in range(3)]
    first, second, third = [await ensure(images, one) for one in environments]
    assert {first.reference, second.reference, third.reference} <= tags(engine)
    assert not (await ensure(images, environments[0])).built
    fourth = await ensure(images, task(tmp_path, 10))
    left = tags(engine)
    assert {first.reference, third.reference, fourth.reference, IMAGE} <= left
    assert second.reference not in left
    assert images.collector.removed == 1
    assert (await ensure(images, environments[1])).built


@pytest.mark.docker
async def test_what_is_in_use_never_goes(engine: Engine, tmp_path: Path) -> None:
    builder = host(engine)
    used, held, spare = [await ensure(builder, task(tmp_path, 5)) for _ in range(3)]
    engine.api.create_container(used.id, ["true"], labels={"rollcage.host": "test-gc"})
    engine.api.tag(IMAGE, "somebody/elses", "1")
    images = host(engine, disk_mb=0.001)
    images.hold(held.id)
    await images.collector.keep_within_budget()
    assert tags(engine) == {IMAGE, "somebody/elses:1", used.reference, held.reference}
    images.let_go(held.id)
    await images.collector.keep_within_budget()
    assert tags(engine) == {IMAGE, "somebody/elses:1", used.reference}
    assert spare.reference not in tags(engine)


@pytest.mark.docker
async def test_another_process_is_given_time_to_start_what_it_asked_for(
    engine: Engine, tmp_path: Path
) -> None:
    image = await ensure(host(engine), task(tmp_path, 5))
    assert await host(engine, disk_mb=0.001, grace_sec=600).collector.keep_within_budget() == 0
    assert image.reference in tags(engine)


@pytest.mark.docker
async def test_an_image_with_a_name_of_somebody_elses_is_not_ours(engine: Engine, tmp_path: Path) -> None:
    image = await ensure(host(engine), task(tmp_path, 5))
    engine.api.tag(image.id, "kept/by-a-user", "1")
    engine.api.tag(IMAGE, "rollcage/env", "without-our-label")
    assert await host(engine, disk_mb=0.001).collector.keep_within_budget() == 0
    assert {image.reference, "kept/by-a-user:1", "rollcage/env:without-our-label"} <= tags(engine)


@pytest.mark.docker
async def test_two_hosts_may_collect_at_once(engine: Engine, tmp_path: Path) -> None:
    builder = host(engine)
    for _ in range(4):
        await ensure(builder, task(tmp_path, 2))
    hosts = [host(engine, disk_mb=0.001) for _ in range(2)]
    await asyncio.gather(*(one.collector.keep_within_budget() for one in hosts))
    assert tags(engine) == {IMAGE}


@pytest.mark.parametrize("looks", [None, 2, 0])
def test_an_engine_that_stumbles_over_a_second_removal_is_no_fault(
    looks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After so many looks the image is gone, by the other removal; or never."""
    monkeypatch.setattr(image_gc, "REMOVAL_SEC", 0.5)
    seen = count()

    class Stumbles:
        """As moby's image/store.go, Delete, does to one of two."""

        def remove_image(self, name: str) -> None:
            response = requests.Response()
            response.status_code = 500
            raise APIError("500", response, f"unrecognized image ID {name}")

        def inspect_image(self, name: str) -> dict[str, str]:
            if looks is not None and next(seen) >= looks:
                raise ImageNotFound(name)
            return {"Id": name}

    image = Stored("sha256:1", "", 1, ("rollcage/env:1", "rollcage/env:2"), True)
    if looks is None:
        with pytest.raises(APIError):
            image_gc._remove(Stumbles(), image)
    else:
        assert image_gc._remove(Stumbles(), image) == 1


@pytest.mark.parametrize("looks", [None, 2])
def test_an_image_that_is_half_removed_is_looked_for_again(
    looks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "REMOVAL_SEC", 0.5)
    seen = count()

    class HalfRemoved:
        def inspect_image(self, name: str) -> dict[str, str]:
            if looks is not None and next(seen) >= looks:
                raise ImageNotFound(name)
            response = requests.Response()
            response.status_code = 500
            raise APIError("500", response, "layer does not exist")

    if looks is None:
        with pytest.raises(APIError):
            pulls.known(HalfRemoved(), "sha256:1")
    else:
        assert pulls.known(HalfRemoved(), "sha256:1") is None


@pytest.mark.docker
async def test_a_build_that_finds_the_disk_full_is_built_once_room_was_made(
    engine: Engine, tmp_path: Path
) -> None:
    images = host(engine)
    old = [await ensure(images, task(tmp_path, 22)) for _ in range(3)]
    new = await ensure(images, task(tmp_path, 40))
    assert new.built
    assert images.builds == 5
    assert new.reference in tags(engine)
    assert old[0].reference not in tags(engine)


@pytest.mark.docker
async def test_a_disk_that_stays_full_is_the_hosts_fault(engine: Engine, tmp_path: Path) -> None:
    images = host(engine)
    with pytest.raises(BuildError) as caught:
        await ensure(images, task(tmp_path, DISK_MB))
    assert caught.value.error_class == "disk_full"


@pytest.mark.docker
async def test_without_a_budget_a_tenth_of_the_disk_is_kept_free(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = host(engine)
    old = await ensure(images, task(tmp_path, 20))
    assert await images.collector.keep_within_budget() == 0
    monkeypatch.setattr(image_gc, "FREE_SHARE", 0.95)
    assert await images.collector.keep_within_budget() == 1
    assert old.reference not in tags(engine)


@pytest.mark.docker
async def test_images_that_buildkit_built_are_counted_without_their_base(
    engine: Engine, tmp_path: Path
) -> None:
    image = await ensure(
        host(engine), task(tmp_path, 5, f"FROM {IMAGE}\nRUN --mount=type=cache,target=/c true\n")
    )
    assert engine.api.inspect_image(image.id)["Parent"] == ""
    images = host(engine, disk_mb=1)
    counted = (await images.collector._forest()).our_bytes()
    assert 5 * MB <= counted < 5.5 * MB
    assert await images.collector.keep_within_budget() == 1


# Images that we pulled


class Registry:
    """A registry in a private engine's network, with one image under any name and any tag."""

    def __init__(self, private: PrivateEngine) -> None:
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            entry = tarfile.TarInfo("random")
            entry.size = 5 * MB
            tar.addfile(entry, io.BytesIO(os.urandom(entry.size)))
        diff_id = "sha256:" + hashlib.sha256(layer.getvalue()).hexdigest()
        config = {"architecture": "amd64", "os": "linux", "rootfs": {"type": "layers", "diff_ids": [diff_id]}}
        self.blobs: dict[str, bytes] = {}
        kinds = ("container.image.v1+json", "image.rootfs.diff.tar")
        parts = [
            {"mediaType": f"application/vnd.docker.{kind}", "size": len(blob), "digest": self._keep(blob)}
            for kind, blob in zip(kinds, (json.dumps(config).encode(), layer.getvalue()), strict=True)
        ]
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        manifest = {"schemaVersion": 2, "mediaType": kind, "config": parts[0], "layers": parts[1:]}
        self.digest = self._keep(json.dumps(manifest).encode())
        listening = private.listen()
        self.name = f"127.0.0.1:{listening.getsockname()[1]}/x"
        self._server = http.server.ThreadingHTTPServer(("", 0), self._handler(kind), bind_and_activate=False)
        self._server.socket.close()
        self._server.socket = listening
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _keep(self, blob: bytes) -> str:
        digest = "sha256:" + hashlib.sha256(blob).hexdigest()
        self.blobs[digest] = blob
        return digest

    def _handler(self, manifest_kind: str) -> type[http.server.BaseHTTPRequestHandler]:
        registry = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.path.rpartition("/")[2]
                is_manifest = "/manifests/" in self.path
                digest = wanted if wanted in registry.blobs else registry.digest
                body = b"{}" if self.path == "/v2/" else registry.blobs[digest]
                self.send_response(200)
                self.send_header("Content-Type", manifest_kind if is_manifest else "application/octet-stream")
                self.send_header("Docker-Content-Digest", digest)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


@pytest.fixture(scope="module")
def registry(private: PrivateEngine) -> Iterator[Registry]:
    registry = Registry(private)
    yield registry
    registry.close()


@pytest.mark.docker
@pytest.mark.parametrize("ending", [":1", "@"])
async def test_an_image_that_we_pulled_may_go_again(engine: Engine, registry: Registry, ending: str) -> None:
    reference = registry.name + (ending if ending == ":1" else f"@{registry.digest}")
    images = host(engine, disk_mb=0.001)
    ready = Environment(context=None, docker_image=reference)
    assert not (await ensure(images, ready)).cached
    assert (await ensure(images, ready)).cached
    assert record_of(reference) in tags(engine)
    assert await images.collector.keep_within_budget() == 1
    assert tags(engine) == {IMAGE}
    assert not engine.api.images(name=registry.name)


@pytest.mark.docker
async def test_an_image_that_was_there_before_is_not_taken_for_pulled(
    engine: Engine, registry: Registry
) -> None:
    for line in engine.api.pull(registry.name, tag="2", stream=True, decode=True):
        assert "error" not in line
    images = host(engine, disk_mb=0.001)
    await ensure(images, Environment(context=None, docker_image=f"{registry.name}:2"))
    await ensure(images, Environment(context=None, docker_image=f"{registry.name}:3"))
    assert await images.collector.keep_within_budget() == 0
    assert f"{registry.name}:2" in tags(engine)


@pytest.mark.docker
async def test_a_pulled_base_stays_as_long_as_what_is_built_on_it(
    engine: Engine, registry: Registry, tmp_path: Path
) -> None:
    base = f"{registry.name}:base"
    builder = host(engine)
    image = await ensure(builder, task(tmp_path, 1, f"FROM {base}\n"))
    engine.api.create_container(image.id, ["true"], labels={"rollcage.host": "test-gc"})
    images = host(engine, disk_mb=0.001)
    assert await images.collector.keep_within_budget() == 0
    for container in engine.api.containers(all=True):
        engine.api.remove_container(container["Id"])
    assert await images.collector.keep_within_budget() == 2
    assert not any(tag.startswith((registry.name, PULLED)) for tag in tags(engine))


@pytest.mark.docker
async def test_the_engine_itself_remembers_the_last_use(engine: Engine, tmp_path: Path) -> None:
    environment = task(tmp_path, 1)
    image = await ensure(host(engine), environment)
    before = pulls.last_used(engine.api.inspect_image(image.id))
    await ensure(host(engine), environment)
    after = pulls.last_used(engine.api.inspect_image(image.id))
    assert before < after <= time.time() + 1
