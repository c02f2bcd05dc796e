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

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from threading import Lock

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from rollcage.metrics import sources
from rollcage.metrics.counts import Buckets, Counts, Example, Labels, Snapshot
from rollcage.metrics.definitions import FAMILIES, LABELS, PREFIX, Family, Kind, Sender
from rollcage.metrics.room import fitted, taken
from rollcage.metrics.sources import PAST, Source
from rollcage.metrics.sums import added_up, counted, succeeded

SILENT_SEC = 30.0
"""A source that sends every few seconds and has not for this long is not there."""

FORGET_SEC = {Sender.HOST: 3600.0, Sender.JOB: 24 * 3600.0}
"""A host that is silent has `host_up` 0 for this long, and a job its gauges, so that the alerts on them are seen; then
it is gone."""

ADDED_UP = 16
"""So many hosts that are gone for as long as `FORGET_SEC` are added up at once."""

SILENCE = "job_silent_seconds"
"""A job's gauge that the exporter knows and the job does not."""

_log = logging.getLogger(__name__)


class Exporter(Collector):
    """Takes snapshots in and yields their sums. May be called from several threads.

    `state`: a directory of its own, made where it is not there. `exemplars`: yield those that sources send, too; they
    are not kept. Raises `OSError` where `state` cannot be written, and `ValueError` for a file in it that is no
    snapshot, naming it.
    """

    def __init__(
        self,
        state: Path | None = None,
        *,
        exemplars: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._state = state
        self._clock = clock
        self._examples: dict[str, dict[Labels, Example]] | None = {} if exemplars else None
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
        self._kept = taken(self._snapshots(self._sources.values()), passing=False)
        """The agents and policies that have series. There is no end to that."""
        self._unkept: set[str] = set()
        """Sources of which `state` has not what is held here."""

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
            snapshot, beyond = fitted(snapshot, self._taken(source))
            self._own.add("exporter_snapshots", snapshot.sender.value)
            held = self._sources.get(source)
            was_ended = held is not None and held.ended
            if held is None:
                held = self._sources[source] = Source(source, incarnation, snapshot, 0.0, of)
            elif held.incarnation == incarnation:
                if snapshot.number <= held.last.number and not final:
                    return beyond
                if snapshot.number > held.last.number:
                    held.last, held.ended = snapshot, False
            elif incarnation in held.past:
                return beyond
            else:
                names = taken(self._snapshots([held]), passing=False)
                held.base, abandoned = succeeded(held, snapshot)
                held.base.declared = {label: tuple(sorted(found)) for label, found in names.items()}
                held.abandoned += abandoned
                held.past = [*held.past, held.incarnation][-PAST:]
                held.incarnation, held.last, held.ended = incarnation, snapshot, False
                self._end_hosts(source)
            if was_ended:
                self._of_the_ended = None
            for label, found in taken([held.last], passing=False).items():
                self._kept.setdefault(label, set()).update(found)
            held.heard_at = self._clock()
            self._note(snapshot)
            self._unkept.add(source)
            if final:
                self._end(held)
            self._keep()
            return beyond

    def _note(self, snapshot: Snapshot) -> None:
        """The newest exemplar of each series stays, also when its source has ended."""
        if self._examples is None:
            return
        for name, examples in snapshot.examples.items():
            newest = self._examples.setdefault(name, {})
            for labels, example in examples.items():
                if labels not in newest or example.at >= newest[labels].at:
                    newest[labels] = example

    def _taken(self, source: str) -> dict[str, set[str]]:
        """The names beside which a snapshot of `source` must fit."""
        there = (held.last for held in self._sources.values() if not held.ended and held.name != source)
        return taken(there, passing=True) | self._kept

    def _snapshots(self, sources: Iterable[Source]) -> Iterator[Snapshot]:
        for held in sources:
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
                self._of_the_ended = added_up(counted(ended))
            gauges = [self._gauges(source, now) for source in there]
            abandoned = sum(source.abandoned for source in self._sources.values())
            whole = added_up([self._of_the_ended, *counted(there), *gauges, self._own.snapshot()])
            kept = {label: tuple(names) for label, names in self._kept.items()}
            whole.examples = {name: dict(newest) for name, newest in (self._examples or {}).items()}
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
            self._keep()

    def _end(self, source: Source) -> None:
        if source.ended:
            return
        source.end()
        self._unkept.add(source.name)
        if self._of_the_ended is not None:
            self._of_the_ended = added_up([self._of_the_ended, *counted([source])])

    def _keep(self) -> None:
        """Write what is not in `state` yet. Raises `OSError`, and tries again with the next snapshot."""
        if self._state is None:
            return
        for name in list(self._unkept):
            source = self._sources[name]
            sources.write(self._state, source, age=self._clock() - source.heard_at)
            self._unkept.discard(name)

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
        try:
            self._keep()
            if len(gone) >= ADDED_UP:
                self._add_up(gone)
        except OSError as error:  # a scrape goes on without; whoever sends is told
            _log.warning("what is counted cannot be kept in %s: %s", self._state, error)

    def _add_up(self, gone: list[Source]) -> None:
        """Have one source in the place of these. A kill halfway doubles nothing, see `sources.replace`."""
        former = [self._sources[sources.GONE]] if sources.GONE in self._sources else []
        values = added_up(counted([*gone, *former]))
        values.sender = Sender.HOST
        whole = Source(sources.GONE, "", values, self._clock())
        whole.ended, whole.past = True, [source.name for source in gone]
        if self._state is not None:
            sources.replace(self._state, whole)
        for name in whole.past:
            del self._sources[name]
            self._unkept.discard(name)
        self._sources[sources.GONE] = whole


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
    examples = whole.examples.get(family.name, {})
    for labels, value in {**zero, **whole.values.get(family.name, {})}.items():
        if (example := examples.get(labels)) is not None and isinstance(metric, CounterMetricFamily):
            metric.add_metric(list(labels), value, exemplar=Exemplar(example.labels, 1.0, example.at))
        else:
            metric.add_metric(list(labels), value)
    return metric


def _cumulative(family: Family, one: Buckets) -> list[tuple[str, float]]:
    bounds = [*(repr(bound) for bound in family.buckets), "+Inf"]
    below, found = 0, []
    for bound, count in zip(bounds, one.counts, strict=True):
        below += count
        found.append((bound, float(below)))
    return found
