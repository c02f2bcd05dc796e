from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

import pytest

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox import container as container_module
from rollcage.rollout.sandbox import storage as storage_module
from rollcage.rollout.sandbox.base import SandboxSpec
from rollcage.rollout.sandbox.container import DockerSandbox, start_sandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.hostconfig import container_config
from rollcage.rollout.sandbox.storage import StorageWatch
from rollcage.rollout.sandbox.traits import engine_traits

pytestmark = pytest.mark.docker

BASE = "debian:bookworm-slim"
MakeSandbox = Any


@pytest.fixture(scope="session")
def user_image(build_image: Callable[[str], str]) -> str:
    """An image with a user of its own, variables and a working directory."""
    return build_image(
        f"FROM {BASE}\n"
        "RUN useradd -m -u 1234 alice && mkdir /srv/own && chown alice /srv/own\n"
        "ENV FROM_IMAGE=image BASH_ENV=/tmp/hook ENV=/tmp/hook\n"
        "RUN echo 'echo hooked; exit 9' >/tmp/hook\n"
        "USER alice\nWORKDIR /srv/own\n"
        'HEALTHCHECK --interval=1s CMD touch /tmp/checked\nENTRYPOINT ["/bin/false"]\nCMD ["nothing"]\n'
    )


async def processes(engine: Engine, sandbox: DockerSandbox) -> list[str]:
    found = await engine.call("list processes", lambda api: api.top(sandbox.id, "-eo pid,args"))
    return [process[1] for process in found["Processes"]]


def end_container(end: str, container_id: str, api: Any) -> None:
    if end == "kill":
        api.kill(container_id)
    else:
        api.remove_container(container_id, force=True)


async def test_nothing_of_the_image_is_started_and_its_settings_hold(
    make_sandbox: MakeSandbox, user_image: str
) -> None:
    sandbox = await make_sandbox(user_image, env={"OURS": "a b"})
    shell = await sandbox.shell(env={"MINE": "it's\ntwo lines"})
    result = await shell.run('id -un; pwd; echo "$FROM_IMAGE $OURS $HOME"; echo "$MINE"; touch /srv/own/x')
    assert result.stdout == b"alice\n/srv/own\nimage a b /home/alice\nit's\ntwo lines\n"
    assert result.exit_code == 0
    root = await sandbox.shell("root")
    assert (await root.run("id -u; pwd; echo $HOME; ls /tmp/checked")).stdout == b"0\n/srv/own\n/root\n"


@pytest.mark.parametrize(
    ("user", "identity"), [("alice", b"1234:1234\n"), (1234, b"1234:1234\n"), ("0:1234", b"0:1234\n")]
)
async def test_a_shell_of_any_user(
    make_sandbox: MakeSandbox, user_image: str, user: str | int, identity: bytes
) -> None:
    sandbox = await make_sandbox(user_image)
    shell = await sandbox.shell(user)
    assert (await shell.run("id -u | tr '\\n' :; id -g")).stdout == identity
    await shell.run("x=kept; sleep 4000 &")
    stopped = await shell.run("sleep 1000; touch /tmp/never", timeout=0.3)
    assert (stopped.timed_out, stopped.shell_replaced) == (True, False)
    assert (await shell.run("echo $x; ls /tmp/never; kill -0 $!; echo $?")).stdout == b"kept\n0\n"
    ended = await shell.run("exit 4")
    assert (ended.shell_replaced, ended.shell_exit_code) == (True, 4)
    assert (await shell.run('echo "[$x]"')).stdout == b"[]\n"
    killed = await shell.run("sh -c 'kill -9 -1'", timeout=20)
    assert killed.shell_replaced
    assert (await shell.run("echo on")).stdout == b"on\n"


