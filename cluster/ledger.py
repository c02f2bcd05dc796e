"""The ledger of a job: what it acknowledges is on disk, and every rollout ends in it once.

    ledger = Ledger.create("runs/demo", job)
    await ledger.record_attempt(attempt)                 # every attempt
    await ledger.record_rollout(attempt, attempts=2, group_size=4)   # the last attempt of an ended rollout
    await ledger.commit_group("bash", "count-lines")     # when each sample of (agent, task, draw) has ended
    await ledger.finish(summary)

Rows go into the journal (`rollout/arrow.py`) and are acknowledged by the return of the call. Rollouts wait
there until their group is committed, so that a group is one batch of one shard; attempts until there are enough
for a shard. After a kill, `open` takes what the journal holds over into a journal of its own.

Calls may be made concurrently from one event loop. Nothing blocks it: Arrow and the disk are used in threads,
one at a time, and all calls that came in meanwhile share one fsync (group commit). A call that is cancelled
has its row written all the same. Beside that thread another one merges small shards (`rollout/rewrite.py`): it touches
only files that are there, and nobody waits for it but the end of the run.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Collection, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollcage.cluster.ended import Known
from rollcage.cluster.ledger_rows import (
    ALL,
    FAILURES,
    Call,
    Group,
    blamed_on,
    converted,
    group_of,
    joined,
    parts,
)
from rollcage.rollout.arrow import (
    IDENTITY,
    TABLES,
    Journal,
    Location,
    NoRun,
    RunError,
    RunExists,
    identities,
    read_shards,
    recover,
)
from rollcage.rollout.rewrite import FAN, compact, withdraw
from rollcage.rollout.trajectory import Attempt, RolloutKey

ATTEMPTS_A_SHARD = 2048
"""Attempts are small rows: a shard of this many is about a megabyte on disk."""

JOURNAL_BYTES = 64 << 20
"""A journal past this size that is at least half rows of shards is written anew without them."""


class EndedTwice(RunError):
    """A rollout, or an attempt, that is in the ledger was recorded again."""


class Ledger:
    """The one writer of a run. `job` is what `job.json` holds; `known` says which rollouts have ended, those of earlier
    drivers too. `not_merged` is why small shards could not be merged the last time; the run is whole without that."""

    def __init__(self, location: Location, lock: int) -> None:
        """Use `create` or `open`."""
        self.location = location
        self.job: dict[str, Any] = location.read_json("job.json") or {}
        self.known = Known()
        self.not_merged: Exception | None = None
        self._lock: int | None = lock
        self._journals: dict[str, Journal] = {}
        self._held: dict[str, dict[Group, list[pa.RecordBatch]]] = {table: {} for table in TABLES}
        self._calls: list[Call] = []
        self._flusher: asyncio.Task[None] | None = None
        self.commits = self.written_bytes = 0
        """Shards written by this process, and their bytes."""
        self._unmerged = FAN
        """Shards written since there was last looked for some to merge; at the start nobody has looked."""
        self._merging: asyncio.Task[None] | None = None
        self._closing = threading.Event()

    @classmethod
    def create(cls, run: str | Path | Location, job: Mapping[str, Any], *, overwrite: bool = False) -> Ledger:
        """Begin a run and write its `job.json`.

        `overwrite` deletes an earlier run's files, and nothing else that lies there. Raises `RunExists`
        where there is a run, and `RunBusy` where another process is writing it.
        """
        location = Location.of(run)
        with ExitStack() as on_error:
            lock = location.lock()
            on_error.callback(os.close, lock)
            if location.exists() and not overwrite:
                raise RunExists(
                    f"{location} holds a run already: `rollcage resume {location}` goes on with it; else name another "
                    "directory with --output, or have it overwritten with --overwrite"
                )
            location.erase()
            location.write_json("job.json", dict(job))
            on_error.pop_all()
        return cls(location, lock)

    @classmethod
    def open(cls, run: str | Path | Location) -> Ledger:
        """Go on with a run, finished or killed. Raises `NoRun`, or `RunBusy` while its driver lives."""
        location = Location.of(run)
        if not location.exists():
            raise NoRun(f"{location}: there is no run here (no job.json and no shard)")
        with ExitStack() as on_error:
            ledger = cls(location, location.lock())
            on_error.callback(ledger.close)
            location.remove_torn()
            ledger._take_over()
            on_error.pop_all()
        return ledger

    async def record_attempt(self, attempt: Attempt) -> None:
        """Keep an attempt. Raises `EndedTwice`, `ValueError` for what the schema can't hold, `OSError`."""
        if self.known.has_attempt(attempt.attempt_id):
            raise EndedTwice(f"{self.location}: the attempt {attempt.attempt_id} is recorded already")
        self.known.add_attempt(attempt.attempt_id)
        try:
            await self._call("attempts", attempt)
        except FAILURES:
            self.known.drop_attempt(attempt.attempt_id)
            raise

    async def record_rollout(self, attempt: Attempt, attempts: int, group_size: int) -> None:
        """Keep an ended rollout: its last attempt, how many it took, and how many samples its group has.

        Raises as `record_attempt`.
        """
        if attempt.key in self.known:
            raise EndedTwice(f"{self.location}: the rollout {attempt.key} has ended already")
        self.known.end(attempt.key)
        row = (attempt, attempts, group_size)
        try:
            await self._call("rollouts", row, (attempt.agent, attempt.task, attempt.draw))
        except FAILURES:
            self.known.reopen(attempt.key)
            raise

    async def commit_group(self, agent: str, task: str, draw: int = 0) -> None:
        """Put the group's rollouts that are in no shard yet into one. Raises `OSError`; they are kept then."""
        await self._call("commit", group=(agent, task, draw))

    @property
    def committed(self) -> int:
        """Batches of rollouts that the shards hold."""
        return self.location.batches("rollouts")

    async def reopen(
        self, job: Mapping[str, Any], rollouts: Collection[RolloutKey], to_run: Collection[Group]
    ) -> None:
        """Go on with another `job.json`, and have these rollouts, which have ended, not ended: they are to be run
        again. Their attempts stay. Groups that wait in the journal and are not among those `to_run` are committed:
        nobody else will. A kill before this returns leaves some rollouts ended. Raises `OSError`, and `RunError` for a
        shard that is damaged."""
        leaving = {tuple(getattr(key, name) for name in IDENTITY["rollouts"]) for key in rollouts}

        def work() -> None:
            self.location.remove("summary.json")
            self.location.write_json("job.json", dict(job))
            withdraw(self.location, "rollouts", leaving)
            held = self._held["rollouts"]
            for group, rows in list(held.items()):
                held[group] = [row for row in rows if identities(row, "rollouts")[0] not in leaving]
                if not held[group]:
                    del held[group]
            self._commit("rollouts", [group for group in held if group not in to_run])
            self._replace_journals("rollouts")

        await asyncio.to_thread(work)
        self.job = dict(job)
        for key in rollouts:
            self.known.reopen(key)

    async def finish(self, summary: Mapping[str, Any]) -> None:
        """Commit all that is left, delete the journal, write `summary.json` and let go of the run."""
        await self._call("finish")
        if self._merging is not None:
            await asyncio.wait({self._merging})
        await asyncio.to_thread(self.location.write_json, "summary.json", dict(summary))
        self.close()
        if self.location.local is None:
            with suppress(OSError):  # something else lies there, or another driver has it by now
                self.location.here.rmdir()

    def close(self) -> None:
        """Let go of the run as it is. What was acknowledged is there for `open`. May be called twice."""
        self._closing.set()  # shards that are being merged stay apart
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _call(self, kind: str, row: Any = None, group: Group = ALL) -> None:
        if self._lock is None:
            raise RunError(f"{self.location}: this ledger is closed")
        call = Call(kind, asyncio.get_running_loop().create_future(), row, group)
        self._calls.append(call)
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        await call.done

    async def _flush(self) -> None:
        while self._calls:
            calls, self._calls = self._calls, []
            [failure] = await asyncio.gather(
                asyncio.to_thread(self._carry_out, calls), return_exceptions=True
            )
            for call in calls:
                call.failure = call.failure or failure
                if call.done.done():
                    continue  # whoever called was cancelled
                if call.failure is None:
                    call.done.set_result(None)
                else:
                    call.done.set_exception(call.failure)
            if self._unmerged >= FAN and (self._merging is None or self._merging.done()):
                self._unmerged = 0
                self._merging = asyncio.create_task(self._merge())

    async def _merge(self) -> None:
        for table in TABLES:
            work = partial(compact, self.location, table, lambda: not self._closing.is_set(), fan=FAN)
            [merged] = await asyncio.gather(asyncio.to_thread(work), return_exceptions=True)
            if isinstance(merged, FAILURES):
                self.not_merged = merged
            elif isinstance(merged, BaseException):
                raise merged

    def _carry_out(self, calls: list[Call]) -> None:
        """What the calls ask for, in the writing thread. Rows come first: a commit covers them."""
        for table in TABLES:
            self._record(table, [call for call in calls if call.kind == table])
        finishing = [call for call in calls if call.kind == "finish"]
        commits = finishing + [call for call in calls if call.kind == "commit"]
        if not commits:
            return
        with blamed_on(commits):
            groups = self._held["rollouts"] if finishing else dict.fromkeys(call.group for call in commits)
            self._commit("rollouts", list(groups))
            if finishing or len(self._held["attempts"].get(ALL, ())) >= ATTEMPTS_A_SHARD:
                self._commit("attempts", [ALL])
            for table in TABLES:
                self._trim(table)
            if finishing:
                for table in TABLES:
                    self._replace_journals(table)
                self.location.remove_journals()

    def _record(self, table: str, calls: list[Call]) -> None:
        batches: list[tuple[pa.RecordBatch, list[Call]]] = []
        for part in parts(table, calls):
            batches += converted(table, part)
        if not batches:
            return
        with blamed_on([call for _, rows in batches for call in rows]):
            if not self._journals:
                self.location.remove("summary.json")  # from now on the run is one that has not ended
            journal = self._journals.get(table)
            if journal is None or journal.broken:
                journal = self._journals[table] = self._new_journal(table)
            journal.append(batch for batch, _ in batches)
            for batch, rows in batches:
                for index, call in enumerate(rows):
                    self._held[table].setdefault(call.group, []).append(batch.slice(index, 1))

    def _commit(self, table: str, groups: list[Group]) -> None:
        held = self._held[table]
        groups = [group for group in groups if group in held]
        if groups:
            path = self.location.write_shard(
                table, [batch for group in groups for batch in joined(held[group], table)]
            )
            self._unmerged += 1
            self.commits += 1
            self.written_bytes += self.location.filesystem.get_file_info(path).size
        for group in groups:
            del held[group]

    def _trim(self, table: str) -> None:
        journal = self._journals.get(table)
        if journal is None or journal.size < JOURNAL_BYTES:
            return
        if sum(batch.nbytes for batch in self._held_rows(table)) < journal.size // 2:
            self._replace_journals(table)

    def _replace_journals(self, table: str) -> None:
        """Put the rows that are held into a new journal, then delete those that came before it."""
        old = self.location.journals(table)
        if table in self._journals:
            self._journals.pop(table).close()
        if rows := self._held_rows(table):
            self._journals[table] = self._new_journal(table)
            self._journals[table].append(rows)
        for path in old:
            path.unlink()

    def _held_rows(self, table: str) -> list[pa.RecordBatch]:
        return [batch for group in self._held[table].values() for batch in group]

    def _new_journal(self, table: str) -> Journal:
        if self.location.journal is None:
            raise RunError(
                f"{self.location}: a run that is not on this machine needs a place for its journal"
            )
        return Journal(self.location.journal, table)

    def _take_over(self) -> None:
        """Learn what has ended, and hold again what is in a journal and in no shard."""
        for table in TABLES:
            for batch in read_shards(self.location, table, IDENTITY[table]):
                for identity in identities(batch, table):
                    self._learn(table, identity)
            for batch in (batch for path in self.location.journals(table) for batch in recover(path)):
                for row, identity in enumerate(identities(batch, table)):
                    if self._learn(table, identity):
                        one = batch.slice(row, 1)
                        self._held[table].setdefault(group_of(one, table), []).append(one)
            self._replace_journals(table)

    def _learn(self, table: str, identity: tuple[Any, ...]) -> bool:
        """Know a row of the run; False where it is known."""
        if table == "attempts":
            known = self.known.has_attempt(identity[0])
            self.known.add_attempt(identity[0])
            return not known
        key = RolloutKey(**dict(zip(IDENTITY[table], identity, strict=True)))
        known = key in self.known
        self.known.end(key)
        return not known
