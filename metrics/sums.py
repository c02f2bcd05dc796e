"""Arithmetic of snapshots: sums of many, and what of an earlier incarnation of a source lasts."""

from __future__ import annotations

from collections.abc import Iterable

from rollcage.metrics.counts import Buckets, Labels, Snapshot
from rollcage.metrics.definitions import FAMILIES, Kind, Sender
from rollcage.metrics.sources import Source

COUNTERS = frozenset(family.name for family in FAMILIES if family.kind is Kind.COUNTER)
OF_THE_LEDGER = frozenset(family.name for family in FAMILIES if family.ledger)
_LARGEST = frozenset(family.name for family in FAMILIES if family.combine == "max")


def added_up(snapshots: Iterable[Snapshot]) -> Snapshot:
    """Their sum; of gauges that cannot be added, the largest. Nothing is declared in it."""
    whole = Snapshot(Sender.EXPORTER, {})
    for snapshot in snapshots:
        for name, series in snapshot.values.items():
            into = whole.values.setdefault(name, {})
            for labels, value in series.items():
                had = into.get(labels, 0.0)
                into[labels] = max(had, value) if name in _LARGEST else had + value
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


def counted(sources: Iterable[Source]) -> list[Snapshot]:
    """What these sources have counted, in all of their incarnations: the part that only grows."""
    return [
        _only(one, COUNTERS) for source in sources for one in (source.base, source.last) if one is not None
    ]


def succeeded(source: Source, following: Snapshot) -> tuple[Snapshot, float]:
    """What of `source` does not come again in the snapshots of its next incarnation, of which `following` is one; and
    how many of its attempts never ended.

    Counters that do not follow from the ledger begin at 0 again. Of the others that is left which the ledger had no
    more when the next incarnation read it (`Snapshot.began`): rollouts that are run again.
    """
    began = following.began or following.values
    again: dict[str, dict[Labels, float]] = {}
    for name in OF_THE_LEDGER - {"attempts_dispatched"}:
        there = began.get(name, {})
        again[name] = {
            labels: value - there.get(labels, 0.0)
            for labels, value in source.last.values.get(name, {}).items()
            if value > there.get(labels, 0.0)
        }
    again["attempts_dispatched"] = dict(again["attempts_ended"])
    lasting = _only(source.last, COUNTERS - OF_THE_LEDGER)
    parts = [lasting, Snapshot(lasting.sender, {}, again)] + ([] if source.base is None else [source.base])
    base = added_up(parts)
    base.sender = source.last.sender
    there_now = began.get("attempts_dispatched", {}).get((), 0.0)
    dispatched = base.values["attempts_dispatched"].get((), 0.0) + there_now + source.abandoned
    return base, max(0.0, source.dispatched - dispatched)


def _only(snapshot: Snapshot, names: frozenset[str]) -> Snapshot:
    values = {name: series for name, series in snapshot.values.items() if name in names}
    return Snapshot(snapshot.sender, {}, values, snapshot.histograms)
