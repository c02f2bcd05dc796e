"""What may become of shards that are there: neighbours are merged, and rollouts that are run again leave.

Batches keep their ordinals and their order through both. A merged shard is there before those that it covers are
deleted; a reader that meets a deleted one finds its batches in the wider one (`arrow.read_numbered`). All of it is only
for the process that holds the run's lock.

Memory: one batch, and of a run that is not local one shard.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import pyarrow as pa

from rollcage.rollout.arrow import IDENTITY, Location, identities
from rollcage.rollout.group_head import head_of, lessened, read_head
from rollcage.rollout.location import UNREADABLE, damaged
from rollcage.rollout.schema import NAME, SCHEMAS
from rollcage.rollout.shards import Headed, Shard, first_batch, names_in, options_for, write

FAN = 64
"""A ledger that runs merges so many neighbours, when there are so many of one size: a batch is written anew once for
each power of it, and a run of a million groups has some hundred files."""

PACKED = 2
"""About how much smaller a small batch is in its shard than in memory."""

LARGE_BYTES = 256 << 20
"""A merged shard is at most about so large."""


def due(shards: Sequence[Shard], fan: int = FAN) -> list[Shard]:
    """Which neighbours a ledger that runs merges next; none where there are too few. They hold about equally many
    commits, so that none is merged with much smaller ones again and again."""
    level, found = -1, list[Shard]()
    for shard in shards:
        if found and shard.first != found[-1].last + 1:
            found = []
        if shard.size > LARGE_BYTES // 2:
            found = []
        elif found and _level(shard, fan) == level:
            found.append(shard)
        else:
            level, found = _level(shard, fan), [shard]
        if len(found) == fan:
            return next(groups(found), [])
    return []


def groups(shards: Sequence[Shard]) -> Iterator[list[Shard]]:
    """All neighbours that fit into one shard together. Over one that is missing nothing is merged: the ordinals of its
    batches stay its own."""
    found, size = list[Shard](), 0
    for shard in shards:
        if size + shard.size > LARGE_BYTES or (found and shard.first != found[-1].last + 1):
            if len(found) > 1:
                yield found
            found, size = [], 0
        found.append(shard)
        size += shard.size
    if len(found) > 1:
        yield found


def merge(
    location: Location, table: str, neighbours: Sequence[Shard], wanted: Callable[[], bool] = lambda: True
) -> bool:
    """Put neighbours into one shard. `wanted` is asked before that is there: where it says no, nothing has changed, and
    False is returned. Raises `RunError` for a damaged one, `OSError`."""
    names = _names(location, table, neighbours)
    options = _options(location, neighbours)
    first = first_batch(location.open_shard(neighbours[0].path, ()))
    path = f"{location.path}/{table}/part-{neighbours[0].first:05d}-{neighbours[-1].last:05d}.arrow"
    batches = (
        headed for shard in neighbours for headed in _batches(location, shard.path, SCHEMAS[table].names)
    )
    if not write(location.filesystem, path, SCHEMAS[table], batches, first, names, options, wanted):
        return False
    for shard in neighbours:
        if shard.path != path:
            location.filesystem.delete_file(shard.path)
    return True


def compact(
    location: Location, table: str, wanted: Callable[[], bool] = lambda: True, *, fan: int | None = None
) -> int:
    """Merge what is `due`, or with no `fan` all neighbours that fit into one shard. Returns how many shards fewer there
    are. Raises as `merge`."""
    gone = 0
    while neighbours := (
        next(groups(location.shard_files(table)), [])
        if fan is None
        else due(location.shard_files(table), fan)
    ):
        if not merge(location, table, neighbours, wanted):
            break
        gone += len(neighbours) - 1
    return gone


def withdraw(location: Location, table: str, leaving: Collection[tuple[Any, ...]]) -> int:
    """Take the rows of these identities out of the shards, whose batches stay, empty ones too. Returns how many there
    were. A kill leaves some of them there. The heads go on to tell of them. Raises as `merge`."""
    count, until = 0, location.batches(table)
    for shard in location.shard_files(table):
        found = [identities(batch, table) for batch, _ in _batches(location, shard.path, IDENTITY[table])]
        staying = [[row for row, key in enumerate(keys) if key not in leaving] for keys in found]
        gone = sum(map(len, found)) - sum(map(len, staying))
        if gone:
            kept = (
                (batch.take(pa.array(rows, pa.int64())), head and lessened(head, rows, until))
                for (batch, head), rows in zip(
                    _batches(location, shard.path, SCHEMAS[table].names), staying, strict=True
                )
            )
            first = first_batch(location.open_shard(shard.path, ()))
            names = _names(location, table, [shard])
            options = _options(location, [shard])
            write(location.filesystem, shard.path, SCHEMAS[table], kept, first, names, options)
            count += gone
    return count


def _names(location: Location, table: str, shards: Sequence[Shard]) -> list[pa.Array]:
    """What each column of names holds in all of these shards."""
    columns = [field.name for field in SCHEMAS[table] if field.type == NAME]
    return [
        names_in(
            batch.column(0) for shard in shards for batch, _ in _batches(location, shard.path, (column,))
        )
        for column in columns
    ]


def _options(location: Location, shards: Sequence[Shard]) -> pa.ipc.IpcWriteOptions:
    """How their batches, which are packed as they lie there, are packed again."""
    count = sum(location.open_shard(shard.path, ()).num_record_batches for shard in shards)
    return options_for(PACKED * sum(shard.size for shard in shards), count)


def _batches(location: Location, path: str, columns: Sequence[str]) -> Iterator[Headed]:
    reader = location.open_shard(path, columns)
    for index in range(reader.num_record_batches):
        try:
            batch, said = reader.get_batch_with_custom_metadata(index)
            yield batch, head_of(batch) if said is None else read_head(said)
        except UNREADABLE as error:
            raise damaged(path, error) from error


def _level(shard: Shard, fan: int) -> int:
    """The power of `fan` that its number of commits has reached."""
    level, span = 0, shard.span
    while span >= fan:
        level, span = level + 1, span // fan
    return level
