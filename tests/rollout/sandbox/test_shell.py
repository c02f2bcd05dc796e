from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import time

import pytest

from rollcage.rollout.sandbox.container import DockerSandbox
from rollcage.rollout.sandbox.link import _script

pytestmark = pytest.mark.docker


async def test_directory_variables_and_functions_last(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("cd /tmp; x='a  b'; export Y=1; greet() { echo hello $1; }")
    result = await shell.run('pwd; echo "$x"; greet you; sh -c \'echo "[$x$Y]"\'')
    assert result.stdout == b"/tmp\na  b\nhello you\n[1]\n"
    assert (result.exit_code, result.stderr, result.note) == (0, b"", "")


async def test_exit_code_and_both_streams_are_told_apart(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    result = await shell.run("echo out; echo err >&2; sh -c 'exit 7'")
    assert (result.exit_code, result.stdout, result.stderr) == (7, b"out\n", b"err\n")
    assert (await shell.run('echo "last: $?"')).stdout == b"last: 7\n"
    assert (await shell.run("true")).exit_code == 0


async def test_a_syntax_error_is_the_commands_and_not_the_shells(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("x=kept")
    result = await shell.run("if then; fi (")
    assert result.exit_code not in (0, None)
    assert b"yntax error" in result.stderr
    assert (await shell.run("echo $x")).stdout == b"kept\n"


async def test_what_a_command_does_to_its_shell_does_not_reach_the_framing(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    for command, printed in (
        ("echo a; break 1; echo b", b"a\n"),
        ("echo a; continue; echo b", b"a\n"),
        ("for i in 1 2; do break; done; echo c", b"c\n"),
        ("printf() { :; }; read() { :; }; kill() { :; }; echo d", b"d\n"),
        ("set -u; set -f; IFS=,; echo e", b"e\n"),
        ("exec 8>&- 9>&- 7<&-; echo f", b"f\n"),
        ("exec </dev/null; echo g", b"g\n"),
        ("set -- 1 2; echo h", b"h\n"),
        ("echo $1$2\necho i", b"12\ni\n"),
        ("exec 3>/tmp/kept; echo in >&3; echo j", b"j\n"),
        ("exec >/tmp/file; echo k", b""),
        ("echo l; exec >&2; cat /tmp/kept", b""),
    ):
        result = await shell.run(command, timeout=10)
        assert (result.stdout, result.timed_out, result.shell_replaced) == (printed, False, False), command
    traced = await shell.run("set -x; echo m")
    assert traced.exit_code == 0
    assert b"rc_" not in (await shell.run("echo n")).stderr


async def test_after_set_e_a_failure_ends_the_shell_and_says_so(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("set -e; true")
    result = await shell.run("sh -c 'exit 5'; echo never")
    assert (result.shell_replaced, result.shell_exit_code, result.stdout) == (True, 5, b"")
    assert (await shell.run("sh -c 'exit 5'; echo again")).stdout == b"again\n"


@pytest.mark.parametrize(
    ("command", "status"),
    [("echo bye; exit 3", 3), ("echo bye; exec sleep 0.1", 0), ("echo bye; kill -9 $$", 137)],
)
async def test_a_shell_that_ends_is_replaced_and_the_agent_is_told(
    sandbox: DockerSandbox, command: str, status: int
) -> None:
    shell = await sandbox.shell(env={"MINE": "yes"})
    await shell.run("cd /tmp; x=lost")
    result = await shell.run(command, timeout=10)
    assert (result.exit_code, result.shell_replaced, result.shell_exit_code) == (None, True, status)
    assert result.stdout == b"bye\n"
    assert f"status {status}" in result.note
    assert (await shell.run('pwd; echo "[$x$MINE]"')).stdout == b"/\n[yes]\n"


async def test_killing_every_process_with_its_own_shell_is_a_command_that_failed(
    sandbox: DockerSandbox,
) -> None:
    shell = await sandbox.shell()
    result = await shell.run("for p in /proc/[0-9]*; do kill -9 ${p#/proc/}; done; echo no", timeout=10)
    assert result.shell_replaced
    assert (await shell.run("echo on")).stdout == b"on\n"
    assert (await sandbox.state()).running
    assert not (await sandbox.state()).oom_killed


async def test_a_background_child_that_holds_stdout_does_not_hold_the_command(
    sandbox: DockerSandbox,
) -> None:
    shell = await sandbox.shell()
    result = await shell.run("(sleep 0.3; echo late; sleep 60) & echo started", timeout=10)
    assert (result.stdout, result.timed_out) == (b"started\n", False)
    assert b"late" in (await shell.run("sleep 0.6")).stdout


async def test_a_timeout_ends_the_command_and_what_it_started_and_nothing_else(
    sandbox: DockerSandbox,
) -> None:
    shell = await sandbox.shell()
    await shell.run("x=kept; cd /tmp; sleep 4001 & sleep 0.05")
    command = "sleep 4002 & (sleep 4003 | cat) & sh -c 'sleep 4004; echo no'; touch /tmp/never; echo never"
    result = await shell.run(f"echo part; {command}", timeout=0.5)
    assert (result.timed_out, result.exit_code, result.shell_replaced) == (True, None, False)
    assert result.stdout == b"part\n"
    assert 0.5 <= result.seconds < 10
    assert "stopped after" in result.note
    left = await shell.run('pwd; echo $x; ls /tmp/never; cat /proc/[0-9]*/cmdline | tr "\\0" " "')
    assert left.stdout.startswith(b"/tmp\nkept\n")
    assert b"4001" in left.stdout
    assert not any(number in left.stdout for number in (b"4002", b"4003", b"4004"))
    assert b"No such file" in left.stderr


@pytest.mark.parametrize(
    "loop",
    [
        "while :; do :; done",
        "while :; do sleep 0.05; done",
        "while true; do /bin/true; done",
        "for i in 1 2 3; do sleep 1000; done",
        "y=$(sleep 1000); echo $y",
        "sleep 1000 | cat | cat",
        "sleep 1000 & wait",
        "trap '' TERM INT HUP; sh -c 'trap \"\" TERM INT; while :; do sleep 1; done'",
    ],
)
async def test_no_command_outlives_its_timeout_and_the_shell_is_kept(
    sandbox: DockerSandbox, loop: str
) -> None:
    shell = await sandbox.shell()
    await shell.run("x=kept")
    result = await shell.run(f"{loop}\necho never", timeout=0.3)
    assert (result.timed_out, result.shell_replaced, result.stdout) == (True, False, b"")
    assert (await shell.run("echo $x")).stdout == b"kept\n"


async def test_a_command_in_a_function_is_ended_with_all_that_follows(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("hang() { sleep 1000; touch /tmp/inside; }")
    result = await shell.run("hang; touch /tmp/behind", timeout=0.3)
    assert result.timed_out
    assert (await shell.run("ls /tmp/inside /tmp/behind")).stdout == b""


async def test_a_shell_that_stops_itself_comes_back(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    started = time.monotonic()
    await shell.run("kill -STOP $$", timeout=1)
    assert (await shell.run("echo on", timeout=10)).stdout == b"on\n"
    assert time.monotonic() - started < 20


async def test_a_shell_that_ignores_the_supervisor_is_replaced(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    result = await shell.run("trap '' 43; while :; do :; done", timeout=0.2)
    assert (result.timed_out, result.shell_replaced) == (True, True)
    assert "after a timeout" in result.note
    assert (await shell.run("echo on")).stdout == b"on\n"


async def test_a_cancelled_command_is_stopped_before_the_next(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    running = asyncio.create_task(shell.run("x=kept; echo part; sleep 1000; touch /tmp/never"))
    await asyncio.sleep(0.3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    result = await shell.run("echo $x; ls /tmp/never")
    assert result.stdout == b"kept\n"


async def test_any_bytes_come_through(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    every = bytes(range(256)) * 300
    result = await shell.run("cat", stdin=every)
    assert result.stdout == every
    result = await shell.run("printf '\\303'; sleep 0.05; printf '\\251\\377\\0end'")
    assert result.stdout == b"\xc3\xa9\xff\0end"
    assert result.text == "é�\0end"
    assert (await shell.run("ls /dev/shm")).stdout == b""


async def test_a_command_of_any_bytes_comes_through(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    text = "".join(chr(code) for code in range(1, 0x180) if code != 0x27) + "€ 'q' \\ \" $x `y`\n\nend\n"
    result = await shell.run(f"cat <<'E O F'\n{text}E O F\n")
    assert result.stdout.decode() == text


async def test_one_line_of_ten_megabytes_is_capped(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    result = await shell.run(
        "head -c 10000000 /dev/zero | tr '\\0' x; echo; echo end >&2", output_bytes=1000, timeout=60
    )
    assert result.omitted_bytes == 10_000_001 - 1000
    assert result.stdout.startswith(b"x" * 500 + b"\n[... 9999001 bytes left out ...]\n")
    assert result.stdout.endswith(b"x\n")
    assert (result.stderr, result.exit_code) == (b"end\n", 0)


async def test_endless_output_is_bounded(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    result = await shell.run("yes & yes >&2", timeout=1, output_bytes=10_000)
    assert result.timed_out
    assert len(result.stdout) < 11_000
    assert len(result.stderr) < 11_000
    assert (await shell.run("echo on")).stdout.endswith(b"on\n")


async def test_a_command_of_a_megabyte_runs(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    body = "".join(f"line {number}\n" for number in range(90_000))
    result = await shell.run(f"md5sum <<'EOF'\n{body}EOF\n", timeout=60)
    assert result.stdout.split()[0].decode() == hashlib.md5(body.encode()).hexdigest()
    large = os.urandom(2 << 20)
    result = await shell.run("md5sum", stdin=large, timeout=60)
    assert result.stdout.split()[0].decode() == hashlib.md5(large).hexdigest()


async def test_a_command_that_knows_its_end_marker_fools_only_itself(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    await shell.run('echo "$rc_nonce 0"; echo "$rc_nonce 0" >&2; sh -c "exit 9"', timeout=10)
    await shell.run('echo "$rc_nonce x y"; echo "$rc_nonce" >&2', timeout=10)
    assert (await shell.run("sleep 0.2; echo on")).stdout.endswith(b"on\n")


async def test_a_fork_bomb_is_over_when_processes_are_stopped(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    await shell.run("x=1; bomb() { bomb | bomb & }; bomb", timeout=2)
    await asyncio.sleep(0.5)
    await sandbox.stop_processes()
    shell = await sandbox.shell()
    assert (await shell.run("sleep 0; echo $x$?", timeout=20)).stdout == b"0\n"


async def test_orphans_that_die_by_the_thousand_do_not_end_the_sandbox(sandbox: DockerSandbox) -> None:
    shell = await sandbox.shell()
    orphans = 'i=0; while [ $i -lt 300 ]; do i=$((i + 1)); (sh -c "(:) & (:) & (:) &" &); done; echo over'
    assert (await shell.run(orphans, timeout=60)).stdout == b"over\n"
    assert (await shell.run("echo on", timeout=20)).stdout == b"on\n"


async def test_one_file_cannot_fill_the_disk(make_sandbox, images, kind) -> None:  # type: ignore[no-untyped-def]
    sandbox = await make_sandbox(images[kind], storage_mb=5)
    shell = await sandbox.shell()
    result = await shell.run("cat /dev/zero >/tmp/big; wc -c </tmp/big", timeout=60)
    assert int(result.stdout) == 5 << 20


async def test_sigint_and_job_groups_are_as_in_a_terminal(make_sandbox) -> None:  # type: ignore[no-untyped-def]
    shell = await (await make_sandbox()).shell()
    await shell.run("x=kept")
    assert (await shell.run("sh -c 'sh -c \"kill -INT \\$\\$\"; echo $?'")).stdout == b"130\n"
    assert (await shell.run("sleep 100 & kill -INT $!; wait $!")).exit_code == 130
    assert (await shell.run("sh -c 'trap \"kill 0\" EXIT; sleep 100 & exit 0'")).exit_code is not None
    assert (await shell.run("echo $x")).stdout == b"kept\n"


@pytest.mark.parametrize("program", ["sh", "bash"])
def test_a_signal_in_the_middle_of_what_another_asked_for_makes_no_condition_wrong(program: str) -> None:
    script = _script("supervisor.sh")
    functions = script[script.index("rc_on() {") : script.index("rc_say() {")]
    command = f"""{functions}
        work() {{ [ 5 -gt "$(kill -45 $$; echo 0)" ] && echo right; }}
        rc_notes='' rc_noted_last=''
        rc_on 44 work; rc_on 45 :
        sleep 100 & rc_shell=$!
        (kill -44 $$; exit 3)
        [ -n "${{BASH_VERSION-}}" ] || rc_wait  # ends at once, for 45 came in between
        kill $rc_shell"""
    result = subprocess.run([program, "-c", command], capture_output=True, text=True, timeout=20)
    assert result.stdout == "right\n", result.stderr


@pytest.mark.parametrize("busy", ["1", ""])
@pytest.mark.parametrize("trap", ["rc_interrupt", "rc_clear"])
def test_a_signal_in_the_middle_of_a_start_leaves_the_timer_out_of_it(trap: str, busy: str) -> None:
    """The supervisor's traps, with what they call left out: a timer started now would be taken for the shell."""
    script = _script("supervisor.sh")
    functions = script[script.index("rc_say() {") : script.index("rc_number=0")]
    stubs = (
        "kill() { :; }; rc_kill_command() { :; }; rc_say() { :; }; rc_look() { return 1; }; rc_tick() { :; }"
    )
    command = f'{functions}\n{stubs}\nrc_busy={busy}; {trap}; echo "[$rc_busy]"'
    result = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=20)
    assert result.stdout == f"[{busy}]\n", result.stderr
