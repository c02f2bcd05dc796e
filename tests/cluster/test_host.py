"""One host on the real engine, in this process."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollcage.cluster.host import HostLoad, HostSpec, SandboxHost
from rollcage.cluster.scratch import remove_abandoned
from rollcage.cluster.task_copies import TaskCopies, _not_copied, pack_task
from rollcage.rollout.outcome import BuildError, Outcome, SandboxError, TaskError
from rollcage.rollout.rollout import AttemptSpec
from rollcage.rollout.sandbox.pool import SandboxSettings
from rollcage.rollout.task import Task, load_task

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

SETTINGS = '[environment]\nmemory_mb = 64\nnetwork_mode = "no-network"\n'


DOCKERFILE = "FROM debian:bookworm-slim\n"


@asynccontextmanager
async def opened(settings: SandboxSettings) -> AsyncIterator[SandboxHost]:
    host = SandboxHost(HostSpec("test-host", settings))
    host.name = f"test-{host.name}"
    await host.open()
    try:
        yield host
    finally:
        await host.close()


@pytest.fixture
async def host() -> AsyncIterator[SandboxHost]:
    async with opened(SandboxSettings(pids=128, deadline_sec=300.0)) as host:
        yield host


def spec(task: Task, number: int = 0, agent: str = "oracle") -> AttemptSpec:
    return AttemptSpec(f"test-{id(task):x}-{number}", "test-host", task, number, 1, agent)


async def test_copies_of_a_task_keep_their_own_names(host: SandboxHost, write_task: Any) -> None:
    tasks = [load_task(write_task(f"tasks/{name}", toml=SETTINGS)) for name in ("first", "second")]
    assert tasks[0].digest == tasks[1].digest
    for task in tasks:
        assert (await host.prepare(task)).error_class is None
    attempts = await asyncio.gather(*(host.run(spec(task), None) for task in tasks))
    assert [(attempt.task, attempt.outcome) for attempt in attempts] == [
        ("first", Outcome.PASSED),
        ("second", Outcome.PASSED),
    ]


async def test_a_host_without_the_tasks_files_asks_for_them(
    host: SandboxHost, write_task: Any, tmp_path: Path
) -> None:
    root = write_task("here/one", toml=SETTINGS)
    (root / "tests/link").symlink_to("test.sh")
    (root / "solution/solve.sh").chmod(0o777)
    task = dataclasses.replace(load_task(root), name="called/otherwise")
    files = pack_task(task)
    shutil.move(root, tmp_path / "gone")
    assert (await host.prepare(task)).wants_files
    prepared = await host.prepare(task, files)
    assert (prepared.error_class, prepared.wants_files) == (None, False)
    attempt = await host.run(spec(task), None)
    assert (attempt.task, attempt.task_digest) == ("called/otherwise", task.digest)
    assert attempt.outcome is Outcome.PASSED, attempt.evidence


async def test_other_files_at_the_same_path_are_not_taken_for_the_task(
    host: SandboxHost, write_task: Any
) -> None:
    task = load_task(write_task("tasks/one", toml=SETTINGS))
    write_task("tasks/one", toml=SETTINGS, solve="#!/bin/sh\nexit 1\n")
    assert (await host.prepare(task)).wants_files


async def test_an_image_that_does_not_build_is_an_answer_and_no_exception(
    host: SandboxHost, write_task: Any
) -> None:
    dockerfile = "FROM debian:bookworm-slim\nRUN exit 7\n"
    prepared = await host.prepare(load_task(write_task("tasks/one", dockerfile=dockerfile)))
    assert prepared.error_class == "image_build"
    assert prepared.evidence is not None


async def test_what_a_host_says_of_an_image_has_no_value_of_its_variables(write_task: Any) -> None:
    root = write_task("tasks/one", toml=SETTINGS)
    (root / "environment/docker-compose.yaml").write_text(
        "services:\n  main: {}\n  b: {image: debian:bookworm-slim, command: sleep inf, cap_add: ['${KEY}']}\n"
    )
    built = write_task(
        "tasks/two", toml=SETTINGS, dockerfile=f"{DOCKERFILE}ARG T\nRUN echo built with $T; exit 4\n"
    )
    (built / "environment/docker-compose.yaml").write_text(
        "services:\n  main: {build: {context: ., args: {T: '${KEY}'}}}\n"
    )
    settings = SandboxSettings(pids=128, deadline_sec=300.0, environ={"KEY": "s3cret-token-12345"})
    async with opened(settings) as host:
        for task, error_class in ((root, "unsupported"), (built, "image_build")):
            prepared = await host.prepare(load_task(task))
            assert prepared.error_class == error_class
            assert prepared.evidence is not None
            said = f"{prepared.evidence.message} {prepared.evidence.log_tail}"
            assert "s3cret-token-12345" not in said.lower()
            assert "${KEY}" in said
    assert "built with ${KEY}" in said


@pytest.mark.parametrize("running", [False, True])
async def test_an_attempt_that_is_cancelled_ends_in_its_record(
    host: SandboxHost, write_task: Any, running: bool
) -> None:
    task = load_task(write_task("tasks/one", toml=SETTINGS, solve="#!/bin/sh\nsleep 600\n"))
    assert (await host.prepare(task)).error_class is None
    attempt = asyncio.ensure_future(host.run(spec(task), None))
    await asyncio.sleep(0)  # it is there and has not begun
    while running and (await host.expect([])).turns == 0:  # noqa: ASYNC110 -- the oracle's own, which sleeps
        await asyncio.sleep(0.05)
    await host.cancel()
    ended = await attempt
    assert await host.expect([]) == HostLoad(room=None, turns=0)
    assert (ended.outcome, ended.error_class) == (Outcome.CANCELLED, "cancelled")


@pytest.mark.parametrize(("file", "content"), [("tests/test.sh", "exit 0\n"), ("solution/solve.sh", "exit 1\n"),
                                               ("environment/Dockerfile", "FROM scratch\n")])  # fmt: skip
async def test_a_task_that_is_edited_while_the_job_runs_is_run_as_it_was(
    host: SandboxHost, write_task: Any, file: str, content: str
) -> None:
    root = write_task("tasks/one", toml=SETTINGS)
    task = load_task(root)
    assert (await host.prepare(task)).error_class is None
    (root / file).write_text(content)
    attempt = await host.run(spec(task), None)
    assert (attempt.outcome, attempt.task_digest) == (Outcome.PASSED, task.digest), attempt.evidence


async def test_files_that_are_not_what_the_digest_says_are_not_run(
    host: SandboxHost, write_task: Any
) -> None:
    root = write_task("tasks/one", toml=SETTINGS)
    task = load_task(root)
    (root / "tests/test.sh").write_text("exit 0\n")
    assert (await host.prepare(task)).wants_files
    prepared = await host.prepare(task, pack_task(task))
    assert prepared.error_class == "task_malformed"
    assert prepared.evidence is not None
    assert f"{root}: the files of one were changed while the job ran" in prepared.evidence.message


@pytest.mark.parametrize("runtime", ["other", "kata"])
async def test_a_runtime_that_the_engine_lacks_ends_the_job_before_it_begins(runtime: str) -> None:
    host = SandboxHost(HostSpec("test-host", SandboxSettings(runtime=runtime)))
    with pytest.raises(SandboxError, match=rf"no runtime '{runtime}' \(it has .*runc"):
        await host.open()


def test_no_room_for_a_copy_is_the_disks_fault_and_not_the_tasks(
    tmp_path: Path, write_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", small], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        root = write_task("tasks/one")
        (root / "tests/data").mkdir()
        (root / "tests/data/large").write_bytes(bytes(1 << 20))
        task = load_task(root)
        copies = TaskCopies()
        for files in (None, pack_task(task)):
            with pytest.raises(BuildError) as raised:
                copies.take(task, files)
            assert raised.value.error_class == "disk_full"
        copies.close()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


def test_what_is_wrong_with_a_copy_is_named_as_the_user_has_it(write_task: Any) -> None:
    root = write_task("tasks/one")
    (root / "environment/docker-compose.yaml").write_text(
        "services:\n  main: {}\n  db: {image: x, network_mode: '${MODE}'}\n"
    )
    task = load_task(root)
    copies = TaskCopies()
    for files in (None, pack_task(task)):
        copy = copies.take(task, files)
        assert copy is not None
        assert copy.path != root
        assert copy.environment.compose is not None
        assert copy.environment.compose.root == copy.path / "environment"
        with pytest.raises(TaskError, match="shares the host's network") as raised:
            copy.environment.compose.services({"MODE": "host"})
        assert raised.value.evidence.message.startswith(
            f"{root}/environment/docker-compose.yaml:3: services.db"
        )
        assert str(copy.path) not in str(raised.value)
    copies.close()


def test_a_socket_that_a_tool_keeps_beside_a_task_is_left_out_of_its_copy(write_task: Any) -> None:
    root = write_task("tasks/one")
    (root / ".git").mkdir()
    os.mkfifo(root / ".git/pipe")
    copies = TaskCopies()
    copy = copies.take(load_task(root))
    assert copy is not None
    assert not (copy.path / ".git/pipe").exists()
    copies.close()


def test_files_that_cannot_be_copied_are_named_with_the_reason(write_task: Any) -> None:
    root = write_task("tasks/one")
    task = load_task(root)
    error = shutil.Error([(str(root / "a"), "/copy/a", "[Errno 5] Input/output error: 'a'")] * 5)
    assert _not_copied(task, error).evidence.message == (
        f"{root}: the files of one cannot be copied: "
        + "; ".join([f"{root}/a: [Errno 5] Input/output error: 'a'"] * 3)
        + "; and 2 more"
    )


def test_copies_of_a_host_that_was_killed_are_removed_by_the_next(
    tmp_path: Path, write_task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    Path(tempfile.gettempdir()).mkdir()
    task = load_task(write_task("tasks/one"))
    living, dead = TaskCopies(), TaskCopies()
    for copies in (living, dead):
        assert copies.take(task) is not None
    os.close(dead._lock)
    remove_abandoned()
    assert living._root is not None
    assert dead._root is not None
    assert living._root.exists()
    assert not dead._root.exists()
    living.close()
    assert not list(Path(tempfile.gettempdir()).iterdir())


async def test_a_host_counts_what_it_makes_and_what_its_networks_hold(write_task: Any) -> None:
    held = "#!/bin/sh\nuntil [ -e /go ]; do sleep 0.1; done\ntouch /app/hello\n"
    toml = '[environment]\nmemory_mb = 64\nnetwork_mode = "public"\n'
    task = load_task(write_task("tasks/one", toml=toml, solve=held))
    broken = load_task(write_task("tasks/two", dockerfile=f"{DOCKERFILE}RUN exit 7\n"))
    async with opened(
        SandboxSettings(pids=128, deadline_sec=300.0, network_modes=frozenset({"public"}))
    ) as host:
        await host.prepare(task)
        await host.prepare(broken)
        attempt = asyncio.create_task(host.run(spec(task), None))
        for _ in range(600):
            if host._pool.in_use:
                break
            await asyncio.sleep(0.1)
        during = await host.counted()
        [sandbox] = host._pool._held.values()
        await sandbox.sandbox.write({"/go": b""})
        assert (await attempt).outcome is Outcome.PASSED
        await host._pool.drained()
        after = await host.counted()
    name = host.name
    assert during.values["sandboxes"]["in_use", name] == 1
    assert during.values["network_leases"]["shared", name] == during.values["bridge_ports_in_use"][name,] == 1
    assert during.values["network_capacity"]["shared", name] == host._pool.networks.capacity().leases_possible
    assert during.values["bridge_ports"][name,] == 1023
    assert during.values["disk_free_bytes"][name,] > 0
    assert after.values["network_leases"]["shared", name] == after.values["sandboxes"]["in_use", name] == 0
    assert after.values["image_builds"]["task_fault",] == 1
    assert after.histograms["sandbox_acquire_seconds"]["cold",].total == 1
    assert after.histograms["sandbox_remove_seconds"][()].total == 1
