"""Rollouts as the report's page holds them: a small table of all, and what happened in each as compressed JSON.

The page shows the table at once and inflates a chunk of a few rollouts when one of them is opened, so that it opens as
quickly with ten thousand rollouts as with ten. The page has a size to keep to: each rollout gets an equal part of what
is left of it, and its longest texts are cut, head and tail, until it fits. What is cut says how much is missing; no
rollout is left out.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

import pyarrow as pa

CHUNK_CHARS = 200_000
"""JSON that is compressed together: rollouts of one task share much of their text, and this inflates at once."""
LEAST_CHARS = 400
"""Of a text, that are kept however small the page must be."""
MOST_CHARS = 4_000_000
"""Of one rollout: past this no browser shows it with pleasure."""
MOST_NAMES = 500
"""Test ids of a rollout that are listed."""
ID_CHARS, LOGPROB_CHARS = 6, 5
"""What a token id and a log-probability take in JSON."""

Segments = list[dict[str, Any]]


class Recordings:
    """Writes rollouts to `sink` as chunks, and keeps the table of all of them.

    `rollouts`: how many are to come; `limit_bytes`: of everything that is written.
    """

    def __init__(self, sink: IO[str], rollouts: int, limit_bytes: int) -> None:
        self.table: list[dict[str, Any]] = []
        self._sink = sink
        self._left = rollouts
        self._limit = limit_bytes
        self._taken: list[str] = []
        self._chars = self._written = 0
        self._chars_written = 0
        self._chunks = 0

    def add(
        self, row: Mapping[str, Any], segments: Callable[[int], Segments], tries: list[dict[str, Any]]
    ) -> None:
        """One row of `rollouts`. `segments` gives its segments in about so many characters; `tries` are the
        attempts that it took before the last."""
        room = self._room()
        detail = _detail(row, tries)
        detail["segments"] = segments(room // 3)
        _fit(detail, room)
        text = to_json(detail)
        self.table.append(_facts(row) | {"chunk": self._chunks, "at": len(self._taken)})
        self._taken.append(text)
        self._chars += len(text)
        self._left -= 1
        if self._chars >= CHUNK_CHARS:
            self._flush()

    def columns(self) -> str:
        """The table of all, by column, packed. Ends the chunks."""
        if self._taken:
            self._flush()
        names = self.table[0] if self.table else {}
        return packed(to_json({name: [row[name] for row in self.table] for name in names}))

    def _room(self) -> int:
        """Characters of JSON that the next rollout may take, by how well those before it were compressed."""
        gain = min(max(self._chars_written / self._written, 1.0), 8.0) if self._written else 3.0
        waiting = self._chars / gain
        left = max(self._limit - self._written - waiting, 0) * gain
        return min(int(left / max(self._left, 1)), MOST_CHARS)

    def _flush(self) -> None:
        chunk = packed(f"[{','.join(self._taken)}]")
        self._sink.write(f'<script type="text/plain" id="c{self._chunks}">{chunk}</script>\n')
        self._chunks += 1
        self._written += len(chunk)
        self._chars_written += self._chars
        self._taken, self._chars = [], 0


def packed(text: str) -> str:
    """Text as base64 of its raw deflate stream: no character of it means anything to an HTML parser."""
    compressor = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return base64.b64encode(compressor.compress(text.encode()) + compressor.flush()).decode()


def to_json(value: Any) -> str:
    """JSON in ASCII that every parser reads: numbers that are none become their names."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def _facts(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the list of rollouts shows and filters by."""
    started, ended = row["started_at"], row["ended_at"]
    return {
        "agent": row["agent"],
        "task": row["task"],
        "draw": row["draw"],
        "sample": row["sample"],
        "outcome": row["outcome"],
        "error_class": row["error_class"] or "",
        "message": ((row["evidence"] or {}).get("message") or "")[:200],
        "reward": row["reward"],
        "ended": None if ended is None else round(ended.timestamp(), 3),
        "seconds": None if None in (started, ended) else round((ended - started).total_seconds(), 3),
        "attempts": row["attempts"],
        "turns": row["turn_count"],
        "commands": row["command_count"],
        "tokens": row["completion_tokens"],
    }


_KEPT = (
    "attempt_id", "task_digest", "policy", "host", "number", "attempts", "group_size", "domain", "stage", "evidence",
    "reward_values", "reward_source", "reward_steps", "skipped_steps", "verifier_output", "started_at",
    "infra_seconds", "malformed_turns", "prompt_tokens", "completion_tokens", "cost_usd", "extra",
)  # fmt: skip


