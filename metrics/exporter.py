"""The one place that Prometheus scrapes: it adds up what all sources have counted.

    exporter = Exporter(state=Path("/var/lib/rollcage/exporter"))
    exporter.accept("demo-1a2b", snapshot, incarnation="7f3c")
    server = serve(exporter, port=9410)

Sources send cumulative snapshots (`counts.py`), so that a snapshot lost or sent twice changes nothing. Invariants:

- A source that starts again (another incarnation) begins at 0: what the earlier one had counted is added for good.
- But a job's counters that follow from its ledger (`Family.ledger`) begin where the ledger is, and take the place of
  the dead driver's. What that one had in flight and never wrote is `attempts_abandoned`, so that
  dispatched = ended + abandoned + in flight at every scrape, and no counter falls.
- What has been accepted outlives the exporter's process: each source has a file of its own in `state`, replaced
  whole. Without `state` the exporter forgets, and only sources that still send are there after it starts again.
- Gauges are those of sources that are heard. A host that is silent for `SILENT_SEC` has `host_up` 0 and no other gauge;
  a job keeps its gauges until it ends (one that died with work open is what an alert is for).
"""

from __future__ import annotations

import hmac
import json
import os
import re
import ssl
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from wsgiref.simple_server import WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer, _SilentHandler
from prometheus_client.registry import Collector

from rollcage.metrics.counts import Buckets, Counts, Labels, Snapshot
from rollcage.metrics.definitions import FAMILIES, Family, Kind, Sender

SILENT_SEC = 30.0
"""A source that sends every few seconds and has not for this long is not there."""

FORGET_SEC = 3600.0
"""A silent host's `host_up` is 0 for this long, then it is gone."""

PORT = 9410
"""Where it listens when nobody says otherwise."""


@dataclass
class _Source:
    """What is held of one source. `base` is what its earlier incarnations counted; `abandoned` and `dispatched` are a
    job's: see the module."""

    name: str
    incarnation: str
    last: Snapshot
    heard_at: float
    base: Snapshot | None = None
    abandoned: float = 0.0
    ended: bool = False

    @property
    def dispatched(self) -> float:
        """As exported."""
        return self.last.values.get("attempts_dispatched", {}).get((), 0.0) + self.abandoned


class Exporter(Collector):
    """Takes snapshots in and yields their sums. May be called from several threads.

    `state`: a directory of its own, made where it is not there. Raises `OSError` where it cannot be written, and
    `ValueError` for a file in it that is no snapshot, naming it.
    """

    def __init__(self, state: Path | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._state = state
        self._clock = clock
        self._lock = Lock()
        self._sources: dict[str, _Source] = {}
        self._own = Counts(Sender.EXPORTER)
        if state is not None:
            state.mkdir(parents=True, exist_ok=True)
            for path in sorted(state.glob("*.json")):
                try:
                    source = _from_json(json.loads(path.read_text(encoding="utf-8")))
                except (ValueError, KeyError, TypeError) as error:
                    remedy = "delete it: what its source counted is then counted no more"
                    raise ValueError(f"{path}: this is no snapshot ({error}); {remedy}") from error
                self._sources[source.name] = source

    def accept(self, source: str, snapshot: Snapshot, *, incarnation: str, final: bool = False) -> None:
        """Take in what `source` has counted. `final`: it sends no more, and its gauges go.

        Raises `UnknownLabel` for a series that there is not; nothing has changed then.
        """
        snapshot.check()
        with self._lock:
            held = self._sources.get(source)
            now = self._clock()
            if held is None:
                held = self._sources[source] = _Source(source, incarnation, snapshot, now)
            elif held.incarnation == incarnation:
                held.last = snapshot
            else:
                held.base = _sum(_lasting(one) for one in (held.base, held.last) if one is not None)
                dispatched = held.dispatched
                held.incarnation, held.last = incarnation, snapshot
                held.abandoned += max(0.0, dispatched - held.dispatched)
            held.heard_at, held.ended = now, final
            self._own.add("exporter_snapshots", snapshot.sender.value)
            if self._state is not None:
                _write(self._state, held)

    def collect(self) -> Iterator[Metric]:
        """Every family, with its series at 0 where nobody has counted."""
        with self._lock:
            now = self._clock()
            self._look_at(now)
            sources = list(self._sources.values())
            counted = [_counters(one) for source in sources for one in (source.base, source.last) if one]
            gauges = [_gauges(source, now) for source in sources]
            abandoned = sum(source.abandoned for source in sources)
            whole = _sum([*counted, *gauges, self._own.snapshot()])
        for name in ("attempts_dispatched", "attempts_abandoned"):
            whole.values.setdefault(name, {}).setdefault((), 0.0)
            whole.values[name][()] += abandoned
        for family in FAMILIES:
            yield _metric(family, whole)

    def describe(self) -> Iterator[Metric]:
        """The families, without samples."""
        for family in FAMILIES:
            yield _metric(family, Snapshot(family.sender, {}), empty=True)

    def _look_at(self, now: float) -> None:
        """Say who is there, and forget hosts that have been silent for long (their counters stay)."""
        for kind in (Sender.JOB, Sender.HOST):
            heard = [
                source.heard_at
                for source in self._sources.values()
                if source.last.sender is kind and not source.ended
            ]
            self._own.set("exporter_sources", len(heard), kind.value)
            self._own.set("exporter_silent_seconds", max(0.0, now - min(heard, default=now)), kind.value)
        for source in self._sources.values():
            if source.last.sender is Sender.HOST and now - source.heard_at > FORGET_SEC:
                source.ended = True


_COUNTERS = frozenset(family.name for family in FAMILIES if family.kind is Kind.COUNTER)
_OF_THE_LEDGER = frozenset(family.name for family in FAMILIES if family.ledger)


def _counters(snapshot: Snapshot) -> Snapshot:
    """The part of it that only grows."""
    values = {name: series for name, series in snapshot.values.items() if name in _COUNTERS}
    return Snapshot(snapshot.sender, snapshot.declared, values, snapshot.histograms)


def _lasting(snapshot: Snapshot) -> Snapshot:
    """The part of it that its source's next incarnation does not have."""
    values = {n: series for n, series in snapshot.values.items() if n in _COUNTERS - _OF_THE_LEDGER}
    return Snapshot(snapshot.sender, snapshot.declared, values, snapshot.histograms)


def _gauges(source: _Source, now: float) -> Snapshot:
    """Those that the source has now."""
    snapshot = source.last
    values: dict[str, dict[Labels, float]] = {}
    silent = snapshot.sender is Sender.HOST and now - source.heard_at > SILENT_SEC
    for family in FAMILIES:
        series = snapshot.values.get(family.name)
        if family.kind is not Kind.GAUGE or series is None or source.ended:
            continue
        if not silent:
            values[family.name] = series
        elif family.silent is not None:
            values[family.name] = dict.fromkeys(series, family.silent)
    return Snapshot(snapshot.sender, snapshot.declared, values)


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


def _metric(family: Family, whole: Snapshot, *, empty: bool = False) -> Metric:
    """A family as prometheus_client has it. Series of constants are there at 0 even before anybody counts."""
    name, names = f"rollcage_{family.name}", list(family.label_names)
    zero = {} if empty else dict.fromkeys(family.series({}), 0.0)
    if family.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, family.help, labels=names)
        found = whole.histograms.get(family.name, {})
        for labels in {**zero, **found}:
            one = found.get(labels) or Buckets([0] * (len(family.buckets) + 1))
            histogram.add_metric(list(labels), _cumulative(family, one), sum_value=one.sum)
        return histogram
    kind = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
    metric = kind(name, family.help, labels=names)
    if family.kind is Kind.GAUGE and family.silent is None and not family.labels:
        zero = zero or {(): 0.0}
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


