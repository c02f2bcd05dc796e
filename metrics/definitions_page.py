"""Prints docs/metrics.md from the list of families: `python -m rollcage.metrics.definitions_page > docs/metrics.md`."""

from __future__ import annotations

from rollcage.metrics.definitions import (
    FAMILIES,
    LABELS,
    MOST,
    OTHER,
    Family,
    Kind,
    Label,
    Sender,
    most_series,
)
from rollcage.metrics.exporter import FORGET_SEC, SILENT_SEC
from rollcage.metrics.serving import PORT

_INTRODUCTION = f"""# Metrics

*Made from `metrics/definitions.py` by `python -m rollcage.metrics.definitions_page`; do not edit.*

One exporter answers for the whole cluster, at port {PORT} of loopback unless told. Drivers and hosts send it cumulative
snapshots, and it adds them up.

- Every series of a constant label is there at 0 from the start, one of a declared label as soon as its value is known.
- A label has a closed set of values. No task, rollout, container or text is ever one.
- At any scrape `rollcage_attempts_dispatched_total` is `rollcage_attempts_ended_total` +
  `rollcage_attempts_abandoned_total` + `rollcage_attempts_in_flight`.
- Restarts of drivers, hosts and of the exporter double nothing. The families that follow from the ledger are read \
from it when a driver goes on with a run, and lose nothing. Of the others, and of attempts that never ended, what a \
driver or a host had counted in the two seconds before it was killed, and not told yet, is lost.
- A rollout that had ended and is run again (`rollcage resume`) ends twice and is counted twice: no counter falls. So \
is a task that the next driver takes out again.
- A host that is silent for {SILENT_SEC:g} s has `rollcage_host_up` 0 and no other gauge, and is forgotten after \
{FORGET_SEC[Sender.HOST] / 3600:g} h; where its job is silent too, or another host has its place, it is gone at once.
- A job keeps its gauges until it ends, or is silent for {FORGET_SEC[Sender.JOB] / 3600:g} h; attempts that it had in \
flight then count as abandoned.
- The exporter's own counters are those of its process: they begin at 0 with it.
- vLLM's and Ray's own metrics are scraped beside these and not copied.

A scrape holds at most **{most_series(host=64):,} samples** with 64 hosts, {MOST["policy"]} policies, \
{MOST["agent"]} agents, {MOST["job_id"]} jobs at once and every error class, and {most_series():,} with \
{MOST["host"]} hosts. What is past the most is counted all the same: agents and policies, in the life of a cluster, \
as `{OTHER}`; hosts and jobs, at once, have no gauges of their own. The job says so.

With `metrics.exemplars: true` in jobs' settings each series of `rollcage_attempts_total` has the last attempt of theirs
that it counted as an exemplar (`job_id` and `attempt_id`, in OpenMetrics alone), if the job that started the exporter
has it too. Prometheus keeps exemplars with `--enable-feature=exemplar-storage`.

The first job of a Ray cluster starts the exporter, as its `metrics:` settings say (README); it ends with the cluster.
[observe.md](observe.md) says how Prometheus and Grafana are started beside it.
"""

_SENDERS = {
    Sender.JOB: "Counted by the driver of a job",
    Sender.HOST: "Counted by a host",
    Sender.EXPORTER: "Counted by the exporter",
}


def page() -> str:
    """The page as Markdown."""
    return "\n".join([_INTRODUCTION, *map(_section, Sender), _histograms(), _labels()])


def _section(sender: Sender) -> str:
    rows = "\n".join(_row(family) for family in FAMILIES if family.sender is sender)
    return f"## {_SENDERS[sender]}\n\n| metric | type | unit | labels | meaning |\n|---|---|---|---|---|\n{rows}\n"


def _row(family: Family) -> str:
    labels = ", ".join(map(_label, family.labels))
    ledger = " From the ledger." if family.ledger else ""
    return f"| `{family.full_name}` | {family.kind} | {family.unit} | {labels} | {family.help}{ledger} |"


def _label(label: Label) -> str:
    own = label.values in (None, label.name)
    return f"`{label.name}`" if own else f"`{label.name}` ({label.values})"


def _histograms() -> str:
    rows = "\n".join(
        f"| `{family.full_name}` | {', '.join(f'{bound:g}' for bound in family.buckets)}, +Inf |"
        for family in FAMILIES
        if family.kind is Kind.HISTOGRAM
    )
    return f"## Buckets\n\n| histogram | upper bounds |\n|---|---|\n{rows}\n"


def _labels() -> str:
    rows = [
        f"| `{name}` | at most {most} names, from the configurations of jobs |" for name, most in MOST.items()
    ]
    for name, values in LABELS.items():
        rows.append(f"| {name} | {', '.join(values) if name != 'version' else 'the one that runs'} |")
    return (
        "## Labels\n\nOf `domain`, `error_class` and `outcome` only those that can go together are there.\n\n"
        "| set | values |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


if __name__ == "__main__":
    print(page(), end="")