async def test_a_user_that_the_image_does_not_have_is_the_tasks_fault(make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox()
    with pytest.raises(SandboxError) as raised:
        await sandbox.shell("nobody-of-that-name")
    assert raised.value.error_class == "container_config"


async def test_the_same_user_has_one_shell_until_processes_are_stopped(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    assert await sandbox.shell("root") is shell
    await shell.run("x=1")
    await sandbox.shell(0, env={"LATER": "yes"})
    assert (await shell.run("echo $x$LATER")).stdout == b"1yes\n"
    await sandbox.stop_processes()
    fresh = await sandbox.shell()
    assert fresh is not shell
    assert (await fresh.run('echo "[$x$LATER]"')).stdout == b"[]\n"


async def test_after_stopping_processes_only_ours_are_left(engine: Engine, sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("sleep 4001 & (setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 4002; done' &) &")
    await shell.run("x=dirty; export PATH=/nowhere; kill() { :; }", timeout=10)
    await sandbox.stop_processes()
    assert not [line for line in await processes(engine, sandbox) if "sleep 400" in line]
    assert (await (await sandbox.shell()).run('echo "$PATH[$x]"')).stdout.endswith(b"bin[]\n")


async def test_a_command_that_runs_on_is_gone_before_the_verifier_starts(
    engine: Engine, sandbox: DockerSandbox
) -> None:
    shell = await sandbox.shell()
    writer = "(while :; do echo 1 >/tmp/reward; sleep 0.02; done) & sleep 4000"
    running = asyncio.create_task(shell.run(writer))
    await asyncio.sleep(0.3)
    running.cancel()
    await sandbox.stop_processes()
    await sandbox.write({"/tmp/reward": b"0"})
    await asyncio.sleep(0.2)
    assert await sandbox.read("/tmp/reward") == b"0"


async def test_a_run_that_is_under_way_when_processes_are_stopped_says_so(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    running = asyncio.create_task(shell.run("echo part; sleep 4000"))
    await asyncio.sleep(0.3)
    await sandbox.stop_processes()
    result = await running
    assert (result.shell_replaced, result.stdout) == (True, b"part\n")


async def test_no_signal_from_inside_ends_pid_1(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    signals = "i=1; while [ $i -le 64 ]; do kill -$i 1 2>/dev/null; i=$((i + 1)); done; sleep 0.2; echo done"
    for _ in range(3):
        await shell.run(f"({signals}) 2>&1", timeout=10)
    await shell.run(f"setsid sh -c 'while :; do {signals}; done' &", timeout=10)
    await asyncio.sleep(0.5)
    assert (await sandbox.state()).running
    await sandbox.stop_processes()
    assert (await (await sandbox.shell()).run("echo on")).stdout == b"on\n"


async def test_pid_1_ends_at_the_deadline_though_its_timer_was_killed(
    make_sandbox: MakeSandbox, images: dict[str, str], kind: str
) -> None:
    sandbox = await make_sandbox(images[kind], deadline_sec=3)
    shell = await sandbox.shell()
    kill_timers = (
        "for p in /proc/[0-9]*; do read -r n x <$p/comm && [ $n = sleep ] && kill -9 ${p#/proc/}; done"
    )
    await shell.run(f"{kill_timers}; true")
    with pytest.raises(SandboxError) as raised:
        await shell.run("while :; do :; done", timeout=30)
    assert raised.value.error_class == "container_lost"
    assert raised.value.evidence.exit_code == 124


async def test_a_container_that_is_killed_or_removed_by_others_is_lost(
    engine: Engine, make_sandbox: MakeSandbox
) -> None:
    for end in ("kill", "remove"):
        sandbox = await make_sandbox()
        shell = await sandbox.shell()
        running = asyncio.create_task(shell.run("sleep 1000"))
        await asyncio.sleep(0.1)
        await engine.call("end a container", partial(end_container, end, sandbox.id))
        with pytest.raises(SandboxError) as raised:
            await running
        assert raised.value.error_class == "container_lost"
        with pytest.raises(SandboxError) as raised:
            await shell.run("echo")
        assert raised.value.error_class == "container_lost"
        with pytest.raises(SandboxError):
            await sandbox.stop_processes()
        assert not (await sandbox.state()).running


async def test_a_process_past_the_memory_limit_shows_in_the_state(
    make_sandbox: MakeSandbox, images: dict[str, str], kind: str
) -> None:
    sandbox = await make_sandbox(images[kind], memory_mb=64)
    shell = await sandbox.shell()
    assert not (await sandbox.state()).oom_killed
    result = await shell.run("sh -c 'kill -9 $$'")
    assert result.exit_code == 137
    assert not (await sandbox.state()).oom_killed
    hoard = "sh -c 'x=$(head -c 200000000 /dev/zero | tr \"\\0\" x); echo no'"
    result = await shell.run(f"{hoard}; echo $?", timeout=60)
    # On a busy machine the kernel may kill another one before it has the first one's memory back: the shell, at times.
    assert (result.stdout, result.shell_exit_code) in [(b"137\n", None), (b"", 137)], result
    state = await sandbox.state()
    assert (state.running, state.oom_killed) == (True, True)
    await sandbox.stop_processes()
    assert sandbox.oom_kills > 0


async def test_too_much_written_stops_the_processes_and_is_noted(
    engine: Engine, make_sandbox: MakeSandbox
) -> None:
    sandbox = await make_sandbox(storage_mb=3)
    assert sandbox._storage is not None
    await sandbox._storage.stop()
    sandbox._storage = StorageWatch(engine, sandbox.id, 3 << 20, sandbox.clear, first_sec=0.2)
    shell = await sandbox.shell()
    fill = "for i in 1 2 3 4; do head -c 2000000 /dev/zero >/tmp/$i; done; sleep 1000"
    result = await shell.run(fill, timeout=60)
    assert result.shell_replaced
    assert sandbox.storage_exceeded
    assert (await shell.run("rm /tmp/?; echo on")).stdout == b"on\n"


async def test_an_engine_that_fails_once_does_not_end_the_watch_on_storage(
    engine: Engine, make_sandbox: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_module, "SHORTEST_SEC", 0.2)
    sandbox = await make_sandbox()
    shell = await sandbox.shell()
    stops: list[str] = []

    async def stop() -> None:
        stops.append("asked")
        if len(stops) == 1:
            raise SandboxError("docker_timeout", "the engine is busy")
        await sandbox.clear()

    watch = StorageWatch(engine, sandbox.id, 1 << 20, stop, first_sec=0.2)
    result = await shell.run("head -c 2000000 /dev/zero >/tmp/1; sleep 1000", timeout=60)
    assert result.shell_replaced
    await watch.stop()
    assert (watch.exceeded, len(stops)) == (True, 2)


async def test_a_verifier_is_not_stopped_for_what_the_agent_has_written(
    engine: Engine, make_sandbox: MakeSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the agent is done, who goes on writing past the budget is stopped again."""
    monkeypatch.setattr(storage_module, "SHORTEST_SEC", 0.2)
    sandbox = await make_sandbox(storage_mb=3)
    assert sandbox._storage is not None
    await sandbox._storage.stop()
    sandbox._storage = StorageWatch(engine, sandbox.id, 3 << 20, sandbox.clear, first_sec=0.2)
    shell = await sandbox.shell()
    for name in ("a", "b"):
        fill = f"head -c 2000000 /dev/zero >/tmp/{name}1; head -c 2000000 /dev/zero >/tmp/{name}2; sleep 1000"
        assert (await shell.run(fill, timeout=60)).shell_replaced
    await sandbox.stop_processes()
    shell = await sandbox.shell()
    before = sandbox._storage.used_bytes
    await shell.run("head -c 2500000 /dev/zero >/tmp/c")
    while sandbox._storage.used_bytes <= before:
        assert (await shell.run("sleep 0.2; echo on")).stdout == b"on\n"
    assert (await shell.run("sleep 1; echo on")).stdout == b"on\n"
    assert sandbox.storage_exceeded


async def test_one_program_apart_from_the_shell(sandbox: DockerSandbox) -> None:
    result = await sandbox.exec(
        ["sh", "-c", "pwd; echo $A; echo err >&2; exit 3"], env={"A": "b c"}, workdir="/tmp"
    )
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"/tmp\nb c\n", b"err\n")
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127
    result = await sandbox.exec(["sh", "-c", "sleep 60 & echo on"], timeout=20)
    assert (result.exit_code, result.stdout) == (0, b"on\n")
    result = await sandbox.exec(["sh", "-c", "echo part; sleep 1000"], timeout=1)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"part\n")
    result = await sandbox.exec(["head", "-c", "3000000", "/dev/zero"], output_bytes=100)
    assert result.omitted_bytes == 3_000_000 - 100


async def test_limits_and_privileges(make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox(cpus=0.5, memory_mb=128, pids=50)
    shell = await sandbox.shell()
    status = (await shell.run("cat /proc/self/status; ulimit -c")).text
    assert "NoNewPrivs:\t1" in status
    assert status.endswith("\n0\n")
    assert (await shell.run("mknod /tmp/null c 1 3")).exit_code != 0
    tools = "useradd -m bob && su bob -c id && chown bob /tmp && chmod u+s /bin/ls && chroot / true"
    assert (await shell.run(tools)).exit_code == 0


async def test_no_start_that_fails_or_is_cancelled_leaves_anything(engine: Engine) -> None:
    def spec(**settings: Any) -> SandboxSpec:
        labels = {"rollcage.host": label}
        return SandboxSpec(**{"image": BASE, "name": f"rollcage-{uuid4().hex}", "labels": labels, **settings})

    label = f"test-start-{uuid4().hex[:8]}"
    with pytest.raises(SandboxError):
        await start_sandbox(engine, spec(image="rollcage-test/no-such-image"))
    with pytest.raises(SandboxError):
        await start_sandbox(engine, spec(network="rollcage-test-no-such-network"))
    for delay in (0.0, 0.01, 0.05, 0.2, 0.5):
        starting = asyncio.create_task(start_sandbox(engine, spec()))
        await asyncio.sleep(delay)
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await (await starting).remove()
    left = await engine.call(
        "list", lambda api: api.containers(all=True, filters={"label": f"rollcage.host={label}"})
    )
    assert left == []


async def test_the_host_that_goes_away_takes_the_sandbox_with_it(
    engine: Engine, make_sandbox: MakeSandbox, images: dict[str, str], kind: str
) -> None:
    sandbox = await make_sandbox(images[kind])
    await (await sandbox.shell()).run("sleep 4000 &")
    await sandbox._link.close()
    ended = await engine.call("wait", lambda api: api.wait(sandbox.id, timeout=30))
    assert ended["StatusCode"] == 125


async def test_removing_twice_is_no_error(engine: Engine, make_sandbox: MakeSandbox) -> None:
    sandbox = await make_sandbox()
    await asyncio.gather(sandbox.remove(), sandbox.remove())
    await sandbox.remove()
    assert not (await sandbox.state()).running


async def test_an_agent_that_breaks_every_shell_has_ended_its_sandbox(
    monkeypatch: pytest.MonkeyPatch, make_sandbox: MakeSandbox
) -> None:
    monkeypatch.setattr(container_module, "ANSWER_SEC", 0.5)
    sandbox = await make_sandbox()
    shell = await sandbox.shell()
    result = await shell.run("rm -f /bin/bash /usr/bin/bash /bin/sh /usr/bin/sh; exit 1")
    assert result.shell_replaced
    with pytest.raises(SandboxError) as raised:
        await shell.run("echo on")
    assert raised.value.error_class == "agent_killed_sandbox"
    started = time.monotonic()
    await sandbox.stop_processes()
    assert await sandbox.read("/etc/hostname") is not None
    assert time.monotonic() - started < 5


async def test_a_process_that_is_killed_before_it_says_a_word_takes_the_sandbox_with_it(
    engine: Engine, images: dict[str, str], kind: str
) -> None:
    """Attached before the start, PID 1 finds its stream at an end whenever that is."""
    spec = SandboxSpec(
        image=images[kind],
        name=f"rollcage-test-{uuid4().hex[:12]}",
        pids=64,
        labels={"rollcage.host": "test-sandbox"},
    )
    made = engine.api.create_container_from_config(
        container_config(spec, await engine_traits(engine)), spec.name
    )
    try:
        _, writer = await engine.attach(made["Id"])
        await engine.call("start", lambda api: api.start(made["Id"]))
        # As the kernel does; docker-py holds a copy of the socket.
        writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        ended = await engine.call("wait", lambda api: api.wait(made["Id"], timeout=20))
        assert ended["StatusCode"] == 125
    finally:
        engine.api.remove_container(made["Id"], force=True)
