"""The token record of conversations whose prompts a server makes."""

from __future__ import annotations

from math import isnan

from rollcage.rollout.policies.served_tokens import record_turn
from rollcage.rollout.trajectory import Segment


def test_a_prompt_that_begins_with_all_that_was_seen_continues_the_segment() -> None:
    segments: list[Segment] = []
    assert record_turn(segments, [1, 2], [3, 4], [-0.1, -0.2]) == 0
    assert record_turn(segments, [1, 2, 3, 4, 5], [6], [-0.3]) == 0
    (segment,) = segments
    assert segment.ids == [1, 2, 3, 4, 5, 6]
    assert segment.loss_mask == [0, 0, 1, 1, 0, 1]
    assert [isnan(value) for value in segment.logprobs] == [True, True, False, False, True, False]
    assert segment.logprobs[2:4] == [-0.1, -0.2]


def test_a_prompt_that_rewrites_what_was_sampled_starts_a_new_segment() -> None:
    segments: list[Segment] = []
    record_turn(segments, [1, 2], [3, 4], [-0.1, -0.2])
    assert record_turn(segments, [1, 2, 3, 5], [6], [-0.3]) == 1  # another token where 4 was sampled
    assert record_turn(segments, [1, 2, 3], [7], [-0.3]) == 2  # shorter than what was seen
    assert [segment.ids for segment in segments] == [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 7]]


def test_another_conversation_starts_a_new_segment_even_where_it_begins_alike() -> None:
    segments: list[Segment] = []
    record_turn(segments, [1], [2], [-0.1])
    assert record_turn(segments, [1, 2, 3], [4], [-0.2], begins=True) == 1
