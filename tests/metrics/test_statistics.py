"""Rates, intervals and pass@k against values that others have published or that can be counted by hand."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.metrics.statistics import (
    PassAtK,
    invalid_bounds,
    mean,
    pass_at_each_k,
    pass_at_k,
    pass_rate,
    quantile,
    wilson,
)

counts = st.integers(0, 60).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))


@pytest.mark.parametrize(
    ("passed", "total", "low", "high"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_wilson_interval_is_the_published_one(passed: int, total: int, low: float, high: float) -> None:
    assert wilson(passed, total) == pytest.approx((low, high), abs=5e-5)


@given(counts)
def test_the_wilson_interval_holds_the_rate_and_mirrors(count: tuple[int, int]) -> None:
    passed, total = count
    low, high = wilson(passed, total)
    assert 0 <= low <= high <= 1
    if total:
        assert low <= passed / total <= high
    mirrored = wilson(total - passed, total)
    assert (1 - mirrored.high, 1 - mirrored.low) == pytest.approx((low, high))


def test_an_interval_of_nothing_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    assert pass_rate(0, 0) is None
    assert invalid_bounds(0, 0, 0) is None


def test_more_passed_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="3 of 2"):
        wilson(3, 2)


def test_invalid_rollouts_bound_the_rate() -> None:
    assert pass_rate(3, 1) == 0.75
    assert invalid_bounds(3, 1, 4) == (3 / 8, 7 / 8)


@pytest.mark.parametrize(
    ("samples", "passed", "k", "expected"),
    [(4, 1, 1, 1 / 4), (4, 1, 2, 1 / 2), (4, 2, 2, 5 / 6), (5, 0, 3, 0), (5, 5, 1, 1), (5, 3, 3, 1),
     (200, 1, 100, 1 / 2)],
)  # fmt: skip
def test_pass_at_k_by_hand(samples: int, passed: int, k: int, expected: float) -> None:
    assert pass_at_k(samples, passed, k) == pytest.approx(expected)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_mean_over_every_choice_of_k_samples(
    results: list[bool], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, len(results)))
    every = [any(chosen) for chosen in itertools.combinations(results, k)]
    assert pass_at_k(len(results), sum(results), k) == pytest.approx(sum(every) / len(every))


@given(st.integers(1, 300), st.data())
def test_pass_at_k_is_that_of_the_paper(samples: int, data: st.DataObject) -> None:
    passed, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    # The numpy code of Chen et al. (2021), figure 3, as published.
    if samples - passed < k:
        published = 1.0
    else:
        published = 1.0 - np.prod(1.0 - k / np.arange(samples - passed + 1, samples + 1))
    assert pass_at_k(samples, passed, k) == pytest.approx(float(published))


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6), st.randoms())
def test_no_order_of_return_changes_pass_at_k(groups: list[list[bool]], chance: random.Random) -> None:
    first = pass_at_each_k([(len(group), sum(group)) for group in groups])
    shuffled = [chance.sample(group, len(group)) for group in groups]
    chance.shuffle(shuffled)
    assert pass_at_each_k([(len(group), sum(group)) for group in shuffled]) == first
    values = [entry.value for entry in first if entry.tasks == len(groups)]
    assert values == sorted(values)


def test_pass_at_k_is_the_mean_over_the_tasks_that_have_k_samples() -> None:
    assert pass_at_each_k([(2, 1), (3, 0)]) == [
        PassAtK(1, 0.25, 2),
        PassAtK(2, 0.5, 2),
        PassAtK(3, 0.0, 1),
    ]
    assert pass_at_each_k([]) == []


@pytest.mark.parametrize(("samples", "passed", "k"), [(3, 1, 4), (3, 1, 0), (3, 4, 1)])
def test_a_pass_at_k_that_is_not_defined_is_refused(samples: int, passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="not defined"):
        pass_at_k(samples, passed, k)


def test_the_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        mean([])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20), st.floats(0, 1))
def test_quantiles_are_those_of_numpy(values: list[float], q: float) -> None:
    assert quantile(values, q) == pytest.approx(float(np.quantile(values, q)), rel=1e-6, abs=1e-6)


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile([], 0.5) is None
