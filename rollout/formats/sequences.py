"""A rollout's tokens as sequences to train on: a prompt, and a response in which the loss mask is 1 exactly on what
the policy sampled. Nothing is tokenized: ids are those of the segments.

`by_turn`: a sequence a turn; the prompt is all that the engine saw, the response what it returned. `by_segment`: a
sequence a segment; the prompt ends where its first answer begins, and what came between answers is in the response,
masked. A sequence without a sampled token is left out, for there is nothing in it to train on.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollcage.rollout.trajectory import Attempt, Segment, Turn


@dataclass(frozen=True)
class Sequence:
    """`response_ids`, `loss_mask` and `logprobs` have one length; `logprobs` is 0 where the mask is 0.

    `index` is the number of the turn or of the segment; `turns` are those whose answers are in the response.
    """

    index: int
    turns: tuple[Turn, ...]
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]

    @property
    def finish_reason(self) -> str:
        """How the engine ended the last answer: `length` where it was cut, `stop` otherwise."""
        return "length" if self.turns[-1].finish_reason == "length" else "stop"


def by_turn(rollout: Attempt) -> list[Sequence]:
    """The rollout's turns that have tokens, in their order."""
    return [
        _sequence(segment, turn.index, (turn,), turn.prompt_len, turn.prompt_len + turn.completion_len)
        for segment, turns in _segments(rollout)
        for turn in turns
        if turn.completion_len
    ]


def by_segment(rollout: Attempt) -> list[Sequence]:
    """The rollout's segments that have sampled tokens, in their order."""
    sequences = []
    for index, (segment, turns) in enumerate(_segments(rollout)):
        sampled = tuple(turn for turn in turns if turn.completion_len)
        if sampled:
            sequences.append(_sequence(segment, index, sampled, sampled[0].prompt_len, len(segment.ids)))
    return sequences


def _segments(rollout: Attempt) -> list[tuple[Segment, list[Turn]]]:
    trajectory = rollout.trajectory
    assert trajectory is not None, "who needs token ids has asked for them"
    return [
        (segment, [turn for turn in trajectory.turns if turn.segment == index])
        for index, segment in enumerate(trajectory.segments)
    ]


def _sequence(segment: Segment, index: int, turns: tuple[Turn, ...], start: int, end: int) -> Sequence:
    mask = segment.loss_mask[start:end]
    return Sequence(
        index,
        turns,
        segment.ids[:start],
        segment.ids[start:end],
        mask,
        [
            logprob if sampled else 0.0
            for logprob, sampled in zip(segment.logprobs[start:end], mask, strict=True)
        ],
    )
