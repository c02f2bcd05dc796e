"""The tables of a report's page: errors with their evidence, and tasks with their pass rates."""

from __future__ import annotations

from collections import Counter
from html import escape
from typing import Any
from urllib.parse import quote

from rollcage.metrics.page_text import link, many, nothing, text
from rollcage.metrics.terminal import percent, percent_range
from rollcage.rollout.outcome import TABLE

AT_ONCE = 100
"""Rows of the table of tasks that are laid out when the page opens: a thousand take a third of a second."""


def errors(report: dict[str, Any]) -> str:
    """Every error class that occurred, with what was said; each piece of evidence leads to its rollout."""
    attempts, rollouts = report["attempt_errors"], report["by_error_class"]
    found = [row for row in TABLE if row.name in attempts or row.name in rollouts]
    if not found:
        return nothing("Every attempt simply passed or failed.")
    return "".join(
        f'<details class="error {row.domain}" {"open" if len(found) <= 3 else ""}><summary><b>{row.name}</b>'
        f'<span class="chip">{row.domain}</span><span class="meaning">{text(row.meaning)}</span>'
        f'<span class="count">{many(attempts.get(row.name, 0), "attempt")}, '
        f"{many(rollouts.get(row.name, 0), 'rollout')}</span></summary>"
        f"{''.join(_evidence(example) for example in report['evidence'].get(row.name, ())) or _no_evidence(row.name)}"
        "</details>"
        for row in found
    )


def _no_evidence(name: str) -> str:
    return f'<p class="note">No evidence was kept. <a href="#class/{name}">Its rollouts</a></p>'


def _evidence(example: dict[str, Any]) -> str:
    facts = [f"said by {example['said_by']}"]
    facts += [f"{name} {example[key]}" for key, name in (("status", "HTTP"), ("exit_code", "exit"))
              if example.get(key) is not None]  # fmt: skip
    facts += ["out of memory"] if example.get("oom_killed") else []
    log = f"<pre>{text(example['log_tail'])}</pre>" if example["log_tail"] else ""
    also = "".join(f"<p class='also'>also: {text(fault)}</p>" for fault in example.get("also", ()))
    where = f"{text(example['task'])} #{example['sample']} ({text(example['agent'])})"
    return (
        f'<div class="evidence"><p><a href="{link(example)}"><bdi>{where}</bdi></a> <small>{text(", ".join(facts))}'
        f"</small></p><p class='said'>{text(example['message'])}</p>{log}{also}</div>"
    )


def tasks(report: dict[str, Any]) -> str:
    """A row of each task and agent with its pass rate; those in trouble first, then from hard to easy."""
    entries = sorted(
        report["tasks"],
        key=lambda entry: (
            -entry["invalid"],
            -1 if entry["pass_rate"] is None else entry["pass_rate"],
            entry["task"],
        ),
    )
    one = len(report["by_agent"]) < 2
    agent = "" if one else "<th data-sort>agent</th>"
    rows = [_task(entry, one) for entry in entries]
    more = (
        f'<template id="more-tasks">{"".join(rows[AT_ONCE:])}</template><p><button type="button" id="all-tasks">'
        f"show all {len(rows):,}</button></p>"
    )
    return (
        '<div class="scroll tall" tabindex="0" aria-label="Tasks"><table class="tasks"><thead><tr>'
        f'<th data-sort>task</th>{agent}<th data-sort>pass rate</th><th data-sort class="n">passed</th>'
        '<th data-sort class="n">valid</th><th data-sort class="n">invalid</th><th>errors</th></tr></thead>'
        f"<tbody>{''.join(rows[:AT_ONCE])}</tbody></table>{more if rows[AT_ONCE:] else ''}</div>"
    )


def band(report: dict[str, Any]) -> str:
    """How many tasks a policy can learn from: some of their samples pass and some fail."""
    found: Counter[str] = Counter()
    for entry in report["tasks"]:
        rate = entry["pass_rate"]
        found[
            "none valid" if rate is None else "never" if rate == 0 else "always" if rate == 1 else "sometimes"
        ] += 1
    kinds = (
        ("sometimes", "passed", "pass sometimes: these teach"),
        ("always", "series0", "pass always"),
        ("never", "failed", "pass never"),
        ("none valid", "invalid", "have no valid rollout"),
    )
    there = [(found[name], kind, said) for name, kind, said in kinds if found[name]]
    parts = "".join(f'<i class="{kind}" style="flex-grow:{count}"></i>' for count, kind, _ in there)
    keys = "".join(f'<span class="key {kind}">{count:,} {said}</span>' for count, kind, said in there)
    return f'<div class="share">{parts}</div><p class="keys">{keys}</p>'


def _task(entry: dict[str, Any], one: bool) -> str:
    rate, valid = entry["pass_rate"], entry["passed"] + entry["failed"]
    bar = '<span class="rate none">-</span>'
    if rate is not None:
        interval = percent_range(entry["pass_rate_low"], entry["pass_rate_high"])
        low, high = entry["pass_rate_low"], entry["pass_rate_high"]
        bar = (
            f'<span class="rate" title="95% {interval}"><i style="width:{100 * rate:.1f}%"></i>'
            f'<u style="left:{100 * low:.1f}%;width:{100 * (high - low):.1f}%"></u></span><b>{percent(rate)}</b>'
        )
    said = [f"{count} {name}" for name, count in entry["error_classes"].items()]
    chip = '<span class="chip bad">quarantined</span>' if entry["quarantined"] else ""
    name = quote(entry["task"], safe="", errors="replace")
    agent = "" if one else f"<td><bdi>{text(entry['agent'])}</bdi></td>"
    return (
        f'<tr><td><a href="#task/{escape(name)}"><bdi>{text(entry["task"])}</bdi></a></td>{agent}'
        f'<td data-value="{-1 if rate is None else rate}"><div class="cell">{bar}</div></td>'
        f'<td class="n">{entry["passed"]}</td><td class="n">{valid}</td><td class="n">{entry["invalid"]}</td>'
        f"<td>{chip} {text(', '.join(said))}</td></tr>"
    )
