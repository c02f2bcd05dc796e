"""The files of a run: shards that are there whole or not at all, and a journal that survives a kill at any byte.

A run directory:

    job.json                    what was asked for
    attempts/part-00000.arrow   Arrow IPC files, one row an attempt (`schema.ATTEMPTS`)
    rollouts/part-00000.arrow   Arrow IPC files, one row an ended rollout (`schema.ROLLOUTS`), a batch a group
    journal/rollouts-00000.arrows   Arrow IPC streams: rows that are in no shard yet
    summary.json                there once the run has ended

Invariants:

- A shard is written as `.tmp`, fsynced and renamed, and never changes afterwards.
- A row is in a shard or in the journal at every moment after its `Journal.append` returned. Rows leave the
  journal only after their shard is on disk, so that a row can be in both: readers drop the journal's copy.
- One process at a time writes a run (`Location.lock`). Reading needs no lock, also while the run is written.

What a kill tears is the journal's last, not yet acknowledged append, and a `.tmp`; both are ignored.
Shards may lie at any `pyarrow.fs` location; the journal, which is appended to, is on this machine's disk.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.ipc

from rollcage.rollout.schema import KEY, SCHEMAS, check_version

SHARD_OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd", unify_dictionaries=True)
"""zstd, which pyarrow, datasets, polars and duckdb all read: measured on trajectories at a third of the size,
and faster to write than lz4."""

JOURNAL_OPTIONS = pa.ipc.IpcWriteOptions(compression=None)
"""Not compressed: a journal's batches are single rows, where compression costs five times its gain."""

TABLES = tuple(SCHEMAS)
IDENTITY: dict[str, tuple[str, ...]] = {"attempts": ("attempt_id",), "rollouts": KEY}
"""What no two rows of a table share."""

_SHARD = re.compile(r"part-(\d{5,})\.arrow")
_JOURNAL = re.compile(r"(attempts|rollouts)-(\d{5,})\.arrows")


class RunError(Exception):
    """A run directory is not as it must be; the message says what to do."""


class NoRun(RunError):
    """There is no run at this place."""


class RunExists(RunError):
    """There is a run already."""


class RunBusy(RunError):
    """Another process is writing this run."""


