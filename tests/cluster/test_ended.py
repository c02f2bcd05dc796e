"""What a ledger knows to have ended stays known, in little memory."""

from __future__ import annotations

import random
import tracemalloc

from rollcage.cluster.ended import LEAST_NEW, Hashes, Known
from rollcage.rollout.trajectory import RolloutKey


def test_whatever_comes_and_goes_the_set_is_what_pythons_own_is() -> None:
    chance = random.Random(1)
    ours, plain = Hashes(), set[int]()
    numbers = [chance.getrandbits(64) for _ in range(3 * LEAST_NEW)] + [0, 2**64 - 1]
    for number in chance.choices(numbers, k=8 * LEAST_NEW):
        if chance.random() < 0.8:
            ours.add(number)
            plain.add(number)
        else:
            ours.discard(number)
            plain.discard(number)
    assert len(ours) == len(plain)
    assert all((number in ours) == (number in plain) for number in numbers)


def test_rollouts_that_differ_in_one_word_are_told_apart() -> None:
    keys = [
        RolloutKey("j", "a", "t", 0, 0),
        RolloutKey("j", "a", "t", 0, 1),
        RolloutKey("j", "a", "t", 1, 0),
        RolloutKey("j", "at", "", 0, 0),
        RolloutKey("j", "", "at", 0, 0),
        RolloutKey("j", "a", "t", 10, 0),
        RolloutKey("j", "a", "t1", 0, 0),
    ]
    known = Known()
    for count, key in enumerate(keys):
        assert key not in known
        known.end(key)
        assert len(known) == count + 1


def test_many_rollouts_and_attempts_take_less_than_40_bytes_each() -> None:
    known = Known()
    tracemalloc.start()
    try:
        for number in range(40_000):
            known.end(RolloutKey("job", "bash", f"task-{number // 8}", 0, number % 8))
            known.add_attempt(f"attempt-{number}")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 40 * 40_000
