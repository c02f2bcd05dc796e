"""Where a run lies, and what may be done there: its JSON files, its lock, the places of its shards and journals.

The layout is `arrow.py`'s. A run may lie at any `pyarrow.fs` location; its journal, which is appended to, is on this
machine's disk.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.fs

from rollcage.rollout import shards as files
from rollcage.rollout.schema import SCHEMAS, SchemaVersionError

TABLES = tuple(SCHEMAS)

ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
"""Where AWS's own tools are told of another S3 server; the first that is set counts."""

READERS = 5000
"""Instants in which readers may look before a run counts as busy: some seconds."""

_JOURNAL = re.compile(r"(attempts|rollouts)-(\d{5,})\.arrows")


class RunError(Exception):
    """A run directory is not as it must be; the message says what to do."""


class Damaged(RunError, ValueError):
    """A file of the run does not hold what it must."""


class NoRun(RunError):
    """There is no run at this place."""


class RunExists(RunError):
    """There is a run already."""


class RunBusy(RunError):
    """Another process is writing this run."""


class Location:
    """Where a run lies: `run` is a path, a URI of `pyarrow.fs` (`s3://bucket/run`), or a `Location`.

    `journal`: the journal's directory on this machine. By default that is `RUN/journal` where the run itself is local,
    and `default_journal` for a URI; a `filesystem` needs one for writing. Raises `RunError` for a URI that pyarrow
    cannot take.
    """

    def __init__(
        self,
        run: str | Path,
        *,
        journal: str | Path | None = None,
        filesystem: pa.fs.FileSystem | None = None,
    ) -> None:
        self.name = str(run)
        remote = filesystem is None and "://" in self.name
        if remote:
            try:
                filesystem, path = pa.fs.FileSystem.from_uri(_with_endpoint(self.name))
            except (pa.ArrowException, OSError) as error:
                raise RunError(f"{_public(self.name)}: no run can lie there: {error}") from error
        else:
            filesystem = filesystem or pa.fs.LocalFileSystem()
            path = self.name
        self.filesystem = filesystem
        self.local = Path(path) if isinstance(filesystem, pa.fs.LocalFileSystem) else None
        self.path = str(self.local.absolute()) if self.local else path.rstrip("/")
        self._next: dict[str, files.Next] = {}
        if journal is not None:
            self.journal: Path | None = Path(journal)
        elif self.local:
            self.journal = self.local / "journal"
        else:
            self.journal = default_journal(self.name) if remote else None

    @classmethod
    def of(cls, run: str | Path | Location) -> Location:
        """`run` itself, or the location that it names."""
        return run if isinstance(run, Location) else cls(run)

    def __str__(self) -> str:
        """For people: without what a URI may hold of keys."""
        return _public(self.name)

    def exists(self) -> bool:
        """True where a run was begun here."""
        return self._type("job.json") is pa.fs.FileType.File or any(self.shards(table) for table in TABLES)

    def shards(self, table: str) -> list[str]:
        """Paths of the table's shards, in the order in which they were written."""
        return [shard.path for shard in self.shard_files(table)]

    def shard_files(self, table: str) -> list[files.Shard]:
        """The same with the numbers that each covers, and its size."""
        return files.listed(self.filesystem, f"{self.path}/{table}")

    def journals(self, table: str) -> list[Path]:
        """The table's journals, in the order in which they were begun."""
        if self.journal is None or not self.journal.is_dir():
            return []
        found = [path for path in self.journal.iterdir() if _JOURNAL.fullmatch(path.name)]
        return sorted(
            (path for path in found if path.name.startswith(f"{table}-")),
            key=lambda path: journal_number(path.name),
        )

    def missing(self, table: str) -> list[str]:
        """Shards that are not there, though later ones are: somebody moved them away. `first-last` for neighbours."""
        found, after = [], 0
        for shard in self.shard_files(table):
            if shard.first > after:
                found.append(
                    f"part-{after:05d}" + (f"-{shard.first - 1:05d}" if shard.first - 1 > after else "")
                )
            after = shard.last + 1
        return [f"{table}/{name}" for name in found]

    def open_shard(self, path: str, columns: Iterable[str]) -> pa.ipc.RecordBatchFileReader:
        """Open one shard, mapped into memory where it is local. Only `columns` are read. Raises `RunError` where it is
        not whole, `SchemaVersionError` for another version's, `FileNotFoundError` where it was merged meanwhile."""
        try:
            return files.opened(self.filesystem, path, columns)
        except UNREADABLE as error:
            if isinstance(error, SchemaVersionError) or getattr(error, "errno", None) is not None:
                raise  # the system's errors are no word on what the file holds
            raise damaged(path, error) from error

    def write_shard(self, table: str, batches: Sequence[pa.RecordBatch]) -> str:
        """Write a new shard with these batches, each as one batch, and return its path once it is durable. Only for the
        process that holds the lock.

        Raises `OSError` where it can't be written; then nothing has changed.
        """
        place = self._place(table)
        return files.write_next(self.filesystem, f"{self.path}/{table}", SCHEMAS[table], batches, place)

    def batches(self, table: str) -> int:
        """How many batches the table's shards hold. Only for the process that holds the lock."""
        return self._place(table).batch

    def _place(self, table: str) -> files.Next:
        if table not in self._next:
            # Once: the lock's holder is the only one who makes shards.
            self.filesystem.create_dir(f"{self.path}/{table}")
            self._next[table] = files.next_after(self.filesystem, self.shard_files(table))
        return self._next[table]

    def write_json(self, name: str, value: Any) -> None:
        """Write `value` to the file `name` of the run, whole or not at all."""
        data = json.dumps(value, indent=2, default=str).encode() + b"\n"
        path = f"{self.path}/{name}"
        self.filesystem.create_dir(path.rpartition("/")[0])
        files.write_whole(self.filesystem, path, lambda sink: sink.write(data))

    def read_json(self, name: str) -> Any:
        """The content of the run's file `name`; None where there is none. Raises `Damaged` for one that is no JSON."""
        if self._type(name) is not pa.fs.FileType.File:
            return None
        with self.filesystem.open_input_stream(f"{self.path}/{name}") as source:
            text = source.read()
        try:
            return json.loads(text)
        except ValueError as error:
            raise Damaged(
                f"{self.path}/{name}: this file is damaged: {error} (put it back as it was)"
            ) from error

    def remove(self, name: str) -> None:
        """Delete the run's file or directory `name`, where it is there."""
        match self._type(name):
            case pa.fs.FileType.File:
                self.filesystem.delete_file(f"{self.path}/{name}")
            case pa.fs.FileType.Directory:
                self.filesystem.delete_dir(f"{self.path}/{name}")

    def erase(self) -> None:
        """Delete every file of the run, and nothing else. Only for the process that holds the lock."""
        for name in ("summary.json", *TABLES, "feed", "curriculum.jsonl", "job.json"):
            self.remove(name)
        self.remove_journals()
        self._next.clear()

    def remove_journals(self) -> None:
        """Delete the journals. Only for the process that holds the lock."""
        if self.journal is None or not self.journal.is_dir():
            return
        for path in (path for table in TABLES for path in self.journals(table)):
            path.unlink()
        if self.local and not any(self.journal.iterdir()):
            self.journal.rmdir()

    def remove_torn(self) -> None:
        """Delete what a kill left half done: a shard half written, shards that a merged one holds already. Only for the
        process that holds the lock."""
        for table in TABLES:
            for path in Path(self.path, table).glob("part-*.arrow.tmp") if self.local else ():
                path.unlink()
            for merged in files.covered(self.filesystem, f"{self.path}/{table}"):
                self.filesystem.delete_file(merged)

    @property
    def here(self) -> Path:
        """The run's directory on this machine: itself, or that of its journal. Raises `RunError` where it has none."""
        directory = Path(self.path) if self.local else self.journal
        if directory is None:
            raise RunError(
                f"{self}: the run is not on this machine, so its journal must be given a place here"
            )
        return directory

    def lock(self) -> int:
        """Become the one process that writes this run; the lock ends with the process, or `os.close` of what
        is returned. Of a run elsewhere it holds on this machine only. Raises `RunBusy`."""
        directory = self.here
        directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY)
        if not _locked(lock):
            os.close(lock)
            raise RunBusy(
                f"{self}: another process{_holder(directory)} is writing this run: wait until it has ended, or name "
                "another directory (--output)"
            )
        return lock

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Inside the block this process is the one that writes this run. Raises as `lock`."""
        lock = self.lock()
        try:
            yield
        finally:
            os.close(lock)

    def is_there(self, path: str) -> bool:
        """True where a file lies at this path of the filesystem."""
        return self.filesystem.get_file_info(path).type is pa.fs.FileType.File

    def _type(self, name: str) -> pa.fs.FileType:
        return self.filesystem.get_file_info(f"{self.path}/{name}").type


def _locked(lock: int) -> bool:
    """Take the lock; False where a writer has it. A reader that looks for the writer holds it shared for an instant,
    and is waited for."""
    for _ in range(READERS):
        for kind in (fcntl.LOCK_EX, fcntl.LOCK_SH):
            try:
                fcntl.flock(lock, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            if kind == fcntl.LOCK_EX:
                return True
            fcntl.flock(lock, fcntl.LOCK_UN)
            time.sleep(0.001)
            break
        else:
            return False
    return False


def state_directory() -> Path:
    """Where what outlives a run is kept for this user (`XDG_STATE_HOME`)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rollcage"


