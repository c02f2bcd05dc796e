"""What `--where` means, and what it says where it can't be read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.rollout.formats.where import Where, WhereError
from rollcage.rollout.rows import rollouts_batch


@pytest.fixture
def rows(table: Any, shapes: Any) -> pa.Table:
    return table(
        shapes.attempt(shapes.text_turns()),
        shapes.attempt(shapes.text_turns(), sample=1, reward=0.25, error_class="turn_limit", task="it's"),
        shapes.attempt(None, sample=2, reward=None, agent="tools", phases={}),
        shapes.attempt(shapes.summed_up(), sample=3, reward=0.75, draw=1),
    )


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("outcome = 'passed'", [0]),
        ("OUTCOME = 'passed'".lower().replace("outcome", "outcome"), [0]),
        ("outcome <> 'passed' AND NOT outcome = 'invalid'", [1, 3]),
        ("reward >= 0.75", [0, 3]),
        ("0.5 < reward", [0, 3]),
        ("reward = 1", [0]),
        ("reward is null", [2]),
        ("reward is not null and reward < 1", [1, 3]),
        ("not reward > 0.5", [1]),
        ("not (reward > 0.5)", [1]),
        ("error_class is null", [0, 3]),
        ("error_class != 'turn_limit'", [2]),
        ("error_class in ('turn_limit', 'image_build')", [1, 2]),
        ("error_class not in ('turn_limit')", [2]),
        ("task like 'count-%'", [0, 2, 3]),
        ("task not like 'count_lines'", [1]),
        ("task = 'it''s'", [1]),
        ("phases.agent > 6 and phases.agent <= 6.5", [0, 1, 3]),
        ("phases.agent is null", [2]),
        ("len(segments) = 3 or len(task) = 4", [1, 3]),
        ("evidence.message is null", [0, 1, 2, 3]),
        ("started_at >= '2023-11-14T22:13:20Z'", [0, 1, 2, 3]),
        ("started_at > '2023-11-14T23:13:21+01:00'", []),
        ("draw = 1 or sample < 1 and agent = 'bash'", [0, 3]),
        ("(draw = 1 or sample < 1) and agent = 'tools'", []),
        ("sample = number", [0]),
        ("true = true", [0, 1, 2, 3]),
        ("1 = 2", []),
    ],
)
def test_it_keeps_the_rows_for_which_it_is_true(rows: pa.Table, text: str, kept: list[int]) -> None:
    assert Where(text).keep(rows)["sample"].to_pylist() == kept


@pytest.mark.parametrize(
    ("text", "says", "place"),
    [
        ("outcome = 'pased'", "none of its values: passed, failed, invalid, cancelled", 10),
        ("rewad > 1", r"no column `rewad` \(`reward`\?\); there are: job, agent, task", 0),
        ("reward > 1 and phases.agnt > 3", r"`phases` has no field `agnt` \(`agent`\?\)", 15),
        ("messages.role = 'user'", "`messages` has no field `role`", 0),
        ("reward = 'high'", r"`reward` \(number\) can't be compared with the text 'high'", 9),
        ("segments = 3", "can't be compared", 0),
        ("reward >", "ends too early", 8),
        ("(reward > 1", r"`\)` was expected", 11),
        ('task = "a"', "texts are in single quotes", 7),
        ("task = 'a", "second single quote", 7),
        ("reward > 1; drop", "this can't be read", 10),
        ("reward > 1 reward", "something else was expected", 11),
        ("reward = null", "write `is null`", 9),
        ("started_at > 'monday'", "is no time", 13),
        ("task like 3", "`like` is for texts", 10),
        ("len(reward) = 1", "`len` is for texts and lists", 4),
        ("reward", "a comparison was expected", 6),
        ("true < false", "no order", 5),
        ("", "ends too early", 0),
        ("__import__('os')", "no column `__import__`", 0),
        ("not " * 60 + "true", "nested deeper than 50", 200),
    ],
)
def test_an_error_points_at_its_place(text: str, says: str, place: int) -> None:
    with pytest.raises(WhereError, match=says) as error:
        Where(text)
    _, shown, pointer = str(error.value).rsplit("\n", 2)
    assert shown.strip() == text.strip()
    assert pointer == " " * (4 + place) + "^"


@given(st.text(st.sampled_from("(') =<>,.1aeltru rwd'noi\n\"%"), max_size=30))
def test_no_text_does_anything_else(text: str) -> None:
    try:
        where = Where(text)
    except WhereError:
        return
    where.keep(pa.Table.from_batches([rollouts_batch([])]))
