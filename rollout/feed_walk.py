"""From batches to the groups of one reader: which are closed and wanted, in what order, and whose they are.

Everything but `Reader.rank` follows from the committed batches and the policy alone, so that readers of different
ranks come to the same numbers without asking each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from rollcage.rollout.feed_batches import Batches
from rollcage.rollout.feed_cursor import Place, Reader, Start, Taken
from rollcage.rollout.feed_heads import GroupKey, GroupPolicy, Head, Parts, Row, Standing, standing
from rollcage.rollout.location import RunError
from rollcage.rollout.schema import ROLLOUTS

COUNTS = ("complete", "short", "zero_variance", "again", "open", "dropped", "stale", "given")
"""What a feed counts. The first five are of all groups that it has come by, whoever's they are: closed with all valid
rewards, closed with fewer, without a difference between them, closed once more; and not closed yet. `dropped`: closed,
and not wanted by the policy. `stale` and `given` are this reader's own."""


@dataclass(frozen=True)
class Found:
    """A group that this reader is to be given: closed by the batch `ordinal`."""

    ordinal: int
    key: GroupKey
    standing: Standing
    again: bool
    number: int


class Walk:
    """Goes over the batches from `start` on. `place` is behind what has been looked at."""

    def __init__(self, batches: Batches, policy: GroupPolicy, reader: Reader, start: Start) -> None:
        self.place = start.place
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._batches = batches
        self._policy = policy
        self._reader = reader
        self._base = start.base
        self._taken: list[Taken] = list(start.taken)
        self._parts: Parts | None = None
        self._open: set[GroupKey] = set()

    @property
    def cursor(self) -> dict[str, Any]:
        """The cursor at `place`."""
        return self._reader.cursor(self.place, self._base, self._taken)

    def next(self) -> Found | None:
        """The next group for this reader; None where no more is committed. Raises `RunError`."""
        while head := self._batches.head(self.place.batch):
            found = self._given(head)
            self.place = Place(head.ordinal + 1, self.place.groups + (found is not None))
            if found and self._is_mine(found.number):
                return found
        return None

    def table(self, found: Found) -> pa.Table:
        """The group's valid rows by sample, as slices of its batches."""
        rows = list(found.standing.valid.values())
        batches = {ordinal: self._batches.rows(ordinal) for ordinal in {row.ordinal for row in rows}}
        for ordinal, batch in batches.items():
            if batch.num_rows != found.standing.row_counts[ordinal]:
                raise RunError(f"batch {ordinal} was written anew while it was read: go on from the cursor")
        slices = [
            batches[ordinal].slice(start, count).replace_schema_metadata(ROLLOUTS.metadata)
            for ordinal, start, count in _ranges(rows)
        ]
        table = pa.Table.from_batches(slices)
        return table if len(slices) == 1 else table.unify_dictionaries()

    def _is_mine(self, number: int) -> bool:
        if (number - self._base) % self._reader.world_size != self._reader.rank:
            return False
        self._taken = [one for one in self._taken if one.groups > number]
        return not any(one.has(number) for one in self._taken)

    def _given(self, head: Head) -> Found | None:
        """The group, if this batch closes it and the policy wants it."""
        if self._parts:
            self._parts.add(head)
        if head.key is None:
            return None
        heads = [*self._before(head), head]
        now = standing(heads)
        self._note_open(head.key, now.closed)
        if not now.closed:
            return None
        before = [standing(heads[:count]) for count in range(1, len(heads))]
        self.counts["complete" if now.complete else "short"] += 1
        self.counts["zero_variance"] += now.zero_variance
        self.counts["again"] += any(earlier.closed for earlier in before)
        if not self._policy.takes(now):
            self.counts["dropped"] += 1
            return None
        again = any(map(self._policy.takes, before))
        return Found(head.ordinal, head.key, now, again, self.place.groups)

    def _before(self, head: Head) -> list[Head]:
        """The group's earlier batches, where this one is not the whole group."""
        if head.whole:
            return []
        if self._parts is None:
            self._parts = Parts(self._head(ordinal) for ordinal in range(head.ordinal + 1))
        return [self._head(ordinal) for ordinal in self._parts.before(head)]

    def _head(self, ordinal: int) -> Head:
        head = self._batches.head(ordinal)
        if head is None:
            raise RunError(f"batch {ordinal} was there, and is there no more")
        return head

    def _note_open(self, key: GroupKey, closed: bool) -> None:
        if closed:
            self._open.discard(key)
        else:
            self._open.add(key)
        self.counts["open"] = len(self._open)


def _ranges(rows: Sequence[Row]) -> list[tuple[int, int, int]]:
    """Runs of neighbouring rows: ordinal, first place, count."""
    first, last = rows[0], rows[-1]
    if [row[:2] for row in rows] == [(first.ordinal, place) for place in range(first.place, last.place + 1)]:
        return [(first.ordinal, first.place, len(rows))]
    ranges: list[tuple[int, int, int]] = []
    for row in rows:
        if ranges:
            ordinal, start, count = ranges[-1]
            if (ordinal, start + count) == (row.ordinal, row.place):
                ranges[-1] = (ordinal, start, count + 1)
                continue
        ranges.append((row.ordinal, row.place, 1))
    return ranges