def default_journal(uri: str) -> Path:
    """The journal's directory of a run at `uri`, below the user's state directory (`XDG_STATE_HOME`): named after the
    run, and the same for every spelling of its endpoint and keys."""
    parts = urlsplit(uri)
    place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path.rstrip('/')}"
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", place.rpartition("/")[2]) or "run"
    return state_directory() / "journals" / f"{stem}-{blake2b(place.encode(), digest_size=6).hexdigest()}"


def journal_number(name: str) -> int:
    """The number in a journal's file name; -1 where it has none."""
    match = _JOURNAL.fullmatch(name)
    return int(match[2]) if match else -1


UNREADABLE = (pa.ArrowException, ValueError, OSError)
"""What Arrow raises over a shard that is not whole; a name in it that is no UTF-8 is a `ValueError`."""


def damaged(path: str, error: Exception) -> Damaged:
    """What is raised for a shard that is not whole."""
    return Damaged(f"{path}: this shard is damaged: {error} (moved away, the rest can be read)")


def _with_endpoint(uri: str) -> str:
    """The URI with the S3 server that the environment names, which pyarrow does not ask for."""
    server = next((os.environ[name] for name in ENDPOINTS if os.environ.get(name)), None)
    if server is None or not uri.startswith("s3://") or "endpoint_override=" in uri:
        return uri
    scheme, _, address = server.rstrip("/").rpartition("://")
    added = f"endpoint_override={quote(address, safe='')}" + (f"&scheme={scheme}" if scheme else "")
    return f"{uri}{'&' if '?' in uri else '?'}{added}"


def _public(name: str) -> str:
    if "://" not in name:
        return name
    scheme, _, rest = name.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path.partition('?')[0]}"


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
