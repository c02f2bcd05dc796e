"""Has a source's snapshot fit beside those of all others, so that no label ever has more values than it may.

Nothing that was counted is lost: counts of agents and policies past the most are `OTHER`'s. Hosts and jobs have gauges
of their own and no counters; those past the most have none, until others are gone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollcage.metrics.counts import Buckets, Labels, Snapshot
from rollcage.metrics.definitions import BY_NAME, MOST, OTHER, Family

Values = dict[str, dict[Labels, float]]

PASSING = frozenset(("host", "job_id"))
"""Labels whose values go with their source. Agents and policies have counters, which stay."""


def taken(snapshots: Iterable[Snapshot], *, passing: bool) -> dict[str, set[str]]:
    """The values of declared labels that these have: of labels that are `PASSING`, or of the others."""
    found: dict[str, set[str]] = {}
    for snapshot in snapshots:
        for label, names in snapshot.declared.items():
            if (label in PASSING) is passing:
                found.setdefault(label, set()).update(names)
    return found


def fitted(snapshot: Snapshot, taken: Mapping[str, set[str]]) -> tuple[Snapshot, str]:
    """`snapshot` itself, or one that fits beside the values that are `taken` (of agents and policies, also by its own
    source before), and what is to be said of that. The number of values is `MOST` at the most then, `OTHER` among
    them."""
    renamed: dict[str, dict[str, str | None]] = {}
    said = []
    for label, names in snapshot.declared.items():
        held = set(taken.get(label, ()))
        new = [name for name in names if name not in held]
        room = MOST[label] - len(held) if label in PASSING else MOST[label] - 1 - len(held - {OTHER})
        over = [name for name in new if name != OTHER or label in PASSING][max(0, room) :]
        if not over:
            continue
        renamed[label] = dict.fromkeys(over, None if label in PASSING else OTHER)
        shown = ", ".join(over[:3]) + (", ..." if len(over) > 3 else "")
        what = "has no gauges of its own" if label in PASSING else f"is counted as {OTHER!r}"
        said.append(f"more than {MOST[label]} values of the label {label!r} in all: {shown} {what}")
    return (_renamed(snapshot, renamed), "; ".join(said)) if renamed else (snapshot, "")


def _renamed(snapshot: Snapshot, names: Mapping[str, Mapping[str, str | None]]) -> Snapshot:
    declared = {
        label: tuple(
            dict.fromkeys(
                new for value in values if (new := names.get(label, {}).get(value, value)) is not None
            )
        )
        for label, values in snapshot.declared.items()
    }
    into = Snapshot(snapshot.sender, declared, number=snapshot.number)
    into.values, into.began = (_values(found, names) for found in (snapshot.values, snapshot.began))
    for name, examples in snapshot.examples.items():
        in_time = sorted(examples.items(), key=lambda item: item[1].at)
        found = {_labels(BY_NAME[name], labels, names): one for labels, one in in_time}
        into.examples[name] = {labels: one for labels, one in found.items() if labels is not None}
    for name, histogram in snapshot.histograms.items():
        buckets = into.histograms.setdefault(name, {})
        for labels, one in histogram.items():
            if (key := _labels(BY_NAME[name], labels, names)) is not None:
                before = buckets.get(key) or Buckets([0] * len(one.counts))
                counts = [a + b for a, b in zip(before.counts, one.counts, strict=True)]
                buckets[key] = Buckets(counts, before.sum + one.sum)
    return into


def _values(found: Values, names: Mapping[str, Mapping[str, str | None]]) -> Values:
    into: Values = {}
    for name, series in found.items():
        family = BY_NAME[name]
        values = into.setdefault(name, {})
        for labels, value in series.items():
            if (key := _labels(family, labels, names)) is not None:
                had = values.get(key, 0.0)
                values[key] = max(had, value) if family.combine == "max" else had + value
    return into


def _labels(family: Family, labels: Labels, names: Mapping[str, Mapping[str, str | None]]) -> Labels | None:
    found = [
        names.get(label, {}).get(value, value)
        for label, value in zip(family.label_names, labels, strict=True)
    ]
    return None if None in found else tuple(value for value in found if value is not None)