def _detail(row: Mapping[str, Any], tries: list[dict[str, Any]]) -> dict[str, Any]:
    """What the page shows of one rollout; what is null, empty or 0 is left out."""
    texts = {turn["index"]: turn["text"] for turn in row["turns"]}
    detail = {name: row[name] for name in _KEPT} | {
        "started_at": "" if row["started_at"] is None else row["started_at"].isoformat(" ", "seconds"),
        "phases": _said(row["phases"]),
        "test_ids": row["test_ids"][:MOST_NAMES],
        "more_test_ids": len(row["test_ids"][MOST_NAMES:]),
        "tries": tries,
        "messages": [_message(message, texts) for message in row["messages"]],
        "turns": [
            _said(turn)
            | {
                "commands": [
                    _said(command) | {"exit_code": command["exit_code"]} for command in turn["commands"]
                ]
            }
            for turn in row["turns"]
        ],
    }
    return _said(detail)


def _message(message: Mapping[str, Any], texts: Mapping[int, str]) -> dict[str, Any]:
    kept = {name: value for name, value in message.items() if name != "blocks"}
    if kept["role"] == "assistant" and texts.get(kept["turn"]) == kept["content"]:
        kept["content"] = ""  # the turn has it
    kept["tool_calls"] = [dict(call) for call in kept["tool_calls"]]
    return _said(kept) | {"turn": kept["turn"]}


def _said(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in values.items() if value not in (None, "", 0, False) and value != []
    }


def _fit(detail: dict[str, Any], room: int) -> None:
    """Cut the longest texts to one length, that at which all of them fit into `room` characters."""
    places = list(_texts(detail))
    lengths = sorted(len(holder[name]) for holder, name in places)
    longest = _longest(lengths, room)
    for holder, name in places:
        holder[name] = cut(holder[name], longest)


def _longest(lengths: list[int], room: int) -> int:
    """The length at which texts of these `lengths`, in ascending order, come to `room` in all."""
    for number, length in enumerate(lengths):
        if length * (len(lengths) - number) > room:
            return max(room // (len(lengths) - number), LEAST_CHARS)
        room -= length
    return max(lengths, default=0)


def cut(text: str, longest: int) -> str:
    """Head and tail of a text that is too long, and how much is missing."""
    missing = len(text) - longest
    if missing <= 100:
        return text
    head = longest * 2 // 3
    return f"{text[:head]}\n[{missing:,} characters are not on this page]\n{text[head + missing :]}"


def _texts(detail: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each text that may be long, as where it is held and under which name."""
    holders: list[tuple[dict[str, Any], tuple[str, ...]]] = [(detail, ("verifier_output", "extra"))]
    for message in detail.get("messages", ()):
        holders.append((message, ("content", "reasoning")))
        holders += [(call, ("arguments",)) for call in message.get("tool_calls", ())]
    for turn in detail.get("turns", ()):
        holders.append((turn, ("text",)))
        holders += [(command, ("command", "stdout", "stderr", "note")) for command in turn["commands"]]
    for holder, names in holders:
        yield from ((holder, name) for name in names if name in holder)


class SegmentColumn:
    """The segments of a batch of rollouts, read without a Python object for each token."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        column = batch.column("segments")
        self._rows = column.offsets.to_numpy()
        parts = (column.values.field(name) for name in ("ids", "loss_mask", "logprobs"))
        self._lists = [(part.offsets.to_numpy(), part.values.to_numpy()) for part in parts]

    def of(self, row: int, room: int) -> Segments:
        """Of each segment of a row its `length`, its `spans` of sampled tokens as [start, length], and as many `ids`
        (`all_ids`: of every token, else of the sampled ones) and `logprobs` (in -1/1000 nat) as fit into `room`."""
        found: Segments = []
        for number in range(self._rows[row], self._rows[row + 1]):
            ids, mask, logprobs = (values[ends[number] : ends[number + 1]] for ends, values in self._lists)
            sampled = mask.nonzero()[0] if len(mask) == len(ids) else ids[:0].nonzero()[0]
            all_ids = len(ids) * ID_CHARS + len(sampled) * LOGPROB_CHARS <= room
            fit = len(sampled) if all_ids else min(len(sampled), max(room, 0) // (ID_CHARS + LOGPROB_CHARS))
            given = logprobs[sampled[:fit]] if len(logprobs) == len(ids) else logprobs[:0]
            kept = ids if all_ids else ids[sampled[:fit]]
            room -= len(kept) * ID_CHARS + len(given) * LOGPROB_CHARS
            found.append(
                {
                    "length": len(ids),
                    "spans": _spans(sampled.tolist()),
                    "all_ids": all_ids,
                    "ids": kept.tolist(),
                    "logprobs": [
                        None if not math.isfinite(value) else round(-1000 * value) for value in given.tolist()
                    ],
                }
            )
        return found


def _spans(places: list[int]) -> list[list[int]]:
    """Runs of consecutive places, each as its start and its length."""
    spans: list[list[int]] = []
    for place in places:
        if spans and place == spans[-1][0] + spans[-1][1]:
            spans[-1][1] += 1
        else:
            spans.append([place, 1])
    return spans
