"""The containers of a task of several, on a real engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import requests
from docker.errors import APIError

from rollcage.rollout.compose import Check, read_compose
from rollcage.rollout.outcome import RolloutError, SandboxError, TaskError
from rollcage.rollout.sandbox.base import Sandbox
from rollcage.rollout.sandbox.container import remove_container
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.faults import engine_fault
from rollcage.rollout.sandbox.hostconfig import NO_RESOLVER
from rollcage.rollout.sandbox.pool import SandboxPool, SandboxSettings
from rollcage.rollout.sandbox.reaper import reap
from rollcage.rollout.sandbox.service_container import DockerService
from rollcage.rollout.task_model import Environment

pytestmark = pytest.mark.docker

BASE = "debian:bookworm-slim"
# A healthcheck that nobody waits for.
NEVER = "healthcheck: {test: 'false', interval: 60s}"

Start = Callable[..., Awaitable[Sandbox]]


@pytest.fixture
async def pool(engine: Engine) -> AsyncIterator[SandboxPool]:
    pool = SandboxPool(engine, SandboxSettings(pids=100), host=f"test-services-{uuid4().hex[:8]}", job="test")
    yield pool
    containers = engine.api.containers(all=True, filters=mine(pool))
    volumes = engine.api.volumes(filters=mine(pool))["Volumes"]
    # Not by what `close` says: it counts what strangers left past its deadline, too.
    await pool.close()
    await reap(engine, host=pool.host, job=None, now=0, images=True)
    assert (containers, volumes or []) == ([], [])


@pytest.fixture
async def start(pool: SandboxPool, tmp_path: Path) -> AsyncIterator[Start]:
    """Start what a docker-compose.yaml says; `main` is Debian. Removed after the test."""
    made: list[Sandbox] = []

    async def start(compose: str, **settings: Any) -> Sandbox:
        environment = Environment(
            context=None,
            **{"docker_image": BASE, "network_mode": "no-network", "build_timeout_sec": 60.0, **settings},
        )
        problems: list[Any] = []
        (tmp_path / "docker-compose.yaml").write_text(compose)
        read = read_compose(tmp_path / "docker-compose.yaml", environment, problems)
        assert read is not None, problems
        environment = Environment(**{**vars(environment), "compose": read})
        image = await pool.image(environment, "test")
        made.append(await pool.acquire(image, environment, attempt_id=uuid4().hex[:12]))
        return made[-1]

    yield start
    for sandbox in made:
        await pool.release(sandbox)
    await pool.drained()


async def refused(start: Start, pool: SandboxPool, compose: str, **settings: Any) -> RolloutError:
    """What the services could not be started for; nothing may be left of them."""
    with pytest.raises(RolloutError) as caught:
        await start(compose, **settings)
    assert await pool.engine.call("list", lambda api: api.containers(all=True, filters=mine(pool))) == []
    volumes = await pool.engine.call("list", lambda api: api.volumes(filters=mine(pool)))
    assert not volumes["Volumes"]
    assert pool.networks.capacity().private == 0
    assert not pool.failed_removals
    return caught.value


def mine(pool: SandboxPool) -> dict[str, str]:
    return {"label": f"rollcage.host={pool.host}"}


async def say(sandbox: Sandbox, command: str) -> str:
    return (await (await sandbox.shell()).run(command, timeout=30)).text.strip()


async def test_what_a_service_is_made_with_is_what_its_file_says(start: Start, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("a secret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/seed").write_text("seed")
    sandbox = await start(
        f"""
services:
  db:
    image: {BASE}
    command: sleep 100
    hostname: the-db
    user: nobody
    working_dir: /opt
    environment: {{A: "1 2"}}
    extra_hosts: ["there:10.1.2.3"]
    tmpfs: /fast
    shm_size: 32m
    mem_limit: 100m
    cpus: 0.5
    pids_limit: 50
    read_only: false
    cap_drop: [NET_RAW]
    init: true
    ulimits: {{nofile: 77}}
    volumes: ["./data:/data", "/own"]
    secrets: [key]
  main:
    volumes: ["./data:/seen"]
    hostname: the-main
    user: nobody
    environment: {{A: file, B: file}}
    tmpfs: /fast
    shm_size: 16m
