"""One image build over the Engine API: stream read as it comes, log capped, ended at once when told to.

The classic builder is asked, which every engine since 20.10 has; what it cannot read has been lowered before. When
the connection goes away the engine kills the step that runs and removes its container, so ending a build means to
shut its socket.
"""

from __future__ import annotations

import json
import socket
from collections import deque
from collections.abc import Mapping
from typing import IO, Any

import urllib3
from docker.errors import DockerException, StreamParseError

from rollcage.rollout.outcome import BuildError, Evidence
from rollcage.rollout.sandbox.faults import build_fault

LOG_CHARS = 64 * 1024
"""Of a build's log this much is kept, its end: a failed step says last what was wrong."""

CONNECT_SEC = 60.0

STREAM_ERRORS = (DockerException, OSError, urllib3.exceptions.HTTPError, StreamParseError)
"""What docker-py raises while an answer is read piece by piece."""


class Build:
    """A build under way. `run` blocks in a thread of its own; `end` may be called from any other."""

    def __init__(self, reference: str, doing: str, build_args: Mapping[str, str]) -> None:
        self.reference = reference
        self.doing = doing
        self.build_args = dict(build_args)
        self.ended = False
        self._log: deque[str] = deque()
        self._log_chars = 0
        self._socket: socket.socket | None = None

    @property
    def log_tail(self) -> str:
        return "".join(self._log)[-LOG_CHARS:]

    def run(self, api: Any, tar: IO[bytes], timeout_sec: float) -> str:
        """Send the context and wait for the image. Returns its id. Raises `BuildError`; where `end` was called,
        an `image_build` or nothing that means anything: the caller knows better."""
        try:
            response = self._request(api, tar, timeout_sec)
            return self._read(api._stream_helper(response, decode=True))
        except STREAM_ERRORS as error:
            raise build_fault(error, self.doing, log_tail=self.log_tail) from error

    def end(self) -> None:
        """Shut the connection; `run` then returns soon. A build that has not been sent yet ends when it is."""
        self.ended = True
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is over already
                self._socket = None

    def _request(self, api: Any, tar: IO[bytes], timeout_sec: float) -> Any:
        params = {
            "t": self.reference,
            "dockerfile": "Dockerfile",
            "rm": True,
            "forcerm": True,
            "buildargs": json.dumps(self.build_args),
        }
        response = api.post(
            api._url("/build"),
            data=tar,
            params=params,
            headers={"Content-Type": "application/x-tar"},
            stream=True,
            timeout=(CONNECT_SEC, timeout_sec + CONNECT_SEC),
        )
        api._raise_for_status(response)
        held = api._get_raw_response_socket(response)
        self._socket = getattr(held, "_sock", held)
        if self.ended:
            self.end()
        return response

    def _read(self, messages: Any) -> str:
        image_id = ""
        for message in messages:
            if "error" in message or "errorDetail" in message:
                raise build_fault(message, self.doing, log_tail=self.log_tail)
            if "stream" in message:
                self._keep(message["stream"])
            image_id = (message.get("aux") or {}).get("ID") or image_id
        if not image_id:
            said = "the builder's stream ended before there was an image"
            raise BuildError("build_infra", said, Evidence(said, said_by="builder", log_tail=self.log_tail))
        return image_id

    def _keep(self, text: str) -> None:
        self._log.append(text)
        self._log_chars += len(text)
        while len(self._log) > 1 and self._log_chars - len(self._log[0]) >= LOG_CHARS:
            self._log_chars -= len(self._log.popleft())
