"""Attempts at tasks of several containers, on a real engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.outcome import Outcome, Stage

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]

SERVER = """\
#!/usr/bin/perl
use IO::Socket::INET;
my $server = IO::Socket::INET->new(LocalPort => 8000, Listen => 5, ReuseAddr => 1) or die "no port: $!";
while (my $client = $server->accept) {
    my $line = <$client>;
    exit if defined $line && $line =~ /^stop/;
    open(my $log, '>>', '/state/asked'); print $log $line; close $log;
    print $client "$ENV{ANSWER}\\n";
    close $client;
}
"""
CLIENT = "exec 3<>/dev/tcp/{host}/8000; echo hello >&3; head -1 <&3"
SOLUTION = f"bash -c '{CLIENT.format(host='server')}' >/app/answer\n"

COMPOSE = """\
x-common: &common
  pids_limit: 64
services:
  main:
    depends_on:
      server: {condition: service_healthy}
      setup: {condition: service_completed_successfully}
    volumes: ["shared:/shared:ro"]
  server:
    <<: *common
    build:
      context: server
      target: serve
      args: {GREETING: "${GREETING:-unset}"}
    image: ${MAIN_IMAGE_NAME}-server
    container_name: web
    command: perl /server.pl
    environment:
      ANSWER: 42
    healthcheck:
      test: ["CMD-SHELL", "test -e /state/ready && bash -c '</dev/tcp/localhost/8000'"]
      interval: 1h  # the engine would not have looked yet
    volumes: ["state:/state"]
    depends_on:
      setup: {condition: service_completed_successfully}
    ports: ["80:8000"]
  setup:
    <<: *common
    image: debian:bookworm-slim
    entrypoint: [sh, -c]
    command: ["cat /etc/given.txt >/shared/given && touch /state/ready"]
    volumes: ["shared:/shared", "state:/state", "./given.txt:/etc/given.txt:ro"]
volumes:
  shared:
  state:
"""


def compose_task(
    rollouts: Any, compose: str = COMPOSE, files: Mapping[str, str] | None = None, **settings: Any
) -> Any:
    files = {
        "environment/docker-compose.yaml": compose,
        "environment/server/Dockerfile": (
            "FROM debian:bookworm-slim AS serve\nARG GREETING\nRUN mkdir /state && echo $GREETING >/greeting\n"
            "COPY server.pl /\nFROM serve\nRUN exit 1\n"
        ),
        "environment/server/server.pl": SERVER,
        "environment/given.txt": "a file of the task\n",
        **(files or {}),
    }
    return rollouts.task(files=files, **{"solution": SOLUTION, **settings})


async def left(rollouts: Any, attempt_id: str) -> list[str]:
    """Volumes that an attempt still has."""
    wanted = {"label": f"rollcage.rollout={attempt_id}"}
    found = await rollouts.engine.call("list volumes", lambda api: api.volumes(filters=wanted))
    return [volume["Name"] for volume in found["Volumes"] or []]


async def running(rollouts: Any, attempt_id: str, name: str) -> str:
    """The id of the attempt's container of this name, once it runs."""
    while True:
        for found in await rollouts.containers(attempt_id):
            if found["Names"][0].endswith(name) and found["State"] == "running":
                return str(found["Id"])
        await asyncio.sleep(0.05)


async def test_the_oracle_passes_a_task_of_three_containers_and_an_idle_agent_fails(rollouts: Any) -> None:
    task = compose_task(rollouts)
    passed, failed = await rollouts.attempts(rollouts.attempt(task), rollouts.attempt(task, "nop"))
    assert (passed.outcome, passed.error_class, passed.evidence) == (Outcome.PASSED, None, None)
    assert (failed.outcome, failed.error_class) == (Outcome.FAILED, None)
    for attempt in (passed, failed):
        assert await left(rollouts, attempt.attempt_id) == []


async def test_the_agent_sees_its_services_and_nothing_else(rollouts: Any) -> None:
    seen: dict[str, str] = {}

    async def run(context: AgentContext) -> None:
        async def say(command: str) -> str:
            return (await context.shell.run(command, timeout=30)).text.strip()

        seen["server"] = await say(CLIENT.format(host="server"))
        seen["alias"] = await say(CLIENT.format(host="web"))
        seen["given"] = await say("cat /shared/given")
        seen["read only"] = await say("touch /shared/x")
        seen["internet"] = await say("timeout 2 bash -c '</dev/tcp/1.1.1.1/53' && echo reached")
        found = await rollouts.containers(context.sandbox.spec.labels["rollcage.rollout"])
        seen["ports"] = str([container["Ports"] for container in found if container["Ports"]])
        seen["names"] = " ".join(sorted(name for one in found for name in one["Names"]))
        details = [rollouts.engine.api.inspect_container(one["Id"])["HostConfig"] for one in found]
        seen["pids"] = str([one["PidsLimit"] for one in details])
        seen["caps"] = str({tuple(one["CapDrop"]) for one in details})

    attempt = await rollouts.attempt(compose_task(rollouts), rollouts.agent(run))
    assert attempt.outcome == Outcome.FAILED
    assert seen["server"] == seen["alias"] == "42"
    assert seen["given"] == "a file of the task"
    assert "Read-only file system" in seen["read only"]
    assert "reached" not in seen["internet"]
    assert seen["ports"] == "[]"
    assert seen["names"].count("-server") == seen["names"].count("-setup") == 1
    assert "0" not in seen["pids"].replace("1024", "").replace("[", "").replace("]", "").split(", ")
    assert seen["caps"] == "{('ALL',)}"


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sh -c 'echo no database here; exit 3'", "ended with status 3"),
        ("sleep 30", "failed 2 times in a row"),
    ],
)
async def test_a_service_that_does_not_get_ready_is_the_tasks_fault(
    rollouts: Any, command: str, said: str
) -> None:
    compose = f"""\
services:
  db:
    image: debian:bookworm-slim
    command: {command}
    healthcheck: {{test: "echo not yet; exit 1", interval: 0.2s, retries: 2}}
"""
    attempt = await rollouts.attempt(compose_task(rollouts, compose))
    assert (attempt.outcome, attempt.error_class, attempt.stage) == (
        Outcome.INVALID,
        "healthcheck",
        Stage.START,
    )
    assert "service db" in attempt.evidence.message
    assert said in attempt.evidence.message
    if "no database" in command:
        assert attempt.evidence.exit_code == 3
        assert "no database here" in attempt.evidence.log_tail
    else:
        assert "not yet" in attempt.evidence.message
    assert await left(rollouts, attempt.attempt_id) == []