secrets: {{key: {{file: key}}}}
""",
        env={"A": "task"},
    )
    db = sandbox.service("db")

    async def there(command: str) -> str:
        return (await db.run(command, timeout=30)).text.strip()

    assert await there("hostname; id -un; pwd; echo $A; ulimit -n") == "the-db\nnobody\n/opt\n1 2\n77"
    assert await there("cat /run/secrets/key /data/seed") == "a secretseed"
    assert "10.1.2.3" in await there("getent ahostsv4 there")
    assert "tmpfs" in await there("grep ' /fast ' /proc/mounts")
    assert "size=32768k" in await there("grep ' /dev/shm ' /proc/mounts")
    assert (await db.run("id -u", user=0, timeout=30)).text.strip() == "0"
    await db.run("echo more >/data/more", user=0, timeout=30)
    assert await say(sandbox, "cat /seen/seed /seen/more; hostname; id -un; echo $A $B") == (
        "seedmore\nthe-main\nnobody\ntask file"
    )
    assert "size=16384k" in await say(sandbox, "grep ' /dev/shm ' /proc/mounts")
    assert (tmp_path / "data/more").exists() is False
    assert "db" in await say(sandbox, "getent hosts db")


async def test_every_container_has_limits_labels_and_walls(start: Start, pool: SandboxPool) -> None:
    compose = (
        f"services: {{db: {{image: '{BASE}', command: 'sleep 100', volumes: ['v:/v']}}}}\nvolumes: {{v: }}"
    )
    sandbox = await start(compose, network_mode="public")
    assert "db" in await say(sandbox, "getent hosts db")
    found = await pool.engine.call("list", lambda api: api.containers(filters=mine(pool)))
    assert len(found) == 2
    inspected = [pool.engine.api.inspect_container(one["Id"]) for one in found]
    labels = sandbox.spec.labels
    for one in inspected:
        host = one["HostConfig"]
        assert 0 < host["PidsLimit"] <= 100
        assert host["CapDrop"] == ["ALL"]
        assert "no-new-privileges" in host["SecurityOpt"]
        assert not host["PortBindings"]
        assert {key: one["Config"]["Labels"].get(key) for key in labels} == dict(labels)
    db = next(one for one in inspected if one["Name"].endswith("-db"))
    assert db["HostConfig"]["LogConfig"]["Config"] == {"max-size": "64k", "max-file": "2"}
    [volume] = (await pool.engine.call("list", lambda api: api.volumes(filters=mine(pool))))["Volumes"]
    assert {key: volume["Labels"].get(key) for key in labels} == dict(labels)


async def test_an_unlimited_ulimit_is_as_much_as_the_engine_gives(start: Start, pool: SandboxPool) -> None:
    """Elasticsearch's published file asks for it; an engine without CAP_SYS_RESOURCE cannot give it."""
    sandbox = await start(
        f"services: {{db: {{image: {BASE}, command: sleep 100, ulimits: {{memlock: -1, nofile: 4096}}}}}}"
    )
    ended = await sandbox.services["db"].run("ulimit -n", timeout=30)
    assert ended.stdout.split() == [b"4096"]


async def test_main_alone_has_no_network_of_its_own(start: Start, pool: SandboxPool) -> None:
    sandbox = await start("services: {main: {working_dir: /opt, environment: [X=1]}}")
    assert await say(sandbox, "pwd; echo $X; ls /sys/class/net") == "/opt\n1\nlo"
    assert pool.networks.capacity().private == 0
    with pytest.raises(KeyError):
        sandbox.service("db")


async def test_services_may_share_a_network_or_have_none(start: Start) -> None:
    sandbox = await start(
        f"""
services:
  beside: {{image: '{BASE}', command: sleep 100, network_mode: 'service:main'}}
  apart: {{image: '{BASE}', command: sleep 100, network_mode: none}}
"""
    )
    own = await say(sandbox, "readlink /proc/self/ns/net")
    assert (await sandbox.service("beside").run("readlink /proc/self/ns/net", timeout=30)).text.strip() == own
    assert (await sandbox.service("apart").run("ls /sys/class/net", timeout=30)).text.strip() == "lo"


