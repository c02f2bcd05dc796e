"""Which task a stream draws next, in which order, how often, and how far ahead of its readers."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.cluster.stream import Stream, left_over, room

TASKS = [f"task{number:02d}" for number in range(20)]


def drawn(stream: Stream, count: int) -> list[str]:
    made = [stream.draw() for _ in range(count)]
    assert all(made)
    return [draw.task for draw in made if draw is not None]


def test_tasks_are_drawn_once_each_before_one_is_drawn_again_and_in_another_order_each_time() -> None:
    stream = Stream(TASKS, seed=7)
    rounds = [drawn(stream, len(TASKS)) for _ in range(5)]
    assert all(sorted(one) == TASKS for one in rounds)
    assert len({tuple(one) for one in rounds}) == 5


def test_a_seed_gives_one_order_and_another_seed_another() -> None:
    def order(seed: int) -> list[str]:
        return drawn(Stream(random.sample(TASKS, len(TASKS)), seed=seed), 100)

    assert order(3) == order(3)
    assert order(3) != order(4)


def test_draws_of_a_task_are_numbered_without_a_gap() -> None:
    stream = Stream(TASKS, weights={"task03": 5})
    numbers: dict[str, list[int]] = {}
    for _ in range(300):
        draw = stream.draw()
        assert draw is not None
        numbers.setdefault(draw.task, []).append(draw.draw)
    assert all(found == list(range(len(found))) for found in numbers.values())
    assert stream.total == 300


@given(st.lists(st.floats(0, 50), min_size=2, max_size=12), st.integers(0, 99))
def test_tasks_are_drawn_as_often_as_their_weights_say_in_every_stretch(
    weights: list[float], seed: int
) -> None:
    by_name = {f"t{number}": weight for number, weight in enumerate(weights)}
    if not any(weight > 1e-6 for weight in weights):
        return
    counts = Counter(drawn(Stream(by_name, seed=seed, weights=by_name), 200))
    for task, weight in by_name.items():
        # A draw's own place is drawn by chance within its stretch of the line: one off at either end of it.
        assert abs(counts[task] - 200 * weight / sum(weights)) <= 2 + len(weights) / 2
        assert weight or not counts[task]


def test_other_weights_count_from_the_next_draw_on_and_nothing_is_made_up_for() -> None:
    stream = Stream(["a", "b", "c"], weights={"c": 0})
    assert Counter(drawn(stream, 100)) == {"a": 50, "b": 50}
    stream.set_weights({"c": 1, "a": 0})
    counts = Counter(drawn(stream, 100))
    assert counts["a"] == 0
    assert abs(counts["b"] - 50) <= 2
    assert abs(counts["c"] - 50) <= 2
    stream.set_weights({"a": 2})
    counts = Counter(drawn(stream, 100))
    assert abs(counts["a"] - 50) <= 2
    assert dict(stream.weights) == {"a": 2.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"tsk03": 1}, r"no task is called 'tsk03' \(did you mean 'task03'\?\)"),
        ({"task03": -1}, "the weight of task03 must be a number from 0 on, not -1"),
        ({"task03": float("nan")}, "must be a number from 0 on, not nan"),
        ({"task03": True}, "must be a number from 0 on, not True"),
        (dict.fromkeys(TASKS, 0), "every task would have the weight 0"),
        ({f"x{number}": 1 for number in range(9)}, "and 4 more"),
    ],
)
def test_weights_that_cannot_be_are_refused_and_change_nothing(weights: dict[str, float], words: str) -> None:
    stream, other = Stream(TASKS), Stream(TASKS)
    with pytest.raises(ValueError, match=words):
        stream.set_weights({"task00": 9} | weights)
    with pytest.raises(ValueError, match=words):
        Stream(TASKS, weights=weights)
    assert drawn(stream, 50) == drawn(other, 50)


def test_a_task_that_is_taken_out_is_not_drawn_again_and_with_the_last_the_stream_ends() -> None:
    stream = Stream(["a", "b"])
    drawn(stream, 10)
    stream.drop("a")
    assert set(drawn(stream, 10)) == {"b"}
    stream.set_weights({"a": 100})
    assert set(drawn(stream, 10)) == {"b"}
    stream.drop("b")
    assert stream.ended
    assert stream.draw() is None


def test_a_stream_ends_after_so_many_draws_those_of_earlier_drivers_too() -> None:
    first = Stream(TASKS, draws=30, seed=1)
    whole = drawn(first, 30)
    assert first.ended
    again = Stream(TASKS, draws=30, seed=1, drawn=Counter(whole[:17]))
    assert drawn(again, 13) == whole[17:], "a stream that is gone on with draws what it would have drawn"
    assert again.draw() is None


def test_a_stream_that_is_gone_on_with_under_other_weights_does_not_catch_up() -> None:
    stream = Stream(["a", "b"], drawn={"a": 1000, "b": 0})
    counts = Counter(drawn(stream, 100))
    assert abs(counts["a"] - 50) <= 2


def test_what_an_interrupted_stream_left_of_its_draws_is_known_from_its_rows() -> None:
    rows = [("x", "a", 0, 0), ("x", "a", 0, 1), ("y", "a", 0, 0), ("x", "a", 2, 1), ("x", "b", 0, 0)]
    drawn_, left = left_over(rows, {"x": 2, "y": 1})
    assert drawn_ == {"a": 3, "b": 1}
    assert left == {
        *{("x", "a", 1, 0), ("x", "a", 1, 1), ("y", "a", 1, 0)},
        *{("x", "a", 2, 0), ("y", "a", 2, 0)},
        *{("x", "b", 0, 1), ("y", "b", 0, 0)},
    }


def test_the_room_is_what_readers_have_left_of_the_lag() -> None:
    assert room(4, committed=0, acknowledged=0, open_groups=0) == 4
    assert room(4, committed=10, acknowledged=8, open_groups=1) == 1
    assert room(4, committed=10, acknowledged=2, open_groups=0) == 0
    assert room(4, committed=3, acknowledged=7, open_groups=1) == 3, "a reader of a run that was gone on with"
