"""Whole groups of valid rollouts of a run, all that it holds now, with pyarrow alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pyarrow as pa

from rollcage.rollout.arrow import Location, read_batches
from rollcage.rollout.feed_heads import VALID, GroupKey


def read_groups(
    run: str | Path | Location, group: Literal["complete", "any"] = "complete"
) -> Iterator[pa.Table]:
    """The groups that a run holds now, one table of `schema.ROLLOUTS` each, rows in the order of `sample`.

    Only rollouts with a valid reward are in a table. `complete`: only groups in which each of the
    `group_size` samples has one. `any`: every group that has at least one, short ones too, and of a run
    that is going on also those of which more is to come.

    One group at a time is in memory (more where a group lies in several shards). Groups come in the order in
    which they were written. Raises `NoRun`.
    """
    if group not in ("complete", "any"):
        raise ValueError(f"group must be 'complete' or 'any', not {group!r}")
    sizes = _sizes(run, group)
    gathered: dict[GroupKey, list[pa.RecordBatch]] = defaultdict(list)
    for batch in read_batches(run, "rollouts"):
        for key, rows in _by_group(batch).items():
            if key not in sizes:
                continue
            gathered[key].append(rows)
            if sum(part.num_rows for part in gathered[key]) >= sizes[key]:
                del sizes[key]
                yield _table(gathered.pop(key))


def _sizes(run: str | Path | Location, group: str) -> dict[GroupKey, int]:
    """How many valid rollouts there are in each group that is wanted."""
    valid: dict[GroupKey, int] = defaultdict(int)
    wanted: dict[GroupKey, int] = defaultdict(int)
    for batch in read_batches(run, "rollouts", ("agent", "task", "draw", "outcome", "group_size")):
        for key, rows in _by_group(batch).items():
            valid[key] += rows.num_rows
            wanted[key] = max(wanted[key], *rows["group_size"].to_pylist())
    return {key: count for key, count in valid.items() if group == "any" or count >= wanted[key]}


def _by_group(batch: pa.RecordBatch) -> dict[GroupKey, pa.RecordBatch]:
    """The valid rows of a batch by group; a batch that is one whole valid group is not copied."""
    rows: dict[GroupKey, list[int]] = defaultdict(list)
    columns = (batch[name].to_pylist() for name in ("outcome", "agent", "task", "draw"))
    for index, (outcome, *key) in enumerate(zip(*columns, strict=True)):
        if outcome in VALID:
            rows[GroupKey(*key)].append(index)
    return {
        key: batch if len(indices) == batch.num_rows else batch.take(pa.array(indices))
        for key, indices in rows.items()
    }


def _table(parts: list[pa.RecordBatch]) -> pa.Table:
    table = pa.Table.from_batches(parts).unify_dictionaries()
    samples = table["sample"].to_pylist()
    order = sorted(range(len(samples)), key=samples.__getitem__)
    return table if order == list(range(len(samples))) else table.take(pa.array(order))
