"""Which metrics a PromQL query names, so that rules and dashboards are held to the list of families."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rollcage.metrics.definitions import FAMILIES, PREFIX, Kind

_SUFFIXES: Mapping[Kind, tuple[str, ...]] = {
    Kind.COUNTER: ("",),
    Kind.GAUGE: ("",),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}

SAMPLES = frozenset(family.full_name + suffix for family in FAMILIES for suffix in _SUFFIXES[family.kind])
"""Names of all samples of a scrape."""

NAME = re.compile(rf"(?:[a-z_]+:)?{PREFIX}\w+(?::\w+)?")
"""One of Rollcage's metrics in a query, recorded or not."""


def metrics_of(query: str) -> set[str]:
    """Names of Rollcage's metrics in `query`, recorded ones (`level:metric:operation`) among them."""
    return set(NAME.findall(query))


def unknown(query: str, recorded: Iterable[str]) -> set[str]:
    """Those that are neither in a scrape nor recorded."""
    return metrics_of(query) - SAMPLES - set(recorded)
