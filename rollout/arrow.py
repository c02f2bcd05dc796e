"""The files of a run, and reading them: shards that are there whole or not at all, and a journal that survives a kill
at any byte.

A run directory:

    job.json                    what was asked for
    attempts/part-00000.arrow   Arrow IPC files, one row an attempt (`schema.ATTEMPTS`); names and order: `shards.py`
    rollouts/part-00000.arrow   Arrow IPC files, one row an ended rollout (`schema.ROLLOUTS`), a batch a group
    journal/rollouts-00000.arrows   Arrow IPC streams: rows that are in no shard yet (`journal.py`)
    feed/                       how far readers are
    summary.json                there once the run has ended

Invariants:

- A shard is written as `.tmp`, fsynced and renamed. Its batches keep their ordinals for ever; what may become of it is
  that neighbours are merged (`compaction.py`), and that rollouts which are run again leave it (`withdraw`).
- A row is in a shard or in the journal at every moment after its `Journal.append` returned. Rows leave the
  journal only after their shard is on disk, so that a row can be in both: readers drop the journal's copy.
- One process at a time writes a run (`Location.lock`). Reading needs no lock, also while the run is written.

What a kill tears is the journal's last, not yet acknowledged append, and a `.tmp`; both are ignored.
Shards may lie at any `pyarrow.fs` location (`location.py`); the journal, which is appended to, is on this machine's
disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollcage.rollout.journal import JOURNAL_OPTIONS, Journal, journalled, recover
from rollcage.rollout.location import (
    TABLES,
    UNREADABLE,
    Location,
    NoRun,
    RunBusy,
    RunError,
    RunExists,
    damaged,
)
from rollcage.rollout.schema import KEY, SCHEMAS
from rollcage.rollout.shards import SHARD_OPTIONS, first_batch, holding

__all__ = [
    "IDENTITY",
    "JOURNAL_OPTIONS",
    "SHARD_OPTIONS",
    "TABLES",
    "Journal",
    "Location",
    "NoRun",
    "RunBusy",
    "RunError",
    "RunExists",
    "identities",
    "journalled",
    "read_attempts",
    "read_batches",
    "read_numbered",
    "read_rollouts",
    "read_shards",
    "recover",
]

IDENTITY: dict[str, tuple[str, ...]] = {"attempts": ("attempt_id",), "rollouts": KEY}
"""What no two rows of a table share."""


def read_rollouts(run: str | Path | Location, columns: Sequence[str] | None = None) -> pa.Table:
    """Every ended rollout of a run once, whether the run is finished, killed or going on. Raises `NoRun`."""
    return _read(run, "rollouts", columns)


def read_attempts(run: str | Path | Location, columns: Sequence[str] | None = None) -> pa.Table:
    """Every attempt of a run once, whether the run is finished, killed or going on. Raises `NoRun`."""
    return _read(run, "attempts", columns)


def read_batches(
    run: str | Path | Location, table: str, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """What `read_rollouts` and `read_attempts` read, batch by batch: the shards, then what only the journals
    hold. Raises `NoRun`."""
    location = Location.of(run)
    if not location.exists():
        raise NoRun(f"{location}: there is no run here (no job.json and no shard)")
    # Journals first: rows move from them into shards, so that the other order could miss a row.
    waiting = journalled(location, table)
    names = SCHEMAS[table].names if columns is None else list(columns)
    seen: set[tuple[Any, ...]] = set()
    for batch in read_shards(location, table, {*names, *IDENTITY[table]} if waiting else names):
        if waiting:
            seen.update(identities(batch, table))
        yield batch.select(names)
    for batch in waiting:
        keys = identities(batch, table)
        fresh = [row for row, key in enumerate(keys) if key not in seen]
        seen.update(keys)
        if fresh:
            yield batch.take(pa.array(fresh)).select(names)


def read_shards(location: Location, table: str, columns: Iterable[str]) -> Iterator[pa.RecordBatch]:
    """The batches of a table's shards; `columns` in the order of the schema. Raises `RunError` where one is not
    whole."""
    return (batch for _, batch in read_numbered(location, table, columns))


def read_numbered(
    location: Location, table: str, columns: Iterable[str], start: int = 0
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The same with the ordinal of each batch, from the ordinal `start` on. Shards may be merged meanwhile."""
    columns = list(columns)
    at, last, gone = start, -1, ""
    while True:
        files = location.shard_files(table)
        if last >= 0 and (not files or files[-1].last <= last):
            return
        try:
            for shard in files[holding(location.filesystem, files, at) if at else 0 :]:
                reader = location.open_shard(shard.path, columns)
                first = first_batch(reader)
                for index in range(max(0, at - first), reader.num_record_batches):
                    try:
                        batch = reader.get_batch(index)
                    except UNREADABLE as error:
                        if location.is_there(shard.path):
                            raise damaged(shard.path, error) from error
                        raise FileNotFoundError(f"{shard.path} is gone") from error
                    at = first + index + 1
                    yield first + index, batch
            if not files or last >= 0:
                return
            # Once more: a listing that is made while the last shards are merged may lack them.
            last = files[-1].last
        except FileNotFoundError as error:
            # It was merged into a wider one, which is there before it goes; the same file is not missed twice.
            if str(error) == gone:
                raise
            gone = str(error)


def identities(batch: pa.RecordBatch, table: str) -> list[tuple[Any, ...]]:
    """What tells each of the rows from every other row of its table."""
    return list(zip(*(batch.column(name).to_pylist() for name in IDENTITY[table]), strict=True))


def _read(run: str | Path | Location, table: str, columns: Sequence[str] | None) -> pa.Table:
    schema = SCHEMAS[table]
    if columns is not None:
        schema = pa.schema([schema.field(column) for column in columns], metadata=schema.metadata)
    return pa.Table.from_batches(read_batches(run, table, columns), schema).unify_dictionaries()
