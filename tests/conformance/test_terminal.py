"""Terminals, by keys and what is shown. tests/rollout/sandbox/test_terminal.py drives programs in them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.base import Sandbox, Screen, Shell, Terminal

pytestmark = pytest.mark.asyncio(loop_scope="session")

Start = Any


def shows(*parts: str) -> Callable[[Screen], bool]:
    return lambda screen: all(part in f"{screen.text}\n" for part in parts)


def prompts(screen: Screen) -> bool:
    return screen.lines[screen.row].endswith(("#", "$"))


async def see(terminal: Terminal, until: Callable[[Screen], bool]) -> Screen:
    came = await terminal.wait(30, until=until)
    screen = await terminal.screen()
    assert came, screen.text
    return screen


async def opened(sandbox: Sandbox, **settings: Any) -> Terminal:
    terminal = await sandbox.terminal(**settings)
    await see(terminal, prompts)
    return terminal


async def test_keys_go_in_and_the_screen_shows_what_comes(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("cd /tmp; echo =$((6 * 7))=; stty size\r")
    screen = await see(terminal, shows("\n=42=\n40 160\n"))
    assert (screen.columns, len(screen.lines), screen.note) == (160, 40, "")
    await terminal.send(b"pwd\n")
    await see(terminal, shows("\n/tmp\n"))


async def test_it_is_a_terminal(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("tty; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo a''ll $TERM\n")
    await see(terminal, shows("/dev/", "all xterm-256color"))


async def test_the_size_is_chosen_and_changed(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox, columns=100, rows=30)
    await terminal.send("stty size\n")
    await see(terminal, shows("30 100\n"))
    await terminal.resize(50, 12)
    await terminal.send("stty size\n")
    screen = await see(terminal, shows("12 50\n"))
    assert (screen.columns, len(screen.lines)) == (50, 12)
    with pytest.raises(ValueError, match="columns"):
        await terminal.resize(0, 12)


async def test_control_c_ends_the_command_and_not_the_shell(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("kept=yes; echo g''o; sleep 1000\n")
    await see(terminal, shows("\ngo\n"))
    await terminal.press("C-c")
    await see(terminal, prompts)
    await terminal.send("echo =$kept=\n")
    await see(terminal, shows("\n=yes=\n"))


async def test_keys_that_do_not_exist_are_named_and_none_is_sent(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    with pytest.raises(ValueError, match="Entr"):
        await terminal.press("x", "Entr")
    await terminal.press("e", "c", "h", "o", "Space", "q", "Enter")
    await see(terminal, shows("\nq\n"))


async def test_what_is_typed_at_a_password_prompt_is_not_shown(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("read -s -p 'Password: ' p; echo; echo got ${#p}\n")
    await see(terminal, shows("\nPassword:"))
    await terminal.send("secret\r")
    assert "secret" not in (await see(terminal, shows("\ngot 6\n"))).text


async def test_new_output_is_what_came_since_the_last_call(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.new_output()
    await terminal.send("echo o''ne\n")
    await see(terminal, lambda screen: shows("\none\n")(screen) and prompts(screen))
    assert (await terminal.new_output()).text.startswith("echo o''ne\none\n")
    assert (await terminal.new_output()).text == ""
    await terminal.send("seq 1 20000; echo e''nd\n")
    await see(terminal, lambda screen: shows("\nend\n")(screen) and prompts(screen))
    new = await terminal.new_output(2000)
    assert new.omitted_bytes > 100_000
    assert f"{new.omitted_bytes} bytes left out" in new.text
    assert "\n1\n2\n3\n" in new.text
    assert "\n20000\nend\n" in new.text


async def test_the_last_thousand_lines_are_there(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("seq 1 5000; echo e''nd\n")
    screen = await see(terminal, lambda screen: shows("\nend\n")(screen) and prompts(screen))
    history = await terminal.history()
    assert len(history) == 1000
    assert int(history[-1]) + 1 == int(screen.lines[0])


async def test_waiting_ends_when_it_is_quiet(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("for i in 1 2 3 4 5; do echo $i; sleep 0.1; done; echo e''nd\n")
    assert await terminal.wait(30, quiet=0.5)
    assert "\nend\n" in (await terminal.screen()).text
    began = time.monotonic()
    assert not await terminal.wait(0.2, until=lambda _: False)
    assert time.monotonic() - began >= 0.2


async def test_the_other_screen_goes_as_it_came(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("echo be''fore; printf '\\033[?1049h\\033[Hot''her'; read x; printf '\\033[?1049l'\n")
    assert "before" not in (await see(terminal, shows("other"))).text
    await terminal.press("Enter")
    await see(terminal, shows("\nbefore\n"))


async def test_wide_combining_and_broken_characters(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("clear; printf '日本|\\ne\\314\\201|\\na\\377b|\\nx\\010y\\n'\n")
    await see(terminal, shows("日本|\né|\na\ufffdb|\ny\n"))


async def test_a_flood_holds_up_nobody(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("cat /dev/urandom\n")
    longest, began = 0.0, time.monotonic()
    while (now := time.monotonic()) - began < 0.5:
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - now)
    await asyncio.wait_for(terminal.screen(), 10)
    await terminal.press("C-c")
    await terminal.send(b"\x15reset; clear; echo o''n\n")
    await terminal.wait(60, until=shows("on"))
    assert longest < 1.0


async def test_a_shell_that_ended_is_replaced_and_this_is_said(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("lost=yes; exit 3\n")
    assert not await terminal.wait(30, until=lambda _: False)
    assert "replaced because it ended with status 3" in (await terminal.screen()).note
    await see(terminal, prompts)
    await terminal.send("echo [$lost]\n")
    assert (await see(terminal, shows("\n[]\n"))).note == ""


async def test_stopping_processes_ends_it_and_the_next_is_fresh(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox)
    await terminal.send("old=yes\n")
    await sandbox.stop_processes()
    fresh = await opened(sandbox)
    assert fresh is not terminal
    await fresh.send("echo [$old]\n")
    await see(fresh, shows("\n[]\n"))


@pytest.mark.parametrize("end", ["close", "end_shells"])
async def test_closing_it_ends_its_foreground_and_leaves_its_background(sandbox: Sandbox, end: str) -> None:
    terminal = await opened(sandbox)
    await terminal.send("sleep 4001 &\nsh -c 'trap \"\" HUP INT; echo u''p; sleep 4002; sleep 4003'\n")
    await see(terminal, shows("\nup\n"))
    await (terminal.close() if end == "close" else sandbox.end_shells())
    left = await (await sandbox.shell()).run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
    assert "sleep 4001" in left.text
    assert "sleep 4002" not in left.text
    assert "sleep 4003" not in left.text


async def test_users_have_their_own(sandbox: Sandbox) -> None:
    root, other = await opened(sandbox), await opened(sandbox, user="1234")
    assert await sandbox.terminal("root") is root
    await other.send("id -u; touch /etc/x\n")
    await see(other, shows("\n1234\n", "Permission denied"))
    with pytest.raises(SandboxError) as raised:
        await sandbox.terminal("no-such-user")
    assert raised.value.error_class == "container_config"


async def test_variables_are_given_to_it(sandbox: Sandbox) -> None:
    terminal = await opened(sandbox, env={"GIVEN": "a b"})
    await terminal.send('echo "=$GIVEN="\n')
    await see(terminal, shows("\n=a b=\n"))


async def test_a_shell_works_beside_it(sandbox: Sandbox, shell: Shell) -> None:
    terminal = await opened(sandbox)
    await terminal.send("echo from the terminal >/tmp/said; sleep 1000\n")
    assert (
        await shell.run("until [ -s /tmp/said ]; do sleep 0.02; done; cat /tmp/said", timeout=30)
    ).text == ("from the terminal\n")