async def test_without_internet_names_are_resolved_within_the_task_alone(
    start: Start, pool: SandboxPool
) -> None:
    sandbox = await start(f"services: {{db: {{image: '{BASE}', command: sleep 100}}}}")
    containers = await pool.engine.call("list", lambda api: api.containers(filters=mine(pool)))
    made = [pool.engine.api.inspect_container(one["Id"])["HostConfig"] for one in containers]
    assert [host["Dns"] for host in made] == [list(NO_RESOLVER)] * 2
    assert "db" in await say(sandbox, "getent hosts db")
    assert "main" in (await sandbox.service("db").run("getent hosts main", timeout=30)).text
    began = time.monotonic()
    assert await say(sandbox, "getent hosts nosuch.example nosuch || echo none") == "none"
    assert time.monotonic() - began < 8, "the engine's DNS makes it twenty seconds for one name"


async def test_an_images_own_healthcheck_counts(start: Start, build_image: Callable[[str], str]) -> None:
    check = "HEALTHCHECK --interval=1h --retries=2 CMD test -e /tmp/ready"  # the engine would not look yet
    image = build_image(f"FROM {BASE}\n{check}\nCMD sleep 1; touch /tmp/ready; sleep 100\n")
    sandbox = await start(
        f"services: {{db: {{image: '{image}'}}, main: {{depends_on: {{db: {{condition: service_healthy}}}}}}}}"
    )
    assert (await sandbox.service("db").run("ls /tmp", timeout=30)).text.strip() == "ready"


async def test_a_service_that_is_started_again_may_get_ready(start: Start) -> None:
    again = "test -e /v/tried && exec sleep 100; touch /v/tried; exit 1"
    await start(
        f"""
services:
  db:
    image: {BASE}
    command: [sh, -c, "{again}"]
    restart: on-failure:3
    volumes: ["v:/v"]
    healthcheck: {{test: test -e /v/tried, interval: 100ms, start_period: 20s}}
volumes: {{v: }}
"""
    )


class TestWhatDoesNotStart:
    async def test_a_command_that_is_not_there(self, start: Start, pool: SandboxPool) -> None:
        error = await refused(start, pool, f"services: {{db: {{image: '{BASE}', command: /no/such}}}}")
        assert error.error_class == "container_config"
        assert "service db" in error.message

    async def test_a_service_that_runs_out_of_memory(self, start: Start, pool: SandboxPool) -> None:
        command = "[sh, -c, 'x=a; while :; do x=$$x$$x; done']"
        error = await refused(
            start, pool, f"services: {{db: {{image: '{BASE}', mem_limit: 20m, command: {command}, {NEVER}}}}}"
        )
        assert error.error_class == "healthcheck"
        assert error.evidence.oom_killed
        assert "memory limit" in error.message

    async def test_a_job_that_fails(self, start: Start, pool: SandboxPool) -> None:
        error = await refused(
            start,
            pool,
            f"services: {{job: {{image: '{BASE}', command: [sh, -c, 'echo no; exit 5']}}, "
            "main: {depends_on: {job: {condition: service_completed_successfully}}}}",
        )
        assert (error.error_class, error.evidence.exit_code) == ("healthcheck", 5)
        assert error.evidence.log_tail.strip() == "no"

    async def test_one_that_another_waits_for_and_that_has_no_healthcheck(
        self, start: Start, pool: SandboxPool
    ) -> None:
        error = await refused(
            start,
            pool,
            f"services: {{db: {{image: '{BASE}', command: sleep 9}}, "
            "main: {depends_on: {db: {condition: service_healthy}}}}",
        )
        assert error.error_class == "healthcheck"
        assert "has no healthcheck" in error.message

    async def test_one_that_takes_longer_than_the_task_allows(self, start: Start, pool: SandboxPool) -> None:
        error = await refused(
            start,
            pool,
            f"services: {{db: {{image: '{BASE}', command: sleep 99, {NEVER}}}}}",
            build_timeout_sec=2.0,
        )
        assert error.error_class == "healthcheck"
        assert "not ready after 2 s" in error.message
        assert "db" in error.message

    async def test_mains_own_healthcheck(self, start: Start, pool: SandboxPool) -> None:
        check = "healthcheck: {test: 'echo never; exit 1', interval: 100ms, retries: 1}"
        error = await refused(start, pool, f"services: {{main: {{{check}}}}}")
        assert error.error_class == "healthcheck"
        assert "never" in error.evidence.message


