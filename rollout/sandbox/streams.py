"""Long answers of the engine, a build's or a pull's: read as they come, and ended at once when told to.

The engine ends what it does for a request when the connection goes away, so that ending means to shut the socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import urllib3
from docker.errors import DockerException, StreamParseError

from rollcage.rollout.sandbox.engine import Engine

T = TypeVar("T")

CONNECT_SEC = 60.0

STREAM_ERRORS = (DockerException, OSError, urllib3.exceptions.HTTPError, StreamParseError)
"""What docker-py raises while an answer is read piece by piece."""


class Stream:
    """The answer to one request. It is read in a thread of its own; `end` may be called from any other."""

    def __init__(self) -> None:
        self.ended = False
        self._socket: socket.socket | None = None

    def end(self) -> None:
        """Shut the connection; reading then ends soon. One that is not answered yet ends when it is."""
        self.ended = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is over already
                self._socket = None

    def post(self, api: Any, path: str, *, silent_sec: float, **request: Any) -> Iterator[dict[str, Any]]:
        """The messages that a POST is answered with. Raises `STREAM_ERRORS`, also where the engine says nothing for
        `silent_sec`."""
        response = api.post(api._url(path), stream=True, timeout=(CONNECT_SEC, silent_sec), **request)
        api._raise_for_status(response)
        held = api._get_raw_response_socket(response)
        self._socket = getattr(held, "_sock", held)
        if self.ended:
            self.end()
        messages: Iterator[dict[str, Any]] = api._stream_helper(response, decode=True)
        return messages


async def followed(engine: Engine, doing: str, stream: Stream, read: Callable[[Any], T]) -> T:
    """`Engine.call` of what reads a stream; one that is cancelled ends the stream first. Raises `SandboxError`."""
    call = asyncio.ensure_future(engine.call(doing, read))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        stream.end()
        await asyncio.wait([call])
        if not call.cancelled():
            call.exception()
        raise
