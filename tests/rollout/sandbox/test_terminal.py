"""Terminals of real sandboxes, driven as a person would: by keys, looking at the screen."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.base import Screen
from rollcage.rollout.sandbox.container import DockerSandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.terminal import DockerTerminal

pytestmark = pytest.mark.docker

MakeSandbox = Any


@pytest.fixture
async def tools(make_sandbox: MakeSandbox, tools_image: str) -> DockerSandbox:
    sandbox: DockerSandbox = await make_sandbox(tools_image)
    return sandbox


def shows(*parts: str) -> Callable[[Screen], bool]:
    return lambda screen: all(part in f"{screen.text}\n" for part in parts)


def prompts(screen: Screen) -> bool:
    return screen.lines[screen.row].endswith(("#", "$"))


async def see(terminal: DockerTerminal, until: Callable[[Screen], bool], seconds: float = 30) -> Screen:
    """Wait for a screen and return it."""
    came = await terminal.wait(seconds, until=until)
    screen = await terminal.screen()
    assert came, screen.text
    return screen


async def test_keys_go_in_and_the_screen_shows_what_comes(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal(env={"MINE": "a b"})
    await see(terminal, prompts)
    await terminal.send('cd /tmp; echo "=$MINE=" $TERM $LANG; stty size || echo none\n')
    screen = await see(terminal, shows("=a b= xterm-256color C.UTF-8", "40 160"))
    assert screen.columns == 160
    assert len(screen.lines) == 40
    assert screen.note == ""
    await terminal.send(b"pwd\r")
    await see(terminal, shows("\n/tmp\n"))
    assert await sandbox.terminal("root") is terminal


async def test_new_output_is_what_came_since_the_last_look(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal()
    await see(terminal, prompts)
    await terminal.new_output()
    await terminal.send("echo one; echo two\n")
    await see(terminal, shows("\none\ntwo\n"))
    await terminal.wait(5, until=prompts)
    new = await terminal.new_output()
    assert new.text.startswith("echo one; echo two\none\ntwo\n")
    assert (new.omitted_bytes, new.note) == (0, "")
    assert (await terminal.new_output()).text == ""
    await terminal.send("i=0; while [ $i -lt 9000 ]; do echo line $i; i=$((i+1)); done; echo e''nd\n")
    await see(terminal, shows("\nend\n"))
    await terminal.wait(5, until=prompts)
    new = await terminal.new_output(2000)
    assert new.omitted_bytes > 50_000
    assert f"[... {new.omitted_bytes} bytes left out ...]" in new.text
    assert "\nline 0\n" in new.text
    assert "\nline 8999\nend\n" in new.text
    history = await terminal.history()
    assert len(history) == 1000
    assert "line 8900" in history


async def test_control_c_ends_a_running_command_and_not_the_shell(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal()
    await see(terminal, prompts)
    await terminal.send("x=kept; echo go; sleep 1000\n")
    await see(terminal, shows("\ngo\n"))
    await terminal.press("C-c")
    await see(terminal, prompts)
    await terminal.send("echo =$x=\n")
    assert (await see(terminal, shows("\n=kept=\n"))).note == ""


async def test_a_password_is_asked_for_and_not_shown(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal()
    await see(terminal, prompts)
    await terminal.send("stty -echo; printf 'Password: '; read p; stty echo; echo; echo got ${#p}\n")
    await see(terminal, shows("\nPassword:"))
    await terminal.send("secret")
    await terminal.press("Enter")
    assert "secret" not in (await see(terminal, shows("\ngot 6\n"))).text


async def test_a_password_is_changed_and_asked_for(tools: DockerSandbox) -> None:
    terminal = await tools.terminal()
    await see(terminal, prompts)
    await terminal.send("passwd alice\n")
    await see(terminal, shows("New password:"))
    await terminal.send("hunter2!\n")
    await see(terminal, shows("Retype new password:"))
    await terminal.send("hunter2!\n")
    screen = await see(terminal, shows("password updated successfully"))
    assert "hunter2!" not in screen.text
    await terminal.send("clear; read -s -p 'PIN: ' pin\n")
    await see(terminal, shows("PIN:"))
    await terminal.send("1234\necho pin=$pin\n")
    await see(terminal, shows("\npin=1234\n"))
    await terminal.send("su alice\n")
    await see(terminal, lambda screen: screen.text.endswith("$"))
    await terminal.send("id -un; exit\n")
    await see(terminal, shows("\nalice\n"))


async def test_vim_writes_a_file_and_gives_the_screen_back(tools: DockerSandbox) -> None:
    terminal = await tools.terminal()
    await see(terminal, prompts)
    await terminal.send("echo before\n")
    await see(terminal, shows("\nbefore\n"))
    await terminal.send("vim -u DEFAULTS /tmp/note.txt\n")
    new = shows('"/tmp/note.txt" [New]')
    screen = await see(terminal, lambda screen: new(screen) and screen.lines[1:38] == ("~",) * 37)
    assert "before" not in screen.text
    await terminal.send("ifirst line\rsecond ünï 日本\r")
    await terminal.send("third")
    inserts = shows("-- INSERT --", "third")
    screen = await see(terminal, lambda screen: inserts(screen) and (screen.row, screen.column) == (2, 5))
    assert screen.lines[:3] == ("first line", "second ünï 日本", "third")
    await terminal.press("Escape")
    await see(terminal, lambda screen: "-- INSERT --" not in screen.text)
    await terminal.send("ggdd")
    await terminal.press("Down")
    await terminal.send("A!")
    await terminal.press("Escape", "Up")
    screen = await see(terminal, lambda screen: screen.lines[:2] == ("second ünï 日本", "third!"))
    await terminal.send(":wq\r")
    screen = await see(terminal, lambda screen: "before" in screen.text and prompts(screen))
    assert "~" not in "".join(screen.lines[4:])
    assert await tools.read("/tmp/note.txt") == "second ünï 日本\nthird!\n".encode()


async def test_less_pages_searches_and_quits(tools: DockerSandbox) -> None:
    terminal = await tools.terminal()
    await see(terminal, prompts)
    await terminal.send("seq 1 500 >/tmp/n; less /tmp/n\n")
    screen = await see(terminal, lambda screen: screen.lines[0] == "1" and screen.lines[38] == "39")
    await terminal.press("Space")
    await see(terminal, lambda screen: screen.lines[0] == "40" and screen.lines[38] == "78")
    await terminal.press("Up")
    await see(terminal, lambda screen: screen.lines[0] == "39" and screen.lines[38] == "77")
    await terminal.send("/^333$\r")
    await see(terminal, lambda screen: screen.lines[0] == "333")
    await terminal.resize(80, 20)
    await see(terminal, lambda screen: screen.lines[0] == "333" and screen.lines[18] == "351")
    await terminal.send("q")
    screen = await see(terminal, shows("less /tmp/n"))
    assert prompts(screen)
    assert "333" not in screen.text


async def test_top_shows_processes_in_columns(tools: DockerSandbox) -> None:
    terminal = await tools.terminal(columns=100, rows=24)
    await see(terminal, prompts)
    await terminal.send("sleep 4321 &\ntop\n")
    screen = await see(terminal, shows("PID USER", "COMMAND", "sleep"))
    assert screen.lines[0].startswith("top - ")
    assert screen.lines[1].startswith("Tasks:")
    assert screen.lines[6].split()[:3] == ["PID", "USER", "PR"]
    await terminal.send("q")
    await see(terminal, prompts)


async def test_a_python_session_is_held(tools: DockerSandbox) -> None:
    terminal = await tools.terminal()
    await see(terminal, prompts)
    await terminal.send("python3 -q\n")
    await see(terminal, shows(">>>"))
    await terminal.send("for i in range(3):\nprint('row', i)\n"[:19])
    await see(terminal, shows("..."))
    await terminal.send("    print('row', i)\n\n")
    await see(terminal, shows("row 0\nrow 1\nrow 2\n"))
    await terminal.send("import time; time.sleep(1000)\n")
    await terminal.wait(0.3)
    await terminal.press("C-c")
    await see(terminal, shows("KeyboardInterrupt"))
    await terminal.press("C-d")
    await see(terminal, lambda screen: prompts(screen) and ">>>" not in screen.lines[screen.row])


async def test_a_resize_is_seen(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal(columns=100, rows=30)
    await see(terminal, prompts)
    await terminal.send("trap 'echo resized' WINCH; stty size\n")
    await see(terminal, shows("\n30 100\n"))
    await terminal.resize(50, 12)
    await terminal.send("\nstty size\n")
    screen = await see(terminal, shows("12 50\n"))
    assert (len(screen.lines), screen.columns) == (12, 50)
    for columns, rows in ((1, 40), (160, 100_000)):
        with pytest.raises(ValueError, match="each must be 2 to 1000"):
            await terminal.resize(columns, rows)


async def test_wide_and_combining_characters_stand_where_they_belong(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal(columns=30, rows=12)
    await see(terminal, prompts)
    await terminal.send(
        "clear; printf '日本|\\ne\\314\\201|\\na\\377b|\\n%s\\n' 12345678901234567890123456789日x\n"
    )
    screen = await see(terminal, shows("日x"))
    shown = [line for line in screen.lines if line and "printf" not in line]
    at = shown.index("日本|")
    assert shown[at : at + 5] == ["日本|", "é|", "a\ufffdb|", "12345678901234567890123456789", "日x"]


async def test_the_other_screen_goes_as_it_came(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal()
    await see(terminal, prompts)
    await terminal.send(
        "echo before; printf '\\033[?1049h\\033[Hot''her'; read x; printf '\\033[?1049l'; echo after\n"
    )
    screen = await see(terminal, shows("other"))
    assert screen.lines[0] == "other"
    assert "before" not in screen.text
    await terminal.press("Enter")
    screen = await see(terminal, shows("\nbefore\n", "after"))
    assert "other\n" not in screen.text


async def test_keys_have_tmuxs_names(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal()
    await see(terminal, prompts)
    with pytest.raises(ValueError, match="no key is called 'Entr'"):
        await terminal.press("x", "Entr")
    with pytest.raises(ValueError, match="at most 1048576"):
        await terminal.send(b"x" * ((1 << 20) + 1))


async def test_a_program_that_asks_where_the_cursor_is_gets_an_answer(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal()
    await see(terminal, prompts)
    ask = "stty -echo -icanon min 1; printf '\\033[5;7H\\033[6n'; dd bs=1 count=6 2>/dev/null | od -c; stty sane\n"
    await terminal.send(ask)
    await see(terminal, shows("5   ;   7   R"))


@pytest.mark.parametrize(
    "flood",
    [
        "yes",
        "cat /dev/zero | tr '\\0' x",
        "cat /dev/urandom",
        "yes $(printf '\\314\\201') | tr -d '\\n'",
        "printf '\\033]0;'; yes | tr -d '\\n'",
    ],
)
async def test_a_flood_holds_up_nobody(make_sandbox: MakeSandbox, flood: str) -> None:
    sandbox = await make_sandbox()
    terminal = await sandbox.terminal()
    await see(terminal, prompts)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    await terminal.send(f"{flood}\n")
    longest, began = 0.0, time.monotonic()
    while (now := time.monotonic()) - began < 0.5:
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - now)
    await asyncio.wait_for(terminal.screen(), 5)
    assert (await asyncio.wait_for(terminal.new_output(1000), 5)).omitted_bytes > 1000
    await terminal.press("C-c")
    # The other screen, or another character set, may be on: binary is binary.
    await terminal.send(b"\x15reset; clear; echo o''n\n")
    await see(terminal, shows("on"), 60)
    assert longest < 1.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


async def test_a_shell_that_ended_is_replaced_and_this_is_said(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal(env={"MINE": "yes"})
    await see(terminal, prompts)
    await terminal.send("cd /tmp; x=lost; echo bye; exit 3\n")
    assert not await terminal.wait(20, until=lambda _: False)
    new = await terminal.new_output()
    assert "\nbye" in new.text
    assert "replaced because it ended with status 3" in new.note
    await see(terminal, prompts)
    await terminal.send('pwd; echo "[$x$MINE]"\n')
    screen = await see(terminal, shows("\n/\n[yes]\n"))
    assert screen.note == ""


async def test_stopping_processes_ends_the_terminal_and_the_next_is_fresh(sandbox: DockerSandbox) -> None:
    terminal = await sandbox.terminal()
    await see(terminal, prompts)
    await terminal.send(
        "x=old; trap '' HUP TERM; (while :; do echo 1 >/tmp/reward; sleep 0.02; done) & echo u''p\n"
    )
    await see(terminal, shows("up\n"))
    await sandbox.stop_processes()
    await sandbox.write({"/tmp/reward": b"0"})
    await asyncio.sleep(0.1)
    assert await sandbox.read("/tmp/reward") == b"0"
    fresh = await sandbox.terminal()
    assert fresh is not terminal
    await fresh.send("echo [$x]\n")
    assert (await see(fresh, shows("[]\n"))).note == ""
    assert "all processes were stopped" in (await terminal.screen()).note


async def test_closing_ends_the_foreground_and_leaves_the_background(sandbox: DockerSandbox) -> None:
    for end in ("close", "end_shells"):
        terminal = await sandbox.terminal()
        await see(terminal, prompts)
        await terminal.send("sleep 4001 &\n")
        await terminal.send("sh -c 'trap \"\" HUP INT TERM; echo u''p; sleep 4002; sleep 4003'\n")
        await see(terminal, shows("up\n"))
        await (terminal.close() if end == "close" else sandbox.end_shells())
        listed = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '"])
        assert "sleep 4001" in listed.text
        assert "4002" not in listed.text
        assert "4003" not in listed.text


async def test_a_terminal_of_another_user(tools: DockerSandbox) -> None:
    terminal = await tools.terminal("alice")
    await see(terminal, prompts)
    await terminal.send("id -un; tty; touch /root/x\n")
    await see(terminal, shows("\nalice\n", "/dev/pts/", "Permission denied"))
    await terminal.close()
    with pytest.raises(SandboxError) as raised:
        await tools.terminal("nobody-of-that-name")
    assert raised.value.error_class == "container_config"


async def test_a_terminal_of_a_container_that_is_gone(engine: Engine, make_sandbox: MakeSandbox) -> None:
    for end in ("kill", "remove"):
        sandbox = await make_sandbox()
        terminal = await sandbox.terminal()
        await see(terminal, prompts)
        call = partial(getattr(engine.api, "kill" if end == "kill" else "remove_container"), sandbox.id)
        kwargs = {} if end == "kill" else {"force": True}
        await engine.call("end a container", lambda _api, call=call, kwargs=kwargs: call(**kwargs))
        with suppress(SandboxError):
            assert not await terminal.wait(20, until=lambda _: False)
        for use in (terminal.screen, terminal.new_output, partial(terminal.send, "x"), sandbox.terminal):
            with pytest.raises(SandboxError) as raised:
                await use()
            assert raised.value.error_class == "container_lost"
