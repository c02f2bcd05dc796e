"""What a trainer reads: whole groups of valid rollouts, with pyarrow alone (no Ray, no Docker, no model).

    with Feed("runs/demo", start=checkpoint.get("feed")) as feed:
        for group in feed:                      # as they are committed, until the job ends
            for reward, segments in zip(group.rewards, group.segments):
                ...                             # segments[0].ids, .loss_mask, .logprobs: numpy, nothing copied
            checkpoint["feed"] = feed.cursor    # JSON: go on behind this group

Each group comes once, in the order in which groups were closed, and only once it is closed. `read_groups` reads what a
run holds now instead, groups that wait in its journal too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, get_args

from rollcage.rollout.arrow import Location, NoRun, RunError, read_attempts, read_rollouts
from rollcage.rollout.feed_batches import Batches, Life, life
from rollcage.rollout.feed_cursor import Cursor, Place, Reader
from rollcage.rollout.feed_files import NAME, Acknowledgement, acknowledge
from rollcage.rollout.feed_group import Group, Tokens
from rollcage.rollout.feed_groups import read_groups
from rollcage.rollout.feed_heads import GroupPolicy
from rollcage.rollout.feed_walk import Found, Walk
from rollcage.rollout.schema import ROLLOUTS

__all__ = ["Cursor", "Feed", "Group", "Tokens", "WriterGone", "read_attempts", "read_groups", "read_rollouts"]

ZeroVariance = Literal["keep", "drop", "downweight"]
OnDead = Literal["raise", "stop", "wait"]

LOOK_SEC = {True: (0.01, 0.1), False: (0.5, 5.0)}
"""Between looks for more: at first, and at most. A look at a local run is two questions to the file system; one at an
object store costs requests."""

WRITER_SEC = 2.0
"""Silence after which the writer is looked for, and between such looks."""

ACKNOWLEDGE_SEC = {True: 0.25, False: 2.0}
"""Between acknowledgements: the driver looks some times a second."""


class WriterGone(RunError):
    """The run has not ended, and nobody writes it: its job was killed. `rollcage resume` goes on with it."""


class Feed:
    """An iterator over the groups of a run, which may be going on. One thread at a time may use it.

    `group`: `complete` (each of k samples has a valid reward), `any` (at least one) or `at_least: N` (so many); the
    latter two take groups that were closed short, too. `follow`: wait for more until the job ends; otherwise end with
    what is committed. `start`: a cursor, or those of all ranks of a world (`feed_cursor.Reader.begin`). `world_size`
    readers, with the same policy, share the groups by `rank`.

    `max_staleness`: groups with a turn whose weights are older than `version` by more than this are left out.
    `zero_variance`: groups whose rewards are all equal are kept, dropped, or given the weight `downweight`.
    `columns`: those of `schema.ROLLOUTS` to read; default all. `on_dead`: what to do once nobody writes a run that has
    not ended: raise `WriterGone`, stop, or wait for somebody to resume it; known only on the writer's machine.
    `acknowledge`: tell the job how far this reader is, as `name`, while the run goes on.

    Raises `NoRun`, and `ValueError` for what can't be; while it is read `RunError` for a damaged or missing shard.
    """

    def __init__(
        self,
        run: str | Path | Location,
        group: str = "complete",
        *,
        follow: bool = True,
        start: Cursor | Sequence[Cursor] | None = None,
        rank: int = 0,
        world_size: int = 1,
        max_staleness: int | None = None,
        name: str = "trainer",
        zero_variance: ZeroVariance = "keep",
        downweight: float = 0.1,
        columns: Sequence[str] | None = None,
        on_dead: OnDead = "raise",
        acknowledge: bool = True,
    ) -> None:
        self.location = Location.of(run)
        if not self.location.exists():
            raise NoRun(f"{self.location}: there is no run here (no job.json and no shard)")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1, not {rank} of {world_size}")
        if not NAME.fullmatch(name):
            raise ValueError(f"a feed's name is letters, digits and ._-, not {name!r}")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness is a number of versions, 0 at least, not {max_staleness}")
        _one_of("zero_variance", zero_variance, get_args(ZeroVariance))
        _one_of("on_dead", on_dead, get_args(OnDead))
        for column in columns or ():
            _one_of("columns", column, ROLLOUTS.names)
        self.name = name
        self.version: int | None = None
        """The trainer's policy version: to be set as it moves on."""
        self.ended = False
        """Nothing more will come."""
        policy = GroupPolicy(group, drop_zero_variance=zero_variance == "drop")
        job = (self.location.read_json("job.json") or {}).get("job")
        self._reader = Reader(job, str(policy), rank, world_size)
        begin = self._reader.begin(start)
        needed = (*(columns or ROLLOUTS.names), *(("turns",) if max_staleness is not None else ()))
        self._batches = Batches(self.location, needed, alone=world_size == 1)
        if (there := self._batches.count()) < begin.place.batch:
            raise ValueError(
                f"{self.location}: the cursor is at batch {begin.place.batch}, and the run has {there}"
            )
        self._walk = Walk(self._batches, policy, self._reader, begin)
        self._follow = follow
        self._max_staleness = max_staleness
        self._zero_variance_weight = downweight if zero_variance == "downweight" else 1.0
        self._on_dead = on_dead
        self._acknowledges = acknowledge and follow and life(self.location) is not Life.ENDED
        self._said: tuple[int, int | None] | None = None
        self._say_at = self._heard_at = time.monotonic()
        self._held: deque[Group] = deque()
        self._busy: int | None = None
        self._cursor = self._walk.cursor

    @property
    def cursor(self) -> dict[str, Any]:
        """What to go on from, as JSON: behind the groups that were given, whatever was looked at since."""
        return dict(self._cursor)

    @property
    def counts(self) -> dict[str, int]:
        """How many groups this feed has come by, by what became of them (`feed_walk.COUNTS`)."""
        return dict(self._walk.counts)

    def __iter__(self) -> Iterator[Group]:
        return self

    def __next__(self) -> Group:
        """The next group; waits for it. Raises `StopIteration` where nothing more will come."""
        group = self.poll(None)
        if group is None:
            raise StopIteration
        return group

    def poll(self, timeout_sec: float | None = 0.0) -> Group | None:
        """The next group, if it is there within this time (None: whenever); None also where nothing more will come,
        which `ended` tells."""
        group = self._held.popleft() if self._held else self._pull(timeout_sec)
        if group is not None:
            self._cursor = group.cursor
        return group

    def batches(self, *, groups: int | None = None, tokens: int | None = None) -> Iterator[list[Group]]:
        """Lists of `groups` groups, or of as many as have at most `tokens` tokens together (one that has more comes
        alone). The last may be smaller. `cursor` is behind the list that was given last."""
        limit = groups if groups is not None else tokens
        if (groups is None) == (tokens is None) or limit is None or limit < 1:
            raise ValueError("give either groups or tokens, a number from 1 on")
        while batch := self._gather(limit, by_tokens=tokens is not None):
            self._cursor = batch[-1].cursor
            yield batch

    def finish(self) -> None:
        """Ask a stream job to begin no more groups and to end; what it has begun still comes. Raises
        `curriculum.NoStream` for any other job."""
        from rollcage.rollout.curriculum import finish

        finish(self.location)

    def close(self) -> None:
        """Say a last time how far this reader is: behind all that it was given."""
        self._busy = None
        self._acknowledge(last=True)
        self._acknowledges = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()

    def _gather(self, limit: int, *, by_tokens: bool) -> list[Group]:
        """The groups of one list. Those that are pulled stay held until it is full, whatever is raised meanwhile."""
        count = size = 0
        while size < limit:
            if count == len(self._held):
                group = self._pull(None)
                if group is None:
                    break
                self._held.append(group)
            more = self._held[count].token_count if by_tokens else 1
            if count and size + more > limit:
                break
            count, size = count + 1, size + more
        return [self._held.popleft() for _ in range(count)]

    def _pull(self, timeout_sec: float | None) -> Group | None:
        """The next group that is not too stale."""
        self._busy = None
        deadline = None if timeout_sec is None else time.monotonic() + timeout_sec
        while found := self._wait(deadline):
            self._heard_at = time.monotonic()
            try:
                group = self._group(found)
            except RunError:
                self._walk.place = Place(found.ordinal, found.number)
                raise
            if self._is_stale(group):
                self._walk.counts["stale"] += 1
                continue
            self._busy = found.ordinal
            self._walk.counts["given"] += 1
            self._acknowledge()
            return group
        return None

    def _wait(self, deadline: float | None) -> Found | None:
        pause, most = LOOK_SEC[self.location.local is not None]
        while True:
            if found := self._walk.next():
                return found
            now = time.monotonic()
            state = life(self.location, look_for_writer=now - self._heard_at > WRITER_SEC)
            if state is not Life.WRITTEN or not self._follow:
                # What was committed before that may have come behind the last look.
                self._batches.refresh()
                if found := self._walk.next():
                    return found
                self.ended = self._has_ended(state)
                if self.ended:
                    return None
            if now - self._heard_at > WRITER_SEC:
                self._heard_at = now
            self._acknowledge()
            left = most if deadline is None else deadline - now
            if left <= 0:
                return None
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, most)

    def _has_ended(self, state: Life) -> bool:
        if state is Life.ENDED or not self._follow:
            return True
        if self._on_dead == "raise":
            raise WriterGone(
                f"{self.location}: the run has not ended, and nobody writes it: its job was killed. "
                "`rollcage resume` goes on with it, and this feed from its cursor"
            )
        return self._on_dead == "stop"

    def _group(self, found: Found) -> Group:
        standing = found.standing
        weight = self._zero_variance_weight if standing.zero_variance else 1.0
        return Group(
            self._walk.table(found),
            *found.key,
            size=standing.size,
            samples=tuple(standing.valid),
            rewards=tuple(row.reward for row in standing.valid.values()),
            weight=weight,
            again=found.again,
            number=found.number,
            cursor=self._walk.cursor,
        )

    def _is_stale(self, group: Group) -> bool:
        if self._max_staleness is None or self.version is None or not group.versions:
            return False
        return self.version - group.versions[0] > self._max_staleness

    def _acknowledge(self, *, last: bool = False) -> None:
        """Write how far this reader is, if that is news and the last time is long enough ago."""
        if not self._acknowledges:
            return
        reached = self._walk.place.batch if self._busy is None else self._busy
        now = time.monotonic()
        if (reached, self.version) == self._said or (now < self._say_at and not last):
            return
        rank, world_size = self._reader.rank, self._reader.world_size
        try:
            acknowledge(
                self.location,
                Acknowledgement(self.name, rank, world_size, reached, self.version, time.time()),
            )
        except OSError as error:
            raise RunError(
                f"{self.location}: cannot tell the job how far this reader is: {error} (acknowledge=False "
                "reads without; a stream job then stops at its lag)"
            ) from error
        self._said = (reached, self.version)
        self._say_at = now + ACKNOWLEDGE_SEC[self.location.local is not None]


def _one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {value!r}")
