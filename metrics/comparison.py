"""Two runs side by side, paired by task: which is better, and could that be chance?

A task that both runs have is a pair. Its difference is that of the two pass@k, and every number is over these
differences, so that an easy task and a hard one never stand against each other. Tasks that only one run has, or whose
files changed in between, are in no number; they are named.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from rollcage.metrics.report import summarize
from rollcage.metrics.statistics import (
    CONFIDENCE,
    RESAMPLES,
    SEED,
    exact_pass_at_k,
    invalid_bounds,
    mean,
    resampled,
    sign_flip,
)
from rollcage.metrics.terminal import new_table, percent, shown_ks
from rollcage.rollout.arrow import Location

NAMED = 10
"""Tasks that are named of those that differ most."""


class NotComparable(ValueError):
    """The two runs have nothing that can be compared; the message says what to do."""


def compare(
    run_a: str | Path | Location,
    run_b: str | Path | Location,
    *,
    agent_a: str | None = None,
    agent_b: str | None = None,
    changed_tasks: bool = False,
) -> dict[str, Any]:
    """The comparison of two runs as JSON values; `difference` is always B less A.

    One agent of each run is compared: `agent_a` and `agent_b`, or the only ones, or the only one that both have.
    `pass_at_k` has for each k the means of both, their difference, its bootstrap interval over tasks (`low`, `high`)
    and the p-value of a sign-flip test (`exact`: every flip was looked at); pass@1 is the pass rate with each task
    counting the same. `difference_worst` and `difference_best` are those of pass@1, had each invalid rollout
    ended as it is worst, and as it is best, for B. Tasks whose digests differ are left out unless `changed_tasks`.
    Raises `NoRun` and `NotComparable`.
    """
    reports = [summarize(run) for run in (run_a, run_b)]
    agents = _agents(reports, agent_a, agent_b)
    a, b = (
        {entry["task"]: entry for entry in report["tasks"] if entry["agent"] == agent}
        for report, agent in zip(reports, agents, strict=True)
    )
    common = sorted(a.keys() & b.keys())
    changed = [task for task in common if a[task]["digest"] != b[task]["digest"]]
    left_out = set() if changed_tasks else set(changed)
    pairs = [(a[task], b[task]) for task in common if task not in left_out]
    if not pairs:
        why = (
            f"the files of all {len(changed)} common tasks changed"
            if changed
            else "they have no task in common"
        )
        remedy = ": --changed-tasks compares them all the same" if changed else ""
        raise NotComparable(f"{run_a} and {run_b} cannot be compared, {why}{remedy}")
    bounds = [_bounds(*pair) for pair in pairs]
    return {
        **{
            side: {"run": report["run"], "agent": agent, "finished": report["finished"]}
            | {name: report["by_agent"][agent][name] for name in _OUTCOMES}
            for side, report, agent in zip("ab", reports, agents, strict=True)
        },
        "tasks": len(pairs),
        "only_a": sorted(a.keys() - b.keys()),
        "only_b": sorted(b.keys() - a.keys()),
        "changed": changed,
        "pass_at_k": _paired(pairs),
        "difference_worst": mean(low for low, _ in bounds),
        "difference_best": mean(high for _, high in bounds),
        "bootstrap": {"confidence": CONFIDENCE, "resamples": RESAMPLES, "seed": SEED},
        "by_task": [_side_by_side(*pair) for pair in pairs],
    }


_OUTCOMES = ("rollouts", "passed", "failed", "invalid", "cancelled", "pass_rate")


def _agents(reports: list[dict[str, Any]], *wanted: str | None) -> tuple[str, str]:
    found = [list(report["by_agent"]) for report in reports]
    both = [agent for agent in found[0] if agent in found[1]]
    chosen: list[str] = []
    for side, report, there, agent in zip("ab", reports, found, wanted, strict=True):
        if agent is None:
            # The only one, or the only one that has a like in the other run.
            agent = there[0] if len(there) == 1 else both[0] if len(both) == 1 else None
        if agent is None or agent not in there:
            raise NotComparable(
                f"{report['run']} has rollouts of {', '.join(there) or 'no agent yet'}: name one by --agent-{side}"
            )
        chosen.append(agent)
    return chosen[0], chosen[1]


def _valid(entry: dict[str, Any]) -> tuple[int, int]:
    """Valid samples of a task, and those of them that passed."""
    return entry["passed"] + entry["failed"], entry["passed"]


def _paired(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each k for which some task has k valid samples in both runs, up to the size of a group."""
    counts = [(_valid(a), _valid(b)) for a, b in pairs]
    most = max(min(a["group_size"], b["group_size"]) for a, b in pairs)
    found = []
    for k in range(1, most + 1):
        values = [(exact_pass_at_k(*a, k), exact_pass_at_k(*b, k)) for a, b in counts if min(a[0], b[0]) >= k]
        if not values:
            break
        differences: list[Fraction] = [b - a for a, b in values]
        [interval] = resampled([[float(difference)] for difference in differences])
        low, high = interval or (None, None)
        test = sign_flip(differences)
        found.append({
            "k": k,
            "tasks": len(values),
            "a": mean(float(a) for a, _ in values),
            "b": mean(float(b) for _, b in values),
            "difference": float(sum(differences) / len(differences)),
            "low": low,
            "high": high,
            "p": test.p,
            "exact": test.exact,
        })  # fmt: skip
    return found


