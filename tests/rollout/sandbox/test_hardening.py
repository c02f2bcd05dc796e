"""What an agent that is root cannot reach: the supervisor, the host, and what the engine keeps for itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.base import SandboxSpec
from rollcage.rollout.sandbox.container import DockerSandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.hostconfig import KEPT_CAPABILITIES, MASKED_PATHS, container_config
from rollcage.rollout.sandbox.seccomp import REFUSED, allowed, profile
from rollcage.rollout.sandbox.traits import EngineTraits, check_runtime, engine_traits, traits_of

docker = pytest.mark.docker
MakeSandbox = Callable[..., Awaitable[DockerSandbox]]

NUMBERS = {
    "x86_64": "ptrace 101 process_vm_readv 310 process_vm_writev 311 prlimit64 302 clone3 435 pidfd_open 434 "
    "pidfd_getfd 438 unshare 272 socket 41 io_uring_setup 425",
    "aarch64": "ptrace 117 process_vm_readv 270 process_vm_writev 271 prlimit64 261 clone3 435 pidfd_open 434 "
    "pidfd_getfd 438 unshare 97 socket 198 io_uring_setup 425",
}
EPERM, ENOSYS = 1, 38


@pytest.fixture
async def sandbox(make_sandbox: MakeSandbox) -> DockerSandbox:
    return await make_sandbox(memory_mb=256)


async def calls(sandbox: DockerSandbox, script: str) -> dict[str, int]:
    """Run perl code whose `call(LABEL, NAME, ARGUMENTS)` makes a system call; the errno of each, 0 for none."""
    shell = await sandbox.shell(0)
    machine = (await shell.run("uname -m")).stdout.decode().strip()
    if machine not in NUMBERS:
        pytest.skip(f"system call numbers of {machine} are not known here")
    head = (
        f"my %n = qw({NUMBERS[machine]}); "
        "sub call { my ($label, $name, @a) = @_; $! = 0; "
        'my $r = syscall($n{$name}, @a); print $label, " ", ($r < 0 ? $!+0 : 0), "\\n"; $r }\n'
    )
    result = await shell.run("perl - <<'PERL'\n$| = 1;\n" + head + script + "\nPERL", timeout=20)
    assert result.exit_code == 0, result.text
    return {
        label: int(errno) for label, errno in (line.split() for line in result.stdout.decode().splitlines())
    }


@docker
async def test_no_running_process_can_be_taken_hold_of_and_a_child_still_can(sandbox: DockerSandbox) -> None:
    errnos = await calls(
        sandbox,
        """
        my $other = fork(); if (!$other) { sleep 100; exit }
        for (["1", 1], ["child", $other]) {
            my ($whom, $pid) = @$_;
            call("attach-$whom", "ptrace", 16, $pid, 0, 0);
            call("seize-$whom", "ptrace", 0x4206, $pid, 0, 0);
        }
        my $traced = fork();
        if (!$traced) { call("traceme", "ptrace", 0, 0, 0, 0); kill "STOP", $$; exit 0 }
        waitpid($traced, 2);
        call("continue", "ptrace", 7, $traced, 1, 0);
        waitpid($traced, 0);
        kill 9, $other;
        """,
    )
    refused = {"attach-1", "seize-1", "attach-child", "seize-child"}
    assert errnos == {**dict.fromkeys(refused, EPERM), "traceme": 0, "continue": 0}


@docker
async def test_the_supervisors_memory_files_and_limits_are_out_of_reach(sandbox: DockerSandbox) -> None:
    errnos = await calls(
        sandbox,
        """
        my $buffer = "\\0" x 64; my $iov = pack("PQ", $buffer, 64);
        call("read-memory", "process_vm_readv", 1, $iov, 1, $iov, 1, 0);
        call("write-memory", "process_vm_writev", 1, $iov, 1, $iov, 1, 0);
        my $fd = call("pidfd", "pidfd_open", 1, 0);
        call("take-file", "pidfd_getfd", $fd, 8, 0);
        my $limit = pack("QQ", 1, 1); my $old = pack("QQ", 0, 0);
        call("set-limit", "prlimit64", 1, 0, $limit, 0);
        call("see-limit", "prlimit64", 1, 0, 0, $old);
        call("set-own-limit", "prlimit64", 0, 4, pack("QQ", 0, 0), 0);
        """,
    )
    refused = {"read-memory", "write-memory", "take-file", "set-limit"}
    assert {label for label, errno in errnos.items() if errno == EPERM} == refused
    assert {label for label, errno in errnos.items() if errno == 0} == set(errnos) - refused
    shell = await sandbox.shell(0)
    for path in ("/proc/1/mem", "/proc/1/task/1/mem", "/proc/self/root/proc/1/mem"):
        assert (await shell.run(f"head -c 1 {path} | wc -c")).stdout.strip() == b"0", path
    await shell.run("kill -STOP 1; kill -KILL 1; kill -TERM 1; kill -HUP 1; kill -SEGV 1")
    assert (await shell.run("echo still here")).stdout == b"still here\n"
    assert (await sandbox.state()).running


@docker
async def test_no_namespace_mount_or_way_around_the_network(sandbox: DockerSandbox) -> None:
    errnos = await calls(
        sandbox,
        """
        call("user-namespace", "unshare", 0x10000000);
        call("clone3", "clone3", 0, 0);
        call("vsock", "socket", 40, 1, 0);
        call("inet", "socket", 2, 1, 0);
        call("io_uring", "io_uring_setup", 1, 0);
        """,
    )
    refused = dict.fromkeys(("user-namespace", "vsock", "io_uring"), EPERM)
    assert errnos == {**refused, "clone3": ENOSYS, "inet": 0}
    shell = await sandbox.shell(0)
    for attempt in ("mount -t tmpfs none /mnt", "mount -t proc none /mnt", "umount /proc/1/mem", "unshare -m true",
                    "nsenter -t 1 -m true", "mknod /tmp/disk b 8 0", "hostname other", "dmesg",
                    "echo 1 >/proc/sys/kernel/panic", "echo b >/proc/sysrq-trigger"):  # fmt: skip
        assert (await shell.run(f"{attempt} 2>&1")).exit_code != 0, attempt


@docker
async def test_what_a_container_is_given(sandbox: DockerSandbox, engine: Engine) -> None:
    found = await engine.call("inspect a container", lambda api: api.inspect_container(sandbox.id))
    host = found["HostConfig"]
    assert (host["Privileged"], host["PidMode"], host["IpcMode"]) == (False, "", "private")
    assert (host["LogConfig"]["Type"], host["PidsLimit"]) == ("none", 128)
    assert (host["Binds"], host["Devices"] or [], found["Mounts"]) == (None, [], [])
    assert set(host["MaskedPaths"]) == set(MASKED_PATHS)
    assert "/proc/sysrq-trigger" in host["ReadonlyPaths"]
    shell = await sandbox.shell(0)
    status = (await shell.run("cat /proc/self/status")).stdout.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (fields["NoNewPrivs"].strip(), fields["Seccomp"].strip()) == ("1", "2")
    bits = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7,
            "NET_BIND_SERVICE": 10, "NET_RAW": 13, "SYS_CHROOT": 18, "AUDIT_WRITE": 29, "SETFCAP": 31}  # fmt: skip
    assert set(bits) == set(KEPT_CAPABILITIES)
    expected = sum(1 << bit for bit in bits.values())
    assert {int(fields[name], 16) for name in ("CapPrm", "CapEff", "CapBnd")} == {expected}
    assert int(fields["CapAmb"], 16) == 0
    devices = (await shell.run("find /dev -type b -o -type c | sort")).stdout.decode().split()
    assert set(devices) <= {"/dev/full", "/dev/null", "/dev/ptmx", "/dev/pts/ptmx", "/dev/random", "/dev/tty",
                            "/dev/urandom", "/dev/zero"}  # fmt: skip
    assert (await shell.run("find / -xdev -name 'docker*.sock' -o -xdev -name containerd.sock")).stdout == b""


@docker
async def test_forged_words_on_pid_1s_own_streams_are_output(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell(0)
    forged = "ended 1 0 0 1"
    key = "0" * 32
    await shell.run(f"for i in 1 2 7 8 9; do echo '{key} {forged}' >/proc/1/fd/$i; done 2>/dev/null")
    assert (await shell.run("echo alive; exit 0")).stdout.endswith(b"alive\n")


LIAR = """#!/usr/bin/perl
$| = 1;
while (<STDIN>) {
    next unless /rc_nonce=(\\w+);/;
    my $word = /kill -44/ ? "KEY ended 2 0 0 1" : "$1 0";
    print STDOUT "$word\\n";
    print STDERR "$word\\n";
}
"""
"""A shell that keeps the order to end all processes to itself, and answers in PID 1's name."""


