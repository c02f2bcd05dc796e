"""The one way to the Docker Engine: calls in threads, and every failure named before it leaves this file.

A call that has been sent is waited for even when its task is cancelled, because it may have made something
that must be removed. Each is bounded by the client's timeout, so the wait is too.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import docker
import urllib3
from docker.errors import DockerException

from rollcage.rollout.sandbox.faults import engine_fault
from rollcage.rollout.sandbox.threads import to_its_end

T = TypeVar("T")

API_TIMEOUT_SEC = 120.0
"""A loaded engine answers late: under 64 starts at once on 2 cores, one has been seen to take 40 s."""

STREAM_BYTES = 1 << 20
TTY_BYTES = 1 << 16
"""Read ahead of a stream, at most twice over. A TTY's is emulated slowly, and what has been read is shown before
the answer to a key is."""

WORKERS = 64
"""Threads that wait for the engine. More only queue up inside it."""


class Engine:
    """A Docker Engine, at `base_url` or where `DOCKER_HOST` and the usual socket say.

    Raises `SandboxError` (`docker_unavailable`) where none answers.
    """

    def __init__(
        self, base_url: str | None = None, *, timeout_sec: float = API_TIMEOUT_SEC, workers: int = WORKERS
    ) -> None:
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="engine")
        try:
            self.api: Any = _client(base_url, timeout_sec, workers)
        except (DockerException, OSError) as error:
            raise engine_fault(error, "connect to the Docker Engine") from error

    async def call(self, doing: str, request: Callable[[Any], T]) -> T:
        """Run `request(api)` in a thread; `api` is docker-py's `APIClient`.

        `doing` completes "could not ...", and decides with the error's type and status what class it is
        (`faults.engine_fault`). Raises `SandboxError`.
        """
        work = asyncio.get_running_loop().run_in_executor(self._threads, request, self.api)
        try:
            return await to_its_end(work)
        except (DockerException, OSError, urllib3.exceptions.HTTPError) as error:
            raise engine_fault(error, doing) from error

    async def attach(self, container_id: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The container's stdin, stdout and stderr as one stream, multiplexed as the Engine API says:
        https://docs.docker.com/reference/api/engine/version/v1.41/#tag/Container/operation/ContainerAttach"""
        params = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
        return await self._stream(
            "attach to a container", lambda api: api.attach_socket(container_id, params)
        )

    async def exec_stream(
        self, exec_id: str, *, tty: bool = False
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Start an exec and return its stream, multiplexed as in `attach` unless it has a TTY."""
        limit = TTY_BYTES if tty else STREAM_BYTES
        return await self._stream(
            "start an exec", lambda api: api.exec_start(exec_id, tty=tty, socket=True), limit
        )

    async def _stream(
        self, doing: str, request: Callable[[Any], Any], limit: int = STREAM_BYTES
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        made: list[socket.socket] = []

        def open_socket(api: Any) -> None:
            held = request(api)
            raw: socket.socket = getattr(held, "_sock", held)
            made.append(socket.socket(fileno=socket.dup(raw.fileno())))
            held.close()

        try:
            await self.call(doing, open_socket)
            made[0].setblocking(False)
            return await asyncio.open_connection(sock=made[0], limit=limit)
        except BaseException:
            for own in made:
                own.close()
            raise

    def close(self) -> None:
        """Let go of the threads and connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.api.close()


def is_local(engine: Engine) -> bool:
    """Whether the engine is reached by a socket of this machine."""
    return str(engine.api.base_url).startswith("http+docker://localhost")


def _client(base_url: str | None, timeout_sec: float, workers: int) -> Any:
    settings: dict[str, Any] = {"timeout": timeout_sec, "max_pool_size": workers, "version": "auto"}
    if base_url is not None:
        return docker.APIClient(base_url=base_url, **settings)
    return docker.from_env(**settings).api