# The files of `state`


def _write(state: Path, source: _Source) -> None:
    path = state / (re.sub(r"[^A-Za-z0-9._-]", "_", source.name) + ".json")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(_to_json(source)), encoding="utf-8")
    os.replace(temporary, path)


def _to_json(source: _Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "incarnation": source.incarnation,
        "heard_at": source.heard_at,
        "abandoned": source.abandoned,
        "ended": source.ended,
        "last": _snapshot_to_json(source.last),
        "base": source.base and _snapshot_to_json(source.base),
    }


def _from_json(data: Mapping[str, Any]) -> _Source:
    return _Source(
        data["name"],
        data["incarnation"],
        _snapshot_from_json(data["last"]),
        float(data["heard_at"]),
        data["base"] and _snapshot_from_json(data["base"]),
        float(data["abandoned"]),
        bool(data["ended"]),
    )


def _snapshot_to_json(snapshot: Snapshot) -> dict[str, Any]:
    """Zeros are left out: every series is there all the same."""
    return {
        "sender": snapshot.sender.value,
        "declared": snapshot.declared,
        "values": {
            name: [[list(labels), value] for labels, value in series.items() if value]
            for name, series in snapshot.values.items()
        },
        "histograms": {
            name: [[list(labels), one.counts, one.sum] for labels, one in series.items() if one.total]
            for name, series in snapshot.histograms.items()
        },
    }


def _snapshot_from_json(data: Mapping[str, Any]) -> Snapshot:
    sender = Sender(data["sender"])
    whole = Counts(sender, {name: tuple(values) for name, values in data["declared"].items()}).snapshot()
    for name, series in data["values"].items():
        for labels, value in series:
            whole.values[name][tuple(labels)] = float(value)
    for name, histogram in data["histograms"].items():
        for labels, counts, total in histogram:
            whole.histograms[name][tuple(labels)] = Buckets([int(count) for count in counts], float(total))
    whole.check()
    return whole


# The port


class Server:
    """An exporter's HTTP server, until `close`. `port` is the one that it got."""

    def __init__(self, server: WSGIServer, thread: Thread) -> None:
        self._server = server
        self._thread = thread
        self.port: int = server.server_port

    def close(self) -> None:
        """Take no more scrapes."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(
    exporter: Collector,
    *,
    host: str = "127.0.0.1",
    port: int = PORT,
    user: str | None = None,
    password: str | None = None,
    certificate: Path | None = None,
    key: Path | None = None,
) -> Server:
    """Answer scrapes at `http://host:port/metrics`, on loopback unless told. With `user` and `password`, only those who
    give them (basic authentication); with `certificate` and `key` (PEM), by TLS.

    Raises `OSError` where the port is taken, `ValueError` for half of a pair.
    """
    if (user is None) != (password is None) or (certificate is None) != (key is None):
        raise ValueError("user and password, and certificate and key, go together")
    registry = CollectorRegistry()
    registry.register(exporter)
    app = make_wsgi_app(registry)
    if user is not None:
        app = _guarded(app, f"{user}:{password}")
    server = make_server(host, port, app, ThreadingWSGIServer, handler_class=_SilentHandler)
    if certificate is not None and key is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return Server(server, thread)


def _guarded(app: Callable[..., Any], credentials: str) -> Callable[..., Any]:
    """`app` for those who know the credentials."""
    wanted = b"Basic " + b64encode(credentials.encode())

    def guard(environ: Mapping[str, Any], start_response: Callable[..., Any]) -> Any:
        if hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), wanted):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", 'Basic realm="rollcage"')])
        return [b"say who you are: this exporter asks for a user and a password\n"]

    return guard