MOMENTS = [
    ("create an exec for a healthcheck", ""),
    ("start an exec", ""),
    ("inspect an exec", ""),
    # Moby's getExecConfig, until the exec of a container that has ended is forgotten, and runc.
    ("start an exec", "Container 0123456789ab is not running: Exited (3) Less than a second ago"),
    ("start an exec", "OCI runtime exec failed: exec failed: cannot exec in a stopped state: unknown"),
]


class EndsAt(Engine):
    """An engine on which a container has ended when something is asked for the first time, and never before. `answer`
    is what it then says, with status 500; empty: whatever it does."""

    moment = container = answer = ""

    async def call(self, doing: str, request: Callable[[Any], Any]) -> Any:
        if doing == self.moment:
            self.moment = ""
            await super().call("end it", lambda api: api.kill(self.container, "TERM"))
            await super().call("wait for its end", lambda api: api.wait(self.container, timeout=30))
            if self.answer:
                response = requests.Response()
                response.status_code = 500
                raise engine_fault(APIError("500", response, self.answer), doing)
        return await super().call(doing, request)


@pytest.mark.parametrize(("moment", "answer"), MOMENTS)
async def test_a_service_that_ends_while_it_is_looked_at_has_ended_by_itself(
    moment: str, answer: str
) -> None:
    engine = EndsAt()
    command = ["sh", "-c", "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.1; done"]
    limits = engine.api.create_host_config(pids_limit=32, network_mode="none")
    made = engine.api.create_container(
        BASE, command, host_config=limits, labels={"rollcage.host": "test-ends"}
    )
    service = DockerService(engine, "db", made["Id"])
    try:
        engine.api.start(made["Id"])
        while "up" not in await service.log_tail():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        engine.moment, engine.container, engine.answer = moment, made["Id"], answer
        with pytest.raises(TaskError) as caught:
            await service.healthy(Check(("false",), 60.0, 30.0, 0.0, 3))
        assert not engine.moment
        assert (caught.value.error_class, caught.value.evidence.exit_code) == ("healthcheck", 3)
        assert "bye" in caught.value.evidence.log_tail
        assert (await service.run("true", timeout=10)).exit_code is None
    finally:
        await remove_container(engine, made["Id"])
        engine.close()


async def test_an_exec_that_is_refused_in_a_service_that_runs_is_not_the_tasks_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollcage.rollout.sandbox.service_container.END_SEC", 0.2)
    limits = engine.api.create_host_config(pids_limit=32, network_mode="none")
    made = engine.api.create_container(
        BASE, ["sleep", "60"], host_config=limits, labels={"rollcage.host": "test-ends"}
    )
    service = DockerService(engine, "db", made["Id"])
    try:
        engine.api.start(made["Id"])
        engine.api.pause(made["Id"])
        with pytest.raises(SandboxError) as caught:
            await service.healthy(Check(("true",), 60.0, 30.0, 0.0, 1))
        assert caught.value.error_class == "container_lost"
        with pytest.raises(SandboxError):
            await service.run("true", timeout=10)
    finally:
        await remove_container(engine, made["Id"])


async def test_a_service_that_has_ended_still_gives_what_it_left(start: Start, tmp_path: Path) -> None:
    sandbox = await start(
        f"services: {{job: {{image: '{BASE}', command: [sh, -c, 'echo done >/out']}}, "
        "main: {depends_on: {job: {condition: service_completed_successfully}}}}"
    )
    job = sandbox.service("job")
    assert (await job.run("true", timeout=10)).exit_code is None
    assert await job.download("/out", tmp_path / "out", max_bytes=100)
    assert (tmp_path / "out").read_text() == "done\n"


async def test_the_reaper_takes_volumes_with_their_containers(start: Start, pool: SandboxPool) -> None:
    compose = (
        f"services: {{db: {{image: '{BASE}', command: sleep 100, volumes: ['v:/v']}}}}\nvolumes: {{v: }}"
    )
    await start(compose)
    found = await reap(pool.engine, host=pool.host, job=None, now=0)
    assert (found.containers, found.volumes) == (2, 1)
