"""Which of a run's rollouts are exported: by columns, table after table, then one by one.

By default every rollout with a valid reward, those of groups that are not complete, too. What was left out is counted
under the reason, and the first reason counts.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from rollcage.rollout.arrow import Location, read_batches
from rollcage.rollout.feed import read_groups
from rollcage.rollout.formats.base import Format, rollout_id, rollouts_of
from rollcage.rollout.formats.where import Where
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.schema import ROLLOUTS
from rollcage.rollout.trajectory import Attempt

_VALID = pa.array([Outcome.PASSED.value, Outcome.FAILED.value])


@dataclass(frozen=True)
class Selection:
    """What is wanted. `agents` and `tasks` are names or patterns of names, all where there are none."""

    where: Where | None = None
    agents: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    complete: bool = False
    """Only groups in which each sample has a valid reward."""
    invalid: bool = False
    """Rollouts without a valid reward, too."""
    untruncated: bool = False
    """Only rollouts of which no answer was cut at the token limit."""
    shortest: bool = False
    """Of each task, the rollout with the fewest sampled tokens."""
    distinct: bool = False
    """Of rollouts of a task with the same answers, the first."""

    def __post_init__(self) -> None:
        if self.complete and self.invalid:
            raise ValueError("a complete group has no rollout without a valid reward: ask for one of the two")


@dataclass
class Counts:
    """`read`: rollouts of the run; `kept`: those that are exported. `left_out`: the others by reason; `unfit` by why
    the format can't hold them, with the first of each."""

    read: int = 0
    kept: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    unfit: Counter[str] = field(default_factory=Counter)
    first_unfit: dict[str, str] = field(default_factory=dict)


def tables(run: str | Path | Location, selection: Selection, counts: Counts) -> Iterator[pa.Table]:
    """The rollouts whose columns are wanted: a table for each batch of the run (a group), or each whole group."""
    for table in _read(run, selection):
        counts.read += table.num_rows
        if not selection.invalid:
            table = _kept(table, pc.is_in(_text(table, "outcome"), _VALID), "no valid reward", counts)
        for column, patterns in (("agent", selection.agents), ("task", selection.tasks)):
            if patterns:
                names = _text(table, column).to_pylist()
                mask = pa.array(
                    [any(fnmatchcase(name, one) for one in patterns) for name in names], pa.bool_()
                )
                table = _kept(table, mask, f"another {column}", counts)
        if selection.where is not None:
            chosen = selection.where.keep(table)
            counts.left_out["not what `where` asks for"] += table.num_rows - chosen.num_rows
            table = chosen
        if table.num_rows:
            yield table


def rollouts(
    run: str | Path | Location, selection: Selection, format: Format, counts: Counts
) -> Iterator[list[Attempt]]:
    """The wanted rollouts that are fit for the format, a list for each table. Those that are not are counted."""
    shortest = _shortest(run, selection, format) if selection.shortest else None
    answers: set[bytes] = set()
    for table in tables(run, selection, counts):
        kept = []
        for rollout in _fit(rollouts_of(table), selection, format, counts):
            if shortest is not None and rollout_id(rollout) not in shortest:
                counts.left_out["not the shortest of its task"] += 1
            elif selection.distinct and (said := _answers(rollout)) in answers:
                counts.left_out["the same answers as another"] += 1
            else:
                if selection.distinct:
                    answers.add(said)
                kept.append(rollout)
        counts.kept += len(kept)
        if kept:
            yield kept


def _read(run: str | Path | Location, selection: Selection) -> Iterator[pa.Table]:
    if selection.complete:
        yield from read_groups(run, "complete")
        return
    for batch in read_batches(run, "rollouts"):
        yield pa.Table.from_batches([batch.select(ROLLOUTS.names)])


def _text(table: pa.Table, column: str) -> pa.ChunkedArray:
    return pc.cast(table[column], pa.string())


def _kept(table: pa.Table, mask: pa.ChunkedArray, why_not: str, counts: Counts) -> pa.Table:
    kept = table.filter(mask)
    counts.left_out[why_not] += table.num_rows - kept.num_rows
    return kept


def _fit(
    candidates: Iterable[Attempt], selection: Selection, format: Format, counts: Counts
) -> Iterator[Attempt]:
    for rollout in candidates:
        if selection.untruncated and _is_truncated(rollout):
            counts.left_out["an answer was cut at the token limit"] += 1
        elif (why := format.unfit(rollout)) is not None:
            counts.unfit[why] += 1
            counts.first_unfit.setdefault(why, rollout_id(rollout))
        else:
            yield rollout


def _shortest(run: str | Path | Location, selection: Selection, format: Format) -> set[str]:
    """The names of the rollouts that are the shortest of their tasks, among those that are fit."""
    best: dict[str, tuple[int, int, str]] = {}
    for table in tables(run, selection, Counts()):
        for rollout in _fit(rollouts_of(table), selection, format, Counts()):
            trajectory = rollout.trajectory
            size = (trajectory.completion_tokens, len(trajectory.turns)) if trajectory else (0, 0)
            best[rollout.task] = min(
                (*size, rollout_id(rollout)), best.get(rollout.task, (*size, "\U0010ffff"))
            )
    return {name for _, _, name in best.values()}


def _is_truncated(rollout: Attempt) -> bool:
    return rollout.trajectory is not None and any(
        turn.finish_reason == "length" for turn in rollout.trajectory.turns
    )


def _answers(rollout: Attempt) -> bytes:
    """A digest of the task and of all that the policy said."""
    messages = rollout.trajectory.messages if rollout.trajectory else []
    said = [
        [one.content, one.reasoning, [[call.name, call.arguments] for call in one.tool_calls]]
        for one in messages
        if one.role == "assistant"
    ]
    return hashlib.sha256(json.dumps([rollout.task, said]).encode()).digest()
