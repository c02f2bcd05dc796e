"""What one source counts: cumulative, complete from the start, and sent as a snapshot.

    counts = Counts(Sender.HOST, {"host": ("host-1",)})
    counts.add("image_builds", "built")
    counts.observe("image_build_seconds", 12.5)
    counts.set("host_up", 1, "host-1")
    snapshot = counts.snapshot()

A snapshot holds totals and never differences, so that one that is lost costs nothing and one that comes twice doubles
nothing; its number says which of two is the later one. Every series of the families that the source counts is there
from the start, at 0. Not for several threads.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from rollcage.metrics.definitions import BY_NAME, FAMILIES, MOST, Family, Kind, Sender

T = TypeVar("T")
Labels = tuple[str, ...]


class UnknownLabel(ValueError):
    """A family that is not in the list, or a label value outside its set."""


@dataclass
class Buckets:
    """One series of a histogram. `counts` has one place for each bound and one for what is above the last: not
    cumulative. `sum` is in the family's unit."""

    counts: list[int]
    sum: float = 0.0

    @property
    def total(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


class Example(NamedTuple):
    """One of those that a series counts, as OpenMetrics' exemplars are. `labels` say which one it is, `at` when it was
    counted (Unix seconds)."""

    labels: dict[str, str]
    at: float


EXAMPLE_CHARS = 128
"""OpenMetrics' limit on all names and values of an exemplar's labels together."""


@dataclass
class Snapshot:
    """All that a source has counted until now: `values` by family and labels, `histograms` likewise. `number`: how many
    snapshots its source had sent with this one, from 1; 0 where that is not known."""

    sender: Sender
    declared: dict[str, tuple[str, ...]]
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)
    histograms: dict[str, dict[Labels, Buckets]] = field(default_factory=dict)
    number: int = 0
    began: dict[str, dict[Labels, float]] = field(default_factory=dict)
    """Of a job that goes on with a run: where its counters that follow from the ledger began."""
    examples: dict[str, dict[Labels, Example]] = field(default_factory=dict)
    """The last of what some counters count, where a job has exemplars."""

    def check(self) -> None:
        """Raises `UnknownLabel` for a series, a declared label or a number of buckets that `definitions.py` does not
        have, and `ValueError` for a counter that is no number or below 0."""
        check_declared(self.declared)
        found: dict[str, set[Labels]] = {name: set(series) for name, series in self.values.items()}
        found |= {name: set(series) for name, series in self.histograms.items()}
        for name, examples in self.examples.items():
            found[name] = found.get(name, set()) | set(examples)
        for name, series in found.items():
            family = _family(name, self.sender)
            known = set(family.series(self.declared))
            for labels in series:
                if labels not in known:
                    raise UnknownLabel(f"{family.full_name} has no series {labels}")
        for name, values in self.values.items():
            if BY_NAME[name].kind is Kind.COUNTER:
                _check_amount(BY_NAME[name].full_name, *values.values())
        for name, histogram in self.histograms.items():
            places = len(BY_NAME[name].buckets) + 1
            if any(len(one.counts) != places for one in histogram.values()):
                raise UnknownLabel(f"{BY_NAME[name].full_name} has {places} buckets, +Inf among them")
            for one in histogram.values():
                _check_amount(BY_NAME[name].full_name, one.sum, *one.counts)


