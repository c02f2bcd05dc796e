"""Attempts as Arrow rows, and back.

`attempt_from_row` undoes both conversions: all that `Attempt` holds is kept, with these limits. Times are whole
microseconds, logprobs are float32, a row of `attempts` has no trajectory, and lone surrogates, which no UTF-8
reader accepts, become U+FFFD.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from itertools import accumulate, chain
from operator import attrgetter
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from rollcage.rollout.outcome import BY_NAME, Evidence, Outcome, Stage
from rollcage.rollout.schema import ATTEMPTS, FIELDS, ROLLOUTS, VOCABULARY, Field
from rollcage.rollout.trajectory import (
    Attempt,
    CommandRecord,
    Message,
    Phase,
    Reward,
    Segment,
    ToolCall,
    Trajectory,
    Turn,
)

_DICTIONARIES = {column: pa.array(words, pa.string()) for column, words in VOCABULARY.items()}
_CODES = {column: {word: code for code, word in enumerate(words)} for column, words in VOCABULARY.items()}
_NESTED = {"messages", "turns", "segments"}
_ATTEMPT_PLAIN, _ROLLOUT_PLAIN = (
    pa.struct(
        [
            pa.field(field.name, pa.int8()) if field.name in VOCABULARY else field
            for field in schema
            if field.name not in _NESTED
        ]
    )
    for schema in (ATTEMPTS, ROLLOUTS)
)
"""The columns that are made of `_attempt_row`. Words are given as codes, so that a dictionary is the whole vocabulary
in its own order in every file."""


def _record_plain(fields: Iterable[Field]) -> dict[str, pa.StructType]:
    found: dict[str, pa.StructType] = {}
    for field in fields:
        plain = [child for child in field.children if not pa.types.is_list(child.type)]
        found |= {field.name: pa.struct([child.arrow() for child in plain])} | _record_plain(field.children)
    return found


_RECORD_PLAIN = _record_plain(field for field in FIELDS["rollouts"] if field.name in _NESTED)
"""Of each list of records those fields that are no lists."""

_CODE = {pa.int32(): "i", pa.int8(): "b", pa.float32(): "f"}
"""Of `struct`, which packs a list of numbers in a third of the time that pyarrow takes."""
_SURROGATES = re.compile("[\ud800-\udfff]")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def attempts_batch(attempts: Sequence[Attempt]) -> pa.RecordBatch:
    """Rows of `attempts`. Raises `ValueError`, `TypeError`, `OverflowError` or `pa.ArrowException` for values that the
    schema can't hold."""
    return _batch([_attempt_row(attempt) for attempt in attempts], ATTEMPTS)


def rollouts_batch(rollouts: Iterable[tuple[Attempt, int, int]]) -> pa.RecordBatch:
    """Rows of `rollouts`, from the last attempt, the number of attempts and the group's size of each.

    Raises as `attempts_batch`.
    """
    ended = list(rollouts)
    trajectories = [attempt.trajectory or Trajectory() for attempt, _, _ in ended]
    rows = [
        _attempt_row(attempt) | {"attempts": attempts, "group_size": group_size}
        for attempt, attempts, group_size in ended
    ]
    nested = {
        field.name: _records(field, list(map(attrgetter(field.name), trajectories)))
        for field in FIELDS["rollouts"]
        if field.name in _NESTED
    }
    return _batch(rows, ROLLOUTS, nested)


def attempt_from_row(row: Mapping[str, Any]) -> Attempt:
    """The attempt that `row`, one of `Table.to_pylist()` of either table, was made from."""
    evidence, reward = row["evidence"], row["reward"]
    return Attempt(
        attempt_id=row["attempt_id"],
        job=row["job"],
        task=row["task"],
        task_digest=row["task_digest"],
        sample=row["sample"],
        number=row["number"],
        agent=row["agent"],
        policy=row["policy"],
        host=row["host"],
        outcome=Outcome(row["outcome"]),
        error_class=row["error_class"],
        stage=None if row["stage"] is None else Stage(row["stage"]),
        evidence=None if evidence is None else Evidence(**(evidence | {"also": tuple(evidence["also"])})),
        reward=None
        if reward is None
        else Reward(
            value=reward,
            values={entry["name"]: entry["value"] for entry in row["reward_values"]},
            source=row["reward_source"],
            output_tail=row["verifier_output"],
            test_ids=tuple(row["test_ids"]),
            steps=tuple((entry["name"], entry["value"]) for entry in row["reward_steps"]),
            skipped_steps=tuple(row["skipped_steps"]),
        ),
        started_at=_seconds(row["started_at"]),
        ended_at=_seconds(row["ended_at"]),
        phases={phase: seconds for phase, seconds in row["phases"].items() if seconds is not None},
        infra_seconds=row["infra_seconds"],
        retry_after_sec=row["retry_after_sec"],
        trajectory=_trajectory(row) if "turns" in row else None,
        extra=json.loads(row["extra"]),
        draw=row["draw"],
    )


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        messages=[
            Message(**(message | {"tool_calls": tuple(ToolCall(**call) for call in message["tool_calls"])}))
            for message in row["messages"]
        ],
        turns=[
            Turn(**(turn | {"commands": [CommandRecord(**command) for command in turn["commands"]]}))
            for turn in row["turns"]
        ],
        segments=[Segment(**segment) for segment in row["segments"]],
    )


