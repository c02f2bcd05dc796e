"""What a shard says beside each batch of `rollouts`: whose group it is and how its rollouts ended, in a few bytes.

A reader knows by it which batches it wants without decoding a column. It is the metadata `rollcage.group` of the
batch's own message, which other readers of Arrow pass over:

    {"group": ["bash", "count-lines", 0], "size": 2, "rows": [[0, "passed", 1.0], [1, "invalid", null]]}

`group` is agent, task and draw, `rows` has sample, outcome and reward in the order of the rows. A batch without rows
has `{}`; one with rows of several groups, which no job writes, `{"groups": 2}`.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

HEAD_KEY = b"rollcage.group"

_COLUMNS = ("agent", "task", "draw", "sample", "outcome", "reward", "group_size")


def written_head(batch: pa.RecordBatch) -> dict[bytes, bytes] | None:
    """The metadata of this batch's message; None for a batch of another table than `rollouts`."""
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
    return {HEAD_KEY: json.dumps(head).encode()}


def read_head(metadata: pa.KeyValueMetadata | None) -> dict[str, Any]:
    """What `written_head` made. Raises `ValueError` where there is nothing."""
    written = metadata.get(HEAD_KEY) if metadata is not None else None
    if written is None:
        raise ValueError("its batches do not say whose they are")
    head: dict[str, Any] = json.loads(written)
    return head