class Counts:
    """A source's counters, gauges and histograms. `declared`: the values of its declared labels, as many as it has; the
    exporter sees to it that there are not too many in all (`room.py`).

    Raises `UnknownLabel` for a label whose values are not declared, and for a value that cannot be written.
    """

    def __init__(self, sender: Sender, declared: Mapping[str, Iterable[str]] | None = None) -> None:
        self.sender = sender
        self.declared = {name: tuple(dict.fromkeys(values)) for name, values in (declared or {}).items()}
        check_declared(self.declared)
        self._sent = 0
        self._began: dict[str, dict[Labels, float]] = {}
        self._values: dict[str, dict[Labels, float]] = {}
        self._histograms: dict[str, dict[Labels, Buckets]] = {}
        self._examples: dict[str, dict[Labels, Example]] = {}
        self._add_series()

    def declare(self, label: str, value: str) -> None:
        """Have one more value of a declared label. Raises `UnknownLabel`."""
        declared = {**self.declared, label: tuple(dict.fromkeys((*self.declared.get(label, ()), value)))}
        check_declared(declared)
        self.declared = declared
        self._add_series()

    def _add_series(self) -> None:
        """Those that are missing, at 0."""
        for family in FAMILIES:
            if family.sender is not self.sender:
                continue
            series = list(family.series(self.declared))
            if family.kind is Kind.HISTOGRAM:
                empty = {labels: _empty(family) for labels in series}
                self._histograms[family.name] = empty | self._histograms.get(family.name, {})
            else:
                zero = dict.fromkeys(series, 0.0)
                self._values[family.name] = zero | self._values.get(family.name, {})

    def add(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Count `amount` more. Raises `UnknownLabel`, and `ValueError` for less than nothing and what is no number."""
        _check_amount(name, amount)
        self._series(self._values, name, labels)
        self._values[name][labels] += amount

    def example(self, name: str, *labels: str, **which: str) -> None:
        """The last that a counter has counted is the one that `which` names; one whose names are too long for an
        exemplar is left out. Raises `UnknownLabel`."""
        self._series(self._values, name, labels)
        if sum(map(len, (*which, *which.values()))) <= EXAMPLE_CHARS:
            self._examples.setdefault(name, {})[labels] = Example(which, time.time())

    def set(self, name: str, value: float, *labels: str) -> None:
        """Say what a gauge is now, or what a counter's total is that somebody else keeps. Raises as `add`."""
        if name in BY_NAME and BY_NAME[name].kind is Kind.COUNTER:
            _check_amount(name, value)
        self._series(self._values, name, labels)
        self._values[name][labels] = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Put one value into a histogram. Raises as `add`."""
        _check_amount(name, value)
        buckets = self._series(self._histograms, name, labels)
        buckets.counts[bisect_left(BY_NAME[name].buckets, value)] += 1
        buckets.sum += value

    def value(self, name: str, *labels: str) -> float:
        """What a counter or a gauge is now. Raises `UnknownLabel`."""
        return self._series(self._values, name, labels)

    def snapshot(self) -> Snapshot:
        """A copy of everything, with the next number."""
        self._sent += 1
        return Snapshot(
            self.sender,
            dict(self.declared),
            {name: dict(series) for name, series in self._values.items()},
            {
                name: {labels: Buckets(list(one.counts), one.sum) for labels, one in series.items()}
                for name, series in self._histograms.items()
            },
            self._sent,
            self._began,
            {name: dict(series) for name, series in self._examples.items()},
        )

    def begin(self) -> None:
        """What is counted now is what the ledger had when its source began (`Snapshot.began`)."""
        families = (family.name for family in FAMILIES if family.ledger and family.name in self._values)
        self._began = {name: dict(self._values[name]) for name in families}

    def _series(self, among: dict[str, dict[Labels, T]], name: str, labels: Labels) -> T:
        try:
            return among[name][labels]
        except KeyError:
            family = _family(name, self.sender)
            if name not in among:
                raise UnknownLabel(f"{family.full_name} is a {family.kind}") from None
            raise UnknownLabel(
                f"{family.full_name}{dict(zip(family.label_names, labels, strict=False))}: no such series"
            ) from None


def check_declared(declared: Mapping[str, Iterable[str]]) -> None:
    """Raises `UnknownLabel` for a label whose values are constants, and for a value that is no text of Unicode."""
    for name, values in declared.items():
        if name not in MOST:
            raise UnknownLabel(f"{name!r} is no label whose values can be declared")
        for value in values:
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise UnknownLabel(f"{value!r} cannot be a value of the label {name!r}: {error}") from None


def _check_amount(name: str, *amounts: float) -> None:
    if not all(0 <= amount < math.inf for amount in amounts):
        raise ValueError(f"{name}: a counter never falls and is a number ({', '.join(map(str, amounts))})")


def _empty(family: Family) -> Buckets:
    return Buckets([0] * (len(family.buckets) + 1))


def _family(name: str, sender: Sender) -> Family:
    family = BY_NAME.get(name)
    if family is None or family.sender is not sender:
        raise UnknownLabel(f"a {sender} counts no {name!r}")
    return family
