"""What the exporter holds of each source, and the files in which that outlives its process.

Each source has one file in the state directory, named after it and replaced whole, so that a kill at any moment leaves
the former or the new one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rollcage.metrics.counts import Buckets, Counts, Snapshot
from rollcage.metrics.definitions import Sender

PAST = 64
"""Earlier incarnations of a source that are remembered, to know a late snapshot of one. A late one is seconds late."""


@dataclass
class Source:
    """What is held of one source. `base` is what its earlier incarnations counted, `past` are their names, the last of
    them last. `of`: a host's job. `abandoned` are a job's attempts that are in no snapshot any more and ended never."""

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
        return self.last.values.get("attempts_dispatched", {}).get((), 0.0) + self.abandoned

    def end(self) -> None:
        """It sends no more: its gauges go, and attempts that were still in flight have been abandoned."""
        if self.ended:
            return
        self.ended = True
        in_flight = self.last.values.get("attempts_in_flight", {}).get((), 0.0)
        if in_flight:
            values = dict(self.last.values)
            values["attempts_dispatched"] = {(): values["attempts_dispatched"][()] - in_flight}
            values["attempts_in_flight"] = {(): 0.0}
            self.last = Snapshot(
                self.last.sender, self.last.declared, values, self.last.histograms, self.last.number
            )
            self.abandoned += in_flight


def read_all(state: Path) -> Iterator[Source]:
    """The sources whose files are in `state`. Raises `OSError`, and `ValueError` for a file that is no snapshot, naming
    it."""
    for path in sorted(state.glob("*.json")):
        try:
            yield _from_json(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, KeyError, TypeError) as error:
            remedy = "delete it: what its source counted is then counted no more"
            raise ValueError(f"{path}: this is no snapshot ({error}); {remedy}") from error


def write(state: Path, source: Source) -> None:
    """Replace the file of `source`. Raises `OSError`."""
    path = state / (quote(source.name, safe="") + ".json")
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(_to_json(source)), encoding="utf-8")
    os.replace(temporary, path)


def _to_json(source: Source) -> dict[str, Any]:
    return {
        "name": source.name,
        "incarnation": source.incarnation,
        "heard_at": source.heard_at,
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
        float(data["heard_at"]),
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
    whole = Counts(sender, {name: tuple(values) for name, values in data["declared"].items()}).snapshot()
    for name, series in data["values"].items():
        for labels, value in series:
            whole.values[name][tuple(labels)] = float(value)
    for name, histogram in data["histograms"].items():
        for labels, counts, total in histogram:
            whole.histograms[name][tuple(labels)] = Buckets([int(count) for count in counts], float(total))
    whole.number = int(data["number"])
    whole.check()
    return whole
