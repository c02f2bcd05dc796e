"""Pass rates that say how sure they are, pass@k that does not depend on who came back first, and the test that two
runs differ. Nothing here depends on the order of what it is given, or on anything random but `SEED`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CONFIDENCE = 0.95
RESAMPLES = 10_000
"""Draws of a bootstrap and of a permutation test that cannot be exact: an end of an interval then moves by about 0.02
of the interval's width between two seeds."""
SEED = 0
"""Of every draw."""
EXACT_FLIPS = 20
"""Differences whose 2**20 signs are all looked at."""
EXACT_WORK = 20_000_000
"""Additions that an exact distribution of sums may take, about 50 ms of them."""


class Interval(NamedTuple):
    """A closed interval of rates, 0 to 1."""

    low: float
    high: float


def pass_rate(passed: int, failed: int) -> float | None:
    """passed / (passed + failed), None where there is nothing to divide by."""
    return passed / (passed + failed) if passed + failed else None


def wilson(passed: int, total: int, confidence: float = CONFIDENCE) -> Interval:
    """The Wilson score interval of a rate of `passed` in `total`, without continuity correction.

    It takes each rollout as independent: samples of one task are less than that, so that over few tasks the
    truth is less sure than the interval says. With `total` 0 nothing is known: (0, 1).

    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22
    (1927); recommended by L. D. Brown, T. T. Cai and A. DasGupta, "Interval estimation for a binomial
    proportion", Statistical Science 16 (2001). Raises `ValueError` unless 0 <= passed <= total.
    """
    if not 0 <= passed <= total:
        raise ValueError(f"{passed} of {total} is no rate")
    if total == 0:
        return Interval(0.0, 1.0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    rate = passed / total
    scale = 1 + z * z / total
    centre = (rate + z * z / (2 * total)) / scale
    half = z / scale * math.sqrt(rate * (1 - rate) / total + z * z / (4 * total * total))
    # At 0 and at `total` the bound is exactly 0 and 1, which rounding would miss.
    low = 0.0 if passed == 0 else max(0.0, centre - half)
    high = 1.0 if passed == total else min(1.0, centre + half)
    return Interval(low, high)


def invalid_bounds(passed: int, failed: int, invalid: int) -> Interval | None:
    """The pass rate had every invalid rollout failed, and had every one passed; None without rollouts.

    No assumption about why rollouts are missing can lead out of these bounds: C. F. Manski, "Partial
    Identification of Probability Distributions" (2003), chapter 1.
    """
    total = passed + failed + invalid
    return Interval(passed / total, (passed + invalid) / total) if total else None


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """The probability that at least one of `k` samples passes, drawn without replacement from `samples` of
    which `passed` did: 1 - C(samples - passed, k) / C(samples, k). Unbiased, and a function of two counts
    only, so that no order of return can change it.

    Source: M. Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1, here in
    exact integers. Raises `ValueError` unless 0 <= passed <= samples and 1 <= k <= samples.
    """
    return float(exact_pass_at_k(samples, passed, k))


def exact_pass_at_k(samples: int, passed: int, k: int) -> Fraction:
    """`pass_at_k` as the fraction that it is."""
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} passed in {samples} samples is not defined")
    every = math.comb(samples, k)
    return Fraction(every - math.comb(samples - passed, k), every)


class PassAtK(NamedTuple):
    """pass@k as the mean over `tasks` tasks, those that have at least k valid samples, with the interval over tasks
    of `resampled`; `low` and `high` are None where there is none."""

    k: int
    value: float
    tasks: int
    low: float | None
    high: float | None


def pass_at_each_k(tasks: Iterable[tuple[int, int]], most: int | None = None) -> list[PassAtK]:
    """pass@k for each k from 1 to the most samples that a task has, or to `most`, from (samples, passed) of each task.

    Only valid samples count. A task with fewer than k samples has no pass@k and is left out of that mean;
    `PassAtK.tasks` says how many are in it.
    """
    found: list[PassAtK] = []
    # In the order of nothing but themselves: sums then are the same whoever came first.
    ordered = sorted(tasks)
    for least in sorted({min(samples, most or samples) for samples, _ in ordered if samples}):
        # The same tasks have all of these k, so that one draw of tasks serves them all.
        ks = range(len(found) + 1, least + 1)
        having = [task for task in ordered if task[0] >= least]
        value = {task: [pass_at_k(*task, k) for k in ks] for task in set(having)}
        values = [value[task] for task in having]
        intervals = resampled(values)
        for k, column, interval in zip(ks, zip(*values, strict=True), intervals, strict=True):
            found.append(PassAtK(k, mean(column), len(having), *(interval or (None, None))))
    return found


def mean(values: Iterable[float]) -> float:
    """The mean, with each task counting the same. Raises `ValueError` for none."""
    taken = list(values)
    if not taken:
        raise ValueError("the mean of nothing")
    return math.fsum(taken) / len(taken)


