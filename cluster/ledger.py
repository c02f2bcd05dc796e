"""The ledger of a job: what it acknowledges is on disk, and every rollout ends in it once.

    ledger = Ledger.create("runs/demo", job)
    await ledger.record_attempt(attempt)                 # every attempt
    await ledger.record_rollout(attempt, attempts=2, group_size=4)   # the last attempt of an ended rollout
    await ledger.commit_group("bash", "count-lines")     # when each sample of (agent, task) has ended
    await ledger.finish(summary)

Rows go into the journal (`rollout/arrow.py`) and are acknowledged by the return of the call. Rollouts wait
there until their group is committed, so that a group is one batch of one shard; attempts until there are enough
for a shard. After a kill, `open` takes what the journal holds over into a journal of its own.

Calls may be made concurrently from one event loop. Nothing blocks it: Arrow and the disk are used in threads,
one at a time, and all calls that came in meanwhile share one fsync (group commit). A call that is cancelled
has its row written all the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

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
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.rows import attempts_batch, rollouts_batch
from rollcage.rollout.trajectory import Attempt, RolloutKey

ATTEMPTS_A_SHARD = 2048
"""Attempts are small rows: a shard of this many is about a megabyte on disk."""

ROWS_AT_ONCE = {"attempts": 64, "rollouts": 4}
"""Rows converted by one call into Arrow, which holds the interpreter's lock meanwhile: a few milliseconds."""

_ALL = ("", "")
"""Attempts wait in one group."""

_KNOWN = {
    "attempts": IDENTITY["attempts"],
    "rollouts": (*IDENTITY["rollouts"], "outcome", "error_class", "attempts", "task_digest"),
}
"""The columns that `open` reads."""

_TO_BATCH: dict[str, Callable[[Any], pa.RecordBatch]] = {
    "attempts": attempts_batch,
    "rollouts": rollouts_batch,
}

_FAILURES = (OSError, ValueError, TypeError, KeyError, OverflowError, RunError, pa.ArrowException)
"""What the disk, Arrow and a row that the schema can't hold raise."""

JOURNAL_BYTES = 64 << 20
"""A journal past this size that is at least half rows of shards is written anew without them."""


@dataclass(frozen=True)
class Ended:
    """How a rollout ended, for whoever goes on with the run."""

    outcome: Outcome
    error_class: str | None
    attempts: int
    task_digest: str


class EndedTwice(RunError):
    """A rollout, or an attempt, that is in the ledger was recorded again."""


@dataclass
class _Call:
    """One call that waits for the writing thread. `kind` is a table, `commit` or `finish`; `row` is what the
    table's function of `_TO_BATCH` takes."""

    kind: str
    done: asyncio.Future[None]
    row: Any = None
    group: tuple[str, str] = _ALL
    failure: BaseException | None = None