class Location:
    """Where a run lies: `run` is a path, a URI of `pyarrow.fs` (`s3://bucket/run`), or a `Location`.

    `journal`: the journal's directory on this machine, `RUN/journal` where the run itself is local; needed
    for writing a run that is not.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        journal: Path | None = None,
        filesystem: pa.fs.FileSystem | None = None,
    ) -> None:
        self.name = str(run)
        if filesystem is None and "://" in self.name:
            filesystem, path = pa.fs.FileSystem.from_uri(self.name)
        else:
            filesystem = filesystem or pa.fs.LocalFileSystem()
            path = self.name
        self.filesystem = filesystem
        self.local = Path(path) if isinstance(filesystem, pa.fs.LocalFileSystem) else None
        self.path = str(self.local.absolute()) if self.local else path.rstrip("/")
        self._shard_numbers: dict[str, Iterator[int]] = {}
        self.journal = self.local / "journal" if journal is None and self.local else journal

    @classmethod
    def of(cls, run: str | Path | Location) -> Location:
        """`run` itself, or the location that it names."""
        return run if isinstance(run, Location) else cls(run)

    def __str__(self) -> str:
        return self.name

    def exists(self) -> bool:
        """True where a run was begun here."""
        return self._type("job.json") is pa.fs.FileType.File or any(self.shards(table) for table in TABLES)

    def shards(self, table: str) -> list[str]:
        """Paths of the table's shards, in the order in which they were written."""
        selector = pa.fs.FileSelector(f"{self.path}/{table}", allow_not_found=True)
        found = [info for info in self.filesystem.get_file_info(selector) if _SHARD.fullmatch(info.base_name)]
        return [info.path for info in sorted(found, key=lambda info: _number(_SHARD, info.base_name))]

    def journals(self, table: str) -> list[Path]:
        """The table's journals, in the order in which they were begun."""
        if self.journal is None or not self.journal.is_dir():
            return []
        found = [path for path in self.journal.iterdir() if _JOURNAL.fullmatch(path.name)]
        return sorted(path for path in found if path.name.startswith(f"{table}-"))

    def open_shard(self, path: str, columns: Iterable[str]) -> pa.ipc.RecordBatchFileReader:
        """Open one shard, mapped into memory where it is local. Only `columns` are read. Raises `RunError` where it is
        not whole, `SchemaVersionError` for another version's."""
        source = pa.memory_map(path) if self.local else self.filesystem.open_input_file(path)
        try:
            reader = pa.ipc.open_file(source)
        except pa.ArrowInvalid as error:
            raise _damaged(path, error) from error
        check_version(reader.schema, path)
        wanted = sorted(reader.schema.get_field_index(column) for column in columns)
        return pa.ipc.open_file(source, options=pa.ipc.IpcReadOptions(included_fields=wanted))

    def write_shard(self, table: str, batches: Sequence[pa.RecordBatch]) -> str:
        """Write a new shard with these batches, each as one batch, and return its path once it is durable.

        Raises `OSError` where it can't be written; then nothing has changed.
        """
        path = self._new_shard(table)
        content = pa.Table.from_batches(batches, SCHEMAS[table])
        if self.local is None:
            # An object store shows an object only when it is complete: closing is the rename.
            with self.filesystem.open_output_stream(path) as sink:
                _write_file(sink, content)
            return path
        temporary = f"{path}.tmp"
        with pa.OSFile(temporary, "wb") as sink:
            _write_file(sink, content)
        _fsync(temporary)
        os.rename(temporary, path)
        _fsync(os.path.dirname(path))
        return path

    def _new_shard(self, table: str) -> str:
        if table not in self._shard_numbers:
            # Once: the lock's holder is the only one who makes shards.
            self.filesystem.create_dir(f"{self.path}/{table}")
            shards = self.shards(table)
            last = _number(_SHARD, shards[-1].rpartition("/")[2]) if shards else -1
            self._shard_numbers[table] = itertools.count(last + 1)
        for number in self._shard_numbers[table]:
            name = f"{table}/part-{number:05d}.arrow"
            if self._type(name) is pa.fs.FileType.NotFound:
                break
        return f"{self.path}/{name}"

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` to the file `name` of the run, whole or not at all."""
        data = json.dumps(value, indent=2, default=str).encode() + b"\n"
        path = f"{self.path}/{name}"
        self.filesystem.create_dir(self.path)
        if self.local is None:
            with self.filesystem.open_output_stream(path) as sink:
                sink.write(data)
            return
        Path(f"{path}.tmp").write_bytes(data)
        _fsync(f"{path}.tmp")
        os.rename(f"{path}.tmp", path)
        _fsync(self.path)

    def read_json(self, name: str) -> Any:
        """The content of the run's file `name`; None where there is none."""
        if self._type(name) is not pa.fs.FileType.File:
            return None
        with self.filesystem.open_input_stream(f"{self.path}/{name}") as source:
            return json.loads(source.read())

    def remove(self, name: str) -> None:
        """Delete the run's file or directory `name`, where it is there."""
        match self._type(name):
            case pa.fs.FileType.File:
                self.filesystem.delete_file(f"{self.path}/{name}")
            case pa.fs.FileType.Directory:
                self.filesystem.delete_dir(f"{self.path}/{name}")

    def erase(self) -> None:
        """Delete every file of the run, and nothing else. Only for the process that holds the lock."""
        for name in ("summary.json", *TABLES, "job.json"):
            self.remove(name)
        self.remove_journals()
        self._shard_numbers.clear()

    def remove_journals(self) -> None:
        """Delete the journals. Only for the process that holds the lock."""
        if self.journal is None or not self.journal.is_dir():
            return
        for path in (path for table in TABLES for path in self.journals(table)):
            path.unlink()
        if self.local and not any(self.journal.iterdir()):
            self.journal.rmdir()

    def remove_torn(self) -> None:
        """Delete what a kill left half written. Only for the process that holds the lock."""
        for table in TABLES if self.local else ():
            for path in Path(self.path, table).glob("part-*.arrow.tmp"):
                path.unlink()

    def lock(self) -> int:
        """Become the one process that writes this run; the lock ends with the process, or `os.close` of what
        is returned. Raises `RunBusy`."""
        directory = Path(self.path) if self.local else self.journal
        if directory is None:
            raise RunError(
                f"{self}: the run is not on this machine, so its journal must be given a place here"
            )
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            holder = _holder(directory)
            raise RunBusy(
                f"{self}: another process{holder} is writing this run: wait until it has ended, or name another "
                "directory (--output)"
            ) from error
        return lock

    def _type(self, name: str) -> pa.fs.FileType:
        return self.filesystem.get_file_info(f"{self.path}/{name}").type


class Journal:
    """One table's journal, begun by this process: an Arrow IPC stream that is only appended to.

    After a failed `append` the stream may be torn and takes no more (`broken`): go on in a new one.
    """

    def __init__(self, directory: Path, table: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        taken = [_number(_JOURNAL, path.name) for path in directory.glob(f"{table}-*.arrows")]
        self.path = directory / f"{table}-{max(taken, default=-1) + 1:05d}.arrows"
        self.broken = False
        self._sink = pa.OSFile(str(self.path), "wb")
        self._descriptor = os.open(self.path, os.O_RDONLY)
        self._writer = pa.ipc.new_stream(self._sink, SCHEMAS[table], options=JOURNAL_OPTIONS)
        _fsync(directory)

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
    for path in location.shards(table):
        reader = location.open_shard(path, columns)
        for index in range(reader.num_record_batches):
            try:
                batch = reader.get_batch(index)
            except (pa.ArrowInvalid, OSError) as error:
                raise _damaged(path, error) from error
            yield batch


def _damaged(path: str, error: Exception) -> RunError:
    return RunError(f"{path}: this shard is damaged: {error} (moved away, the rest can be read)")


def identities(batch: pa.RecordBatch, table: str) -> list[tuple[Any, ...]]:
    """What tells each of the rows from every other row of its table."""
    return list(zip(*(batch.column(name).to_pylist() for name in IDENTITY[table]), strict=True))


def _read(run: str | Path | Location, table: str, columns: Sequence[str] | None) -> pa.Table:
    schema = SCHEMAS[table]
    if columns is not None:
        schema = pa.schema([schema.field(column) for column in columns], metadata=schema.metadata)
    return pa.Table.from_batches(read_batches(run, table, columns), schema).unify_dictionaries()


def journalled(location: Location, table: str) -> list[pa.RecordBatch]:
    """Every whole batch of the table's journals; some of their rows may be in shards by now, too. For shards, read
    afterwards: rows move from journals into them."""
    while True:
        try:
            return [batch for path in location.journals(table) for batch in recover(path)]
        except FileNotFoundError:
            # The run's writer folded it meanwhile: its rows are in another journal or in a shard by now.
            continue


def _write_file(sink: pa.NativeFile, content: pa.Table) -> None:
    with pa.ipc.new_file(sink, content.schema, options=SHARD_OPTIONS) as writer:
        writer.write_table(content)


def _holder(directory: Path) -> str:
    """The process that has locked it, in brackets; empty where the kernel does not say (`/proc/locks`)."""
    try:
        locks = Path("/proc/locks").read_text()
    except OSError:
        return ""
    # 1: FLOCK  ADVISORY  WRITE 4711 fd:00:131 0 EOF
    rows = (line.split() for line in locks.splitlines())
    inode = f":{directory.stat().st_ino}"
    found = [row[4] for row in rows if row[1] == "FLOCK" and row[5].endswith(inode) and int(row[4]) > 0]
    return f" ({found[0]})" if len(found) == 1 else ""


def _number(pattern: re.Pattern[str], name: str) -> int:
    match = pattern.fullmatch(name)
    return int(match[match.lastindex or 0]) if match else -1


def _fsync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
