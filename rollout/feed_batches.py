"""The committed batches of a run by their ordinal, also of a run that is being written, compacted or resumed.

A batch's ordinal is how many come before it in the order of shards, and never changes. Each shard says in its
schema's metadata which is its first, so that any of them is found with a few looks. Nothing is held but the shards
that were opened last; a shard that compaction deleted meanwhile is looked for anew.
"""

from __future__ import annotations

import fcntl
import os
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import pyarrow as pa
import pyarrow.ipc

from rollcage.rollout.feed_heads import Head, make_head
from rollcage.rollout.group_head import read_head
from rollcage.rollout.location import UNREADABLE, Location, RunError, damaged
from rollcage.rollout.schema import ROLLOUTS
from rollcage.rollout.shards import first_batch

TABLE = "rollouts"

SMALLEST = "sample"
"""The column that is decoded with a batch's head alone: none at all cannot be asked for."""

OPEN_SHARDS = 4
"""Shards that stay open: the one that is read, and those with earlier parts of its groups."""

LIST_AGAIN_SEC = 1.0
"""A folder whose time of change is as it was is listed again after this long: two shards in one tick of the file
system's clock leave one time."""

GAPS = 5
"""Listings in which a shard may be missed between others. One that runs while shards are made and merged may show the
later ones alone."""


class Life(StrEnum):
    """What becomes of a run: more is written, it has ended, or nobody writes it although it has not."""

    WRITTEN = "written"
    ENDED = "ended"
    ABANDONED = "abandoned"


@dataclass
class _Shard:
    path: str
    first: int
    count: int
    heads: pa.ipc.RecordBatchFileReader
    rows: pa.ipc.RecordBatchFileReader | None = None


Reader = Callable[[_Shard], pa.ipc.RecordBatchFileReader]


