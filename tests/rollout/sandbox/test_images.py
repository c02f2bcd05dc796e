"""Images are made once per host, named by their content, and a failure is nobody else's."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import docker
import pytest
from built_images import build_image, remove_built_by

from rollcage.rollout.compose import image_environment, read_compose
from rollcage.rollout.outcome import BuildError
from rollcage.rollout.sandbox.build import Build
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.images import BuiltImage, Images
from rollcage.rollout.sandbox.reaper import BUILD_LABEL, REPOSITORY, reap
from rollcage.rollout.task import Environment

pytestmark = pytest.mark.docker

BASE = "debian:bookworm-slim"
SALT = uuid.uuid4().hex
"""Keeps what an earlier run of these tests built apart."""


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine(timeout_sec=60)
    yield engine
    engine.close()


@pytest.fixture
async def images(engine: Engine) -> AsyncIterator[Images]:
    """Its builds are labelled with a host of its own; whatever they made is removed."""
    images = Images(engine, host=f"test-{uuid.uuid4().hex[:8]}", pull_waits_sec=(0.1,))
    yield images
    await images.close()
    remove_built_by(engine.api, images.host)


def task(tmp_path: Path, dockerfile: str, *, timeout_sec: float = 120, **files: str) -> Environment:
    root = tmp_path / uuid.uuid4().hex
    root.mkdir()
    (root / "Dockerfile").write_text(dockerfile and dockerfile + f"LABEL test={SALT}\n")
    for name, content in files.items():
        (root / name).write_text(content)
    return Environment(context=root, build_timeout_sec=timeout_sec)


async def ensure(images: Images, environment: Environment) -> BuiltImage:
    return await images.ensure(environment, task="t")


async def fails(images: Images, environment: Environment) -> BuildError:
    with pytest.raises(BuildError) as caught:
        await ensure(images, environment)
    return caught.value


def leftovers(images: Images) -> list[Any]:
    """Containers of this host's builds, and its images without a name."""
    api = images.engine.api
    label = f"{BUILD_LABEL}={images.host}"
    return [
        *api.containers(all=True, filters={"label": label}),
        *api.images(filters={"label": label, "dangling": True}),
    ]


async def test_eight_samples_wait_for_one_build(images: Images, tmp_path: Path) -> None:
    environment = task(
        tmp_path, f"FROM {BASE}\nENV a=b\nWORKDIR /w\nUSER nobody\nRUN echo built $((6 * 7))\n"
    )
    made = await asyncio.gather(*(ensure(images, environment) for _ in range(8)))
    assert images.builds == 1
    assert [image.built for image in made].count(True) == 1
    assert {image.id for image in made} == {made[0].id}
    first = next(image for image in made if image.built)
    assert (first.user, first.workdir, first.env["a"]) == ("nobody", "/w", "b")
    assert first.reference.startswith(f"{REPOSITORY}:")
    assert "built 42" in first.log_tail
    assert first.build_seconds > 0
    again = await ensure(images, environment)
    assert (again.cached, again.built, again.id) == (True, False, first.id)
    elsewhere = await ensure(Images(images.engine), environment)
    assert (elsewhere.built, elsewhere.id) == (False, first.id)


async def test_others_may_remove_images_on_the_same_base_during_a_build(
    images: Images, tmp_path: Path
) -> None:
    """The classic builder looks through all of them for the step that it is at, and fails over one that goes then."""
    over, base = threading.Event(), f"rollcage-test/beside:{SALT}"
    build_image(images.engine.api, base, f"FROM {BASE}", labels={"rollcage.test": SALT})

    def churn() -> None:
        api, beside = docker.APIClient(), deque[str]()
        container = api.create_container(base, ["true"])["Id"]
        try:
            while not over.is_set():
                beside.append(api.commit(container, changes=f"LABEL test={uuid.uuid4().hex}")["Id"])
                if len(beside) > 40:
                    api.remove_image(beside.popleft())
        finally:
            api.remove_container(container)
            for image in beside:
                api.remove_image(image)
            api.close()

    churning = [asyncio.create_task(asyncio.to_thread(churn)) for _ in range(2)]
    try:
        met = False
        while not met and not any(one.done() for one in churning):
            texts = [f"FROM {base}\nENV x={uuid.uuid4().hex}\n" for _ in range(4)]
            made = await asyncio.gather(*(ensure(images, task(tmp_path, text)) for text in texts))
            met = any("an image was removed meanwhile" in image.log_tail for image in made)
    finally:
        over.set()
        await asyncio.gather(*churning)
        images.engine.api.remove_image(base)  # its name alone, while others are built on it
    assert met


