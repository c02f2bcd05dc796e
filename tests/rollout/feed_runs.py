"""Runs for the tests of the feed, written by the real ledger."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollcage.cluster.ledger import Ledger
from rollcage.rollout.feed import Feed, Group
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.trajectory import Attempt, Message, Reward, Segment, Trajectory, Turn

CANCELLED = "cancelled"
Ending = float | str | None
"""A reward; None for an invalid rollout; `CANCELLED`."""


def an_attempt(
    task: str, sample: int, ending: Ending, *, draw: int = 0, version: int = 0, number: int = 1
) -> Attempt:
    """An attempt whose ids tell which sample it is of: sample + 1 times the number sample + 1."""
    ids = [sample + 1] * (sample + 1)
    trajectory = Trajectory(
        [Message("user", f"do {task}")],
        [Turn(0, "ls", "stop", 0, 0, len(ids), "model", version, version)],
        [Segment(ids, [1] * len(ids), [-0.5] * len(ids)), Segment([7, 8], [0, 1], [math.nan, -1.0])],
    )
    outcome, error_class = Outcome.INVALID, "container_lost"
    if ending == CANCELLED:
        outcome, error_class = Outcome.CANCELLED, "cancelled"
    elif isinstance(ending, float):
        outcome, error_class = Outcome.PASSED if ending >= 1 else Outcome.FAILED, None
    reward = Reward(ending) if isinstance(ending, float) else None
    return Attempt(
        f"{task}-{draw}-{sample}-{number}", "demo", task, "digest", sample, number, "bash", "model", "host",
        outcome, error_class, reward=reward, trajectory=trajectory, draw=draw,
    )  # fmt: skip


async def end_rollouts(
    ledger: Ledger, task: str, endings: Sequence[Ending], *, size: int = 0, first: int = 0, **about: Any
) -> None:
    """These samples of a group end, from sample `first` on."""
    for sample, ending in enumerate(endings, first):
        attempt = an_attempt(task, sample, ending, **about)
        await ledger.record_attempt(attempt)
        await ledger.record_rollout(attempt, attempts=attempt.number, group_size=size or len(endings))


async def a_group(ledger: Ledger, task: str, endings: Sequence[Ending], **about: Any) -> None:
    """These samples of a group end, and it is committed."""
    await end_rollouts(ledger, task, endings, **about)
    await ledger.commit_group("bash", task, about.get("draw", 0))


async def a_run(path: Path, groups: dict[str, Sequence[Ending]]) -> Path:
    """A finished run with these groups, in this order."""
    ledger = Ledger.create(path, {"job": "demo"})
    for task, endings in groups.items():
        await a_group(ledger, task, endings)
    await ledger.finish({})
    return path


def named(groups: Sequence[Group]) -> list[str]:
    """The tasks of these groups."""
    return [group.task for group in groups]


def ready(feed: Feed) -> list[Group]:
    """What is committed for this reader now."""
    feed._batches.refresh()  # two commits may have come in one tick of the file system's clock
    groups = []
    while group := feed.poll():
        groups.append(group)
    return groups
