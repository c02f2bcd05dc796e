"""The answers of another run, in their order: its policy traffic once more, without a model.

A session serves the turns of the recorded rollout of the same agent, task and sample: text, reasoning, tool calls,
exact ids and log-probabilities, finish reason, versions, usage, and the engine's own seconds, which are charged but
not waited for. So the segments of a replay are those of the recording, value for value.

What the agent says is compared with what it said then. Where it differs, because the sandbox answered in another way
(times, process ids), the session is `diverged`, and goes on with the recorded answers. It says so in its notes
(`KeepsNotes`), which stand in the attempt's `extra["replay"]`.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollcage.rollout.arrow import Location, RunError
from rollcage.rollout.outcome import Evidence, PolicyError
from rollcage.rollout.policies.base import Completion, Sampling, Structure, Tool
from rollcage.rollout.policies.recording import NoRecording, Recording, Recordings, end_of
from rollcage.rollout.policies.scripted import ByteTokenizer
from rollcage.rollout.tokens import ChatRenderer, load_tokenizer
from rollcage.rollout.trajectory import Attempt, Message, Segment

REQUEST_CHARACTERS = 80
"""The end of a request for a summary, which is the same however much of the conversation stands before it."""

BYTES = "bytes"
"""The tokenizer of a scripted policy that has tokens."""

BEFORE_CHARACTERS, EXCERPT_CHARACTERS = 200, 1200
"""What is kept of two texts that differ: so much before the first difference, so much in all."""

_SURROGATES = re.compile("[\ud800-\udfff]")


class RecordedPolicy:
    """Serves sessions from the run at `run`, which may be a path or a URI of `pyarrow.fs`. `agent`: the label of the
    agent whose answers these are; None: the run's only one. `tokenizer`: a directory or name, for agents that count
    tokens (`MeasuresTokens`); `BYTES`: a scripted policy's, where the recording has tokens. `draw`: of a run that drew
    its tasks several times, the draw that is served.

    It can be pickled: each process opens the run by itself. Raises `ValueError` where there is no run, it cannot be
    read, or it has no such agent.
    """

    _recordings: Recordings | None

    def __init__(
        self,
        run: str | Path,
        *,
        agent: str | None = None,
        name: str = "recorded",
        tokenizer: str | None = None,
        draw: int = 0,
    ) -> None:
        if not Location.of(run).exists():
            raise ValueError(f"{run}: there is no run here (no job.json and no shard)")
        self.name = name
        self.run = str(run)
        self._agent = agent
        self._draw = draw
        self._tokenizer = tokenizer
        self._open()
        try:
            recordings = Recordings(self.run)
            recordings.agent(agent)
        except (RunError, NoRecording, pa.ArrowException) as error:
            raise ValueError(str(error)) from error
        self._recordings = recordings

    def __getstate__(self) -> dict[str, Any]:
        own = ("_recordings", "_lock", "_renderer")
        return {key: value for key, value in vars(self).items() if key not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def _open(self) -> None:
        self._recordings = None
        self._renderer: ChatRenderer | None = None
        self._lock = threading.Lock()

    def session(self, session_id: str, *, task: str, sample: int) -> RecordedSession:
        """See `Policy`. Nothing is read before the first question."""
        return RecordedSession(self, task, sample)

    def find(self, task: str, sample: int) -> tuple[Attempt, ChatRenderer | None]:
        """The recorded rollout, and what counts its tokens. Blocks; for threads. Raises `PolicyError` (`policy_error`)
        where the run has none or cannot be read."""
        with self._lock:
            try:
                if self._recordings is None:
                    self._recordings = Recordings(self.run)
                found = self._recordings.find(self._agent, task, sample, self._draw)
                if self._tokenizer is not None and self._renderer is None:
                    own = ByteTokenizer() if self._tokenizer == BYTES else load_tokenizer(self._tokenizer)
                    self._renderer = ChatRenderer(own)
            except (RunError, NoRecording, OSError, ValueError, pa.ArrowException) as error:
                said = f"the recording cannot be read: {error}"
                raise PolicyError("policy_error", said, Evidence(said, "recording")) from error
        counted = self._tokenizer != BYTES or bool(found.trajectory and found.trajectory.segments)
        return found, self._renderer if counted else None


class RecordedSession:
    """One rollout's recorded answers."""

    def __init__(self, policy: RecordedPolicy, task: str, sample: int) -> None:
        self._policy = policy
        self._task, self._sample = task, sample
        self._segments: list[Segment] = []
        self._recording: Recording | None = None
        self._renderer: ChatRenderer | None = None
        self._next = 0
        self._diverged: dict[str, Any] | None = None
        self._overflowed_at = -1

    @property
    def segments(self) -> list[Segment]:
        return self._segments

    @property
    def notes(self) -> Mapping[str, Any]:
        """See `KeepsNotes`: what was replayed. `diverged` has the first turn that was asked for with other messages,
        and both texts from a little before their first difference on; None where there is none."""
        recording = self._recording
        return {
            "replay": {
                "run": self._policy.run,
                "attempt_id": recording.attempt.attempt_id if recording else "",
                "turns": self._next,
                "recorded_turns": len(recording.turns) if recording else None,
                "diverged": self._diverged,
            }
        }

    @property
    def max_model_len(self) -> int | None:
        """See `MeasuresTokens`: that of the recorded session."""
        found = None if self._recording is None else self._recording.attempt.extra.get("max_model_len")
        return found if isinstance(found, int) else None

    def count_tokens(self, text: str) -> int | None:
        """See `MeasuresTokens`."""
        if self._renderer is None:
            return None
        return len(self._renderer.encode(self._renderer.harmless(Message("tool", text))))

    def restart(self) -> None:
        """See `PolicySession`. The recording says where segments begin."""

    async def complete(
        self,
        new_messages: list[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> tuple[Completion, int | None]:
        """See `PolicySession`. Where no more was recorded this raises what ended the recorded agent in the same place
        (`ENDED_IN_COMPLETE`), and else `policy_error`. Where the next recorded turn is a summary and the agent asks for
        something else, it is told once what made it sum up then: `context_overflow`."""
        if self._recording is None:
            found, self._renderer = await asyncio.to_thread(self._policy.find, self._task, self._sample)
            self._recording = Recording(found)
        recording, index = self._recording, self._next
        if index >= len(recording.turns):
            if recording.was_done and self._diverged is None:
                self._diverged = _difference(index, [], new_messages)
            raise recording.end()
        asked = recording.asked(index)
        turn = recording.turns[index]
        if turn.purpose == "summary" and self._overflowed_at != index and not _end_alike(asked, new_messages):
            self._overflowed_at = index
            raise PolicyError("context_overflow", f"the recorded context was full before turn {index}")
        if asked is not None and self._diverged is None:
            self._diverged = _difference(index, asked, new_messages)
        self._next += 1
        made = recording.completion(turn)
        if turn.segment is not None:
            self._extend(turn.segment, recording.trajectory.segments[turn.segment], end_of(turn))
        return made, turn.segment

    def _extend(self, index: int, recorded: Segment, end: int) -> None:
        """Have the segments hold what they held behind the turn that ends there."""
        self._segments += [Segment() for _ in range(index + 1 - len(self._segments))]
        self._segments[index] = Segment(recorded.ids[:end], recorded.loss_mask[:end], recorded.logprobs[:end])

    async def close(self) -> None:
        """Nothing is kept."""


def _end_alike(recorded: Sequence[Message] | None, given: Sequence[Message]) -> bool:
    if not recorded or not given:
        return recorded is None
    return _shown(recorded[-1])[-REQUEST_CHARACTERS:] == _shown(given[-1])[-REQUEST_CHARACTERS:]


def _difference(index: int, recorded: Sequence[Message], given: Sequence[Message]) -> dict[str, Any] | None:
    """The first message that is not what it was then; None where all are."""
    for place in range(max(len(recorded), len(given))):
        then = _shown(recorded[place]) if place < len(recorded) else ""
        now = _shown(given[place]) if place < len(given) else ""
        if then != now:
            at = next(
                (i for i, (a, b) in enumerate(zip(then, now, strict=False)) if a != b), len(min(then, now))
            )
            start = max(0, at - BEFORE_CHARACTERS)
            cut = slice(start, start + EXCERPT_CHARACTERS)
            return {"turn": index, "recorded": then[cut], "given": now[cut]}
    return None


def _shown(message: Message) -> str:
    """Everything of a message that a policy sees, as a run holds it: lone surrogates are U+FFFD there."""
    calls = "".join(f"\n{call.name}({call.arguments}) as {call.id}" for call in message.tool_calls)
    answers = f" (to {message.tool_call_id})" if message.tool_call_id is not None else ""
    text = f"{message.role}{answers}: {message.content}{calls}"
    return _SURROGATES.sub("\ufffd", text)
