"""One image build over the Engine API: stream read as it comes, log capped, ended at once when told to.

The classic builder is asked, which every engine since 20.10 has; what it cannot read has been lowered before. What
cannot be lowered goes to BuildKit (`buildkit.py`). When the connection goes away the engine kills the step that runs
and removes its container.

A failure names the author's own instruction: the builder says which step of the lowered Dockerfile it was at.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import IO, Any

from rollcage.rollout.outcome import BuildError, Evidence
from rollcage.rollout.sandbox.buildkit import TRACE, Trace, buildkit_fault
from rollcage.rollout.sandbox.faults import build_fault
from rollcage.rollout.sandbox.lowering import Step
from rollcage.rollout.sandbox.streams import CONNECT_SEC, STREAM_ERRORS, Stream

LOG_CHARS = 64 * 1024
"""Of a build's log this much is kept, its end: a failed step says last what was wrong."""

TRIES = 20
"""At most, of a build under which images are removed: each that goes may meet it once."""

_REMOVED_MEANWHILE = re.compile(r'^(unable to find image "sha256:|unknown parent image ID sha256:)')
"""What the classic builder says where somebody else has just removed an image on the one that it is at: it looks
through all of these for a step that it need not do again (moby's daemon/images/cache.go)."""

SHOWN_CHARS = 120
"""Of a failed instruction's first line so much is shown; its line number leads to the rest."""


class _RemovedMeanwhile(Exception):
    """See `_REMOVED_MEANWHILE`."""


class Build(Stream):
    """A build under way. `run` blocks in a thread of its own; `end` may be called from any other.

    `file` and `steps` are what the lowered Dockerfile comes from. `buildkit`: that builder is asked.
    """

    def __init__(
        self,
        reference: str,
        doing: str,
        build_args: Mapping[str, str],
        *,
        file: str = "Dockerfile",
        steps: Sequence[Step] = (),
        buildkit: bool = False,
    ) -> None:
        super().__init__()
        self.reference = reference
        self.doing = doing
        self.build_args = dict(build_args)
        self.file = file
        self.steps = tuple(steps)
        self.buildkit = buildkit
        self._at = 0
        self._trace = Trace()
        self._log: deque[str] = deque()
        self._log_chars = 0

    @property
    def log_tail(self) -> str:
        return "".join(self._log)[-LOG_CHARS:]

    def run(self, api: Any, tar: IO[bytes], timeout_sec: float) -> str:
        """Send the context, all of `tar`, and wait for the image. Returns its id. Raises `BuildError`; where `end` was
        called, an `image_build` or nothing that means anything: the caller knows better."""
        tried = 0
        while True:
            tried += 1
            tar.seek(0)
            self._at, self._trace = 0, Trace()
            try:
                return self._read(self._request(api, tar, timeout_sec), last=tried == TRIES)
            except _RemovedMeanwhile:
                self.say("an image was removed meanwhile: the build begins again, what is done is kept")
            except STREAM_ERRORS as error:
                raise build_fault(error, self.doing, log_tail=self.log_tail) from error

    def _request(self, api: Any, tar: IO[bytes], timeout_sec: float) -> Iterator[dict[str, Any]]:
        params = {
            "t": self.reference,
            "dockerfile": "Dockerfile",
            "rm": True,
            "forcerm": True,
            "buildargs": json.dumps(self.build_args),
            **({"version": "2"} if self.buildkit else {}),
        }
        return self.post(
            api,
            "/build",
            silent_sec=timeout_sec + CONNECT_SEC,
            data=tar,
            params=params,
            headers={"Content-Type": "application/x-tar"},
        )

    def _read(self, messages: Iterable[dict[str, Any]], *, last: bool = True) -> str:
        """Raises `BuildError`; unless it is the `last` try, `_RemovedMeanwhile` for that."""
        image_id = ""
        for message in messages:
            if "error" in message or "errorDetail" in message:
                if not last and not self.ended and _REMOVED_MEANWHILE.match(str(message.get("error"))):
                    raise _RemovedMeanwhile
                fault = buildkit_fault if self.buildkit else build_fault
                raise self._placed(fault(message, self.doing, log_tail=self.log_tail))
            if message.get("id") == TRACE:
                self._keep(self._trace.read(message["aux"]))
                continue
            if "stream" in message:
                self._watch(message["stream"])
                self._keep(message["stream"])
            image_id = (message.get("aux") or {}).get("ID") or image_id
        if not image_id:
            said = "the builder's stream ended before there was an image"
            raise BuildError("build_infra", said, Evidence(said, said_by="builder", log_tail=self.log_tail))
        return image_id

    def _watch(self, text: str) -> None:
        """Note at which step the classic builder is. A step may print the same words: only the next is believed."""
        found = re.match(r"Step (\d+)/(\d+) : (\w+)", text)
        if found is None or (int(found[1]), int(found[2])) != (self._at + 1, len(self.steps)):
            return
        if self.steps[self._at].keyword == found[3].upper():
            self._at += 1

    def _step(self) -> Step | None:
        """The step that failed, or else the one that was begun last."""
        if not self.buildkit:
            return self.steps[self._at - 1] if self._at else None
        shown = self._trace.failed or self._trace.begun
        found = re.match(r"\[(?:.*?([^\] ]+) )?(\d+)/\d+\] (\w+)", shown)
        if found is None:
            return None
        stage, number, keyword = found[1], int(found[2]), found[3].upper()
        same = [
            step
            for step in self.steps
            if step.number == number and step.keyword == keyword and stage in (None, step.stage)
        ]
        return same[0] if len(same) == 1 else None

    @property
    def place(self) -> str:
        """The author's instruction that failed, or that was begun last, as `file:line:column: RUN ...`; empty where
        the builder did not say."""
        step = self._step()
        if step is None:
            return ""
        at = step.origin
        first = re.sub(r"\s+", " ", at.verbatim.split("\n", 1)[0]).strip().removesuffix(" \\")
        shown = first if len(first) <= SHOWN_CHARS else first[: SHOWN_CHARS - 1] + "…"
        return f"{self.file}:{at.line}:{at.column}: {shown}"

    def _placed(self, fault: BuildError) -> BuildError:
        """The failure, said of the author's instruction."""
        place, code = self.place, fault.evidence.exit_code
        if not place:
            return fault
        message = f"{place} ended with status {code}" if code else f"{place}: {fault.message}"
        return BuildError(
            fault.error_class, message, replace(fault.evidence, message=message), fault.retry_after_sec
        )

    def say(self, text: str) -> None:
        """Put a line of ours into the log."""
        self._keep(text + "\n")

    def _keep(self, text: str) -> None:
        self._log.append(text)
        self._log_chars += len(text)
        while len(self._log) > 1 and self._log_chars - len(self._log[0]) >= LOG_CHARS:
            self._log_chars -= len(self._log.popleft())
