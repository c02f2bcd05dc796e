"""A run's report as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import floor, log10
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollcage.rollout.outcome import TABLE, Outcome

TASKS = 50
"""Rows of the table of tasks."""

_COLOURS = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "yellow",
    Outcome.INVALID: "red",
    Outcome.CANCELLED: "bright_black",
}


def render(summary: dict[str, Any]) -> RenderableType:
    """What `summarize` gave, for a terminal of 80 columns or more."""
    parts: list[RenderableType] = [_headline(summary), _outcomes(summary)]
    if any(
        at["k"] > 1 or at["tasks"] > 1 for agent in summary["by_agent"].values() for at in agent["pass_at_k"]
    ):
        parts.append(_pass_at_k(summary))
    if summary["attempt_errors"] or summary["by_error_class"]:
        parts.append(_errors(summary))
    parts += [_tasks(summary), _phases(summary)]
    if summary["evidence"]:
        parts.append(_evidence(summary))
    return Group(*parts)


def _headline(summary: dict[str, Any]) -> Text:
    text = Text()
    if not summary["finished"]:
        text.append("This run has not ended: it is still going on, or was killed. ", style="bold yellow")
        text.append("What follows is what has been written so far.\n", style="yellow")
    if gone := summary["missing_shards"]:
        text.append(
            f"Shards are missing, and what they hold is not counted: {', '.join(gone)}.\n", style="bold red"
        )
    speed = summary["rollouts_per_second"]
    text.append(f"{summary['rollouts']} rollouts", style="bold")
    text.append(f", {summary['attempts']} attempts (retries: {summary['retries']})")
    if speed is not None:
        spent, whole = (duration(summary[name]) for name in ("rollout_seconds", "wall_seconds"))
        text.append(
            f" in {spent}, {speed:.2f} rollouts/s" + (f" (the whole job: {whole})" if whole != spent else "")
        )
    if summary["completion_tokens"]:
        text.append(f", {summary['completion_tokens']:,} tokens sampled")
    if summary["cost_usd"] is not None:
        text.append(f", {dollars(summary['cost_usd'])}")
    for policy, budget in summary["budgets"].items():
        spent = "an unknown part" if budget["spent_usd"] is None else dollars(budget["spent_usd"])
        text.append(f"\nbudget of {policy}: {spent} of {dollars(budget['limit_usd'])} spent")
    return text


def _outcomes(summary: dict[str, Any]) -> Table:
    outcomes = _shown_outcomes(summary)
    with_invalid = ["bounds by invalid"] if summary["invalid"] else []
    table = new_table(
        "Outcomes", "agent", *(f">{o}" for o in outcomes), ">pass rate", "95% interval", *with_invalid
    )
    for agent, entry in summary["by_agent"].items():
        bounds = percent_range(entry["pass_rate_worst"], entry["pass_rate_best"])
        table.add_row(
            Text(agent),
            *(_count(entry[outcome], _COLOURS[outcome]) for outcome in outcomes),
            percent(entry["pass_rate"]),
            percent_range(entry["pass_rate_low"], entry["pass_rate_high"]),
            *([bounds if entry["invalid"] else ""] if with_invalid else []),
        )
    return table


def _pass_at_k(summary: dict[str, Any]) -> Table:
    """Powers of two and the last k of each agent: a few lines, however many samples there are."""
    table = new_table("pass@k: mean over the tasks with k valid samples", "agent", ">k", ">pass@k",
                   "95% interval over tasks", ">tasks")  # fmt: skip
    for agent, entry in summary["by_agent"].items():
        for at in shown_ks(entry["pass_at_k"]):
            interval = percent_range(at["low"], at["high"]) or "-"
            table.add_row(Text(agent), str(at["k"]), percent(at["value"]), interval, str(at["tasks"]))
    return table


def shown_ks(pass_at_k: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those entries whose k is a power of two, and the last."""
    return [at for at in pass_at_k if at["k"].bit_count() == 1 or at is pass_at_k[-1]]


def _errors(summary: dict[str, Any]) -> Table:
    table = new_table("How attempts ended, where they did not just pass or fail",
                   "error class", "domain", ">attempts", ">rollouts", "meaning")  # fmt: skip
    attempts, rollouts = summary["attempt_errors"], summary["by_error_class"]
    for row in TABLE:
        if row.name in attempts or row.name in rollouts:
            counts = (str(count.get(row.name, 0)) for count in (attempts, rollouts))
            table.add_row(row.name, row.domain.value, *counts, row.meaning)
    return table


