"""Rates, intervals and pass@k against values that others have published or that can be counted by hand."""

from __future__ import annotations

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcage.metrics import statistics
from rollcage.metrics.statistics import (
    PassAtK,
    bca,
    exact_pass_at_k,
    invalid_bounds,
    mean,
    pass_at_each_k,
    pass_at_k,
    pass_rate,
    quantile,
    resampled,
    sign_flip,
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


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6), st.randoms())
def test_no_order_of_return_changes_pass_at_k(groups: list[list[bool]], chance: random.Random) -> None:
    first = pass_at_each_k([(len(group), sum(group)) for group in groups])
    shuffled = [chance.sample(group, len(group)) for group in groups]
    chance.shuffle(shuffled)
    assert pass_at_each_k([(len(group), sum(group)) for group in shuffled]) == first
    values = [entry.value for entry in first if entry.tasks == len(groups)]
    assert values == sorted(values)


def test_pass_at_k_is_the_mean_over_the_tasks_that_have_k_samples() -> None:
    assert pass_at_each_k([(2, 1), (3, 0), (0, 0)]) == [
        PassAtK(1, 0.25, 2, 0.0, 0.5),
        PassAtK(2, 0.5, 2, 0.0, 1.0),
        PassAtK(3, 0.0, 1, None, None),
    ]
    assert pass_at_each_k([]) == []
    assert [entry.k for entry in pass_at_each_k([(5, 1), (6, 2)], most=2)] == [1, 2]


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


SPATIAL = [
    48,
    36,
    20,
    29,
    42,
    42,
    20,
    42,
    22,
    41,
    45,
    14,
    6,
    0,
    33,
    28,
    34,
    4,
    32,
    24,
    47,
    41,
    24,
    26,
    30,
    41,
]
"""Test A of B. Efron and R. J. Tibshirani, "An Introduction to the Bootstrap" (1993), table 14.1."""


def test_the_bca_interval_is_the_published_one() -> None:
    values = np.array(SPATIAL, float)
    drawn = np.random.default_rng(1).choice(values, (20_000, len(values))).var(axis=1)
    left_out = np.array([np.delete(values, place).var() for place in range(len(values))])
    assert values.var() == pytest.approx(171.5, abs=0.05)
    # Section 14.3 and table 14.2: percentile (100.8, 233.9), BCa (115.8, 259.6) from 2,000 draws.
    low, high = bca(drawn, float(values.var()), left_out, confidence=0.9)
    assert (low, high) == (pytest.approx(115.8, rel=0.02), pytest.approx(259.6, rel=0.02))


def test_an_interval_over_tasks_is_as_wide_as_the_theory_says() -> None:
    rows = [[1.0, 0.3]] * 60 + [[0.0, 0.3]] * 40
    rate, flat = resampled(rows)
    assert rate == pytest.approx(wilson(60, 100), abs=0.01)
    assert flat is None, "a statistic without spread has no interval"
    assert resampled([[1.0]]) == [None]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=12), st.randoms())
def test_no_order_of_tasks_changes_an_interval(
    rows: list[tuple[float, float]], chance: random.Random
) -> None:
    first = resampled(rows)
    assert resampled(chance.sample(rows, len(rows))) == first
    for column, interval in enumerate(first):
        if interval:
            values = [row[column] for row in rows]
            assert min(values) - 1e-9 <= interval.low <= interval.high <= max(values) + 1e-9


DARWIN = [49, -67, 8, 16, 6, 23, 28, 41, 14, 29, 56, 24, 75, 60, -48]
"""Differences of heights in eighths of an inch: R. A. Fisher, "The Design of Experiments" (1935), sections 17, 21."""


def test_the_sign_flip_test_is_fishers() -> None:
    # Section 21: of 32,768 arrangements, 863 have a sum of 314 or more; as many are as far below 0.
    assert sign_flip(map(Fraction, DARWIN)) == (pytest.approx(2 * 863 / 2**15), True)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.fractions(-1, 1, max_denominator=9), max_size=9), st.randoms())
def test_the_sign_flip_test_looks_at_every_flip(found: list[Fraction], chance: random.Random) -> None:
    flips = list(itertools.product((1, -1), repeat=len(found)))
    sums = [abs(sum(sign * one for sign, one in zip(signs, found, strict=True))) for signs in flips]
    expected = sum(value >= abs(sum(found)) for value in sums) / len(flips)
    assert sign_flip(found) == (pytest.approx(expected), True)
    assert sign_flip(chance.sample(found, len(found))) == sign_flip(found)


def test_a_sign_flip_test_that_cannot_look_at_every_flip_comes_close(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Fraction(one, 8) for one in DARWIN]
    monkeypatch.setattr(statistics, "EXACT_WORK", 0)
    assert sign_flip(found) == (pytest.approx(2 * 863 / 2**15), True)
    monkeypatch.setattr(statistics, "EXACT_FLIPS", 0)
    p, exact = sign_flip(found)
    assert (p, exact) == (pytest.approx(2 * 863 / 2**15, abs=0.01), False)
    assert sign_flip(found[::-1]).p == p
    # Equal sides are no evidence, however they are counted; and no p-value of drawn flips is 0.
    assert sign_flip([Fraction(0)] * 5).p == 1
    assert 0 < sign_flip([Fraction(1)] * 50).p < 0.001


def test_many_tasks_on_one_scale_are_tested_exactly() -> None:
    differences = [exact_pass_at_k(8, 3 + n % 3, 1) - exact_pass_at_k(8, 3, 1) for n in range(400)]
    assert sign_flip(differences).exact
    assert sign_flip(differences).p < 1e-50