class Ledger:
    """The one writer of a run. `job` is what `job.json` holds; `ended` has every rollout that has ended, those
    of earlier drivers too."""

    def __init__(self, location: Location, lock: int) -> None:
        """Use `create` or `open`."""
        self.location = location
        self.job: dict[str, Any] = location.read_json("job.json") or {}
        self.ended: dict[RolloutKey, Ended] = {}
        self._attempt_ids: set[str] = set()
        self._lock: int | None = lock
        self._journals: dict[str, Journal] = {}
        self._held: dict[str, dict[tuple[str, str], list[pa.RecordBatch]]] = {table: {} for table in TABLES}
        self._calls: list[_Call] = []
        self._flusher: asyncio.Task[None] | None = None

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
                    f"{location} holds a run already: name another directory with --output, "
                    "or have it overwritten with --overwrite"
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
        if attempt.attempt_id in self._attempt_ids:
            raise EndedTwice(f"{self.location}: the attempt {attempt.attempt_id} is recorded already")
        self._attempt_ids.add(attempt.attempt_id)
        try:
            await self._call("attempts", attempt)
        except _FAILURES:
            self._attempt_ids.discard(attempt.attempt_id)
            raise

    async def record_rollout(self, attempt: Attempt, attempts: int, group_size: int) -> None:
        """Keep an ended rollout: its last attempt, how many it took, and how many samples its group has.

        Raises as `record_attempt`.
        """
        if attempt.key in self.ended:
            raise EndedTwice(f"{self.location}: the rollout {attempt.key} has ended already")
        self.ended[attempt.key] = Ended(attempt.outcome, attempt.error_class, attempts, attempt.task_digest)
        row = (attempt, attempts, group_size)
        try:
            await self._call("rollouts", row, (attempt.agent, attempt.task))
        except _FAILURES:
            del self.ended[attempt.key]
            raise

    async def commit_group(self, agent: str, task: str) -> None:
        """Put the group's rollouts that are in no shard yet into one. Raises `OSError`; they are kept then."""
        await self._call("commit", group=(agent, task))

    async def finish(self, summary: Mapping[str, Any]) -> None:
        """Commit all that is left, delete the journal, write `summary.json` and let go of the run."""
        await self._call("finish")
        await asyncio.to_thread(self.location.write_json, "summary.json", dict(summary))
        self.close()

    def close(self) -> None:
        """Let go of the run as it is. What was acknowledged is there for `open`. May be called twice."""
        for journal in self._journals.values():
            journal.close()
        self._journals.clear()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def _call(self, kind: str, row: Any = None, group: tuple[str, str] = _ALL) -> None:
        if self._lock is None:
            raise RunError(f"{self.location}: this ledger is closed")
        call = _Call(kind, asyncio.get_running_loop().create_future(), row, group)
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

    def _carry_out(self, calls: list[_Call]) -> None:
        """What the calls ask for, in the writing thread. Rows come first: a commit covers them."""
        for table in TABLES:
            self._record(table, [call for call in calls if call.kind == table])
        finishing = [call for call in calls if call.kind == "finish"]
        commits = finishing + [call for call in calls if call.kind == "commit"]
        if not commits:
            return
        with _blamed_on(commits):
            groups = self._held["rollouts"] if finishing else dict.fromkeys(call.group for call in commits)
            self._commit("rollouts", list(groups))
            if finishing or len(self._held["attempts"].get(_ALL, ())) >= ATTEMPTS_A_SHARD:
                self._commit("attempts", [_ALL])
            for table in TABLES:
                self._trim(table)
            if finishing:
                for table in TABLES:
                    self._replace_journals(table)
                self.location.remove_journals()

    def _record(self, table: str, calls: list[_Call]) -> None:
        batches: list[tuple[pa.RecordBatch, list[_Call]]] = []
        for start in range(0, len(calls), ROWS_AT_ONCE[table]):
            batches += _converted(table, calls[start : start + ROWS_AT_ONCE[table]])
        if not batches:
            return
        with _blamed_on([call for _, rows in batches for call in rows]):
            if not self._journals:
                self.location.remove("summary.json")  # from now on the run is one that has not ended
            journal = self._journals.get(table)
            if journal is None or journal.broken:
                journal = self._journals[table] = self._new_journal(table)
            journal.append(batch for batch, _ in batches)
            for batch, rows in batches:
                for index, call in enumerate(rows):
                    self._held[table].setdefault(call.group, []).append(batch.slice(index, 1))

    def _commit(self, table: str, groups: list[tuple[str, str]]) -> None:
        held = self._held[table]
        groups = [group for group in groups if group in held]
        if groups:
            self.location.write_shard(table, [b for group in groups for b in _joined(held[group], table)])
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
            known: set[tuple[Any, ...]] = set()
            for batch in read_shards(self.location, table, _KNOWN[table]):
                known.update(self._learn(table, batch))
            for batch in (batch for path in self.location.journals(table) for batch in recover(path)):
                for row, identity in enumerate(identities(batch, table)):
                    if identity not in known:
                        one = batch.slice(row, 1)
                        known.update(self._learn(table, one))
                        self._held[table].setdefault(_group(one, table), []).append(one)
            self._replace_journals(table)

    def _learn(self, table: str, batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
        found = identities(batch, table)
        if table == "attempts":
            self._attempt_ids.update(attempt_id for (attempt_id,) in found)
            return found
        columns = (batch.column(name).to_pylist() for name in _KNOWN["rollouts"][len(IDENTITY["rollouts"]) :])
        for key, (outcome, error_class, attempts, digest) in zip(
            found, zip(*columns, strict=True), strict=True
        ):
            self.ended[RolloutKey(*key)] = Ended(Outcome(outcome), error_class, attempts, digest)
        return found


def _converted(table: str, calls: list[_Call]) -> list[tuple[pa.RecordBatch, list[_Call]]]:
    """The rows of these calls as one batch; where one can't be converted, each by itself, and that one fails."""
    try:
        return [(_TO_BATCH[table]([call.row for call in calls]), calls)]
    except _FAILURES as error:
        if len(calls) > 1:
            return [batch for call in calls for batch in _converted(table, [call])]
        calls[0].failure = error
        return []


@contextmanager
def _blamed_on(calls: Sequence[_Call]) -> Iterator[None]:
    """What fails inside has failed for these calls, and for no other."""
    try:
        yield
    except _FAILURES as error:
        for call in calls:
            call.failure = error


def _group(row: pa.RecordBatch, table: str) -> tuple[str, str]:
    return _ALL if table == "attempts" else (row["agent"][0].as_py(), row["task"][0].as_py())


def _joined(rows: list[pa.RecordBatch], table: str) -> list[pa.RecordBatch]:
    """One batch of single rows, samples in order (several batches only where one can't hold them)."""
    if table == "rollouts":
        rows = sorted(rows, key=lambda row: row["sample"][0].as_py())
    return list(pa.Table.from_batches(rows).unify_dictionaries().combine_chunks().to_batches())
