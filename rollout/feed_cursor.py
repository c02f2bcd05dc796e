"""Where a reader is, as JSON that a trainer keeps in its checkpoint, and what other readers have had before it.

    {"job": "demo", "policy": "complete", "batch": 41, "groups": 38, "rank": 0, "world_size": 4, "base": 0, "taken": []}

`batch` is the ordinal of the next batch; `groups` counts the groups that all readers together are given before it.
Group number `n` is of rank `(n - base) % world_size`, so that a cursor also says which groups its reader has had: those
of its rank below `groups`. `taken` says the same of readers of an earlier, other world, whose numbers are not passed:
`[rank, world_size, base, groups]`. A world begins at its `base`; what an earlier one left below that is shared, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

Cursor = Mapping[str, Any]
"""What `Feed.cursor` and `Group.cursor` are."""


@dataclass(frozen=True)
class Place:
    """The next batch, and the number of the next group that a reader is given."""

    batch: int = 0
    groups: int = 0


@dataclass(frozen=True)
class Taken:
    """The groups of this rank, in a world of this size and base, below number `groups`."""

    rank: int
    world_size: int
    base: int
    groups: int

    def has(self, number: int) -> bool:
        """True for a group that this reader has had."""
        return number < self.groups and (number - self.base) % self.world_size == self.rank


@dataclass(frozen=True)
class Start:
    """Where to begin, the base of this world, and what others have had of the groups behind that."""

    place: Place = Place()
    base: int = 0
    taken: tuple[Taken, ...] = ()


@dataclass(frozen=True)
class Reader:
    """Whose groups are read: `rank` of `world_size` readers of the job `job` with this policy."""

    job: str | None
    policy: str
    rank: int
    world_size: int

    def cursor(self, place: Place, base: int, taken: Sequence[Taken]) -> dict[str, Any]:
        """This reader's cursor at `place`."""
        left = [list(astuple(one)) for one in taken if one.groups > place.groups]
        return {
            "job": self.job,
            "policy": self.policy,
            "batch": place.batch,
            "groups": place.groups,
            "rank": self.rank,
            "world_size": self.world_size,
            "base": base,
            "taken": left,
        }

    def begin(self, start: Cursor | Sequence[Cursor] | None) -> Start:
        """Where this reader begins that is to go on from `start`.

        One cursor of this rank and world size: behind it. One of another rank or world size stands for its whole
        world, whose ranks are taken to have had as many groups each: all rounds up to its own are done. The cursors of
        all ranks of a world: behind each of them, exactly. Raises `ValueError` for what is no cursor of this run and
        policy.
        """
        if start is None:
            return Start()
        cursors = [start] if isinstance(start, Mapping) else list(start)
        if strange := [cursor for cursor in cursors if not isinstance(cursor, Mapping)]:
            raise ValueError(f"this is no cursor of a feed: {strange[0]!r}")
        places = [self._place(cursor) for cursor in cursors]
        taken = [Taken(*one) for cursor in cursors for one in cursor.get("taken", ())]
        if len(cursors) == 1:
            [cursor], [place] = cursors, places
            size, base = cursor.get("world_size", self.world_size), cursor.get("base", 0)
            if (cursor.get("rank", self.rank), size) != (self.rank, self.world_size):
                rounds = -(-(place.groups - base) // size)
                # What a world of one has had is had, also where this one's readers have not come to its end yet.
                base = max([base + rounds * size, *(one.groups for one in taken if one.world_size == 1)])
                taken.append(Taken(0, 1, 0, base))
            return Start(place, base, tuple(taken))
        ranks = sorted((cursor.get("world_size"), cursor.get("rank")) for cursor in cursors)
        if not cursors or ranks != [(len(cursors), rank) for rank in range(len(cursors))]:
            raise ValueError(f"start must be one cursor, or those of all ranks of one world, not of {ranks}")
        taken += [Taken(cursor["rank"], len(cursors), cursor["base"], cursor["groups"]) for cursor in cursors]
        first, last = min(places, key=_groups), max(places, key=_groups)
        return Start(first, last.groups, tuple(taken))

    def _place(self, cursor: Cursor) -> Place:
        numbers = [cursor.get("batch"), cursor.get("groups", 0)]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"this is no cursor of a feed: {cursor!r}")
        for name, own in (("job", self.job), ("policy", self.policy)):
            if cursor.get(name, own) != own:
                raise ValueError(
                    f"this cursor is of the {name} {cursor[name]!r}, and this feed of {own!r}: begin it with "
                    f'start={{"batch": {cursor["batch"]}}} if that is meant'
                )
        return Place(*numbers)


def _groups(place: Place) -> int:
    return place.groups
