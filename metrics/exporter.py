"""The one place that Prometheus scrapes: it adds up what all sources have counted.

    exporter = Exporter(state=Path("/var/lib/rollcage/exporter"))
    exporter.accept("demo-1a2b", snapshot, incarnation="7f3c")
    server = serve(exporter, port=9410)  # serving.py

Sources send cumulative snapshots (`counts.py`), so that one that is lost, or comes twice or late,
changes nothing. Invariants:

- A source that starts again (another incarnation) begins at 0: what the earlier one had counted is added for good.
- But a job's counters that follow from its ledger (`Family.ledger`) begin where the ledger is, and take the place of
  the dead driver's. What that one had in flight and never wrote is `attempts_abandoned`, so that
  dispatched = ended + abandoned + in flight at every scrape. Rollouts that had ended and are run again end twice, and
  are counted twice. So no counter falls.
- What has been accepted outlives the exporter's process, in `state` (`sources.py`). Without it the exporter forgets,
  and only sources that still send are there after it starts again. Its own counters are its process's and begin at 0.
- Gauges are those of sources that are heard. A host that is silent for `SILENT_SEC` has `host_up` 0 and no other gauge;
  a job keeps its gauges until it ends (one that died with work open is what an alert is for). A host of a job that is
  silent too has died with it, and no gauge. Both are forgotten at last, see `FORGET_SEC`; attempts that a job had in
  flight are abandoned then.
- A cluster may have thousands of jobs and hosts in its life. Of one that has ended only what is not 0 is kept, and
  hosts, which never come back, are added up in one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Lock

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from rollcage.metrics import sources
from rollcage.metrics.counts import Buckets, Counts, Labels, Snapshot
from rollcage.metrics.definitions import FAMILIES, LABELS, PREFIX, Family, Kind, Sender
from rollcage.metrics.room import fitted, taken
from rollcage.metrics.sources import PAST, Source

SILENT_SEC = 30.0
"""A source that sends every few seconds and has not for this long is not there."""

FORGET_SEC = {Sender.HOST: 3600.0, Sender.JOB: 24 * 3600.0}
"""A host that is silent has `host_up` 0 for this long, and a job its gauges, so that the alerts on them are seen; then
it is gone."""

ADDED_UP = 16
"""So many hosts that are gone for as long as `FORGET_SEC` are added up at once."""


SILENCE = "job_silent_seconds"
"""A job's gauge that the exporter knows and the job does not."""


