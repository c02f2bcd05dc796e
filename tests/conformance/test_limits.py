"""Limits and privileges: what a sandbox cannot use up, and what it cannot do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rollcage.rollout.sandbox.base import Sandbox, Shell
from rollcage.rollout.sandbox.hostconfig import KEPT_CAPABILITIES

pytestmark = pytest.mark.asyncio(loop_scope="session")

Start = Any
NUMBERS = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7,
    "NET_BIND_SERVICE": 10, "NET_RAW": 13, "SYS_CHROOT": 18, "AUDIT_WRITE": 29, "SETFCAP": 31,
}  # fmt: skip
"""https://man7.org/linux/man-pages/man7/capabilities.7.html, as in the kernel's linux/capability.h."""


async def test_a_fork_bomb_is_held_and_over_when_processes_are_stopped(start: Start) -> None:
    sandbox = await start(pids=64)
    shell = await sandbox.shell()
    await shell.run("bomb() { bomb | bomb & }; bomb", timeout=2)
    await asyncio.sleep(0.3)
    await sandbox.stop_processes()
    assert (await (await sandbox.shell()).run("sleep 0; echo on", timeout=30)).stdout == b"on\n"


async def test_processes_are_counted(start: Start) -> None:
    shell = await (await start(pids=40)).shell()
    result = await shell.run("for i in $(seq 60); do sleep 100 & done 2>/dev/null; wait", timeout=3)
    assert result.exit_code != 0


async def test_a_process_past_the_memory_limit_is_killed_and_this_is_known(start: Start) -> None:
    sandbox = await start(memory_mb=64)
    shell = await sandbox.shell()
    hoard = "sh -c 'x=$(head -c 200000000 /dev/zero | tr \"\\0\" x); echo no'"
    assert (await shell.run(f"{hoard}; echo $?", timeout=60)).stdout == b"137\n"
    state = await sandbox.state()
    assert (state.running, state.oom_killed) == (True, True)
    await sandbox.stop_processes()
    assert sandbox.oom_kills > 0


async def test_a_file_ends_at_the_storage_budget(start: Start) -> None:
    shell = await (await start(storage_mb=5)).shell()
    assert (await shell.run("cat /dev/zero >/tmp/big; wc -c </tmp/big", timeout=60)).stdout == b"5242880\n"


async def test_a_sandbox_past_its_storage_budget_is_stopped_and_this_is_known(start: Start) -> None:
    sandbox = await start(storage_mb=3)
    shell = await sandbox.shell()
    fill = "for i in 1 2 3 4; do head -c 2000000 /dev/zero >/var/$i; done; sleep 1000"
    assert (await shell.run(fill, timeout=60)).shell_replaced
    assert sandbox.storage_exceeded
    assert (await sandbox.state()).storage_exceeded
    assert (await shell.run("rm /var/?; echo on")).stdout == b"on\n"


async def test_there_is_no_network_with_none(shell: Shell) -> None:
    assert (await shell.run("ls /sys/class/net")).stdout == b"lo\n"
    connected = await shell.run("bash -c 'echo >/dev/tcp/192.0.2.1/80'", timeout=20)
    assert connected.exit_code == 1
    assert "unreachable" in connected.text


async def test_capabilities_are_those_that_are_listed(shell: Shell) -> None:
    kept = sum(1 << NUMBERS[name] for name in KEPT_CAPABILITIES)
    lines = (await shell.run("grep -E 'Cap(Eff|Prm|Bnd)' /proc/self/status")).text.split()
    assert [int(value, 16) for value in lines[1::2]] == [kept] * 3


async def test_devices_are_not_made_and_nothing_is_mounted(shell: Shell) -> None:
    assert (await shell.run("mknod /tmp/disk b 8 0")).exit_code != 0
    assert (await shell.run("mount -t tmpfs none /mnt")).exit_code != 0
    assert (await shell.run("echo 1 >/proc/sys/kernel/panic")).exit_code != 0


async def test_no_new_privileges_are_to_be_had(sandbox: Sandbox, shell: Shell) -> None:
    assert "NoNewPrivs:\t1" in (await shell.run("cat /proc/self/status")).text
    await shell.run("cp /usr/bin/id /tmp/id; chmod 4755 /tmp/id")
    nobody = await sandbox.shell("nobody")
    assert (await nobody.run("/tmp/id -u")).stdout == b"65534\n"
    assert "CapEff:\t0000000000000000" in (await nobody.run("cat /proc/self/status")).text


async def test_other_users_and_programs_have_no_more_privileges(sandbox: Sandbox) -> None:
    status = (await sandbox.exec(["cat", "/proc/self/status"], user="nobody")).text
    assert "CapEff:\t0000000000000000" in status
    assert "NoNewPrivs:\t1" in status


async def test_a_root_users_everyday_tools_work(start: Start) -> None:
    shell = await (await start()).shell()
    tools = "useradd -m bob && su bob -c id && chown bob /tmp && chmod u+s /bin/ls && chroot / true"
    assert (await shell.run(tools)).exit_code == 0


async def test_no_core_is_dumped(shell: Shell) -> None:
    await shell.run("cd /tmp; sh -c 'kill -SEGV $$'")
    assert (await shell.run("ulimit -c; ls /tmp")).stdout == b"0\n"


async def test_the_memory_of_the_first_process_is_out_of_reach(shell: Shell) -> None:
    assert (await shell.run("head -c 1 /proc/1/mem | wc -c; : >/proc/1/mem")).stdout == b"0\n"


async def test_there_is_no_socket_of_the_engine(shell: Shell) -> None:
    found = await shell.run("ls /var/run/docker.sock /run/docker.sock /run/podman 2>/dev/null")
    assert found.stdout == b""
