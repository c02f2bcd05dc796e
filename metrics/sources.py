"""What the exporter holds of each source, and the files in which that outlives its process.

Each source has one file in the state directory, named after it and replaced whole, so that a kill at any moment leaves
the former or the new one. Another version of Rollcage may have written it: series that there are no more are left out,
and those that are new begin at 0.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rollcage.metrics.counts import Buckets, Counts, Labels, Snapshot
from rollcage.metrics.definitions import MOST, Sender

LONGEST = 200
"""Characters of a source's name in that of its file: most file systems take 255 bytes."""

GONE = "hosts that are gone"
"""The source that stands for them: `past` has those that were last added to it. A host's own name has no blanks."""

PAST = 64
"""Earlier incarnations of a source that are remembered, to know a late snapshot of one. A late one is seconds late."""


@dataclass
class Source:
    """What is held of one source. `heard_at` is in the time of the exporter's clock. `base` is what its earlier
    incarnations counted, `past` are their names, the last of them last. `of`: a host's job. `abandoned` are a job's
    attempts that are in no snapshot any more and ended never."""

    name: str
    incarnation: str
    last: Snapshot
    heard_at: float
    of: str = ""
    base: Snapshot | None = None
    past: list[str] = field(default_factory=list)
    abandoned: float = 0.0
    ended: bool = False

    @property
    def dispatched(self) -> float:
        """As exported."""
        counted = [self.last] if self.base is None else [self.last, self.base]
        return self.abandoned + sum(one.values.get("attempts_dispatched", {}).get((), 0.0) for one in counted)

    def end(self) -> None:
        """It sends no more: its gauges go, and attempts that were still in flight have been abandoned."""
        if self.ended:
            return
        self.ended = True
        self.last, self.base = _without_zeros(self.last), self.base and _without_zeros(self.base)
        in_flight = self.last.values.get("attempts_in_flight", {}).get((), 0.0)
        if in_flight:
            values = dict(self.last.values)
            values["attempts_dispatched"] = {(): values["attempts_dispatched"][()] - in_flight}
            del values["attempts_in_flight"]
            self.last = Snapshot(
                self.last.sender, self.last.declared, values, self.last.histograms, self.last.number
            )
            self.abandoned += in_flight


def read_all(state: Path) -> Iterator[tuple[Source, float]]:
    """The sources whose files are in `state`, and how many seconds ago each was heard. Their `heard_at` is the caller's
    to set. Raises `OSError`, and `ValueError` for a file that is no snapshot, naming it."""
    gone: set[str] = set()
    for path in sorted(state.glob("*.json"), key=lambda path: (path != _path(state, GONE), path)):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            source = _from_json(data)
            age = max(0.0, time.time() - float(data["heard_at"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            remedy = "delete it: what its source counted is then counted no more"
            raise ValueError(f"{path}: this is no snapshot ({error}); {remedy}") from error
        if source.ended:
            source.last, source.base = (
                _without_zeros(source.last),
                source.base and _without_zeros(source.base),
            )
        if source.name == GONE:
            gone = set(source.past)
        if source.name in gone:
            path.unlink(missing_ok=True)
        else:
            yield source, age


def replace(state: Path, whole: Source) -> None:
    """Write `whole`, and remove the files of the sources in its `past`. Killed in between, `read_all` does the rest.
    Raises `OSError`."""
    write(state, whole, age=0.0)  # before any other file goes
    for name in whole.past:
        _path(state, name).unlink(missing_ok=True)


def write(state: Path, source: Source, *, age: float) -> None:
    """Replace the file of `source`, which was heard `age` seconds ago. Raises `OSError`."""
    path = _path(state, source.name)
    temporary = path.with_suffix(".tmp")
    state.mkdir(parents=True, exist_ok=True)
    temporary.write_text(json.dumps(_to_json(source, time.time() - age)), encoding="utf-8")
    os.replace(temporary, path)


def _path(state: Path, source: str) -> Path:
    name = quote(source, safe="", errors="surrogatepass")
    if len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{sha256(name.encode()).hexdigest()[:16]}"
    return state / f"{name}.json"


def _without_zeros(snapshot: Snapshot) -> Snapshot:
    """With them a source is ten times as large, and every series is exported at 0 all the same."""
    values: dict[str, dict[Labels, float]] = {}
    for name, series in snapshot.values.items():
        if counted := {labels: value for labels, value in series.items() if value}:
            values[name] = counted
    histograms: dict[str, dict[Labels, Buckets]] = {}
    for name, histogram in snapshot.histograms.items():
        if observed := {labels: one for labels, one in histogram.items() if one.total}:
            histograms[name] = observed
    return Snapshot(snapshot.sender, snapshot.declared, values, histograms, snapshot.number)


def _to_json(source: Source, heard_at: float) -> dict[str, Any]:
    """`heard_at`: in seconds since the epoch, which a process' own clock does not outlive."""
    return {
        "name": source.name,
        "incarnation": source.incarnation,
        "heard_at": heard_at,
        "of": source.of,
        "past": source.past,
        "abandoned": source.abandoned,
        "ended": source.ended,
        "last": _snapshot_to_json(source.last),
        "base": source.base and _snapshot_to_json(source.base),
    }


def _from_json(data: Mapping[str, Any]) -> Source:
    return Source(
        data["name"],
        data["incarnation"],
        _snapshot_from_json(data["last"]),
        0.0,
        str(data["of"]),
        data["base"] and _snapshot_from_json(data["base"]),
        [str(name) for name in data["past"]],
        float(data["abandoned"]),
        bool(data["ended"]),
    )


def _snapshot_to_json(snapshot: Snapshot) -> dict[str, Any]:
    """Zeros are left out: every series is there all the same."""
    return {
        "sender": snapshot.sender.value,
        "number": snapshot.number,
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
    declared = {name: values[: MOST[name]] for name, values in data["declared"].items() if name in MOST}
    whole = Counts(sender, declared).snapshot()
    for name, series in data["values"].items():
        for labels, value in series:
            if tuple(labels) in whole.values.get(name, {}):
                whole.values[name][tuple(labels)] = float(value)
    for name, histogram in data["histograms"].items():
        for labels, counts, total in histogram:
            empty = whole.histograms.get(name, {}).get(tuple(labels))
            if empty is not None and len(empty.counts) == len(counts):
                whole.histograms[name][tuple(labels)] = Buckets(
                    [int(count) for count in counts], float(total)
                )
    whole.number = int(data["number"])
    whole.check()
    return whole
