"""A server in the foreground's care: started, waited for until it answers, and ended with what it was started for.

    async with server("Prometheus", ["prometheus", ...], port=9090, ready="/-/ready", data=data) as process:
        ...

It is a session of its own, so that Ctrl-C reaches the one that started it alone; its output is `data/<name>.log`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import urllib.request
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

READY_SEC = 120.0
"""As long as Prometheus may take to read what it has kept, or Grafana to make its database."""

LOOK_SEC = 0.2
"""Between two questions whether one of them is ready."""

END_SEC = 20.0
"""As long as one of them may take to end; then it is killed."""

TAIL_LINES = 5
"""Of the log of one that ended by itself: why is in the last ones."""


class CannotObserve(RuntimeError):
    """A server could not be started, or ended by itself; says what to do."""


def url_of(port: int) -> str:
    """Of a server of this machine."""
    return f"http://127.0.0.1:{port}"


def check_port(name: str, port: int, option: str) -> None:
    """Before it is started: another's server on the port would be taken for it. Raises `CannotObserve`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise CannotObserve(
                f"{name}'s port {port} cannot be had ({error.strerror}); {option} names another"
            ) from error


@asynccontextmanager
async def server(
    name: str,
    command: list[str],
    *,
    port: int,
    ready: str,
    data: Path,
    settings: Mapping[str, str] | None = None,
) -> AsyncIterator[Process]:
    """The process of `command` from when it answers at the path `ready` to the end of the block. `settings`: of its
    environment, beside ours. Raises `CannotObserve` where it ends before or does not answer in `READY_SEC`."""
    with log_of(name, data).open("w", encoding="utf-8") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=data,
            env={**os.environ, **(settings or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        await _wait_until_it_answers(name, process, url_of(port) + ready, data)
        yield process
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    """All of its session: Grafana's packages start it from a shell script."""
    for one in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, one)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_SEC)
            return


async def _wait_until_it_answers(name: str, process: Process, url: str, data: Path) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + READY_SEC
    while loop.time() < until:
        try:
            await asyncio.wait_for(process.wait(), LOOK_SEC)
        except TimeoutError:
            if await asyncio.to_thread(_answers, url):
                return
        else:
            raise ended(name, process, data)
    raise CannotObserve(f"{name} is not ready after {READY_SEC:g} s; {log_of(name, data)} may say why")


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:  # refused, not ready yet, or cut off
        return False


async def first_to_end(running: Mapping[str, Process], data: Path) -> None:
    """Wait for ever, or until one ends by itself, which it should not. Raises `CannotObserve` then."""
    waits = {asyncio.create_task(process.wait()): name for name, process in running.items()}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    name = waits[done.pop()]
    raise ended(name, running[name], data)


def ended(name: str, process: Process, data: Path) -> CannotObserve:
    """The error of one that ended by itself."""
    log = log_of(name, data)
    tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
    return CannotObserve(
        f"{name} ended with status {process.returncode}; if it is that another one keeps its data there, --data names "
        f"another directory. The end of {log}:\n{tail}"
    )


def log_of(name: str, data: Path) -> Path:
    """Where its output goes."""
    return data / f"{name.lower()}.log"