async def test_the_name_follows_the_content(images: Images, tmp_path: Path) -> None:
    text = f"FROM {BASE}\nCOPY <<EOF /a\nx\nEOF\nCOPY f /f\n"
    environment = task(tmp_path, text, f="1")
    first = await ensure(images, environment)
    same = await ensure(images, task(tmp_path, text, f="1"))
    assert (same.reference, same.built) == (first.reference, False)
    assert environment.context is not None
    (environment.context / "f").write_text("2")
    changed = await ensure(images, environment)
    (environment.context / "f").chmod(0o755)
    runnable = await ensure(images, environment)
    (environment.context / "Dockerfile").write_text(text + f"LABEL test={SALT}\nENV x=y\n")
    extended = await ensure(images, environment)
    assert len({image.reference for image in (first, changed, runnable, extended)}) == 4
    assert images.builds == 4


async def test_what_dockerignore_leaves_out_changes_no_name(images: Images, tmp_path: Path) -> None:
    environment = task(tmp_path, f"FROM {BASE}\nCOPY . /x\n", **{".dockerignore": "*.log\n", "a.log": "1"})
    first = await ensure(images, environment)
    assert environment.context is not None
    (environment.context / "a.log").write_text("2")
    assert (await ensure(images, environment)).reference == first.reference
    assert images.builds == 1


async def test_a_step_that_fails_is_built_once_for_all_samples(images: Images, tmp_path: Path) -> None:
    environment = task(tmp_path, f"FROM {BASE}\nRUN echo kept > /kept\nRUN echo why it failed; exit 7\n")
    errors = await asyncio.gather(*(fails(images, environment) for _ in range(8)))
    errors.append(await fails(images, environment))
    assert images.builds == 1
    for error in errors:
        assert error.error_class == "image_build"
        assert error.evidence.exit_code == 7
        assert "why it failed" in error.evidence.log_tail
    assert len({id(error) for error in errors}) == 9
    assert leftovers(images) == []


async def test_a_step_that_prints_an_engines_words_is_the_tasks_fault(images: Images, tmp_path: Path) -> None:
    said = "Error response from daemon: mkdir /var/lib/docker/overlay2/1: no space left on device"
    error = await fails(images, task(tmp_path, f"FROM {BASE}\nRUN echo '{said}'; exit 1\n"))
    assert error.error_class == "image_build"
    assert said in error.evidence.log_tail


async def test_a_dockerfile_that_is_none_spends_no_build(images: Images, tmp_path: Path) -> None:
    error = await fails(images, task(tmp_path, f"FROM {BASE}\nRUN <<EOF\necho\n"))
    assert error.error_class == "dockerfile_parse"
    assert "Dockerfile:2:5" in error.message
    missing = task(tmp_path, "")
    assert missing.context is not None
    (missing.context / "Dockerfile").unlink()
    assert (await fails(images, missing)).error_class == "task_malformed"
    gone = await fails(images, task(tmp_path, f"FROM {BASE}\nCOPY nope /\n"))
    assert gone.error_class == "image_build"
    assert images.builds == 0


async def test_a_build_that_hangs_ends_by_its_timeout_and_leaves_nothing(
    images: Images, tmp_path: Path
) -> None:
    environment = task(tmp_path, f"FROM {BASE}\nRUN echo begun; sleep 600\n", timeout_sec=6)
    error = await fails(images, environment)
    assert error.error_class == "image_build"
    assert "6 s" in error.message
    assert "begun" in error.evidence.log_tail
    assert leftovers(images) == []


async def test_one_who_gives_up_leaves_the_build_to_the_others(images: Images, tmp_path: Path) -> None:
    environment = task(tmp_path, f"FROM {BASE}\nRUN sleep 1\n")
    first = asyncio.create_task(ensure(images, environment))
    await begun(images)
    second = asyncio.create_task(ensure(images, environment))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await second).id
    assert images.builds == 1


async def test_closing_ends_a_build_at_once(images: Images, tmp_path: Path) -> None:
    environment = task(tmp_path, f"FROM {BASE}\nRUN sleep 600\n")
    waiting = asyncio.create_task(ensure(images, environment))
    await begun(images)
    async with asyncio.timeout(30):
        await images.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert leftovers(images) == []


