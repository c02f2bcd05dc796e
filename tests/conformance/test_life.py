"""A sandbox's life: processes stopped, shells ended, the end by whoever brings it, what is said afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.base import Sandbox, Shell

pytestmark = pytest.mark.asyncio(loop_scope="session")

Start = Any
LIST = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"


async def test_stopping_processes_leaves_none(sandbox: Sandbox, shell: Shell) -> None:
    await shell.run("sleep 4001 & (setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 4002; done' &) &")
    await sandbox.stop_processes()
    left = await (await sandbox.shell()).run(LIST)
    assert "sleep 400" not in left.text


async def test_after_stopping_processes_the_shell_is_fresh(sandbox: Sandbox, shell: Shell) -> None:
    await shell.run("old=yes; cd /tmp; PATH=/nowhere; kill() { :; }")
    await sandbox.stop_processes()
    fresh = await sandbox.shell()
    assert fresh is not shell
    assert (await fresh.run('echo "[$old]"; pwd; ls -d /etc')).stdout == b"[]\n/\n/etc\n"


async def test_a_writer_is_gone_once_processes_are_stopped(sandbox: Sandbox, shell: Shell) -> None:
    running = asyncio.create_task(shell.run("(while :; do echo 1 >/tmp/reward; done) & sleep 1000"))
    await asyncio.sleep(0.2)
    running.cancel()
    await sandbox.stop_processes()
    await sandbox.write({"/tmp/reward": b"0"})
    await asyncio.sleep(0.1)
    assert await sandbox.read("/tmp/reward") == b"0"


async def test_a_command_under_way_says_that_its_shell_was_replaced(sandbox: Sandbox, shell: Shell) -> None:
    running = asyncio.create_task(shell.run("echo part; sleep 1000"))
    await asyncio.sleep(0.2)
    await sandbox.stop_processes()
    result = await running
    assert (result.exit_code, result.shell_replaced, result.stdout) == (None, True, b"part\n")


async def test_ending_shells_leaves_what_runs_in_the_background(sandbox: Sandbox, shell: Shell) -> None:
    await shell.run("old=yes; sleep 4001 &")
    await sandbox.end_shells()
    fresh = await sandbox.shell()
    assert fresh is not shell
    assert "sleep 4001" in (await fresh.run(LIST)).text
    assert (await fresh.run('echo "[$old]"')).stdout == b"[]\n"


async def test_killing_everything_ends_no_more_than_the_shell(sandbox: Sandbox, shell: Shell) -> None:
    assert (await shell.run("sh -c 'kill -9 -1'", timeout=20)).shell_replaced
    assert (await shell.run("echo on")).stdout == b"on\n"
    assert (await sandbox.state()).running


async def test_no_signal_from_inside_ends_the_sandbox(sandbox: Sandbox, shell: Shell) -> None:
    signals = "i=1; while [ $i -le 64 ]; do kill -$i 1 2>/dev/null; i=$((i + 1)); done; sleep 0.2; echo done"
    await shell.run(f"({signals}) 2>&1", timeout=20)
    assert (await sandbox.state()).running
    await sandbox.stop_processes()
    assert (await (await sandbox.shell()).run("echo on")).stdout == b"on\n"


async def test_a_running_sandbox_says_so(sandbox: Sandbox, shell: Shell) -> None:
    await shell.run("sh -c 'kill -9 $$'")
    state = await sandbox.state()
    assert (state.running, state.exit_code, state.oom_killed, state.storage_exceeded) == (
        True,
        None,
        False,
        False,
    )
    assert sandbox.id
    assert sandbox.spec.pids == 128


async def test_sandboxes_are_apart(start: Start) -> None:
    one, other = await asyncio.gather(start(), start())
    assert one.id != other.id
    await (await one.shell()).run("echo x >/tmp/mine; sleep 4001 &")
    shell = await other.shell()
    assert (await shell.run("ls /tmp")).stdout == b""
    assert "4001" not in (await shell.run(LIST)).text


async def test_removing_twice_is_no_error(start: Start) -> None:
    sandbox = await start()
    await asyncio.gather(sandbox.remove(), sandbox.remove())
    await sandbox.remove()
    assert not (await sandbox.state()).running


USES: dict[str, Callable[[Sandbox, Path], Awaitable[object]]] = {
    "shell": lambda sandbox, _: sandbox.shell(),
    "terminal": lambda sandbox, _: sandbox.terminal(),
    "exec": lambda sandbox, _: sandbox.exec(["true"]),
    "stop_processes": lambda sandbox, _: sandbox.stop_processes(),
    "upload": lambda sandbox, folder: sandbox.upload(folder, "/tmp/x"),
    "write": lambda sandbox, _: sandbox.write({"/tmp/x": b""}),
    "read": lambda sandbox, _: sandbox.read("/etc/hostname"),
    "download": lambda sandbox, folder: sandbox.download("/etc", folder / "x", max_bytes=1 << 20),
    "changes": lambda sandbox, _: sandbox.changes(),
}


async def test_whatever_is_asked_of_a_removed_sandbox_says_that_it_is_gone(
    start: Start, tmp_path: Path
) -> None:
    sandbox = await start()
    shell = await sandbox.shell()
    await sandbox.remove()
    with pytest.raises(SandboxError):
        await shell.run("echo")
    for name, use in USES.items():
        with pytest.raises(SandboxError) as raised:
            await use(sandbox, tmp_path)
        assert raised.value.error_class == "container_lost", name


async def test_a_command_whose_container_is_killed_raises(start: Start, kind: Any, server: Any) -> None:
    sandbox = await start()
    shell = await sandbox.shell()
    running = asyncio.create_task(shell.run("sleep 1000"))
    await asyncio.sleep(0.2)
    await kind.kill(server, sandbox)
    with pytest.raises(SandboxError) as raised:
        await asyncio.wait_for(running, 30)
    assert raised.value.error_class == "container_lost"


async def test_whatever_is_asked_of_a_dead_container_says_that_it_is_lost(
    start: Start, kind: Any, server: Any
) -> None:
    sandbox = await start()
    shell, terminal = await sandbox.shell(), await sandbox.terminal()
    await kind.kill(server, sandbox)
    calls = (
        lambda: shell.run("echo"),
        lambda: sandbox.exec(["true"]),
        sandbox.stop_processes,
        terminal.screen,
    )
    for call in calls:
        with pytest.raises(SandboxError) as raised:
            await asyncio.wait_for(call(), 30)
        assert raised.value.error_class == "container_lost"
    state = await sandbox.state()
    assert (state.running, state.oom_killed) == (False, False)


async def test_a_sandbox_ends_by_itself_at_its_deadline(start: Start) -> None:
    sandbox = await start(deadline_sec=2)
    shell = await sandbox.shell()
    with pytest.raises(SandboxError) as raised:
        await shell.run("while :; do :; done", timeout=30)
    assert raised.value.error_class == "container_lost"
    assert "deadline" in raised.value.message