@docker
async def test_after_a_shells_end_the_engine_vouches_for_the_end_of_processes(
    sandbox: DockerSandbox, engine: Engine
) -> None:
    """The child that PID 1 forks then has PID 1's memory, and the secret in it, beside the agent's processes."""
    shell = await sandbox.shell(0)
    await sandbox.write(
        {"/usr/local/sbin/bash": LIAR.replace("KEY", sandbox._link._key.decode()).encode()}, mode=0o755
    )
    assert (await shell.run("setsid sleep 1000 >/dev/null 2>&1 & exit 3")).shell_exit_code == 3
    assert (await shell.run("echo is this a shell")).stdout == b""
    await sandbox.stop_processes()
    left = await engine.call("list processes", lambda api: api.top(sandbox.id, "-o pid,args"))
    assert not [process for process in left["Processes"] if "sleep 1000" in process[1]]


@docker
async def test_counting_kills_for_memory_leaves_the_shell_as_it_is(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell(0)
    await shell.run("perl -e '$a = \"x\" x (1 << 30)'")
    await shell.run("x=kept")
    link = sandbox._link
    exposed = link.exposed  # the kernel may have killed the shell, too (test_container.py)
    link.oom_kills = 0
    await sandbox.count_oom_kills()
    kills = sandbox.oom_kills
    assert kills > 0
    assert (await shell.run("echo $x")).stdout == b"kept\n"
    assert link.exposed == exposed
    busy = asyncio.create_task(shell.run("sleep 100"))
    await asyncio.sleep(0)
    link.oom_kills = 0
    await sandbox.count_oom_kills()
    assert sandbox.oom_kills == kills
    assert not busy.done()
    busy.cancel()


@docker
@pytest.mark.parametrize(("limit", "reserve", "reserved"), [(64, 32, 32), (64, 128, 64), (None, 32, 32)])
async def test_a_reserve_stands_beside_the_kill_limit(
    make_sandbox: MakeSandbox, engine: Engine, limit: int | None, reserve: int, reserved: int
) -> None:
    sandbox = await make_sandbox(memory_mb=limit, memory_reservation_mb=reserve)
    found = await engine.call("inspect a container", lambda api: api.inspect_container(sandbox.id))
    host = found["HostConfig"]
    assert host["Memory"] == (limit or 0) << 20
    assert host["MemoryReservation"] == reserved << 20


@docker
async def test_a_task_for_a_larger_machine_gets_the_processors_that_there_are(
    make_sandbox: MakeSandbox, engine: Engine
) -> None:
    sandbox = await make_sandbox(cpus=4096.0)
    found = await engine.call("inspect a container", lambda api: api.inspect_container(sandbox.id))
    assert found["HostConfig"]["NanoCpus"] == (await engine_traits(engine)).cpus * 10**9


@docker
async def test_a_runtime_that_the_engine_does_not_have_is_named(engine: Engine) -> None:
    traits = await engine_traits(engine)
    assert "runc" in traits.runtimes
    for runtime in (None, "runc", "io.containerd.runsc.v1"):
        check_runtime(traits, runtime)
    with pytest.raises(SandboxError, match=r"no runtime 'kata' \(it has .*runc.*sandbox\.runtime"):
        check_runtime(traits, "kata")


def test_every_system_call_is_in_one_list() -> None:
    refused = [name for names in REFUSED.values() for name in names.split()]
    special = ["ptrace", "prlimit64", "clone", "clone3", "personality", "socket"]
    named = [*allowed(), *refused, *special]
    assert len(named) == len(set(named))
    assert list(allowed()) == sorted(allowed())
    rules = json.loads(profile())["syscalls"]
    attach = [rule for rule in rules if rule["names"] == ["ptrace"]]
    allowed_requests = {0: False, 16: False, 17: False, 0x4206: False, 0x4207: False}
    for rule in attach:
        argument = rule["args"][0]
        holds = {"LT": int.__lt__, "EQ": int.__eq__, "GT": int.__gt__}[
            argument["op"].removeprefix("SCMP_CMP_")
        ]
        for request in allowed_requests:
            allowed_requests[request] |= holds(request, argument["value"])
    assert allowed_requests == {0: True, 16: False, 17: True, 0x4206: False, 0x4207: True}


def test_engines_get_the_filter_in_the_form_that_they_take() -> None:
    podman = traits_of(
        {"Components": [{"Name": "Podman Engine"}]},
        {"SecurityOptions": ["name=seccomp,profile=default"], "NCPU": 2},
    )
    assert podman == EngineTraits(podman=True, seccomp=True, cpus=2)
    spec = SandboxSpec(image="x", name="y")
    path = Path(_seccomp_of(container_config(spec, podman)))
    assert path.read_text() == profile()
    path.unlink()
    assert json.loads(_seccomp_of(container_config(spec, EngineTraits()))) == json.loads(profile())
    without = traits_of({}, {"SecurityOptions": ["name=apparmor"]})
    assert not without.seccomp
    assert container_config(spec, without)["HostConfig"]["SecurityOpt"] == ["no-new-privileges"]


def _seccomp_of(config: dict[str, Any]) -> str:
    (option,) = [one for one in config["HostConfig"]["SecurityOpt"] if one.startswith("seccomp=")]
    return option.removeprefix("seccomp=")