def quantile(values: Iterable[float], q: float) -> float | None:
    """The q-quantile with linear interpolation between order statistics; None for no values.

    Source: definition 7 of R. J. Hyndman and Y. Fan, "Sample quantiles in statistical packages", The American
    Statistician 50 (1996); numpy's default.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    position = q * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def resampled(
    rows: Sequence[Sequence[float]], confidence: float = CONFIDENCE, seed: int = SEED
) -> list[Interval | None]:
    """For each column of `rows` (a row a task, a column a statistic) the bootstrap interval of its mean over tasks.

    Tasks are drawn with replacement, `RESAMPLES` times: how far would the mean move on other tasks like these? The
    samples of one task stay together, so that nothing is assumed about them. None where drawing tasks shows no
    spread, over fewer than two tasks or where all have the same value: an interval of width 0 would claim to know.
    """
    import numpy as np

    # A draw of tasks is a draw of how many there are of each kind.
    table = np.round(np.asarray(rows, float).reshape(len(rows), -1), 12)
    kinds, numbers = np.unique(table, axis=0, return_counts=True)
    drawn = np.random.default_rng(seed).multinomial(len(rows), numbers / len(rows), RESAMPLES)
    # Rounded, so that means of the same tasks are the same number, in whatever order they were added up.
    means = np.round(drawn @ kinds / len(rows), 12)
    intervals: list[Interval | None] = []
    for column, values in zip(means.T, kinds.T, strict=True):
        if values.min() == values.max():
            intervals.append(None)
            continue
        every = np.repeat(values, numbers)
        left_out = (every.sum() - every) / (len(every) - 1)
        intervals.append(bca(column, round(float(every.mean()), 12), left_out, confidence))
    return intervals


def bca(
    estimates: npt.NDArray[np.float64],
    estimate: float,
    left_out: npt.NDArray[np.float64],
    confidence: float = CONFIDENCE,
) -> Interval:
    """The bias-corrected and accelerated interval of `estimate`, from the `estimates` of the resamples and those with
    each observation `left_out` in turn.

    Source: B. Efron, "Better bootstrap confidence intervals", JASA 82 (1987); as in B. Efron and R. J. Tibshirani,
    "An Introduction to the Bootstrap" (1993), section 14.3, with ties counted by half.
    """
    import numpy as np

    normal = NormalDist()
    below = float(((estimates < estimate).sum() + (estimates <= estimate).sum()) / (2 * len(estimates)))
    one = 0.5 / len(estimates)  # no draw is further out than the furthest of them all
    bias = normal.inv_cdf(min(max(below, one), 1 - one))
    deviations = left_out.mean() - left_out
    furthest = float(np.abs(deviations).max())
    deviations = deviations / (furthest or 1.0)  # no power of them vanishes
    acceleration = float((deviations**3).sum() / (6 * (deviations**2).sum() ** 1.5)) if furthest else 0.0
    ends = []
    for end in ((1 - confidence) / 2, (1 + confidence) / 2):
        z = bias + normal.inv_cdf(end)
        ends.append(float(np.quantile(estimates, normal.cdf(bias + z / (1 - acceleration * z)))))
    return Interval(*ends)


class SignFlip(NamedTuple):
    """The two-sided p-value of a sign-flip test, and whether every sign was looked at."""

    p: float
    exact: bool


def sign_flip(differences: Iterable[Fraction], seed: int = SEED) -> SignFlip:
    """How often the sum of paired `differences` would be as far from 0 as it is, had a coin decided each sign.

    That is the permutation test that a pair's two sides were the same in truth. Exact for `EXACT_FLIPS` differences
    that are not 0, and for any number of them on a common scale, as pass rates over the same number of samples are;
    else of `RESAMPLES` random flips, the observed one among them (B. Phipson and G. K. Smyth, "Permutation p-values
    should never be zero", 2010).

    Source: R. A. Fisher, "The Design of Experiments" (1935), section 21.
    """
    import numpy as np

    found = [difference for difference in differences if difference]
    scale = math.lcm(*(difference.denominator for difference in found))
    sizes = sorted(int(abs(difference) * scale) for difference in found)
    total, observed = sum(sizes), abs(int(sum(found) * scale))
    if total * len(sizes) <= EXACT_WORK:
        # The probability of each sum of those that keep their sign: their sum less that of the others is 2 s - total.
        chance = np.zeros(total + 1)
        chance[0] = 1.0
        for size in sizes:
            kept = np.zeros_like(chance)
            kept[size:] = chance[: total + 1 - size]
            chance = (chance + kept) / 2
        far = np.abs(2 * np.arange(total + 1) - total) >= observed
        return SignFlip(min(1.0, float(chance[far].sum())), True)
    shares = [size / total for size in sizes]
    limit = observed / total - 1e-12
    if len(sizes) <= EXACT_FLIPS:
        sums = np.zeros(1)
        for share in shares:
            sums = np.concatenate([sums + share, sums - share])
        return SignFlip(float((np.abs(sums) >= limit).mean()), True)
    counts = Counter(shares)
    values, numbers = np.array(list(counts)), np.array(list(counts.values()))
    pluses = np.random.default_rng(seed).binomial(numbers, 0.5, (RESAMPLES, len(numbers)))
    sums = (2 * pluses - numbers) @ values
    return SignFlip((1 + int((np.abs(sums) >= limit).sum())) / (1 + RESAMPLES), False)