def _bounds(a: dict[str, Any], b: dict[str, Any]) -> tuple[float, float]:
    """The difference of one task's pass rates at its worst and at its best for `b`, over all that invalid rollouts may
    have been."""
    (a_low, a_high), (b_low, b_high) = (
        invalid_bounds(entry["passed"], entry["failed"], entry["invalid"]) or (0.0, 1.0) for entry in (a, b)
    )
    return b_low - a_high, b_high - a_low


def _side_by_side(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    rates = a["pass_rate"], b["pass_rate"]
    return {
        "task": a["task"],
        **{
            f"{side}_{name}": entry[name]
            for side, entry in zip("ab", (a, b), strict=True)
            for name in _COUNTS
        },
        "difference": None if None in rates else rates[1] - rates[0],
    }


_COUNTS = ("passed", "failed", "invalid")


def render(comparison: dict[str, Any]) -> RenderableType:
    """What `compare` gave, for a terminal."""
    parts: list[RenderableType] = [_sides(comparison), _table(comparison)]
    if any(comparison[side]["invalid"] for side in "ab"):
        worst, best = (f"{100 * comparison[f'difference_{end}']:+.1f}" for end in ("worst", "best"))
        parts.append(Text(f"Whatever the invalid rollouts were, pass@1 differs by {worst} to {best} points."))
    differing = [entry for entry in comparison["by_task"] if entry["difference"]]
    if differing:
        parts.append(_tasks(differing))
    parts += [
        Text(f"{text}: {_names(tasks)}", style="dim")
        for text, tasks in (
            ("Only in A", comparison["only_a"]),
            ("Only in B", comparison["only_b"]),
            ("Changed in between", comparison["changed"]),
        )
        if tasks
    ]
    return Group(*parts)


def _sides(comparison: dict[str, Any]) -> RenderableType:
    table = new_table("", "", "run", "agent", ">passed", ">failed", ">invalid", ">pass rate")
    for side in "ab":
        entry = comparison[side]
        run = Text(entry["run"], overflow="fold")
        if not entry["finished"]:
            run.append(" (not finished)", style="yellow")
        counts = (str(entry[name]) for name in _COUNTS)
        table.add_row(side.upper(), run, Text(entry["agent"]), *counts, percent(entry["pass_rate"]))
    return table


def _table(comparison: dict[str, Any]) -> RenderableType:
    title = f"Paired by task ({comparison['tasks']} in common), B less A in points"
    interval = "95% interval over tasks"
    table = new_table(title, ">k", ">pass@k of A", ">of B", ">difference", interval, ">p", ">tasks")
    for at in shown_ks(comparison["pass_at_k"]):
        interval = "-" if at["low"] is None else f"{100 * at['low']:+.1f} to {100 * at['high']:+.1f}"
        difference = Text(f"{100 * at['difference']:+.1f}", style="bold" if at["p"] < 1 - CONFIDENCE else "")
        p = ("" if at["exact"] else "~") + (f"{at['p']:.3f}" if at["p"] >= 0.001 else f"{at['p']:.1g}")
        table.add_row(
            str(at["k"]), percent(at["a"]), percent(at["b"]), difference, interval, p, str(at["tasks"])
        )
    table.caption = "p: two-sided sign-flip test over tasks; ~: from random flips, not all of them"
    return table


def _tasks(differing: list[dict[str, Any]]) -> RenderableType:
    differing = sorted(differing, key=lambda entry: (-abs(entry["difference"]), entry["task"]))
    table = new_table("Tasks that differ most: passed of valid", "task", ">A", ">B", ">difference")
    for entry in differing[:NAMED]:
        sides = (f"{entry[f'{s}_passed']}/{entry[f'{s}_passed'] + entry[f'{s}_failed']}" for s in "ab")
        table.add_row(Text(entry["task"], overflow="fold"), *sides, f"{100 * entry['difference']:+.1f}")
    if len(differing) > NAMED:
        table.caption = f"and {len(differing) - NAMED} more; --json has them all"
    return table


def _names(tasks: list[str]) -> str:
    more = f" and {len(tasks) - NAMED} more" if len(tasks) > NAMED else ""
    return ", ".join(tasks[:NAMED]) + more
