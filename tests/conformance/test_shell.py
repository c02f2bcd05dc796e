"""Commands: what lasts between them, what they print, how they end."""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from typing import Any

import pytest

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.base import Sandbox, Shell

pytestmark = pytest.mark.asyncio(loop_scope="session")

Start = Any


async def test_the_directory_lasts(shell: Shell) -> None:
    await shell.run("cd /tmp && mkdir deep && cd deep")
    assert (await shell.run("pwd")).stdout == b"/tmp/deep\n"


async def test_variables_last_and_only_exported_ones_are_inherited(shell: Shell) -> None:
    await shell.run("kept='a  b'; export passed=on")
    assert (await shell.run('echo "$kept"; sh -c \'echo "[$kept][$passed]"\'')).stdout == b"a  b\n[][on]\n"


async def test_functions_last(shell: Shell) -> None:
    await shell.run('greet() { echo "hello $1"; }')
    assert (await shell.run("greet you")).stdout == b"hello you\n"


async def test_the_exit_code_is_the_last_commands(shell: Shell) -> None:
    assert (await shell.run("false; sh -c 'exit 7'")).exit_code == 7
    assert (await shell.run('echo "last $?"')).stdout == b"last 7\n"
    assert (await shell.run("sh -c 'kill -TERM $$'")).exit_code == 143


async def test_stdout_and_stderr_are_told_apart(shell: Shell) -> None:
    result = await shell.run("echo out; echo err >&2; echo more")
    assert (result.stdout, result.stderr) == (b"out\nmore\n", b"err\n")
    assert result.text == "out\nmore\nerr\n"


async def test_an_empty_command_does_nothing(shell: Shell) -> None:
    for command in ("", "\n\n", "# nothing"):
        result = await shell.run(command)
        assert (result.exit_code, result.stdout, result.stderr) == (0, b"", b"")


async def test_a_command_of_many_lines_runs(shell: Shell) -> None:
    result = await shell.run("for i in 1 2; do\n  cat <<EOF\nrow $i 'q' \"d\"\nEOF\ndone\n")
    assert result.stdout == b"row 1 'q' \"d\"\nrow 2 'q' \"d\"\n"


async def test_a_syntax_error_leaves_the_shell(shell: Shell) -> None:
    await shell.run("kept=yes")
    result = await shell.run("if then fi (")
    assert result.exit_code not in (0, None)
    assert result.stderr
    assert (await shell.run("echo $kept")).stdout == b"yes\n"


async def test_output_past_the_cap_is_kept_head_and_tail_and_the_rest_is_counted(shell: Shell) -> None:
    result = await shell.run("seq 1 20000; seq 1 20000 >&2", output_bytes=1000)
    assert result.omitted_bytes == 2 * (108894 - 1000)
    assert result.stdout.startswith(b"1\n2\n3\n")
    assert result.stderr.endswith(b"19999\n20000\n")
    assert b"107894 bytes left out" in result.stdout
    assert len(result.stdout) < 1100


async def test_output_of_just_the_cap_is_whole(shell: Shell) -> None:
    result = await shell.run("head -c 1000 /dev/zero | tr '\\0' x", output_bytes=1000)
    assert (result.stdout, result.omitted_bytes) == (b"x" * 1000, 0)


async def test_one_line_of_ten_megabytes_is_no_burden(shell: Shell) -> None:
    result = await shell.run("head -c 10000000 /dev/zero | tr '\\0' x", timeout=60)
    assert result.exit_code == 0
    assert result.omitted_bytes == 10_000_000 - (1 << 20)


async def test_every_byte_comes_out(shell: Shell) -> None:
    every = bytes(range(256)) * 64
    await shell.run("cat >/tmp/every", stdin=every)
    assert (await shell.run("cat /tmp/every; cat /tmp/every >&2")).stdout == every


async def test_what_is_not_utf8_is_replaced_in_text_and_kept_in_bytes(shell: Shell) -> None:
    result = await shell.run("printf '\\303'; sleep 0.05; printf '\\251\\377\\0end'")
    assert result.stdout == b"\xc3\xa9\xff\0end"
    assert result.text == "é\ufffd\0end"


async def test_without_stdin_a_reader_is_at_its_end(shell: Shell) -> None:
    result = await shell.run("cat; read x; echo $?", timeout=20)
    assert (result.stdout, result.timed_out) == (b"1\n", False)


async def test_stdin_of_any_bytes_goes_in(shell: Shell) -> None:
    given = bytes(range(256)) + b"\n'$x`y`\\\n"
    assert (await shell.run("cat", stdin=given)).stdout == given


async def test_stdin_of_megabytes_goes_in(shell: Shell) -> None:
    given = os.urandom(3 << 20)
    result = await shell.run("sha256sum", stdin=given, timeout=60)
    assert result.stdout.split()[0].decode() == hashlib.sha256(given).hexdigest()


