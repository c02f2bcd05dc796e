"""BuildKit over the Engine API: whether an engine offers it, what its stream says, and whose a failure is.

`POST /build?version=2` takes a context in the request's body as the classic builder does, and needs no client of its
own: no docker, no buildx. What only a client's session could give (secrets, SSH keys, credentials for registries)
it has not; base images are pulled before. When the connection goes, the build ends.

The stream's trace messages are protobuf, `moby.buildkit.v1.StatusResponse`:
https://github.com/moby/buildkit/blob/master/api/services/control/control.proto. Of it only the vertices (name, error)
and the log lines are read.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rollcage.rollout.outcome import BuildError
from rollcage.rollout.sandbox.faults import Rule, build_fault
from rollcage.rollout.sandbox.mounts import MOUNTS_API, Api

TRACE = "moby.buildkit.trace"

_PREFIX = re.compile(
    r"^(?:failed to solve(?: with frontend \S+)?: |failed to create LLB definition: |rpc error: code = \w+ desc = )+"
)
_STEP_ENDED = re.compile(
    r"^(?:executor failed running \[.*\]|process \".*\" did not complete successfully): exit code: (\d+)$",
    re.DOTALL,
)

_RULES = (
    Rule("image_build", r"^failed to (?:compute cache key|calculate checksum of ref).*: not found$"),
    Rule("image_build", r"^failed to load cache key: invalid response status 4\d\d"),
    Rule("build_infra", r"^failed to load cache key: "),
    Rule("unsupported", r"^(?:no active sessions?\b|granting entitlement \S+ is not allowed)"),
    Rule("unsupported", r"buildkit not supported"),
    Rule("image_build", r"\bunable to find (?:user|group) .*: no matching entries"),
)
"""Beside those of the classic builder, which are asked after these."""


def offered(version: Mapping[str, Any]) -> Api | None:
    """The API's version, from the engine's answer to /version, where the engine has BuildKit: any of Docker's since
    19.03 but on Windows. Podman builds with something else."""
    names = {component.get("Name") for component in version.get("Components") or []}
    found = re.match(r"(\d+)\.(\d+)", str(version.get("ApiVersion", "")))
    if found is None or "Podman Engine" in names or version.get("Os", "linux") != "linux":
        return None
    api = int(found[1]), int(found[2])
    return api if api >= MOUNTS_API else None


def buildkit_fault(message: Mapping[str, Any], doing: str, *, log_tail: str = "") -> BuildError:
    """The class of a build that failed, from the message of the stream that says so. A step that ended by itself is
    the task's fault whatever it says; only the words that BuildKit puts around it are looked at."""
    detail = dict(message.get("errorDetail") or {})
    said = _PREFIX.sub("", str(detail.get("message") or message.get("error") or message))
    if ended := _STEP_ENDED.match(said):
        detail["code"] = int(ended[1])
    fault = build_fault({"errorDetail": {**detail, "message": said}}, doing, log_tail=log_tail)
    rule = next((rule for rule in _RULES if rule.holds(said, None)), None)
    if rule is None or fault.evidence.exit_code:
        return fault
    return BuildError(rule.error_class, fault.message, fault.evidence)


class Trace:
    """Reads trace messages as they come. `failed` is the name of the first vertex with an error of its own, `begun` of
    the last one that began."""

    def __init__(self) -> None:
        self.failed = ""
        self.begun = ""
        self._shown: set[bytes] = set()

    def read(self, aux: str) -> str:
        """What a log shows of one message: the names of vertices as they start, and what their commands say."""
        text = ""
        for number, value in _fields(base64.b64decode(aux)):
            if number == 1:
                text += self._vertex(dict(_fields(value)))
            elif number == 3:
                text += dict(_fields(value)).get(4, b"").decode("utf-8", "replace")
        return text

    def _vertex(self, vertex: dict[int, bytes]) -> str:
        name = vertex.get(3, b"").decode("utf-8", "replace")
        error = vertex.get(7, b"").decode("utf-8", "replace")
        if error and not self.failed and "context canceled" not in error:
            self.failed = name
        digest = vertex.get(1, b"")
        if 5 not in vertex or digest in self._shown:
            return ""
        self._shown.add(digest)
        self.begun = name
        return f"=> {name}\n"


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a protobuf message; numbers are left out."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                _, at = _varint(data, at)
            case 1:
                at += 8
            case 2:
                length, at = _varint(data, at)
                yield key >> 3, data[at : at + length]
                at += length
            case 5:
                at += 4
            case other:
                raise ValueError(f"no protobuf message: wire type {other}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data):
            raise ValueError("no protobuf message: it ends within a number")
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not data[at - 1] & 0x80:
            return value, at
