"""What only BuildKit can do is built by the engine's own; whose a failure is does not depend on the builder."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollcage.rollout.outcome import BuildError
from rollcage.rollout.sandbox.build import Build
from rollcage.rollout.sandbox.buildkit import Trace, buildkit_fault, offered
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.images import BuiltImage, Images
from rollcage.rollout.sandbox.reaper import BUILD_LABEL
from rollcage.rollout.task import Environment

BASE = "debian:bookworm-slim"

ENDED = "executor failed running [/bin/sh -c {}]: exit code: {}"
ENDED_NEW = 'process "/bin/sh -c {}" did not complete successfully: exit code: {}'
SOLVE = "failed to solve with frontend dockerfile.v0: failed to create LLB definition: "
FULL = "write /var/lib/docker/overlay2/x/diff/a: no space left on device"

FAULTS = [
    (ENDED.format("apt-get install nonexistent", 100), "image_build", 100),
    (ENDED_NEW.format("exit 7", 7), "image_build", 7),
    ("failed to solve: " + ENDED_NEW.format("a\nb", 1), "image_build", 1),
    (ENDED.format(f"echo {FULL}", 1), "image_build", 1),
    (ENDED.format("echo 'failed to load cache key: Get x'; exit 137", 137), "image_build", 137),
    ("executor failed running [/bin/sh -c id]: unable to find user nosuch: no matching entries in passwd file",
     "image_build", None),
    (SOLVE + "dockerfile parse error line 3: unknown instruction: ECHO", "dockerfile_parse", None),
    ("dockerfile parse error on line 3: unknown instruction: ECHO", "dockerfile_parse", None),
    (SOLVE + "dockerfile parse error line 2: Unknown flag: network", "dockerfile_parse", None),
    ('failed to compute cache key: "/nope" not found: not found', "image_build", None),
    ('failed to compute cache key: failed to calculate checksum of ref 1::2: "/nope": not found', "image_build", None),
    ('failed to solve: failed to compute cache key: failed to calculate checksum of ref 1::2: "/n": not found',
     "image_build", None),
    (SOLVE + 'failed to do request: Head "https://nosuch.invalid/v2/x/manifests/1": dial tcp: lookup nosuch.invalid on '
     "10.0.0.2:53: no such host", "image_pull", None),
    (SOLVE + 'failed to do request: Head "http://127.0.0.1:1/v2/none/manifests/1": dial tcp 127.0.0.1:1: connect: '
     "connection refused", "image_pull", None),
    ("failed to solve: python:9: failed to resolve source metadata for docker.io/library/python:9: "
     "docker.io/library/python:9: not found", "build_infra", None),
    ("failed to solve: failed to resolve source metadata for docker.io/a/b:1: pull access denied, repository does not "
     "exist or may require authorization: server message: insufficient_scope: authorization failed",
     "base_image_missing", None),
    ("failed to copy: httpReadSeeker: failed open: unexpected status code "
     "https://registry-1.docker.io/v2/library/x/manifests/sha256:0: 429 Too Many Requests - Server message: "
     "toomanyrequests: You have reached your pull rate limit", "image_pull", None),
    ('failed to load cache key: Get "http://127.0.0.1:1/x": dial tcp 127.0.0.1:1: connect: connection refused',
     "build_infra", None),
    ("failed to load cache key: invalid response status 404", "image_build", None),
    ("failed to load cache key: invalid response status 503", "build_infra", None),
    ("no active sessions", "unsupported", None),
    ("failed to solve: granting entitlement security.insecure is not allowed by build daemon configuration",
     "unsupported", None),
    ("failed to copy files: copy file range failed: no space left on device", "disk_full", None),
    ("failed to export image: failed to set parent sha256:0: unknown parent image ID sha256:0", "build_infra", None),
    ("rpc error: code = Unavailable desc = error reading from server: EOF", "image_pull", None),
]  # fmt: skip
"""Of Engine 20.10 as it says them, and of 23 to 28 from the sources of moby/buildkit and moby/moby."""


@pytest.mark.parametrize(("said", "error_class", "code"), FAULTS)
def test_a_failure_is_named_by_buildkits_own_words(said: str, error_class: str, code: int | None) -> None:
    error = buildkit_fault({"errorDetail": {"message": said}, "error": said}, "build x")
    assert (error.error_class, error.evidence.exit_code) == (error_class, code)


@pytest.mark.parametrize(
    ("version", "api"),
    [
        ({"ApiVersion": "1.41", "Os": "linux", "Components": [{"Name": "Engine"}]}, (1, 41)),
        ({"ApiVersion": "1.50", "Os": "linux"}, (1, 50)),
        ({"ApiVersion": "1.38", "Os": "linux"}, None),
        ({"ApiVersion": "1.41", "Os": "windows"}, None),
        ({"ApiVersion": "1.41", "Os": "linux", "Components": [{"Name": "Podman Engine"}]}, None),
        ({}, None),
    ],
)
def test_an_engine_says_whether_it_has_buildkit(version: dict[str, object], api: object) -> None:
    assert offered(version) == api


def test_a_trace_message_that_is_none_is_an_error() -> None:
    for data in (b"\xff", b"\x0b\x00"):
        with pytest.raises(ValueError, match="no protobuf"):
            Trace().read(base64.b64encode(data).decode())


# On an engine


@pytest.fixture
async def images() -> AsyncIterator[Images]:
    engine = Engine(timeout_sec=60)
    images = Images(engine, host=f"test-{uuid.uuid4().hex[:8]}")
    yield images
    await images.close()
    for image in engine.api.images(filters={"label": f"{BUILD_LABEL}={images.host}"}):
        engine.api.remove_image(image["Id"], force=True)
    engine.close()


async def ensure(images: Images, tmp_path: Path, text: str, *, timeout_sec: float = 120) -> BuiltImage:
    root = tmp_path / uuid.uuid4().hex / "environment"
    root.mkdir(parents=True)
    (root / "Dockerfile").write_text(f"{text}\nLABEL salt={root.parent.name}\n")
    (root / "file").write_text("of the context\n")
    return await images.ensure(Environment(context=root, build_timeout_sec=timeout_sec), task="t")


async def fails(images: Images, tmp_path: Path, text: str, *, timeout_sec: float = 120) -> BuildError:
    with pytest.raises(BuildError) as caught:
        await ensure(images, tmp_path, text, timeout_sec=timeout_sec)
    return caught.value


@pytest.mark.docker
async def test_its_image_is_known_by_our_label_and_its_log_is_kept(images: Images, tmp_path: Path) -> None:
    text = f"FROM {BASE}\nRUN --mount=type=bind,source=file,target=/f cat /f && echo to-stderr >&2 # {uuid.uuid4()}"
    image = await ensure(images, tmp_path, text)
    assert image.built
    inspected = images.engine.api.inspect_image(image.id)
    assert inspected["Config"]["Labels"][BUILD_LABEL] == images.host
    assert image.reference in inspected["RepoTags"]
    assert "of the context\n" in image.log_tail
    assert "to-stderr\n" in image.log_tail


@pytest.mark.docker
@pytest.mark.parametrize("flag", ["", "--mount=type=cache,target=/c "])
async def test_a_failed_step_is_named_by_the_authors_own_line(
    images: Images, tmp_path: Path, flag: str
) -> None:
    text = (
        f"ARG V=1\nFROM {BASE} AS unused\nRUN false\n\nFROM {BASE} AS used\nCOPY <<EOF /a\nb\nEOF\nFROM used\n# why\n"
        f"RUN {flag}echo 'Step 9/9 : RUN x' && \\\n    echo on-the-way; exit 9\nRUN true"
    )
    error = await fails(images, tmp_path, text)
    assert error.error_class == "image_build"
    assert error.message == (
        f"environment/Dockerfile:11:1: RUN {flag}echo 'Step 9/9 : RUN x' && ended with status 9"
    )
    assert error.evidence.message == error.message
    assert "on-the-way" in error.evidence.log_tail


@pytest.mark.docker
@pytest.mark.parametrize("flag", ["", "--mount=type=cache,target=/c "])
async def test_a_build_that_is_ended_says_where_and_leaves_nothing(
    images: Images, tmp_path: Path, flag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[Build] = []

    class Watched(Build):
        def run(self, *given: Any) -> str:
            builds.append(self)
            return super().run(*given)

    monkeypatch.setattr("rollcage.rollout.sandbox.images.Build", Watched)
    seconds = f"6{uuid.uuid4().int % 10**6}"
    building = asyncio.create_task(
        ensure(images, tmp_path, f"FROM {BASE}\n\nRUN {flag}echo begun; sleep {seconds}")
    )
    while not builds or "begun\n" not in builds[0].log_tail:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert running(seconds)
    await images.close()
    with pytest.raises(asyncio.CancelledError):
        await building
    assert builds[0].place == f"environment/Dockerfile:3:1: RUN {flag}echo begun; sleep {seconds}"
    while running(seconds):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def running(seconds: str) -> bool:
    """Whether a build's step sleeps so long."""
    return any(["sleep", seconds] == process.info["cmdline"] for process in psutil.process_iter(["cmdline"]))


@pytest.mark.docker
async def test_a_syntax_directive_asks_no_registry(images: Images, tmp_path: Path) -> None:
    text = f"# syntax=docker/dockerfile:1.7-labs\nFROM {BASE}\nCOPY --parents ./file /x/\nRUN cat /x/file"
    image = await ensure(images, tmp_path, text)
    assert "# syntax=docker/dockerfile:1.7-labs is not fetched" in image.log_tail


@pytest.mark.docker
async def test_chown_to_a_user_without_a_group_of_that_name(images: Images, tmp_path: Path) -> None:
    text = f"FROM {BASE}\nCOPY --chown=nobody file /f\nRUN stat -c %U:%G /f # {uuid.uuid4()}"
    assert "nobody:nogroup" in (await ensure(images, tmp_path, text)).log_tail


@pytest.mark.docker
@pytest.mark.parametrize("kind", ["secret,id=x", "ssh"])
async def test_secrets_have_no_source(images: Images, tmp_path: Path, kind: str) -> None:
    error = await fails(images, tmp_path, f"FROM {BASE}\nRUN --mount=type={kind} true")
    assert error.error_class == "unsupported"
    assert error.message.startswith("environment/Dockerfile:2:5: RUN --mount=type=")
    assert images.builds == 0
