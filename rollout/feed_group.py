"""A group as a trainer gets it, and its tokens as numpy arrays that share memory with Arrow."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class Tokens(NamedTuple):
    """One segment: three arrays of one length that can't be written to. `loss_mask` is 1 exactly on sampled tokens;
    `logprobs` (nat) is NaN where it is 0."""

    ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.int8]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Group:
    """The rollouts of one group that have a valid reward, in the order of `sample`.

    `table` has their rows of `schema.ROLLOUTS` (of the columns that the feed reads). `size` is how many samples the
    group was to have. `number` counts the groups that the run's readers are given together, from 0: it says
    whose the group is. `cursor` goes on behind it.
    """

    table: pa.Table = field(repr=False)
    agent: str
    task: str
    draw: int
    size: int
    samples: tuple[int, ...]
    rewards: tuple[float, ...]
    weight: float
    """What the loss of this group is to be multiplied with: below 1 for zero variance that is weighted down."""
    again: bool
    """The group was given before, with fewer samples: the run was resumed with more of them, or with retries."""
    number: int
    cursor: dict[str, Any] = field(repr=False)

    @property
    def complete(self) -> bool:
        """Each of the group's samples has a valid reward."""
        return len(self.samples) == self.size

    @property
    def short(self) -> bool:
        """Some samples ended without a valid reward, and their retries are spent."""
        return not self.complete

    @property
    def zero_variance(self) -> bool:
        """All rewards are equal: advantages within the group are 0."""
        return len(set(self.rewards)) == 1

    @cached_property
    def versions(self) -> tuple[int, ...]:
        """The versions of the policy's weights that sampled the group's turns, ascending; empty for agents without a
        policy. Needs the column `turns`."""
        found: set[int] = set()
        for chunk in self._column("turns").chunks:
            turns = chunk.flatten()
            for name in ("policy_version", "policy_version_end"):
                found.update(turns.field(name).unique().to_pylist())
        return tuple(sorted(found))

    @cached_property
    def segments(self) -> list[list[Tokens]]:
        """The segments of each sample. The arrays are views: nothing of a token column is copied. Needs numpy, and the
        column `segments`."""
        return [segments for chunk in self._column("segments").chunks for segments in _views(chunk)]

    @cached_property
    def token_count(self) -> int:
        """Tokens in all segments of all samples. Needs the column `segments`."""
        return sum(len(chunk.flatten().field("ids").flatten()) for chunk in self._column("segments").chunks)

    def _column(self, name: str) -> pa.ChunkedArray:
        if name not in self.table.column_names:
            raise ValueError(f"the feed does not read the column {name!r}: name it in `columns`")
        return self.table.column(name)


def _views(rollouts: pa.ListArray) -> list[list[Tokens]]:
    starts = rollouts.offsets.to_pylist()
    # `values` of what has no offset of its own: positions are absolute, and nothing is copied.
    lists = [rollouts.values.field(name) for name in Tokens._fields]
    ids, loss_mask, logprobs = (column.values.to_numpy(zero_copy_only=True) for column in lists)
    offsets = (column.offsets.slice(starts[0], starts[-1] - starts[0] + 1).to_pylist() for column in lists)
    views = [
        Tokens(ids[a:b], loss_mask[c:d], logprobs[e:f])
        for (a, b), (c, d), (e, f) in zip(*map(pairwise, offsets), strict=True)
    ]
    return [views[start - starts[0] : end - starts[0]] for start, end in pairwise(starts)]
