"""The token record of a conversation whose prompts a server makes: kept from what it says that it saw."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

from rollcage.rollout.trajectory import Segment


def record_turn(
    segments: list[Segment],
    prompt_ids: Sequence[int],
    ids: Sequence[int],
    logprobs: Sequence[float],
    *,
    begins: bool = False,
) -> int:
    """Add a turn, and return the index of the segment that holds it.

    A prompt that begins with the last segment, whole, continues it. Any other starts a new one, as does the first turn
    of a conversation (`begins`).
    """
    last = segments[-1] if segments and not begins else None
    if last is None or list(prompt_ids[: len(last.ids)]) != last.ids:
        last = Segment()
        segments.append(last)
    added = list(prompt_ids[len(last.ids) :])
    last.ids += [*added, *ids]
    last.loss_mask += [0] * len(added) + [1] * len(ids)
    last.logprobs += [nan] * len(added) + list(logprobs)
    return len(segments) - 1
