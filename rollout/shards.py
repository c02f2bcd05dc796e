"""The shards of one table: their names, their order, and the ordinals of their batches.

    part-00007.arrow            one commit's groups, a batch each
    part-00000-00063.arrow      64 neighbours merged: the same batches in the same order

A batch has an ordinal: how many batches stand before it in the order of shards. It never changes, and each shard's
metadata has that of its first batch (`rollcage.first_batch`), so that a reader can begin anywhere. A merged shard
covers the numbers in its name. Where it and some of those are there (a kill came between), the wider one counts.

A file called `part-*.arrow` is whole: it is written under another name, synced and renamed; an object store shows an
object only when it is complete.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.ipc

from rollcage.rollout.group_head import head_of, written_head
from rollcage.rollout.schema import NAME, check_version

SMALL_BYTES = 64 << 10
"""A batch below this size is packed with lz4. It has some hundred buffers, and for each zstd makes a context, in 9 us:
a group of toy rollouts takes fifteen times as long as with lz4, writing and reading, and a tenth less of the disk."""

THREADS_BYTES = 256 << 10
"""From this size of a batch on its buffers are packed in Arrow's threads; handing smaller ones over costs more."""

THREADS_PACKED_BYTES = THREADS_BYTES // 4
"""The same of a batch as it lies in its shard, for reading."""

FEW = 4
"""So many columns, of which a reader of tokens needs one, are decoded sooner without threads on a machine at work, and
about as soon on one that is idle."""

_ALONE = pa.ipc.IpcReadOptions(use_threads=False)
_SMALL = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_MIDDLE = pa.ipc.IpcWriteOptions(compression="zstd", use_threads=False)
SHARD_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")
"""zstd, which pyarrow, datasets, polars and duckdb all read (lz4, too): a quarter of the size of trajectories of 4,000
tokens, where lz4 leaves half."""

BUFFER_BYTES = 1 << 20
"""A batch is some hundred pieces, most of them small: one call of the system each costs a tenth of the time."""

LISTINGS = 5
"""Of a folder that seems to lack a shard."""

FIRST_BATCH_KEY = b"rollcage.first_batch"

Headed = tuple[pa.RecordBatch, dict[str, Any] | None]
"""A batch and what is said beside it."""

_SHARD = re.compile(r"part-(\d{5,})(?:-(\d{5,}))?\.arrow")


@dataclass(frozen=True)
class Shard:
    """One file: the numbers `first` to `last` that it covers, and its size in bytes."""

    path: str
    first: int
    last: int
    size: int

    @property
    def span(self) -> int:
        """How many commits it holds."""
        return self.last - self.first + 1


@dataclass
class Next:
    """What the next shard of a table is called, and the ordinal of its first batch."""

    number: int
    batch: int


def listed(filesystem: pa.fs.FileSystem, directory: str) -> list[Shard]:
    """The shards that count, in order.

    A listing that is made while shards are merged may have neither the merged one, which came behind it, nor its parts,
    which went before it. Numbers have no gaps, so one is a reason to list again; a shard that was moved away leaves one
    for good.
    """
    for _ in range(LISTINGS):
        shards = _sorted(filesystem, directory)[0]
        after = [0, *(shard.last + 1 for shard in shards)]
        if all(shard.first == number for shard, number in zip(shards, after, strict=False)):
            break
    return shards


def covered(filesystem: pa.fs.FileSystem, directory: str) -> list[str]:
    """Paths of shards that a wider one holds already."""
    return [shard.path for shard in _sorted(filesystem, directory)[1]]


def opened(
    filesystem: pa.fs.FileSystem, path: str, columns: Iterable[str] | None
) -> pa.ipc.RecordBatchFileReader:
    """Open a shard for `columns` (None: all), mapped into memory where it is local. Raises `pa.ArrowInvalid`,
    `SchemaVersionError`, `FileNotFoundError`."""
    local = isinstance(filesystem, pa.fs.LocalFileSystem)
    source = pa.memory_map(path) if local else filesystem.open_input_file(path)
    reader = pa.ipc.open_file(source, options=_ALONE)
    check_version(reader.schema, path)
    names = reader.schema.names
    wanted = sorted(names.index(column) for column in (names if columns is None else columns))
    threads = len(wanted) > FEW and source.size() > THREADS_PACKED_BYTES * reader.num_record_batches
    if not wanted or (len(wanted) == len(names) and not threads):
        return reader
    return pa.ipc.open_file(
        source, options=pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=threads)
    )


def first_batch(reader: pa.ipc.RecordBatchFileReader) -> int:
    """The ordinal of the shard's first batch."""
    return int((reader.schema.metadata or {}).get(FIRST_BATCH_KEY, b"0"))


def next_after(filesystem: pa.fs.FileSystem, shards: Sequence[Shard]) -> Next:
    """What follows these shards. Raises as `opened`."""
    if not shards:
        return Next(0, 0)
    reader = opened(filesystem, shards[-1].path, ())
    return Next(shards[-1].last + 1, first_batch(reader) + reader.num_record_batches)


def holding(filesystem: pa.fs.FileSystem, shards: Sequence[Shard], ordinal: int) -> int:
    """The index of the shard that holds the batch with this ordinal, or would. Opens O(log shards). Raises as
    `opened`."""
    place = bisect_right(shards, ordinal, key=lambda shard: first_batch(opened(filesystem, shard.path, ())))
    return max(0, place - 1)


