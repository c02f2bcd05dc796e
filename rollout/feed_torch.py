"""A feed as a dataset of torch: `DataLoader(FeedDataset("runs/demo"), batch_size=None)` gives `Group`s."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from rollcage.rollout.feed import Cursor, Feed, Group
from rollcage.rollout.location import Location


class FeedDataset(IterableDataset):  # type: ignore[misc]
    """The groups of one rank. Each worker of a `DataLoader` is a reader of its own: worker `w` of `n` has rank
    `rank * n + w` of `world_size * n`, and its groups' cursors are those of that rank. `options` are `Feed`'s."""

    def __init__(
        self,
        run: str | Path | Location,
        *,
        rank: int = 0,
        world_size: int = 1,
        start: Cursor | Sequence[Cursor] | None = None,
        **options: Any,
    ) -> None:
        self._settings = {"run": run, "start": start, **options}
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[Group]:
        info = get_worker_info()
        workers, worker = (info.num_workers, info.id) if info else (1, 0)
        rank = self._rank * workers + worker
        with Feed(**self._settings, rank=rank, world_size=self._world_size * workers) as feed:
            yield from feed
