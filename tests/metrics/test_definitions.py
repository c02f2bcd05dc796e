"""The list of families: closed labels, and the page made from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollcage.metrics.counts import Counts, UnknownLabel
from rollcage.metrics.definitions import FAMILIES, LABELS, MOST, Family, Kind, Sender, most_series
from rollcage.metrics.definitions_page import page
from rollcage.metrics.exporter import Exporter
from rollcage.rollout.outcome import TABLE

DOCS = Path(__file__).parents[2] / "docs"
NEVER = {
    "task",
    "rollout",
    "container",
    "attempt",
    "message",
    "evidence",
    "job",
    "instance",
    "le",
    "quantile",
}
"""Labels without a bound, and those that Prometheus has for itself."""


def test_the_page_is_current() -> None:
    assert (DOCS / "metrics.md").read_text("utf-8") == page()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_page_lists_every_family_with_its_meaning(family: Family) -> None:
    row = next(
        line for line in page().splitlines() if line.startswith(f"| `{family.full_name}` | {family.kind}")
    )
    assert family.help in row


def test_the_page_says_how_many_series_there_can_be() -> None:
    text = page().replace("\n", " ")
    assert f"at most **{most_series(host=64):,} samples** with 64 hosts, {MOST['policy']} policies" in text
    assert f"{most_series():,} with {MOST['host']} hosts" in text
    assert most_series(host=64) < 4_000


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_has_base_units_and_closed_labels(family: Family) -> None:
    assert not NEVER & set(family.label_names)
    assert family.name.endswith(family.unit)
    assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_ms", "_milliseconds", "_mb"))
    assert bool(family.buckets) == (family.kind is Kind.HISTOGRAM)
    assert list(family.buckets) == sorted(set(family.buckets))
    for label in family.labels:
        assert label.name in MOST if label.values is None else LABELS[label.values]


def test_names_are_there_once() -> None:
    assert len({family.full_name for family in FAMILIES}) == len(FAMILIES)


def test_every_error_class_is_in_its_own_domain_and_in_no_other() -> None:
    attempts = next(family for family in FAMILIES if family.name == "attempts")
    pairs = {labels[1:3] for labels in attempts.series({"agent": ("oracle",)})}
    assert pairs == {(row.domain.value, row.name) for row in TABLE} | {("none", "none")}


def test_an_infra_error_neither_passes_nor_fails() -> None:
    attempts = next(family for family in FAMILIES if family.name == "attempts")
    assert {labels[0] for labels in attempts.series({"agent": ("a",)}) if labels[1] == "infra"} == {"invalid"}
    assert {labels[0] for labels in attempts.series({"agent": ("a",)}) if labels[1] == "agent"} == {
        "passed",
        "failed",
    }


def test_a_thousand_task_names_are_no_label() -> None:
    """CASES 34. The exporter gives whatever is declared as many values as its label may have."""
    tasks = [f"task-{number}" for number in range(1000)]
    for label in MOST:
        sender = Sender.HOST if label == "host" else Sender.JOB
        exporter = Exporter()
        said = exporter.accept("j", Counts(sender, {label: tasks}).snapshot(), incarnation="1")
        assert f"more than {MOST[label]} values of the label {label!r}" in said
        samples = [sample for metric in exporter.collect() for sample in metric.samples]
        assert len({sample.labels[label] for sample in samples if label in sample.labels}) == MOST[label]
        assert len(samples) <= most_series()
    with pytest.raises(UnknownLabel, match="'task' is no label"):
        Counts(Sender.JOB, {"task": tasks})
