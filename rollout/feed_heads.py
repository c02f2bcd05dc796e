"""What a group is, from the heads of its batches (`group_head`): which samples there are, and whether it is closed.

A group is written as one batch. It lies in several where a run was interrupted in it, or was resumed with more
samples or with retries; then what a later batch says of a sample counts. From the batches up to one of them follows
what that one made of the group, whoever reads it and whenever: `Standing`. Rollouts that are run again leave their
batch, whose head goes on to say that they were there; a batch is empty where all of its have left.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollcage.rollout.location import RunError
from rollcage.rollout.outcome import Outcome

VALID = (Outcome.PASSED, Outcome.FAILED)
CANCELLED = Outcome.CANCELLED

_AT_LEAST = re.compile(r"at_least:\s*([1-9]\d*)")


class GroupKey(NamedTuple):
    """Names a group of a run."""

    agent: str
    task: str
    draw: int


class Row(NamedTuple):
    """One ended rollout: where it is, and how it ended. `reward` counts only where `valid`."""

    ordinal: int
    place: int
    valid: bool
    ended: bool
    reward: float


@dataclass(frozen=True)
class Head:
    """One batch: its ordinal, its group (None where it is empty), the `size` that the group was to have, and its rows
    by sample."""

    ordinal: int
    key: GroupKey | None
    size: int
    rows: Mapping[int, Row]
    gone: Mapping[int, tuple[bool, int]]
    """Of samples that are run again and were in it: whether they had ended, and the ordinal before which they had been
    there."""

    @property
    def whole(self) -> bool:
        """It has a row for every sample of its group."""
        return self.rows.keys() >= set(range(self.size))


@dataclass(frozen=True)
class Standing:
    """A group after one of its batches. `valid` has the rows with a valid reward, by sample."""

    size: int
    closed: bool
    """Each of the samples has ended. One that was called off has not: it is run when the job is resumed."""
    valid: Mapping[int, Row]
    row_counts: Mapping[int, int]
    """Rows of each of its batches."""

    @property
    def complete(self) -> bool:
        """Each of the samples has a valid reward."""
        return len(self.valid) == self.size

    @property
    def short(self) -> bool:
        """All have ended, and not all with a valid reward."""
        return self.closed and not self.complete

    @property
    def zero_variance(self) -> bool:
        """All valid rewards are equal: there is nothing to prefer."""
        return len({row.reward for row in self.valid.values()}) == 1


def make_head(written: Mapping[str, Any], ordinal: int, path: str) -> Head:
    """The head of a batch from what its shard says of it. Raises `RunError` where it holds rows of several groups."""
    if "groups" in written:
        raise RunError(
            f"{path}: batch {ordinal} holds rows of {written['groups']} groups, where a run has one batch for "
            "each: read it with read_groups"
        )
    if not written:
        return Head(ordinal, None, 0, {}, {})
    rows = {
        sample: Row(ordinal, place, outcome in VALID, outcome != CANCELLED, reward)
        for place, (sample, outcome, reward) in enumerate(written["rows"])
    }
    gone = {sample: (outcome != CANCELLED, until) for sample, outcome, until in written.get("gone", ())}
    return Head(ordinal, GroupKey(*written["group"]), written["size"], rows, gone)


def _left(head: Head, ordinal: int) -> Iterator[tuple[int, Row]]:
    """The rows that a batch had when the batch with this ordinal was written, and has no more."""
    for sample, (ended, until) in head.gone.items():
        if ordinal < until:
            yield sample, Row(head.ordinal, -1, False, ended, 0.0)


def standing(heads: Sequence[Head]) -> Standing:
    """The group after the last of these, which are all of its batches so far, in their order."""
    last = heads[-1]
    rows = last.rows
    if len(heads) > 1 or last.gone:
        known = {
            sample: row for head in heads for sample, row in (*_left(head, last.ordinal), *head.rows.items())
        }
        rows = {sample: known[sample] for sample in range(last.size) if sample in known}
    closed = len(rows) == last.size and all([row.ended for row in rows.values()])
    valid = {sample: row for sample, row in rows.items() if row.valid}
    return Standing(last.size, closed, valid, {head.ordinal: len(head.rows) for head in heads})


class GroupPolicy:
    """Which groups a reader is given: `complete`, `any` (at least one valid reward) or `at_least: N` (so many), of
    those that are closed. `drop_zero_variance`: none without a difference in its rewards. Raises `ValueError`."""

    def __init__(self, group: str, drop_zero_variance: bool = False) -> None:
        at_least = _AT_LEAST.fullmatch(group)
        if group not in ("complete", "any") and not at_least:
            raise ValueError(f"group must be 'complete', 'any' or 'at_least: N', not {group!r}")
        self.name = group
        self._least = int(at_least[1]) if at_least else 1
        self._drop_zero_variance = drop_zero_variance

    def __str__(self) -> str:
        return f"{self.name}, zero variance dropped" if self._drop_zero_variance else self.name

    def takes(self, group: Standing) -> bool:
        """True where a reader is given the group as it stands."""
        if not group.closed or len(group.valid) < self._least:
            return False
        if self.name == "complete" and not group.complete:
            return False
        return not (self._drop_zero_variance and group.zero_variance)


class Parts:
    """Which earlier batches the groups have. Only a run in which a group lies in several batches has one: a few
    hundred bytes for each group."""

    def __init__(self, heads: Iterable[Head]) -> None:
        self._ordinals: dict[GroupKey, list[int]] = {}
        for head in heads:
            self.add(head)

    def add(self, head: Head) -> None:
        """Learn a batch, the next in order."""
        if head.key:
            ordinals = self._ordinals.setdefault(head.key, [])
            if head.ordinal not in ordinals[-1:]:
                ordinals.append(head.ordinal)

    def before(self, head: Head) -> list[int]:
        """The ordinals of the group's batches before this one."""
        ordinals = self._ordinals.get(head.key, ()) if head.key else ()
        return [ordinal for ordinal in ordinals if ordinal < head.ordinal]