async def test_a_command_of_a_megabyte_runs(shell: Shell) -> None:
    body = "".join(f"line {number}\n" for number in range(90_000))
    result = await shell.run(f"sha256sum <<'EOF'\n{body}EOF\n", timeout=60)
    assert result.stdout.split()[0].decode() == hashlib.sha256(body.encode()).hexdigest()


async def test_a_timeout_ends_the_command_and_keeps_the_shell(shell: Shell) -> None:
    await shell.run("kept=yes; cd /tmp")
    result = await shell.run("echo part; sleep 1000; echo never", timeout=0.3)
    assert (result.exit_code, result.timed_out, result.shell_replaced) == (None, True, False)
    assert result.stdout == b"part\n"
    assert result.seconds >= 0.3
    assert "stopped" in result.note
    assert (await shell.run("echo $kept; pwd")).stdout == b"yes\n/tmp\n"


async def test_a_timeout_kills_what_the_command_started(shell: Shell) -> None:
    await shell.run("sleep 4002 & (sleep 4003 | cat); sh -c 'sleep 4004; true'", timeout=0.3)
    left = await shell.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert not any(number in left.stdout for number in (b"4002", b"4003", b"4004"))


async def test_a_timeout_ends_what_ignores_signals(shell: Shell) -> None:
    result = await shell.run("sh -c 'trap \"\" TERM INT HUP QUIT; while :; do sleep 1; done'", timeout=0.3)
    assert (result.timed_out, result.shell_replaced) == (True, False)


async def test_a_loop_of_builtins_is_ended_by_its_timeout(shell: Shell) -> None:
    await shell.run("kept=yes")
    assert (await shell.run("while :; do :; done", timeout=0.3)).timed_out
    assert (await shell.run("echo $kept")).stdout == b"yes\n"


async def test_a_cancelled_command_is_over_before_the_next(shell: Shell) -> None:
    running = asyncio.create_task(shell.run("kept=yes; sleep 1000; touch /tmp/never"))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (await shell.run("echo $kept; ls /tmp")).stdout == b"yes\n"


async def test_a_background_child_does_not_hold_the_command_and_lives_on(shell: Shell) -> None:
    result = await shell.run("(sleep 0.3; echo late >/tmp/late; sleep 60) & echo started", timeout=20)
    assert (result.stdout, result.timed_out) == (b"started\n", False)
    assert (await shell.run("until [ -e /tmp/late ]; do sleep 0.02; done; cat /tmp/late")).stdout == b"late\n"


@pytest.mark.parametrize(
    ("command", "status"),
    [("echo bye; exit 3", 3), ("echo bye; exec sleep 0.05", 0), ("echo bye; kill -9 $$", 137)],
    ids=["exit", "exec", "kill"],
)
async def test_a_shell_that_ended_is_replaced_and_this_is_said(
    shell: Shell, command: str, status: int
) -> None:
    await shell.run("lost=yes; cd /tmp")
    result = await shell.run(command, timeout=20)
    assert (result.exit_code, result.shell_replaced, result.shell_exit_code) == (None, True, status)
    assert result.stdout == b"bye\n"
    assert f"ended with status {status}" in result.note
    assert (await shell.run('echo "[$lost]"; pwd')).stdout == b"[]\n/\n"


async def test_a_shell_that_stopped_itself_comes_back(shell: Shell) -> None:
    await shell.run("kill -STOP $$", timeout=1)
    assert (await shell.run("echo on", timeout=20)).stdout == b"on\n"


async def test_a_shell_that_closed_its_streams_still_serves(shell: Shell) -> None:
    await shell.run("exec >/tmp/gone 2>&1 </dev/null; echo unseen")
    assert (await shell.run("exit 0")).shell_replaced
    assert (await shell.run("cat /tmp/gone")).stdout == b"unseen\n"


async def test_after_set_e_a_failure_ends_the_shell_and_this_is_said(shell: Shell) -> None:
    await shell.run("set -e; true")
    result = await shell.run("sh -c 'exit 5'; echo never")
    assert (result.shell_replaced, result.shell_exit_code, result.stdout) == (True, 5, b"")


async def test_two_hundred_commands_go_quickly(shell: Shell) -> None:
    began = time.monotonic()
    for number in range(200):
        assert (await shell.run(f"echo {number}")).stdout == f"{number}\n".encode()
    assert time.monotonic() - began < 20


async def test_commands_of_one_shell_wait_for_each_other(shell: Shell) -> None:
    results = await asyncio.gather(*(shell.run(f"n={n}; sleep 0.02; echo $n") for n in range(5)))
    assert [result.stdout for result in results] == [b"0\n", b"1\n", b"2\n", b"3\n", b"4\n"]