async def test_a_service_whose_image_does_not_build_spends_one_build(rollouts: Any) -> None:
    broken = {
        "environment/server/Dockerfile": "FROM debian:bookworm-slim AS serve\nRUN echo it breaks && exit 9\n"
    }
    task = compose_task(rollouts, files=broken)
    attempts = await rollouts.attempts(*(rollouts.attempt(task) for _ in range(2)))
    for attempt in attempts:
        assert (attempt.error_class, attempt.stage) == ("image_build", Stage.BUILD)
        assert "it breaks" in attempt.evidence.log_tail
        assert "server" in attempt.evidence.message


async def test_a_service_killed_from_outside_is_infra(rollouts: Any) -> None:
    compose = """\
services:
  db:
    image: debian:bookworm-slim
    command: sleep 60
    healthcheck: {test: "exit 1", interval: 60s}
"""
    spec = rollouts.named()
    attempt = asyncio.ensure_future(rollouts.attempt(compose_task(rollouts, compose), **spec))
    db = await running(rollouts, spec["attempt_id"], "-db")
    rollouts.engine.api.kill(db)
    assert (await attempt).error_class == "container_lost"


async def test_a_service_that_dies_while_the_agent_works_is_graded_as_it_is(rollouts: Any) -> None:
    gone = "while bash -c '</dev/tcp/server/8000'; do sleep 0.2; done\n"
    stop = f"bash -c '{CLIENT.format(host='server').replace('hello', 'stop')}'\n"
    task = compose_task(rollouts, solution=SOLUTION + stop + gone)
    attempt = await rollouts.attempt(task)
    assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)


async def test_collect_commands_and_artifacts_come_from_other_services(rollouts: Any) -> None:
    task = compose_task(
        rollouts,
        root='artifacts = [{source = "/state/log", service = "server"}, "/app/answer"]\n',
        test="grep -q hello /state/log && grep -q 42 /app/answer && echo 1 >/logs/verifier/reward.txt",
        verifier=(
            'environment_mode = "separate"\n'
            'collect = [{command = "sort /state/asked >/state/log", service = "server"}]\n'
        ),
        files={"tests/Dockerfile": "FROM debian:bookworm-slim\nCOPY . /tests\n"},
    )
    attempt = await rollouts.attempt(task)
    assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None), attempt.evidence


async def test_a_verifier_may_have_services_of_its_own(rollouts: Any) -> None:
    own = """\
services:
  main: {build: ., depends_on: {judge: {condition: service_healthy}}}
  judge:
    image: debian:bookworm-slim
    command: perl /server.pl
    environment: {ANSWER: 1}
    volumes: ["./server.pl:/server.pl", "/state"]
    healthcheck: {test: bash -c '</dev/tcp/localhost/8000'}
"""
    task = rollouts.task(
        test=f"bash -c '{CLIENT.format(host='judge')}' >/logs/verifier/reward.txt",
        files={
            "tests/docker-compose.yaml": own,
            "tests/Dockerfile": "FROM debian:bookworm-slim\nCOPY test.sh /tests/\n",
            "tests/server.pl": SERVER,
        },
        verifier='environment_mode = "separate"\n',
    )
    attempt = await rollouts.attempt(task, "nop")
    assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None), attempt.evidence
    assert await left(rollouts, attempt.attempt_id) == []


async def test_four_at_once_share_images_and_nothing_else(rollouts: Any) -> None:
    task = compose_task(rollouts)
    builds = rollouts.pool.images.builds
    attempts = await rollouts.attempts(*(rollouts.attempt(task) for _ in range(4)))
    assert [attempt.outcome for attempt in attempts] == [Outcome.PASSED] * 4
    assert rollouts.pool.images.builds <= builds + 2


async def test_a_cancelled_start_leaves_nothing(rollouts: Any) -> None:
    compose = COMPOSE.replace("touch /state/ready", "sleep 60")
    spec = rollouts.named()
    attempt = asyncio.ensure_future(rollouts.attempt(compose_task(rollouts, compose), **spec))
    await running(rollouts, spec["attempt_id"], "-setup")
    attempt.cancel()
    ended = await asyncio.gather(attempt, return_exceptions=True)
    await rollouts.pool.drained()
    assert ended
    assert await rollouts.containers(spec["attempt_id"]) == []
    assert await left(rollouts, spec["attempt_id"]) == []
