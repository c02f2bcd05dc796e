"""What became of a run, from its files alone: `summarize` counts, `render` (`terminal.py`) shows.

A rate is passed / (passed + failed): invalid and cancelled rollouts are in no rate, and stand beside it with what
the rate would be had every invalid rollout failed, and had every one passed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rollcage.metrics.statistics import (
    CONFIDENCE,
    RESAMPLES,
    SEED,
    invalid_bounds,
    pass_at_each_k,
    pass_rate,
    quantile,
    wilson,
)
from rollcage.metrics.terminal import render
from rollcage.rollout.arrow import TABLES, Location, read_batches
from rollcage.rollout.outcome import BY_NAME, SUSPECTS, TABLE, Domain, ErrorClass, Outcome, Quarantine
from rollcage.rollout.trajectory import Phase

__all__ = ["render", "summarize"]

EXAMPLES = 3
"""Pieces of evidence shown for each error class."""

_ROLLOUT_COLUMNS = (
    "agent", "task", "task_digest", "sample", "attempt_id", "outcome", "error_class", "evidence", "attempts",
    "group_size", "started_at", "ended_at",
)  # fmt: skip
_ATTEMPT_COLUMNS = (
    "agent", "task", "sample", "outcome", "error_class", "evidence", "started_at", "ended_at", "phases",
    "infra_seconds", "turn_count", "command_count", "prompt_tokens", "completion_tokens", "cost_usd",
)  # fmt: skip


@dataclass
class _Count:
    """Rollouts of one task, one agent or the whole run."""

    outcomes: Counter[str] = field(default_factory=Counter)
    error_classes: Counter[str] = field(default_factory=Counter)
    digests: set[str] = field(default_factory=set)
    quarantined: str | None = None
    suspicions: int = 0
    group_size: int = 0

    def add(self, row: dict[str, Any]) -> None:
        self.outcomes[row["outcome"]] += 1
        self.digests.add(row["task_digest"])
        self.group_size = max(self.group_size, row["group_size"])
        if error_class := row["error_class"]:
            self.error_classes[error_class] += 1
            if row["outcome"] == Outcome.INVALID:
                self._suspect(BY_NAME[error_class], row["attempts"], row["attempt_id"])

    def _suspect(self, row: ErrorClass, attempts: int, decided_by: str) -> None:
        """Take a rollout's end for a sign that its task was quarantined: it did not even begin, or gave up."""
        waited = not attempts or not decided_by
        if row.quarantine is Quarantine.AT_ONCE or (row.quarantine is not Quarantine.NEVER and waited):
            self.quarantined = row.name
            self.suspicions = SUSPECTS
        elif row.quarantine is Quarantine.AFTER_RETRIES and attempts > row.retries:
            self.quarantined = row.name
            self.suspicions += 1

    @property
    def is_quarantined(self) -> bool:
        """Of the rollouts of one task by all agents: whether their ends add up to a quarantine."""
        return self.suspicions >= min(SUSPECTS, self.outcomes.total())

    @property
    def valid(self) -> tuple[int, int]:
        """Valid rollouts, and those of them that passed."""
        passed = self.outcomes[Outcome.PASSED]
        return passed + self.outcomes[Outcome.FAILED], passed

    def report(self) -> dict[str, Any]:
        valid, passed = self.valid
        failed, invalid = self.outcomes[Outcome.FAILED], self.outcomes[Outcome.INVALID]
        interval = wilson(passed, valid) if valid else None
        bounds = invalid_bounds(passed, failed, invalid)
        return {
            "rollouts": self.outcomes.total(),
            **{outcome.value: self.outcomes[outcome] for outcome in Outcome},
            "pass_rate": pass_rate(passed, failed),
            "pass_rate_low": interval and interval.low,
            "pass_rate_high": interval and interval.high,
            "pass_rate_worst": bounds and bounds.low,
            "pass_rate_best": bounds and bounds.high,
        }