async def test_shells_of_two_users_work_at_once(sandbox: Sandbox) -> None:
    root, nobody = await sandbox.shell(), await sandbox.shell("nobody")
    meet = "echo $(id -u) >/tmp/met-$(id -u); until [ -e /tmp/met-{} ]; do sleep 0.02; done; id -un"
    results = await asyncio.gather(
        root.run(meet.format(65534), timeout=20), nobody.run(meet.format(0), timeout=20)
    )
    assert [result.stdout for result in results] == [b"root\n", b"nobody\n"]


async def test_each_user_has_one_shell(sandbox: Sandbox) -> None:
    root, nobody = await sandbox.shell(), await sandbox.shell("nobody")
    assert await sandbox.shell("root") is root
    assert await sandbox.shell("nobody") is nobody
    await root.run("mine=root")
    assert (await nobody.run('echo "[$mine]"')).stdout == b"[]\n"


async def test_a_user_by_number_and_group(sandbox: Sandbox) -> None:
    shell = await sandbox.shell("1234:4321")
    assert (await shell.run("id -u; id -g")).stdout == b"1234\n4321\n"


async def test_a_user_has_only_its_own_rights(sandbox: Sandbox) -> None:
    shell = await sandbox.shell("nobody")
    assert (await shell.run("touch /etc/mine 2>&1")).exit_code != 0
    assert (await shell.run("touch /tmp/mine && stat -c %U /tmp/mine")).stdout == b"nobody\n"


async def test_a_timeout_keeps_another_users_shell_too(sandbox: Sandbox) -> None:
    shell = await sandbox.shell("nobody")
    await shell.run("kept=yes")
    result = await shell.run("sleep 1000; touch /tmp/never", timeout=0.3)
    assert (result.timed_out, result.shell_replaced) == (True, False)
    assert (await shell.run("echo $kept; ls /tmp")).stdout == b"yes\n"


async def test_a_user_that_does_not_exist_is_named(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError) as raised:
        await sandbox.shell("no-such-user")
    assert raised.value.error_class == "container_config"
    assert "no-such-user" in raised.value.message


async def test_variables_are_given_to_a_shell_with_any_content(sandbox: Sandbox) -> None:
    shell = await sandbox.shell(env={"GIVEN": 'it\'s "two"\nlines $x `y`'})
    assert (await shell.run('printf %s "$GIVEN"')).stdout == b'it\'s "two"\nlines $x `y`'
    await sandbox.shell(env={"LATER": "yes"})
    assert (await shell.run("sh -c 'echo \"$LATER\"'")).stdout == b"yes\n"
    with pytest.raises(ValueError, match="a-b"):
        await sandbox.shell(env={"a-b": "x"})


async def test_the_specs_variables_and_directory_are_everybodys(start: Start) -> None:
    sandbox = await start(env={"FROM_SPEC": "a b"}, workdir="/var")
    shell = await sandbox.shell()
    assert (await shell.run('pwd; echo "$FROM_SPEC"')).stdout == b"/var\na b\n"
    assert (await (await sandbox.shell("nobody")).run('pwd; echo "$FROM_SPEC"')).stdout == b"/var\na b\n"
    assert (await sandbox.exec(["sh", "-c", 'pwd; echo "$FROM_SPEC"'])).stdout == b"/var\na b\n"


async def test_a_program_is_run_as_given(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["printf", "%s|", "a b", "$HOME", "", "'q'"])
    assert (result.exit_code, result.stdout) == (0, b"a b|$HOME||'q'|")
    result = await sandbox.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")


async def test_a_program_has_user_variables_and_directory(sandbox: Sandbox) -> None:
    result = await sandbox.exec(
        ["sh", "-c", 'id -un; pwd; echo "$A"'], user="nobody", env={"A": "b c"}, workdir="/tmp"
    )
    assert result.stdout == b"nobody\n/tmp\nb c\n"


async def test_a_program_is_apart_from_the_shell(sandbox: Sandbox, shell: Shell) -> None:
    await shell.run("export SHELLS=own; cd /tmp")
    assert (await sandbox.exec(["sh", "-c", 'pwd; echo "[$SHELLS]"'])).stdout == b"/\n[]\n"


async def test_a_program_that_is_not_there_is_a_result(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["no-such-program"])).exit_code == 127


async def test_a_program_is_ended_by_its_timeout(sandbox: Sandbox, shell: Shell) -> None:
    result = await sandbox.exec(["sh", "-c", "echo part; sleep 4005"], timeout=0.5)
    assert (result.exit_code, result.timed_out, result.stdout) == (None, True, b"part\n")
    assert b"4005" not in (await shell.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).stdout


async def test_a_programs_output_is_capped(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["head", "-c", "3000000", "/dev/zero"], output_bytes=100)
    assert result.omitted_bytes == 3_000_000 - 100


async def test_a_programs_background_child_does_not_hold_it(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["sh", "-c", "sleep 60 & echo on"], timeout=30)
    assert (result.exit_code, result.stdout, result.timed_out) == (0, b"on\n", False)
