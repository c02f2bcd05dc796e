"""What the ledger's writing thread works on: calls that wait, their rows as Arrow, and a group's rows as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rollcage.rollout.arrow import RunError
from rollcage.rollout.rows import attempts_batch, rollouts_batch
from rollcage.rollout.trajectory import Attempt

ROWS_AT_ONCE = 64
"""Rows converted by one call into Arrow, most of whose time is the same for one row as for eight."""

TOKENS_AT_ONCE = 16_000
"""A call takes no more rows once it has so many tokens: it holds the interpreter's lock for a few milliseconds."""

Group = tuple[str, str, int]
"""Agent, task, and which draw of the task."""

ALL: Group = ("", "", 0)
"""Attempts wait in one group."""

_TO_BATCH: dict[str, Callable[[Any], pa.RecordBatch]] = {
    "attempts": attempts_batch,
    "rollouts": rollouts_batch,
}

FAILURES = (OSError, ValueError, TypeError, KeyError, OverflowError, RunError, pa.ArrowException)
"""What the disk, Arrow and a row that the schema can't hold raise."""


@dataclass
class Call:
    """One call that waits for the writing thread. `kind` is a table, `commit` or `finish`; `row` is what the
    table's function of `_TO_BATCH` takes."""

    kind: str
    done: asyncio.Future[None]
    row: Any = None
    group: Group = ALL
    failure: BaseException | None = None


def parts(table: str, calls: Sequence[Call]) -> Iterator[list[Call]]:
    """The calls whose rows are converted together."""
    part, size = list[Call](), 0
    for call in calls:
        part.append(call)
        size += _tokens(call.row[0]) if table == "rollouts" else 0
        if len(part) == ROWS_AT_ONCE or size >= TOKENS_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def converted(table: str, calls: list[Call]) -> list[tuple[pa.RecordBatch, list[Call]]]:
    """The rows of these calls as one batch; where one can't be converted, each by itself, and that one fails."""
    try:
        return [(_TO_BATCH[table]([call.row for call in calls]), calls)]
    except FAILURES as error:
        if len(calls) > 1:
            return [batch for call in calls for batch in converted(table, [call])]
        calls[0].failure = error
        return []


def _tokens(attempt: Attempt) -> int:
    return sum(len(segment.ids) for segment in attempt.trajectory.segments) if attempt.trajectory else 0


@contextmanager
def blamed_on(calls: Sequence[Call]) -> Iterator[None]:
    """What fails inside has failed for these calls, and for no other."""
    try:
        yield
    except FAILURES as error:
        for call in calls:
            call.failure = error


def group_of(row: pa.RecordBatch, table: str) -> Group:
    """Where a single row waits."""
    if table == "attempts":
        return ALL
    return row["agent"][0].as_py(), row["task"][0].as_py(), row["draw"][0].as_py()


def joined(rows: list[pa.RecordBatch], table: str) -> list[pa.RecordBatch]:
    """One batch of single rows, samples in order (several batches only where one can't hold them)."""
    if table == "rollouts":
        rows = sorted(rows, key=lambda row: row["sample"][0].as_py())
    try:
        return [pa.concat_batches(rows)]
    except pa.ArrowInvalid:  # more than 2**31 tokens together
        return list(pa.Table.from_batches(rows).unify_dictionaries().combine_chunks().to_batches())
