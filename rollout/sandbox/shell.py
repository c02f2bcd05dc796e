"""A shell in a Docker sandbox: one stream, one command at a time, and what becomes of a command that will not end.

A command that runs out of time is ended in three steps, none of which needs a new process inside, so that a
fork bomb cannot keep them from it:

1. The supervisor tells the shell to drop the rest of the command, and kills what the command has started. The
   shell goes on with its directory and variables.
2. A shell that does not come back within `GRACE_SEC` is replaced: PID 1 kills every process but itself.
3. PID 1 that does not answer either is the end of the sandbox.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.base import OUTPUT_BYTES, CommandResult
from rollcage.rollout.sandbox.link import Command, Link, LinkClosed, quoted

GRACE_SEC = 2.0
"""From the first step of stopping a command to the second. The first takes 10 to 50 ms on an idle machine."""
START_SEC = 90.0
"""For a shell to start and answer, which takes milliseconds, and to end what an earlier command left. Past this
there is none: an agent may have taken away what a shell needs, PID 1's timer among it."""
START_TRIES = 3
"""What an earlier command left running may end a shell that has just started."""
STREAM_STDIN_BYTES = 1 << 20
"""A shell reads its stream byte by byte, at about 3 MB a second: more than this goes in as a file."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_ESCAPED = re.compile(rb"[\0\n\\]")


class Owner(Protocol):
    """What a shell needs of its sandbox."""

    async def interrupt(self, link: Link) -> None:
        """Have the link's supervisor stop the command in hand."""
        ...

    async def clear(self) -> None:
        """Kill every process but PID 1, by the engine, and wait until they are gone."""
        ...

    async def loss(self) -> SandboxError | None:
        """The error of a sandbox that is gone; None where it is as it should be."""
        ...

    async def write(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        """Put files into the sandbox."""
        ...


class DockerShell:
    """Implements `Shell`. `connect` gives the link, a new one where the last has ended.

    The object outlives its shell: after `Sandbox.stop_processes` the next command starts a fresh one.
    """

    def __init__(
        self, owner: Owner, connect: Callable[[], Awaitable[Link]], env: Mapping[str, str] | None = None
    ) -> None:
        self._owner = owner
        self._connect = connect
        self._env: dict[str, str] = {}
        self._stale_env = True
        self._started = False
        self.export(env or {})

    def export(self, env: Mapping[str, str]) -> None:
        """Variables that the shell has from its start, or from its next command on. Raises `ValueError` for
        a name that no shell takes."""
        for name in env:
            if not _NAME.match(name):
                raise ValueError(f"{name!r} cannot be a shell variable's name")
        if any(self._env.get(name) != value for name, value in env.items()):
            self._env.update(env)
            self._stale_env = True

    async def start(self) -> None:
        """Start the shell if it does not run."""
        link = await self._connect()
        async with link.lock:
            await self._prepare(link)

    async def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        stdin: bytes = b"",
        output_bytes: int = OUTPUT_BYTES,
    ) -> CommandResult:
        """See `Shell.run`. A run that is cancelled leaves its command to the next run, which stops it first.

        An output past `output_bytes` has a line in its middle that says how much was left out.
        """
        link = await self._connect()
        async with link.lock:
            await self._prepare(link)
            given, path = await self._give(stdin) if stdin else (b"", "")
            began = time.monotonic()
            running = link.begin(output_bytes)
            timed_out = False
            try:
                async with asyncio.timeout(timeout):
                    await link.send_frame(running, command.encode("utf-8", "replace"), given)
                    await link.until(lambda: running.done)
            except TimeoutError:
                timed_out = True
                await self._stop(link, running)
            except LinkClosed:
                running.shell_ended = True
            link.command = None
            seconds = time.monotonic() - began
            if link.closed and running.shell_ended and (loss := await self._owner.loss()):
                raise loss
            if path and not link.plain:
                await link.ask(f"command rm -f {path}")
            return _result(running, seconds, timed_out)

    async def _prepare(self, link: Link) -> None:
        """Make the link's shell this one's: alive, idle, with the environment."""
        exports = "; ".join(f"export {name}={_word(value)}" for name, value in self._env.items())
        try:
            async with asyncio.timeout(START_SEC):
                command = await self._ready(link, exports or ":")
        except TimeoutError:
            error_class = "agent_killed_sandbox" if self._started else "container_start"
            said = f"no shell of the sandbox answers within {START_SEC:.0f} s"
            raise await self._owner.loss() or SandboxError(error_class, said) from None
        except LinkClosed:
            raise await self._owner.loss() or _no_shell(self._started, "its stream has ended") from None
        if command is not None:
            raise await self._owner.loss() or _no_shell(self._started, _text(command))

    async def _ready(self, link: Link, exports: str) -> Command | None:
        """See `_prepare`. Returns the last try where none has succeeded."""
        if link.command is not None and not link.command.done:
            await self._stop(link, link.command)
        link.command = None
        command = None
        for _ in range(START_TRIES):
            if link.plain:
                await link.become_shell()
            if link.owner is self and not self._stale_env:
                return None
            command = await link.ask(exports)
            if not command.shell_ended:
                self._started = True
                self._stale_env = False
                link.owner = self
                return None
        return command

    async def _stop(self, link: Link, command: Command) -> None:
        """End the command in hand, or the shell with it."""
        interrupts = link.interrupts + 1
        await self._owner.interrupt(link)
        try:
            async with asyncio.timeout(GRACE_SEC):
                await link.until(lambda: link.closed or (link.interrupts >= interrupts and command.done))
        except TimeoutError:
            await self._owner.clear()
            await link.until(lambda: link.closed or command.done)

    async def _give(self, stdin: bytes) -> tuple[bytes, str]:
        """Text of a frame that leaves `stdin` in a file and names it in `rc_in`, and that file's path."""
        name = f"rollcage-{secrets.token_hex(8)}"
        if len(stdin) > STREAM_STDIN_BYTES:
            await self._owner.write({f"/tmp/{name}": stdin})
            return f"rc_in=/tmp/{name}".encode(), f"/tmp/{name}"
        escaped = _ESCAPED.sub(lambda match: b"\\0%03o" % match[0][0], stdin)
        path = f"/dev/shm/{name}"
        return b'rc_in=%b; command printf %%b %b >"$rc_in"' % (path.encode(), quoted(escaped)), path


def _result(command: Command, seconds: float, timed_out: bool) -> CommandResult:
    outputs = [stream for stream in (command.stdout, command.stderr) if stream is not None]
    return CommandResult(
        exit_code=None if timed_out or command.shell_ended else command.exit_code,
        stdout=command.stdout.bytes() if command.stdout else b"",
        stderr=command.stderr.bytes() if command.stderr else b"",
        seconds=seconds,
        timed_out=timed_out,
        omitted_bytes=sum(output.omitted for output in outputs),
        shell_replaced=command.shell_ended,
        shell_exit_code=command.shell_exit_code,
    )


def _no_shell(started: bool, said: str) -> SandboxError:
    """The sandbox lives and has no shell: the agent broke it, or the image never had one that works."""
    error_class = "agent_killed_sandbox" if started else "container_config"
    return SandboxError(error_class, f"no shell can be started in the sandbox: {said}")


def _text(command: Command) -> str:
    said = (command.stdout.bytes() if command.stdout else b"") + (
        command.stderr.bytes() if command.stderr else b""
    )
    return f"exit status {command.shell_exit_code} {said[-500:].decode('utf-8', 'replace')}"


def _word(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
