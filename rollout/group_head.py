"""What a shard says beside each batch of `rollouts`: whose group it is and how its rollouts ended, in a few bytes.

A reader knows by it which batches it wants without decoding a column. It is the metadata `rollcage.group` of the
batch's own message, which other readers of Arrow pass over:

    {"group": ["bash", "count-lines", 0], "size": 2, "rows": [[0, "passed", 1.0], [1, "invalid", null]]}

`group` is agent, task and draw, `rows` has sample, outcome and reward in the order of the rows. A batch that never had
rows has `{}`; one with rows of several groups, which no job writes, `{"groups": 2}`.

Rows that left the batch because their rollouts are run again (`rewrite.withdraw`) are still told, so that a reader who
comes later counts the groups as one did who came before: `"gone": [[1, "invalid", 17]]` says that sample 1 was there,
and was invalid, for all batches with an ordinal below 17.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pyarrow as pa

HEAD_KEY = b"rollcage.group"

_COLUMNS = ("agent", "task", "draw", "sample", "outcome", "reward", "group_size")


def head_of(batch: pa.RecordBatch) -> dict[str, Any] | None:
    """What is said beside this batch; None for a batch of another table than `rollouts`."""
    if "group_size" not in batch.schema.names:
        return None
    agents, tasks, draws, samples, outcomes, rewards, sizes = (
        batch.column(name).to_pylist() for name in _COLUMNS
    )
    groups = set(zip(agents, tasks, draws, strict=True))
    head: dict[str, Any] = {"groups": len(groups)} if groups else {}
    if len(groups) == 1:
        rows = list(zip(samples, outcomes, rewards, strict=True))
        head = {"group": groups.pop(), "size": max(sizes), "rows": rows}
    return head


def lessened(head: dict[str, Any], rows: Collection[int], until: int) -> dict[str, Any]:
    """The head of a batch once only the rows at these places are left; the others were there for the batches with an
    ordinal below `until`."""
    if "rows" not in head:
        return head
    leaving = [[*row[:2], until] for place, row in enumerate(head["rows"]) if place not in rows]
    kept = [row for place, row in enumerate(head["rows"]) if place in rows]
    return {**head, "rows": kept, "gone": head.get("gone", []) + leaving}


def written_head(head: dict[str, Any] | None) -> dict[bytes, bytes] | None:
    """A head as the metadata of its batch's message."""
    return None if head is None else {HEAD_KEY: json.dumps(head).encode()}


def read_head(metadata: pa.KeyValueMetadata | None) -> dict[str, Any]:
    """The head that `written_head` made this of. Raises `ValueError` where there is nothing."""
    written = metadata.get(HEAD_KEY) if metadata is not None else None
    if written is None:
        raise ValueError("its batches do not say whose they are")
    head: dict[str, Any] = json.loads(written)
    return head
