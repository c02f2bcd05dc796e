"""Attempts as Arrow rows, and back.

`attempt_from_row` undoes both conversions: all that `Attempt` holds is kept, with these limits. Times are whole
microseconds, logprobs are float32, a row of `attempts` has no trajectory, and lone surrogates, which no UTF-8
reader accepts, become U+FFFD.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa

from rollcage.rollout.outcome import BY_NAME, Evidence, Outcome, Stage
from rollcage.rollout.schema import ATTEMPTS, ROLLOUTS, VOCABULARY
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
_SURROGATES = re.compile("[\ud800-\udfff]")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def attempts_batch(attempts: Sequence[Attempt]) -> pa.RecordBatch:
    """Rows of `attempts`. Raises `ValueError` or `pa.ArrowException` for values that the schema can't hold."""
    return _batch([_attempt_row(attempt) for attempt in attempts], ATTEMPTS)


def rollouts_batch(rollouts: Iterable[tuple[Attempt, int, int]]) -> pa.RecordBatch:
    """Rows of `rollouts`, from the last attempt, the number of attempts and the group's size of each.

    Raises as `attempts_batch`.
    """
    rows = []
    for attempt, attempts, group_size in rollouts:
        trajectory = attempt.trajectory or Trajectory()
        rows.append(
            _attempt_row(attempt)
            | {
                "attempts": attempts,
                "group_size": group_size,
                "messages": [
                    vars(message) | {"tool_calls": [vars(call) for call in message.tool_calls]}
                    for message in trajectory.messages
                ],
                "turns": [
                    vars(turn) | {"commands": [vars(command) for command in turn.commands]}
                    for turn in trajectory.turns
                ],
                "segments": [vars(segment) for segment in trajectory.segments],
            }
        )
    return _batch(rows, ROLLOUTS)


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
    reward = attempt.reward
    return {
        "job": attempt.job,
        "agent": attempt.agent,
        "task": attempt.task,
        "task_digest": attempt.task_digest,
        "sample": attempt.sample,
        "attempt_id": attempt.attempt_id,
        "number": attempt.number,
        "policy": attempt.policy,
        "host": attempt.host,
        "outcome": attempt.outcome,
        "error_class": attempt.error_class,
        "domain": None if attempt.error_class is None else BY_NAME[attempt.error_class].domain,
        "stage": attempt.stage,
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


def _batch(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = [_column(field, [row[field.name] for row in rows]) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(field: pa.Field, values: list[Any]) -> pa.Array:
    if codes := _CODES.get(field.name):
        # Given as codes, so that the dictionary is the whole vocabulary in its own order in every file.
        indices = pa.array([None if value is None else codes[value] for value in values], pa.int8())
        return pa.DictionaryArray.from_arrays(indices, _DICTIONARIES[field.name])
    try:
        return pa.array(values, field.type)
    except UnicodeEncodeError:
        return pa.array(_encodable(values), field.type)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return _SURROGATES.sub("\ufffd", value)
    if isinstance(value, dict):
        return {key: _encodable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encodable(item) for item in value]
    return value
