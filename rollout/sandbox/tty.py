"""One TTY in a sandbox: an `exec` of the engine with an interactive shell, bash where there is one, else sh.

The shell starts when the terminal has its size, and what was printed before is nobody's: the boot says a secret word
and its process id, waits for a line, says the word again and becomes the shell.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.program import run_program

READ_BYTES = 1 << 18
KILL_SEC = 5.0

_BOOT = (
    "printf '%s %s \\n' \"$1\" $$; { IFS= read -r rc_go; echo 1000 >/proc/self/oom_score_adj; } 2>/dev/null; "
    'case ${LC_ALL-}${LC_CTYPE-}${LANG-} in "") export LANG=C.UTF-8 ;; esac; '
    "printf '%s\\n' \"$1\"; command -v bash >/dev/null && exec bash; exec sh"
)
_KILL = (
    'read -r rc_stat <"/proc/$1/stat" || exit 0; set -- "$1" ${rc_stat##*)}; [ "$5" = "$1" ] || exit 0; '
    'kill -KILL "$1"; [ "$7" -lt 2 ] || kill -KILL -"$7"'
)
"""Of a session's leader: itself, then the foreground's process group."""


@dataclass(frozen=True)
class Tty:
    """`pid` is the shell's in the sandbox. `said` is what came right behind its greeting."""

    engine: Engine
    container_id: str
    exec_id: str
    pid: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    said: bytes

    async def set_size(self, columns: int, rows: int) -> None:
        """Programs are told by SIGWINCH. Nothing happens where the shell has ended."""
        await _set_size(self.engine, self.exec_id, columns, rows)

    async def exit_code(self) -> int | None:
        """The shell's, where the engine still knows it."""
        found = await self.engine.call("inspect an exec", lambda api: api.exec_inspect(self.exec_id))
        code: int | None = found["ExitCode"]
        return code

    async def kill(self) -> None:
        """Kill the shell and its foreground job. Background jobs live on, without a terminal."""
        argv = ["/bin/sh", "-c", _KILL, "sh", str(self.pid)]
        await run_program(self.engine, self.container_id, argv, {"user": "0"}, KILL_SEC, READ_BYTES)


async def open_tty(
    engine: Engine, container_id: str, user: str, env: Mapping[str, str], columns: int, rows: int
) -> Tty:
    """Start a shell. Raises `SandboxError`: `container_config` where the image has none for this user."""
    word = secrets.token_hex(16).encode()
    settings: dict[str, Any] = {"tty": True, "stdin": True, "user": user, "environment": dict(env)}
    argv = ["/bin/sh", "-c", _BOOT, "sh", word.decode()]
    made = await engine.call("create an exec", lambda api: api.exec_create(container_id, argv, **settings))
    reader, writer = await engine.exec_stream(made["Id"], tty=True)
    try:
        greeting, _ = await _until(reader, word, b"", user)
        await _set_size(engine, made["Id"], columns, rows)
        writer.write(b"\n")
        _, said = await _until(reader, word, b"", user)
    except BaseException:
        writer.close()
        raise
    return Tty(engine, container_id, made["Id"], int(greeting), reader, writer, said)


async def read_some(reader: asyncio.StreamReader) -> bytes:
    """The next bytes; empty at the stream's end."""
    try:
        return await reader.read(READ_BYTES)
    except ConnectionError:
        return b""


async def _until(reader: asyncio.StreamReader, word: bytes, said: bytes, user: str) -> tuple[bytes, bytes]:
    """Read to the line that begins with `word`: the rest of that line, and what came behind it."""
    while (at := said.find(word)) < 0 or (end := said.find(b"\n", at)) < 0:
        more = await read_some(reader)
        if not more:
            message = said[-500:].decode("utf-8", "replace").strip()
            raise SandboxError("container_config", f"no terminal for user {user!r}: {message}")
        said = said[-READ_BYTES:] + more
    return said[at + len(word) : end].strip(), said[end + 1 :]


async def _set_size(engine: Engine, exec_id: str, columns: int, rows: int) -> None:
    try:
        await engine.call("resize an exec", lambda api: api.exec_resize(exec_id, rows, columns))
    except SandboxError as error:
        # The exec has ended, which its stream says.
        if error.evidence.status not in (404, 409, 500):
            raise