class Exporter(Collector):
    """Takes snapshots in and yields their sums. May be called from several threads.

    `state`: a directory of its own, made where it is not there. Raises `OSError` where it cannot be written, and
    `ValueError` for a file in it that is no snapshot, naming it.
    """

    def __init__(self, state: Path | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._lock = Lock()
        self._sources: dict[str, Source] = {}
        self._of_the_ended: Snapshot | None = None
        """Counters of all sources that have ended, added up; None where they have to be added up anew."""
        self._own = Counts(Sender.EXPORTER)
        self._own.set("build_info", 1, *LABELS["version"])
        if state is not None:
            state.mkdir(parents=True, exist_ok=True)
            now = clock()
            for source, age in sources.read_all(state):
                source.heard_at = now - age
                self._sources[source.name] = source
        self._kept = taken(self._snapshots(), passing=False)
        """The agents and policies that have series. There is no end to that."""

    def accept(
        self, source: str, snapshot: Snapshot, *, incarnation: str, final: bool = False, of: str = ""
    ) -> str:
        """Take in what `source` has counted. `final`: it sends no more, and its gauges go. `of`: of a host, the job
        that it works for. One that is late (a later one of the same source has come) changes nothing.

        Returns which names are beyond those that their label may have (`room.py`), nothing where none is. Raises
        `UnknownLabel` for a series that there is not, and `ValueError` for a counter that is no number or below 0;
        nothing has changed then.
        """
        snapshot.check()
        with self._lock:
            held = self._sources.get(source)
            snapshot, beyond = fitted(snapshot, self._taken(source))
            now = self._clock()
            if final or (held is not None and held.ended):
                self._of_the_ended = None
            self._own.add("exporter_snapshots", snapshot.sender.value)
            if held is None:
                held = self._sources[source] = Source(source, incarnation, snapshot, now, of)
            elif held.incarnation == incarnation:
                if snapshot.number <= held.last.number and not final:
                    return beyond
                if snapshot.number > held.last.number:
                    held.last, held.ended = snapshot, False
            elif incarnation in held.past:
                return beyond
            else:
                parts = (held.base, _lasting(held.last), _ended_again(held.last, snapshot))
                held.base = _sum(one for one in parts if one is not None)
                dispatched = held.dispatched
                held.past = [*held.past, held.incarnation][-PAST:]
                held.incarnation, held.last, held.ended = incarnation, snapshot, False
                held.abandoned += max(0.0, dispatched - held.dispatched)
                self._end_hosts(source)
            held.heard_at = now
            if final:
                held.end()
            if self._state is not None:
                sources.write(self._state, held, age=0.0)
            for label, names in taken([held.last], passing=False).items():
                self._kept.setdefault(label, set()).update(names)
            return beyond

    def _taken(self, source: str) -> dict[str, set[str]]:
        """The names beside which a snapshot of `source` must fit."""
        there = (held.last for held in self._sources.values() if not held.ended and held.name != source)
        return taken(there, passing=True) | self._kept

    def _snapshots(self) -> Iterator[Snapshot]:
        for held in self._sources.values():
            yield held.last
            if held.base is not None:
                yield held.base

    def collect(self) -> Iterator[Metric]:
        """Every family, with its series at 0 where nobody has counted."""
        with self._lock:
            now = self._clock()
            self._look_at(now)
            there = [source for source in self._sources.values() if not source.ended]
            if self._of_the_ended is None:
                ended = (source for source in self._sources.values() if source.ended)
                self._of_the_ended = _sum(_counted(ended))
            counted = [self._of_the_ended, *_counted(there)]
            gauges = [self._gauges(source, now) for source in there]
            abandoned = sum(source.abandoned for source in self._sources.values())
            whole = _sum([*counted, *gauges, self._own.snapshot()])
            kept = {label: tuple(names) for label, names in self._kept.items()}
        for name in ("attempts_dispatched", "attempts_abandoned"):
            whole.values.setdefault(name, {}).setdefault((), 0.0)
            whole.values[name][()] += abandoned
        for family in FAMILIES:
            yield _metric(family, whole, kept)

    def describe(self) -> Iterator[Metric]:
        """The families, without samples."""
        for family in FAMILIES:
            yield _metric(family, Snapshot(family.sender, {}))

    def end(self, source: str) -> None:
        """`source` is known to be gone, and what it was doing is looked after: its gauges go."""
        with self._lock:
            held = self._sources.get(source)
            if held is not None:
                self._end(held)

    def _end(self, source: Source) -> None:
        source.end()
        self._of_the_ended = None
        if self._state is not None:
            sources.write(self._state, source, age=self._clock() - source.heard_at)

    def _end_hosts(self, job: str) -> None:
        """Those of the job's dead driver died with it. One that is the new driver's, and was heard before it, is back
        with its next word."""
        for source in self._sources.values():
            if source.of == job and not source.ended:
                self._end(source)

    def _gauges(self, source: Source, now: float) -> Snapshot:
        """Those that a source which has not ended has now."""
        snapshot = source.last
        values: dict[str, dict[Labels, float]] = {}
        silent = snapshot.sender is Sender.HOST and now - source.heard_at > SILENT_SEC
        if silent and self._is_gone(source.of, now):
            return Snapshot(snapshot.sender, snapshot.declared)
        for family in FAMILIES:
            series = snapshot.values.get(family.name)
            if family.kind is not Kind.GAUGE or series is None:
                continue
            if not silent:
                values[family.name] = series
            elif family.silent is not None:
                values[family.name] = dict.fromkeys(series, family.silent)
        for labels in values.get(SILENCE, {}):
            values[SILENCE] = {labels: max(0.0, now - source.heard_at)}
        return Snapshot(snapshot.sender, snapshot.declared, values)

    def _is_gone(self, job: str, now: float) -> bool:
        held = self._sources.get(job)
        return held is not None and (held.ended or now - held.heard_at > SILENT_SEC)

    def _look_at(self, now: float) -> None:
        """Say who is there, and forget those that have been silent for long (their counters stay)."""
        for kind in (Sender.JOB, Sender.HOST):
            heard = []
            for source in self._sources.values():
                if source.last.sender is kind and not source.ended:
                    if now - source.heard_at > FORGET_SEC[kind]:
                        self._end(source)
                    else:
                        heard.append(source.heard_at)
            self._own.set("exporter_sources", len(heard), kind.value)
            self._own.set("exporter_silent_seconds", max(0.0, now - min(heard, default=now)), kind.value)
        gone = [
            source
            for source in self._sources.values()
            if source.ended
            and source.last.sender is Sender.HOST
            and now - source.heard_at > FORGET_SEC[Sender.HOST]
            and source.name != sources.GONE
        ]
        if len(gone) >= ADDED_UP:
            self._add_up(gone)

    def _add_up(self, gone: list[Source]) -> None:
        """Have one source in the place of these. A kill halfway doubles nothing, see `sources.replace`."""
        former = self._sources.get(sources.GONE)
        counted = _sum(_counted([*gone, *([former] if former is not None else [])]))
        whole = Source(sources.GONE, "", Snapshot(Sender.HOST, {}, counted.values, counted.histograms), 0.0)
        whole.ended, whole.past = True, [source.name for source in gone]
        if self._state is not None:
            sources.replace(self._state, whole)
        for name in whole.past:
            del self._sources[name]
        self._sources[sources.GONE] = whole


_COUNTERS = frozenset(family.name for family in FAMILIES if family.kind is Kind.COUNTER)
_OF_THE_LEDGER = frozenset(family.name for family in FAMILIES if family.ledger)


def _counted(of: Iterable[Source]) -> list[Snapshot]:
    """What these sources have counted, in all of their incarnations."""
    return [_counters(one) for source in of for one in (source.base, source.last) if one is not None]


def _counters(snapshot: Snapshot) -> Snapshot:
    """The part of it that only grows."""
    values = {name: series for name, series in snapshot.values.items() if name in _COUNTERS}
    return Snapshot(snapshot.sender, snapshot.declared, values, snapshot.histograms)


def _lasting(snapshot: Snapshot) -> Snapshot:
    """The part of it that its source's next incarnation does not have."""
    values = {n: series for n, series in snapshot.values.items() if n in _COUNTERS - _OF_THE_LEDGER}
    return Snapshot(snapshot.sender, snapshot.declared, values, snapshot.histograms)


def _ended_again(before: Snapshot, now: Snapshot) -> Snapshot:
    """What `before` had of its ledger that the ledger has no more: rollouts that are run again. Attempts stay there."""
    values: dict[str, dict[Labels, float]] = {}
    for name in _OF_THE_LEDGER - {"attempts_dispatched"}:
        there = now.values.get(name, {})
        values[name] = {
            labels: value - there.get(labels, 0.0)
            for labels, value in before.values.get(name, {}).items()
            if value > there.get(labels, 0.0)
        }
    return Snapshot(before.sender, before.declared, values)


def _sum(snapshots: Iterable[Snapshot]) -> Snapshot:
    whole = Snapshot(Sender.EXPORTER, {})
    largest = {family.name for family in FAMILIES if family.combine == "max"}
    for snapshot in snapshots:
        whole.sender = snapshot.sender
        for name, values in snapshot.declared.items():
            whole.declared[name] = tuple(dict.fromkeys((*whole.declared.get(name, ()), *values)))
        for name, series in snapshot.values.items():
            into = whole.values.setdefault(name, {})
            for labels, value in series.items():
                had = into.get(labels, 0.0)
                into[labels] = max(had, value) if name in largest else had + value
        for name, histogram in snapshot.histograms.items():
            into_buckets = whole.histograms.setdefault(name, {})
            for labels, one in histogram.items():
                before = into_buckets.get(labels)
                if before is None:
                    into_buckets[labels] = Buckets(list(one.counts), one.sum)
                else:
                    before.counts = [a + b for a, b in zip(before.counts, one.counts, strict=True)]
                    before.sum += one.sum
    return whole


def _metric(family: Family, whole: Snapshot, kept: dict[str, Labels] | None = None) -> Metric:
    """A family as prometheus_client has it, without samples where `kept` is None. Series of constants are there at 0
    even before anybody counts, and those of the agents and policies in `kept` for ever; but a gauge is somebody's."""
    name, names = PREFIX + family.name, list(family.label_names)
    declared = {} if kept is None or family.kind is Kind.GAUGE else kept
    zero = {} if kept is None else dict.fromkeys(family.series(declared), 0.0)
    if family.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, family.help, labels=names)
        found = whole.histograms.get(family.name, {})
        for labels in {**zero, **found}:
            one = found.get(labels) or Buckets([0] * (len(family.buckets) + 1))
            histogram.add_metric(list(labels), _cumulative(family, one), sum_value=one.sum)
        return histogram
    kind = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = kind(name, family.help, labels=names)
    for labels, value in {**zero, **whole.values.get(family.name, {})}.items():
        metric.add_metric(list(labels), value)
    return metric


def _cumulative(family: Family, one: Buckets) -> list[tuple[str, float]]:
    bounds = [*(repr(bound) for bound in family.buckets), "+Inf"]
    below, found = 0, []
    for bound, count in zip(bounds, one.counts, strict=True):
        below += count
        found.append((bound, float(below)))
    return found
