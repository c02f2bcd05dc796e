"""Pass rates that say how sure they are, and pass@k that does not depend on who came back first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import NormalDist
from typing import NamedTuple


class Interval(NamedTuple):
    """A closed interval of rates, 0 to 1."""

    low: float
    high: float


def pass_rate(passed: int, failed: int) -> float | None:
    """passed / (passed + failed), None where there is nothing to divide by."""
    return passed / (passed + failed) if passed + failed else None


def wilson(passed: int, total: int, confidence: float = 0.95) -> Interval:
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
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} passed in {samples} samples is not defined")
    every = math.comb(samples, k)
    return (every - math.comb(samples - passed, k)) / every


class PassAtK(NamedTuple):
    """pass@k as the mean over `tasks` tasks, those that have at least k valid samples."""

    k: int
    value: float
    tasks: int


def pass_at_each_k(tasks: Sequence[tuple[int, int]]) -> list[PassAtK]:
    """pass@k for each k from 1 to the most samples that a task has, from (samples, passed) of each task.

    Only valid samples count. A task with fewer than k samples has no pass@k and is left out of that mean;
    `PassAtK.tasks` says how many are in it.
    """
    found = []
    for k in range(1, max((samples for samples, _ in tasks), default=0) + 1):
        values = [pass_at_k(samples, passed, k) for samples, passed in tasks if samples >= k]
        found.append(PassAtK(k, mean(values), len(values)))
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