def write_next(
    filesystem: pa.fs.FileSystem,
    directory: str,
    schema: pa.Schema,
    batches: Sequence[pa.RecordBatch],
    place: Next,
) -> str:
    """Write the next shard and move `place` on. Returns its path. Raises `OSError`; then nothing has changed."""
    while True:
        path = f"{directory}/part-{place.number:05d}.arrow"
        if filesystem.get_file_info(path).type is pa.fs.FileType.NotFound:
            break
        place.number += 1  # somebody else's file, which is never written over
    write(filesystem, path, schema, [(batch, head_of(batch)) for batch in batches], place.batch)
    place.number += 1
    place.batch += len(batches)
    return path


def options_for(size: int, batches: int) -> pa.ipc.IpcWriteOptions:
    """How batches that have `size` bytes together are packed."""
    mean = size // max(1, batches)
    return _SMALL if mean < SMALL_BYTES else _MIDDLE if mean < THREADS_BYTES else SHARD_OPTIONS


def write(
    filesystem: pa.fs.FileSystem,
    path: str,
    schema: pa.Schema,
    batches: Iterable[Headed],
    first: int,
    names: Sequence[pa.Array] | None = None,
    options: pa.ipc.IpcWriteOptions | None = None,
    ready: Callable[[], bool] = lambda: True,
) -> bool:
    """Write a shard whose first batch has the ordinal `first`, and replace the one that has this path.

    `names`, what the columns of names hold, and `options` are given where `batches` can be gone through only once.
    `ready` is asked when all is written: where it says no, nothing has changed and False is returned. Raises `OSError`;
    then nothing has changed.
    """
    columns = [index for index, field in enumerate(schema) if field.type == NAME]
    if names is None or options is None:
        batches = list(batches)
        names = [names_in(batch.column(index) for batch, _ in batches) for index in columns]
        options = options_for(sum(batch.nbytes for batch, _ in batches), len(batches))
    own = schema.with_metadata({**(schema.metadata or {}), FIRST_BATCH_KEY: str(first).encode()})

    def fill(sink: pa.NativeFile) -> None:
        with pa.ipc.new_file(sink, own, options=options) as writer:
            for batch, head in batches:
                batch = _renamed(batch, own, columns, names)
                writer.write_batch(batch, custom_metadata=written_head(head))

    return write_whole(filesystem, path, fill, ready)


def names_in(columns: Iterable[pa.DictionaryArray]) -> pa.Array:
    """Every name of some dictionary columns once, in the order in which they are met."""
    found: dict[str, None] = {}
    for column in columns:
        found.update(dict.fromkeys(column.dictionary.to_pylist()))
    return pa.array(found, pa.string())


def write_whole(
    filesystem: pa.fs.FileSystem,
    path: str,
    fill: Callable[[pa.NativeFile], object],
    ready: Callable[[], bool] = lambda: True,
) -> bool:
    """Write a file so that it is there whole or not at all, durably; see `write` for `ready`. Raises `OSError`."""
    if not isinstance(filesystem, pa.fs.LocalFileSystem):
        # Closing is what makes an object: what is not wanted after all must not have been begun.
        buffer = pa.BufferOutputStream()
        fill(buffer)
        if not ready():
            return False
        with filesystem.open_output_stream(path) as sink:
            sink.write(buffer.getvalue())
        return True
    temporary = f"{path}.tmp"
    with pa.BufferedOutputStream(pa.OSFile(temporary, "wb"), BUFFER_BYTES) as sink:
        fill(sink)
    fsync(temporary)
    if not ready():
        os.unlink(temporary)
        return False
    os.rename(temporary, path)
    fsync(os.path.dirname(path))
    return True


def fsync(path: str | os.PathLike[str]) -> None:
    """Have the disk hold what a file or directory holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sorted(filesystem: pa.fs.FileSystem, directory: str) -> tuple[list[Shard], list[Shard]]:
    """The shards that count, in order, and those that are covered."""
    selector = pa.fs.FileSelector(directory, allow_not_found=True)
    found = []
    for info in filesystem.get_file_info(selector):
        if match := _SHARD.fullmatch(info.base_name):
            first = int(match[1])
            found.append(Shard(info.path, first, int(match[2] or first), info.size or 0))
    found.sort(key=lambda shard: (shard.first, -shard.last))
    counting: list[Shard] = []
    under: list[Shard] = []
    for shard in found:
        wider = counting and counting[-1].last >= shard.last
        (under if wider else counting).append(shard)
    return counting, under


def _renamed(
    batch: pa.RecordBatch, schema: pa.Schema, columns: Sequence[int], names: Sequence[pa.Array]
) -> pa.RecordBatch:
    """The batch with one dictionary for the whole file: a file can't replace one. Raises `pa.ArrowInvalid` for a batch
    of another table."""
    arrays = list(batch.columns)
    if [field.type for field in batch.schema] != schema.types:
        raise pa.ArrowInvalid("these rows are of another table")
    for index, known in zip(columns, names, strict=True):
        if not arrays[index].dictionary.equals(known):
            place = {name: code for code, name in enumerate(known.to_pylist())}
            codes = [place[name] for name in arrays[index].to_pylist()]
            arrays[index] = pa.DictionaryArray.from_arrays(pa.array(codes, NAME.index_type), known)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