def _attempt_row(attempt: Attempt) -> dict[str, Any]:
    if unknown := attempt.phases.keys() - set(Phase):
        raise ValueError(f"attempt {attempt.attempt_id}: no such phase: {', '.join(sorted(unknown))}")
    trajectory = attempt.trajectory or Trajectory()
    reward, error_class = attempt.reward, attempt.error_class
    return {
        "job": attempt.job,
        "agent": attempt.agent,
        "task": attempt.task,
        "task_digest": attempt.task_digest,
        "draw": attempt.draw,
        "sample": attempt.sample,
        "attempt_id": attempt.attempt_id,
        "number": attempt.number,
        "policy": attempt.policy,
        "host": attempt.host,
        "outcome": _CODES["outcome"][attempt.outcome],
        "error_class": None if error_class is None else _CODES["error_class"][error_class],
        "domain": None if error_class is None else _CODES["domain"][BY_NAME[error_class].domain],
        "stage": None if attempt.stage is None else _CODES["stage"][attempt.stage],
        "evidence": None if attempt.evidence is None else asdict(attempt.evidence.capped()),
        "reward": None if reward is None else reward.value,
        "reward_values": [] if reward is None else _named(reward.values.items()),
        "reward_source": None if reward is None else reward.source,
        "reward_steps": [] if reward is None else _named(reward.steps),
        "skipped_steps": [] if reward is None else reward.skipped_steps,
        "test_ids": [] if reward is None else reward.test_ids,
        "verifier_output": "" if reward is None else reward.output_tail,
        "started_at": _microseconds(attempt.started_at),
        "ended_at": _microseconds(attempt.ended_at),
        "phases": {phase.value: attempt.phases.get(phase) for phase in Phase},
        "infra_seconds": attempt.infra_seconds,
        "retry_after_sec": attempt.retry_after_sec,
        "turn_count": len(trajectory.turns),
        "malformed_turns": sum(turn.malformed for turn in trajectory.turns),
        "command_count": sum(len(turn.commands) for turn in trajectory.turns),
        "prompt_tokens": trajectory.prompt_tokens,
        "completion_tokens": trajectory.completion_tokens,
        "cost_usd": trajectory.cost_usd,
        # A value that is not JSON is the fault of a user's agent, and must not cost the attempt's record.
        "extra": json.dumps(attempt.extra, default=repr),
    }


def _named(pairs: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in pairs]


def _microseconds(seconds: float) -> int | None:
    return round(seconds * 1e6) if seconds else None


def _seconds(time: datetime | None) -> float:
    return 0.0 if time is None else (time - _EPOCH) // _MICROSECOND / 1e6


def _batch(
    rows: list[dict[str, Any]], schema: pa.Schema, nested: Mapping[str, pa.Array] = MappingProxyType({})
) -> pa.RecordBatch:
    columns = {**nested, **_plain(rows, _ATTEMPT_PLAIN if schema is ATTEMPTS else _ROLLOUT_PLAIN)}
    for name, dictionary in _DICTIONARIES.items():
        columns[name] = pa.DictionaryArray.from_arrays(columns[name], dictionary)
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def _records(field: Field, lists: Sequence[Sequence[Any]]) -> pa.Array:
    """A list of structs for each list of objects."""
    items = list(chain.from_iterable(lists))
    try:
        columns = _plain(list(map(vars, items)), _RECORD_PLAIN[field.name])
        for child in field.children:
            if child.name not in columns:
                make = _records if child.children else _numbers
                columns[child.name] = make(child, list(map(attrgetter(child.name), items)))
    except (AttributeError, TypeError) as error:
        raise TypeError(f"{field.name} holds what it should not: {error}") from error
    structs = pa.StructArray.from_arrays(
        [columns[child.name] for child in field.children], fields=list(field.type.value_type)
    )
    return pa.ListArray.from_arrays(_offsets(lists), structs, type=field.type)


def _numbers(field: Field, lists: Sequence[Sequence[float]]) -> pa.Array:
    """A list of numbers for each list."""
    kind = field.type.value_type
    try:
        data = b"".join(struct.pack(f"={len(numbers)}{_CODE[kind]}", *numbers) for numbers in lists)
    except struct.error as error:
        raise ValueError(f"{field.name} must be numbers of type {kind}: {error}") from error
    values = pa.Array.from_buffers(kind, len(data) // kind.byte_width, [None, pa.py_buffer(data)])
    return pa.ListArray.from_arrays(_offsets(lists), values, type=field.type)


def _offsets(lists: Sequence[Sequence[Any]]) -> pa.Array:
    return pa.array(accumulate(map(len, lists), initial=0), pa.int32())


def _plain(rows: Sequence[Mapping[str, Any]], kind: pa.StructType) -> dict[str, pa.Array]:
    """The fields of `kind` by name. One call makes them all: a call for each takes twice as long for a few rows."""
    if not kind.num_fields:
        return {}
    try:
        made = pa.array(rows, kind)
    except UnicodeEncodeError:
        made = pa.array(_encodable(rows), kind)
    return dict(zip(kind.names, made.flatten(), strict=True))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(item) for item in value]
    return value