def _tasks(summary: dict[str, Any]) -> Table:
    """A row a task with passed/valid of each agent; tasks in trouble first, and no more than fit on a few screens."""
    agents = list(summary["by_agent"])
    with_invalid = [">invalid"] if summary["invalid"] else []
    table = new_table(
        "Tasks: passed of valid", "task", *(f">{agent}" for agent in agents), *with_invalid, "errors"
    )
    by_task: dict[str, dict[str, dict[str, Any]]] = {}
    for entry in summary["tasks"]:
        by_task.setdefault(entry["task"], {})[entry["agent"]] = entry
    ranked = sorted(by_task.items(), key=lambda item: -sum(entry["invalid"] for entry in item[1].values()))
    for task, entries in ranked[:TASKS]:
        invalid = sum(entry["invalid"] for entry in entries.values())
        table.add_row(
            Text(task, overflow="fold"),
            *(_passed_of_valid(entries.get(agent)) for agent in agents),
            *([_count(invalid, "red")] if with_invalid else []),
            Text("\n".join(_task_errors(entries.values())), style="red" if invalid else "", overflow="fold"),
        )
    if hidden := ranked[TASKS:]:
        table.caption = f"and {len(hidden)} more; --json has them all"
    return table


def _passed_of_valid(entry: dict[str, Any] | None) -> Text:
    if entry is None or entry["pass_rate"] is None:
        return Text("-", style="dim")
    valid = entry["passed"] + entry["failed"]
    return Text(f"{entry['passed']}/{valid}", style="green" if entry["passed"] else "yellow")


def _task_errors(entries: Iterable[dict[str, Any]]) -> list[str]:
    counts: Counter[str] = Counter()
    quarantined = False
    for entry in entries:
        counts.update(entry["error_classes"])
        quarantined |= bool(entry["quarantined"])
    return ["quarantined:"] * quarantined + [f"{count} {name}" for name, count in counts.items()]


def _phases(summary: dict[str, Any]) -> Table:
    table = new_table("Time by phase", "phase", ">p50", ">p95", ">total")
    for phase, entry in summary["phases"].items():
        if entry["count"]:
            table.add_row(phase, *(duration(entry[name]) for name in ("p50", "p95", "total")))
    if summary["infra_seconds"]:
        lost = "lost to infra (waiting for the policy)"
        table.add_row(lost, "", "", duration(summary["infra_seconds"]), style="dim")
    return table


def _evidence(summary: dict[str, Any]) -> Table:
    table = new_table("Evidence", "error class", "attempt", "said by", "what was said")
    for name, examples in summary["evidence"].items():
        for number, example in enumerate(examples):
            place = f"{example['task']} #{example['sample']} ({example['agent']})"
            message = " ".join((example["message"] or example["log_tail"]).split())
            table.add_row(
                name if number == 0 else "",
                Text(place, overflow="fold"),
                Text(example["said_by"]),
                Text(message if len(message) <= 300 else f"{message[:300]}...", overflow="fold"),
            )
    return table


def new_table(title: str, *headers: str) -> Table:
    """A table with these headers; one that starts with `>` is a column of numbers."""
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        caption_justify="left",
    )
    for header in headers:
        table.add_column(header.lstrip(">"), justify="right" if header.startswith(">") else "left")
    return table


def _shown_outcomes(summary: dict[str, Any]) -> list[Outcome]:
    """Cancelled ones have a column only where there are some."""
    return [outcome for outcome in Outcome if outcome is not Outcome.CANCELLED or summary["cancelled"]]


def _count(number: int, style: str) -> Text:
    return Text(str(number), style=style if number else "dim")


def percent(rate: float | None) -> str:
    """A rate for people; `-` where there is none."""
    return "-" if rate is None else f"{100 * rate:.1f}%"


def percent_range(low: float | None, high: float | None) -> str:
    """An interval of rates for people; empty where there is none."""
    return "" if low is None or high is None else f"{100 * low:.1f}-{100 * high:.1f}%"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def dollars(amount: float) -> str:
    """US dollars for people: cents, or below one dollar two digits that are not 0."""
    digits = 1 - floor(log10(amount)) if 0 < amount < 1 else 2
    return f"${amount:,.{max(2, digits)}f}"