class Batches:
    """Reads `columns` of a run's committed groups. `alone`: one reader has them all, so that a batch is read once with
    its head; a reader that has a share reads the heads of all and the rest of its own."""

    def __init__(self, location: Location, columns: Iterable[str], *, alone: bool = False) -> None:
        self.location = location
        self._alone = alone
        self._last: tuple[int, pa.RecordBatch] | None = None
        self.columns = [name for name in ROLLOUTS.names if name in set(columns)]
        self._paths: list[str] = []
        self._firsts: dict[str, int] = {}
        self._open: OrderedDict[str, _Shard] = OrderedDict()
        self._changed: int | None = None
        self._listed_at = -LIST_AGAIN_SEC

    def head(self, ordinal: int) -> Head | None:
        """The head of this batch; None where it is not committed. Raises `RunError` where a shard is damaged or
        missing."""
        found = self._get(ordinal, _heads)
        if found is None:
            return None
        batch, head, path = found
        self._last = (ordinal, batch) if self._alone else None
        return make_head(head, ordinal, path)

    def rows(self, ordinal: int) -> pa.RecordBatch:
        """The batch, which is there. Raises as `head`."""
        last, self._last = self._last, None
        if last and last[0] == ordinal:
            return last[1]
        found = self._get(ordinal, self._rows)
        if found is None:
            raise RunError(f"{self.location}: batch {ordinal} was there, and is there no more")
        return found[0]

    def count(self) -> int:
        """How many batches are committed now."""
        while True:
            self._list()
            if not self._paths:
                return 0
            if shard := self._opened(self._paths[-1]):
                return shard.first + shard.count

    def refresh(self) -> None:
        """Look for new shards with the next question, whatever the folder's time of change says."""
        self._changed = None

    def _get(self, ordinal: int, reader: Reader) -> tuple[pa.RecordBatch, dict[str, Any], str] | None:
        """The batch as this reader of its shard has it, what is said beside it, and the shard's path."""
        for last in (False, True):
            if (shard := self._shard(ordinal)) is None:
                return None
            try:
                batch, said = reader(shard).get_batch_with_custom_metadata(ordinal - shard.first)
                return batch, read_head(said), shard.path
            except UNREADABLE as error:
                # An object that is deleted or written anew can't be read on, as a file that is open can.
                if last:
                    raise damaged(shard.path, error) from error
                del self._open[shard.path]
                self.refresh()
        raise AssertionError("the second try returns or raises")

    def _rows(self, shard: _Shard) -> pa.ipc.RecordBatchFileReader:
        if shard.rows is None:
            shard.rows = self.location.open_shard(shard.path, self.columns)
        return shard.rows

    def _shard(self, ordinal: int) -> _Shard | None:
        for shard in reversed(self._open.values()):
            if shard.first <= ordinal < shard.first + shard.count:
                return shard
        behind: _Shard | None = None
        for _ in range(GAPS):
            behind = self._look(ordinal)
            if behind is None or ordinal >= behind.first:
                return behind
            self.refresh()
        assert behind
        raise RunError(
            f"{self.location}: batches {ordinal} to {behind.first - 1} are missing (was a shard of {TABLE}/ moved "
            f'away?): go on behind them with start={{"batch": {behind.first}}}'
        )

    def _look(self, ordinal: int) -> _Shard | None:
        """The shard with this batch, or the first one behind it; None where there is neither."""
        self._list()
        place = max(bisect_right(self._paths, ordinal, key=self._first) - 1, 0)
        for path in self._paths[place:]:
            shard = self._opened(path)
            if shard and ordinal < shard.first + shard.count:
                return shard
        return None

    def _first(self, path: str) -> int:
        if path not in self._firsts:
            shard = self._opened(path)
            # One that is gone was merged into its neighbours: the listing that follows shows what came of it.
            self._firsts[path] = shard.first if shard else -1
        return self._firsts[path]

    def _opened(self, path: str) -> _Shard | None:
        """The shard at this path; None where it was merged into a wider one."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        try:
            heads = self.location.open_shard(path, self.columns if self._alone else (SMALLEST,))
        except FileNotFoundError:
            self.refresh()
            return None
        first = first_batch(heads)
        self._open[path] = _Shard(
            path, first, heads.num_record_batches, heads, heads if self._alone else None
        )
        self._firsts[path] = first
        if len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)
        return self._open[path]

    def _list(self) -> None:
        now = time.monotonic()
        changed = self._folder_changed()
        if changed is not None and changed == self._changed and now - self._listed_at < LIST_AGAIN_SEC:
            return
        paths = self.location.shards(TABLE)
        for _ in range(GAPS if self._paths else 0):
            # None at all, while they are merged, may be what one listing shows.
            paths = paths or self.location.shards(TABLE)
        if self._paths and not paths:
            raise RunError(f"{self.location}: the run was begun anew, or deleted, while it was read")
        self._paths = paths
        self._firsts = {path: first for path, first in self._firsts.items() if path in self._open} | {
            path: self._firsts[path] for path in self._paths if self._firsts.get(path, -1) >= 0
        }
        self._changed, self._listed_at = changed, now

    def _folder_changed(self) -> int | None:
        if self.location.local is None:
            return None
        try:
            return os.stat(f"{self.location.path}/{TABLE}").st_mtime_ns
        except FileNotFoundError:
            return None


def _heads(shard: _Shard) -> pa.ipc.RecordBatchFileReader:
    return shard.heads


def life(location: Location, *, look_for_writer: bool = False) -> Life:
    """What becomes of the run. Who writes it holds its lock, which the kernel takes from the dead: `look_for_writer`
    asks for it, where it is on this machine. Raises `RunError` where the run is gone."""
    summary = f"{location.path}/summary.json"
    if location.is_there(summary):
        return Life.ENDED
    if not look_for_writer or _locked(location):
        return Life.WRITTEN
    if not location.exists():
        raise RunError(f"{location}: the run was deleted")
    # Whoever ends a run writes the summary and then lets go.
    return Life.ENDED if location.is_there(summary) else Life.ABANDONED


def _locked(location: Location) -> bool:
    """True where a process holds the run's lock, and where that can't be known: it is on the journal's machine."""
    directory = location.local or location.journal
    if directory is None:
        return True
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except FileNotFoundError:
        return location.local is None
    try:
        # Shared, and let go of at once: the writer that begins in this instant tries again (`Location.lock`).
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