def summarize(run: str | Path | Location) -> dict[str, Any]:
    """The report of a run as JSON values, whether the run is finished, killed or going on (`finished`).

    Counts are rollouts where nothing else is said; rates are None where there is nothing to divide by; times
    are seconds. `tasks` has an entry for each (agent, task), with all of its draws. `pass_at_k` is the mean over the
    tasks of one agent, so that a run of several agents has it under `by_agent` only; its `low` and `high` are the
    `bootstrap` interval over tasks. `attempt_errors` counts attempts,
    those that were tried again too; `evidence` has examples of each. `wall_seconds` are the whole job's, with Ray's
    start and end; `rollout_seconds` go from the first start to the last end of an attempt or rollout, and rates by
    time are by them. `cost_usd` is what the answers of all attempts cost, None where none has a price; `budgets` has
    `limit_usd` and `spent_usd` of each policy with a budget, once the run is finished. Raises `NoRun`.
    """
    location = Location.of(run)
    summary = location.read_json("summary.json")
    whole, agents, tasks = (
        _Count(),
        defaultdict[str, _Count](_Count),
        defaultdict[tuple[str, str], _Count](_Count),
    )
    evidence = _Examples()
    retries = 0
    by_task = defaultdict[tuple[str, str], _Count](_Count)
    times = _Times()
    for row in _rows(location, "rollouts", _ROLLOUT_COLUMNS):
        all_agents = by_task[row["task"], row["task_digest"]]
        for count in (whole, agents[row["agent"]], tasks[row["agent"], row["task"]], all_agents):
            count.add(row)
        retries += max(0, row["attempts"] - 1)
        times.add(row)
        if not row["attempt_id"]:
            # No attempt decided it, its task was quarantined: no row of `attempts` says why.
            evidence.add(row)

    attempts = 0
    totals: Counter[str] = Counter()
    attempt_errors: Counter[str] = Counter()
    phases: dict[str, list[float]] = defaultdict(list)
    infra_seconds, costs = 0.0, list[float]()
    for row in _rows(location, "attempts", _ATTEMPT_COLUMNS):
        attempts += 1
        times.add(row)
        infra_seconds += row["infra_seconds"]
        costs += [row["cost_usd"]] if row["cost_usd"] is not None else []
        for name in ("turn_count", "command_count", "prompt_tokens", "completion_tokens"):
            totals[name] += row[name]
        for phase, seconds in row["phases"].items():
            if seconds is not None:
                phases[phase].append(seconds)
        if row["error_class"]:
            attempt_errors[row["error_class"]] += 1
            evidence.add(row)

    wall = (summary or {}).get("wall_seconds") or times.span
    busy = (attempts and times.span) or wall  # without an attempt, nothing took time
    report = whole.report()
    per_task = [
        {
            "agent": agent,
            "task": task,
            "digest": " ".join(sorted(count.digests)),
            **count.report(),
            "error_classes": _in_table_order(count.error_classes),
            "quarantined": count.quarantined
            if any(by_task[task, digest].is_quarantined for digest in count.digests)
            else None,
            "group_size": count.group_size,
        }
        for (agent, task), count in sorted(tasks.items())
    ]
    per_agent = {
        agent: count.report()
        | {"pass_at_k": _pass_at_k(entry for (a, _), entry in tasks.items() if a == agent)}
        for agent, count in sorted(agents.items())
    }
    return {
        "run": str(location),
        "finished": summary is not None,
        "missing_shards": [name for table in TABLES for name in location.missing(table)],
        **report,
        "attempts": attempts,
        "retries": retries,
        "by_error_class": _in_table_order(whole.error_classes),
        "by_domain": _by_domain(whole.error_classes),
        "attempt_errors": _in_table_order(attempt_errors),
        "wall_seconds": wall,
        "rollout_seconds": busy,
        "rollouts_per_second": report["rollouts"] / busy if busy else None,
        "pass_at_k": next(iter(per_agent.values()))["pass_at_k"] if len(per_agent) == 1 else None,
        "bootstrap": {"confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED},
        "by_agent": per_agent,
        "phases": {
            phase.value: {
                "count": len(phases[phase]),
                "p50": quantile(phases[phase], 0.5),
                "p95": quantile(phases[phase], 0.95),
                "total": sum(phases[phase]),
            }
            for phase in Phase
        },
        "infra_seconds": infra_seconds,
        "turns": totals["turn_count"],
        "commands": totals["command_count"],
        "prompt_tokens": totals["prompt_tokens"],
        "completion_tokens": totals["completion_tokens"],
        "cost_usd": sum(costs) if costs else None,
        "budgets": (summary or {}).get("budgets") or {},
        "completion_tokens_per_second": totals["completion_tokens"] / busy if busy else None,
        "quarantined": [entry for entry in per_task if entry["quarantined"]],
        "tasks": per_task,
        "evidence": evidence.by_error_class(),
    }


class _Examples:
    """The first pieces of evidence of each error class that differ in task or message."""

    def __init__(self) -> None:
        self._found: dict[str, dict[tuple[str, str], dict[str, Any]]] = defaultdict(dict)

    def add(self, row: dict[str, Any]) -> None:
        evidence, found = row["evidence"], self._found[row["error_class"]]
        if evidence and len(found) < EXAMPLES:
            place = {key: row[key] for key in ("agent", "task", "sample")}
            found.setdefault((row["task"], evidence["message"]), place | evidence)

    def by_error_class(self) -> dict[str, list[dict[str, Any]]]:
        return {row.name: list(self._found[row.name].values()) for row in TABLE if self._found.get(row.name)}


class _Times:
    """First start and last end of anything that is added."""

    def __init__(self) -> None:
        self._first: datetime | None = None
        self._last: datetime | None = None

    def add(self, row: dict[str, Any]) -> None:
        started, ended = row["started_at"], row["ended_at"]
        if started is not None and (self._first is None or started < self._first):
            self._first = started
        if ended is not None and (self._last is None or ended > self._last):
            self._last = ended

    @property
    def span(self) -> float | None:
        """Seconds between them; None where nothing ever started and ended."""
        if self._first is None or self._last is None:
            return None
        return (self._last - self._first).total_seconds()


def _rows(location: Location, table: str, columns: Iterable[str]) -> Iterator[dict[str, Any]]:
    for batch in read_batches(location, table, tuple(columns)):
        yield from batch.to_pylist()


def _in_table_order(counts: Counter[str]) -> dict[str, int]:
    return {row.name: counts[row.name] for row in TABLE if counts[row.name]}


def _by_domain(counts: Counter[str]) -> dict[str, int]:
    return {domain.value: sum(counts[row.name] for row in TABLE if row.domain is domain) for domain in Domain}


def _pass_at_k(tasks: Iterable[_Count]) -> list[dict[str, Any]]:
    """Up to the size of a group: a task that a stream job has drawn often has more samples than anybody asks of."""
    counts = list(tasks)
    most = max((count.group_size for count in counts), default=0)
    return [entry._asdict() for entry in pass_at_each_k((count.valid for count in counts), most)]
