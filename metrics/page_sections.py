"""The numbers and plots of a report's page, which need no script: made from `summarize`'s report, and from the table of
all rollouts that `recordings.py` keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from rollcage.metrics.page_text import many, nothing, text
from rollcage.metrics.plots import Bar, Point, bars, both, curves
from rollcage.metrics.terminal import dollars, duration, percent, percent_range, shown_ks
from rollcage.rollout.outcome import Outcome

BINS = 48
"""Bars of the plot of outcomes over time."""
REWARD_BINS = 20
SERIES = 6
"""Colours for agents and for phases; a seventh agent begins again."""


def headline(report: dict[str, Any]) -> str:
    """What a person asks first, in a row of tiles."""
    tiles = []
    if report["pass_rate"] is not None:
        notes = [f"95%: {percent_range(report['pass_rate_low'], report['pass_rate_high'])}"]
        if report["invalid"]:
            notes.append(f"by invalid: {percent_range(report['pass_rate_worst'], report['pass_rate_best'])}")
        tiles.append(_tile("Pass rate", percent(report["pass_rate"]), *notes))
    if report["pass_at_k"] and (last := report["pass_at_k"][-1])["k"] > 1:
        interval = percent_range(last["low"], last["high"])
        notes = [f"95%: {interval}"] if interval else []
        tiles.append(
            _tile(f"pass@{last['k']}", percent(last["value"]), *notes, f"over {many(last['tasks'], 'task')}")
        )
    tasks = many(len({entry["task"] for entry in report["tasks"]}), "task")
    agents = many(len(report["by_agent"]), "agent")
    tiles.append(_tile("Rollouts", f"{report['rollouts']:,}", f"{tasks}, {agents}"))
    share = report["invalid"] / report["rollouts"] if report["rollouts"] else 0.0
    invalid = f"{report['invalid']:,} of {report['rollouts']:,}"
    retries = many(report["retries"], "retry", "retries")
    tiles.append(_tile("Invalid", percent(share), invalid, retries, kind="bad" if report["invalid"] else ""))
    if (busy := report["rollout_seconds"]) is not None:
        speed = report["rollouts_per_second"]
        tiles.append(_tile("Time", duration(busy), *([] if speed is None else [f"{speed:.2f} rollouts/s"])))
    if report["completion_tokens"]:
        tiles.append(_tile("Tokens sampled", _short(report["completion_tokens"]),
                           f"in {report['turns']:,} turns", f"{report['prompt_tokens']:,} read"))  # fmt: skip
    if report["cost_usd"] is not None:
        budgets = [f"{name}: {dollars(b['limit_usd'])} allowed" for name, b in report["budgets"].items()]
        tiles.append(_tile("Cost", dollars(report["cost_usd"]), *budgets))
    return "".join(tiles)


def _tile(name: str, value: str, *notes: str, kind: str = "") -> str:
    said = "".join(f"<span>{text(note)}</span>" for note in notes)
    return (
        f'<div class="tile {kind}"><dt>{text(name)}</dt><dd><strong>{text(value)}</strong>{said}</dd></div>'
    )


def outcomes(report: dict[str, Any]) -> str:
    """A line of each agent: how its rollouts ended, as one bar and in numbers."""
    rows = []
    for agent, entry in report["by_agent"].items():
        present = [outcome for outcome in Outcome if entry[outcome]]
        parts = "".join(
            f'<i class="{outcome}" style="flex-grow:{entry[outcome]}" title="{entry[outcome]:,} {outcome}"></i>'
            for outcome in present
        )
        counts = "".join(
            f'<span class="key {outcome}">{entry[outcome]:,} {outcome}</span>' for outcome in present
        )
        rate = percent(entry["pass_rate"])
        interval = percent_range(entry["pass_rate_low"], entry["pass_rate_high"])
        said = f"{rate} passed ({interval})" if interval else "no valid rollout"
        rows.append(
            f'<div class="by-agent"><h3><bdi>{text(agent)}</bdi> <small>{said}</small></h3>'
            f'<div class="share">{parts}</div><p class="keys">{counts}</p></div>'
        )
    return "".join(rows)


def over_time(rollouts: Sequence[dict[str, Any]]) -> str:
    """Rollouts by the time at which they ended, stacked by outcome."""
    ended = [(row["ended"], row["outcome"]) for row in rollouts if row["ended"] is not None]
    if not ended:
        return nothing("Nothing has ended yet.")
    first, last = min(ended)[0], max(ended)[0]
    bins = [Counter[str]() for _ in range(min(BINS, max(1, len(ended))))]
    step = max((last - first) / len(bins), 0.001)
    for at, outcome in ended:
        bins[min(int((at - first) / step), len(bins) - 1)][outcome] += 1
    found = [
        Bar(f"{duration(number * step)} to {duration((number + 1) * step)}: {_counts(count)}",
            tuple((outcome, count[outcome]) for outcome in Outcome))
        for number, count in enumerate(bins)
    ]  # fmt: skip
    middle = [(len(bins) / 2, duration((last - first) / 2))] if len(bins) > 2 else []
    start = datetime.fromtimestamp(first, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    labels = [(0.0, "0"), *middle, (float(len(bins)), duration(last - first))]
    said = f"Rollouts ended over time, by outcome, from {start} on"
    return (
        both(lambda width: bars(said, found, labels, width))
        + f'<p class="note">from {start}, when the first ended</p>'
    )


def rewards(rollouts: Sequence[dict[str, Any]]) -> str:
    """The histogram of rewards, stacked by outcome."""
    given = [(row["reward"], row["outcome"]) for row in rollouts if row["reward"] is not None]
    if not given:
        return nothing("No rollout has a reward.")
    low, high = min(0.0, min(given)[0]), max(1.0, max(given)[0])
    width = (high - low) / REWARD_BINS
    bins = [Counter[str]() for _ in range(REWARD_BINS)]
    for reward, outcome in given:
        bins[min(int((reward - low) / width), REWARD_BINS - 1)][outcome] += 1
    found = [
        Bar(f"{low + number * width:.2f} to {low + (number + 1) * width:.2f}: {_counts(count)}",
            tuple((outcome, count[outcome]) for outcome in Outcome))
        for number, count in enumerate(bins)
    ]  # fmt: skip
    labels = [(REWARD_BINS * part / 4, f"{low + (high - low) * part / 4:g}") for part in range(5)]
    mean = sum(reward for reward, _ in given) / len(given)
    said = f"Histogram of {len(given)} rewards, mean {mean:.3f}"
    return both(lambda wide: bars(said, found, labels, wide)) + (
        f'<p class="note">{many(len(given), "reward")}, mean {mean:.3f}</p>'
    )


def pass_at_k(report: dict[str, Any]) -> str:
    """pass@k of each agent with its band, and the numbers below."""
    lines, keys, rows = [], [], []
    for number, (agent, entry) in enumerate(report["by_agent"].items()):
        series, points = f"series{number % SERIES}", []
        for at in entry["pass_at_k"]:
            interval = percent_range(at["low"], at["high"])
            said = (
                f"{agent}: pass@{at['k']} {percent(at['value'])} {interval} over {many(at['tasks'], 'task')}"
            )
            points.append(Point(at["k"], at["value"], at["low"], at["high"], text(said)))
        if not points:
            continue
        lines.append((series, points))
        keys.append(f'<span class="key {series}"><bdi>{text(agent)}</bdi></span>')
        rows += [
            f"<tr><td><bdi>{text(agent)}</bdi></td><td>{at['k']}</td><td>{percent(at['value'])}</td>"
            f"<td>{percent_range(at['low'], at['high']) or '-'}</td><td>{at['tasks']}</td></tr>"
            for at in shown_ks(entry["pass_at_k"])
        ]
    if not lines:
        return nothing("No task has a valid rollout.")
    drawn = report["bootstrap"]
    return (
        both(lambda width: curves("pass@k with its interval over tasks", lines, width))
        + (f'<p class="keys">{"".join(keys)}</p>' if len(lines) > 1 else "")
        + '<div class="scroll"><table class="numbers"><thead><tr><th>agent</th><th>k</th><th>pass@k</th>'
        f"<th>95% interval</th><th>tasks</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        '<p class="note">Unbiased, the mean over tasks with k valid samples. The interval is over tasks: BCa '
        f"bootstrap, {drawn['resamples']:,} draws, seed {drawn['seed']}.</p>"
    )


def phases(report: dict[str, Any]) -> str:
    """Where the attempts' time went."""
    found = {name: entry for name, entry in report["phases"].items() if entry["count"]}
    whole = sum(entry["total"] for entry in found.values())
    if not whole:
        return nothing("No attempt has taken time.")
    parts = "".join(
        f'<i class="series{n % SERIES}" style="flex-grow:{entry["total"] / whole:.5f}" '
        f'title="{name}: {duration(entry["total"])}"></i>'
        for n, (name, entry) in enumerate(found.items())
    )
    rows = "".join(
        f'<tr><td><span class="key series{n % SERIES}">{name}</span></td><td>{duration(entry["p50"])}</td>'
        f"<td>{duration(entry['p95'])}</td><td>{duration(entry['total'])}</td>"
        f"<td>{percent(entry['total'] / whole)}</td></tr>"
        for n, (name, entry) in enumerate(found.items())
    )
    lost = report["infra_seconds"]
    note = (
        f'<p class="note">{duration(lost)} of the agents\' time was lost to infra and charged to nobody.</p>'
    )
    return (
        f'<div class="share">{parts}</div><div class="scroll"><table class="numbers"><thead><tr><th>phase</th>'
        f"<th>p50</th><th>p95</th><th>total</th><th>share</th></tr></thead><tbody>{rows}</tbody></table></div>"
        + (note if lost else "")
    )


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{counts[outcome]:,} {outcome}" for outcome in Outcome if counts[outcome]) or "none"


def _short(number: int) -> str:
    for size, unit in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number)