async def test_no_more_builds_run_at_once_than_there_are_slots(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = Images(engine, host=f"test-{uuid.uuid4().hex[:8]}", build_slots=1)
    environments = [task(tmp_path, f"FROM {BASE}\nRUN echo {n}; exit 3\n") for n in range(2)]
    seen = []

    class Watched(Build):
        def run(self, *given: Any) -> str:
            seen.append(images.building)
            return super().run(*given)

    monkeypatch.setattr("rollcage.rollout.sandbox.images.Build", Watched)
    await asyncio.gather(*(fails(images, environment) for environment in environments))
    assert seen == [1, 1]
    await images.close()


async def test_stages_that_are_done_with_are_not_left(images: Images, tmp_path: Path) -> None:
    text = f"FROM {BASE} AS a\nRUN echo {uuid.uuid4()} > /made\nFROM {BASE}\nCOPY --from=a /made /made\n"
    assert (await ensure(images, task(tmp_path, text))).built
    assert leftovers(images) == []


async def test_a_services_arguments_and_its_target_make_its_image(images: Images, tmp_path: Path) -> None:
    """As `build: {context, dockerfile, args, target}` of a compose file has it; what comes after is not built."""
    (tmp_path / "web").mkdir()
    text = (
        f"ARG base=none\nFROM ${{base}} AS tools\nFROM tools AS serve\nARG who=nobody\nLABEL test={SALT} who=$who\n"
        "FROM 127.0.0.1:1/none:1\nRUN exit 1\n"
    )
    (tmp_path / "web/Dockerfile.web").write_text(text)

    def service(who: str, target: str) -> Environment:
        (tmp_path / "docker-compose.yaml").write_text(
            "services:\n  main: {}\n  web:\n    build:\n      context: web\n      dockerfile: Dockerfile.web\n"
            f"      target: {target}\n      args: {{base: '{BASE}', who: {who}}}\n"
        )
        own = Environment(context=None, docker_image=BASE)
        problems: list[Any] = []
        compose = read_compose(tmp_path / "docker-compose.yaml", own, problems)
        assert compose is not None, problems
        return image_environment(compose.services({}, {})["web"], own)

    one, same, other = [await ensure(images, service(who, "serve")) for who in ("me", "me", "you")]
    assert (one.built, same.built, other.built) == (True, False, True)
    assert one.reference == same.reference != other.reference
    labels = [images.engine.api.inspect_image(image.id)["Config"]["Labels"] for image in (one, other)]
    assert [label["who"] for label in labels] == ["me", "you"]
    error = await fails(images, service("me", "no-such"))
    assert error.error_class == "dockerfile_parse"
    assert "no stage 'no-such'" in error.message
    assert images.builds == 2


async def test_a_registry_that_cannot_be_reached_is_infra_and_tried_again(
    images: Images, tmp_path: Path
) -> None:
    environment = task(tmp_path, "FROM 127.0.0.1:1/none:1\n")
    error = await fails(images, environment)
    assert error.error_class == "image_pull"
    assert "127.0.0.1:1/none:1" in error.message
    assert images.builds == 0
    images.engine.api.tag(BASE, "127.0.0.1:1/none", "1")
    try:
        assert (await ensure(images, environment)).built
    finally:
        images.engine.api.remove_image("127.0.0.1:1/none:1")


async def test_a_digest_that_is_not_there_is_asked_for_by_name(images: Images, tmp_path: Path) -> None:
    reference = f"127.0.0.1:1/none:1@sha256:{'0' * 64}"
    error = await fails(images, task(tmp_path, f"FROM {reference}\n"))
    assert error.error_class == "image_pull"
    assert reference in error.message


async def test_a_ready_image_is_used_as_it_is(images: Images) -> None:
    image = await ensure(images, Environment(context=None, docker_image=BASE))
    assert (image.reference, image.built, image.cached) == (BASE, False, True)
    assert image.id.startswith("sha256:")


async def test_built_images_go_when_asked_for_and_not_in_use(images: Images, tmp_path: Path) -> None:
    api = images.engine.api
    used, spare = [await ensure(images, task(tmp_path, f"FROM {BASE}\nENV n={n}\n")) for n in range(2)]
    container = api.create_container(used.id, ["true"], labels={"rollcage.host": "test-in-use"})["Id"]
    try:
        assert (await reap(images.engine, host=images.host, job=None, now=0)).images == 0
        assert (await reap(images.engine, host=images.host, job=None, now=0, images=True)).images == 1
        left = {image["Id"] for image in api.images()}
        assert (used.id in left, spare.id in left) == (True, False)
    finally:
        api.remove_container(container, force=True)
    again = await ensure(images, task(tmp_path, f"FROM {BASE}\nENV n=1\n"))
    assert again.built


async def begun(images: Images) -> None:
    while images.builds == 0:  # noqa: ASYNC110
        await asyncio.sleep(0.02)
