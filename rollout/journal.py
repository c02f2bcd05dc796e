"""The journal: rows that are in no shard yet, in Arrow's stream format, on this machine's disk.

It is only appended to. What a kill tears is the last append, which was not yet acknowledged, and `recover` leaves that
out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc

from rollcage.rollout.location import Location, journal_number
from rollcage.rollout.schema import SCHEMAS, check_version
from rollcage.rollout.shards import fsync

JOURNAL_OPTIONS = pa.ipc.IpcWriteOptions(compression=None)
"""Not compressed: a journal's batches are single rows, where compression costs five times its gain."""


class Journal:
    """One table's journal, begun by this process: an Arrow IPC stream that is only appended to.

    After a failed `append` the stream may be torn and takes no more (`broken`): go on in a new one.
    """

    def __init__(self, directory: Path, table: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        taken = [journal_number(path.name) for path in directory.glob(f"{table}-*.arrows")]
        self.path = directory / f"{table}-{max(taken, default=-1) + 1:05d}.arrows"
        self.broken = False
        self._sink = pa.OSFile(str(self.path), "wb")
        self._descriptor = os.open(self.path, os.O_RDONLY)
        self._writer = pa.ipc.new_stream(self._sink, SCHEMAS[table], options=JOURNAL_OPTIONS)
        fsync(directory)

    @property
    def size(self) -> int:
        """Bytes so far."""
        return int(self._sink.tell())

    def append(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Write the batches; when this returns, they are on disk. Raises `OSError`."""
        self.broken = True
        for batch in batches:
            self._writer.write_batch(batch)
        os.fsync(self._descriptor)
        self.broken = False

    def close(self) -> None:
        """Close the file and leave it where it is."""
        self._sink.close()
        os.close(self._descriptor)


def recover(path: str | Path) -> list[pa.RecordBatch]:
    """Every whole batch of a journal, in order. A torn tail ends it; it was never acknowledged.

    Raises `OSError` where the file can't be opened, `SchemaVersionError` for another version's.
    """
    batches: list[pa.RecordBatch] = []
    with pa.OSFile(str(path), "rb") as source:
        try:
            reader = pa.ipc.open_stream(source)
        except (pa.ArrowException, OSError):
            return batches
        check_version(reader.schema, path)
        while True:
            try:
                batches.append(reader.read_next_batch())
            except (StopIteration, pa.ArrowException, OSError):
                return batches


def journalled(location: Location, table: str) -> list[pa.RecordBatch]:
    """Every whole batch of the table's journals; some of their rows may be in shards by now, too. For shards, read
    afterwards: rows move from journals into them."""
    while True:
        try:
            return [batch for path in location.journals(table) for batch in recover(path)]
        except FileNotFoundError:
            # The run's writer folded it meanwhile: its rows are in another journal or in a shard by now.
            continue
