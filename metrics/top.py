"""What the dashboards say first, in a terminal: `rollcage top` reads the exporter's port and shows what changed.

previous = read(url)
...
Console().print(render(Change(previous, read(url))))
"""

from __future__ import annotations

import ssl
import time
import urllib.request
from base64 import b64encode
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rollcage.metrics.definitions import LABELS, NONE, PREFIX
from rollcage.rollout.outcome import Domain, Outcome

ANSWER_SEC = 10.0
"""As long as an exporter may take to answer."""

SILENT_SEC = 10.0
"""A driver that was last heard longer ago than this may be dead: it sends every two seconds."""

_COLOURS = {
    Outcome.PASSED: "green",
    Outcome.FAILED: "yellow",
    Outcome.INVALID: "red",
    Outcome.CANCELLED: "bright_black",
}


class Scrape:
    """One answer of the exporter. `at`: seconds of a clock that only goes forward."""

    def __init__(self, text: str, at: float) -> None:
        self.at = at
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._samples[sample.name].append((sample.labels, sample.value))

    def by(self, name: str, *labels: str, **only: str) -> dict[tuple[str, ...], float]:
        """Sums of a metric (its name without the prefix) by these labels, of the series that have `only`."""
        sums: dict[tuple[str, ...], float] = defaultdict(float)
        for found, value in self._samples.get(PREFIX + name, ()):
            if all(found[label] == wanted for label, wanted in only.items()):
                sums[tuple(found[label] for label in labels)] += value
        return sums

    def sum(self, name: str, **only: str) -> float:
        """The sum of all its series that have `only`."""
        return self.by(name, **only).get((), 0.0)


@dataclass(frozen=True)
class Change:
    """Two scrapes, one after the other."""

    before: Scrape
    now: Scrape

    def rate(self, name: str, **only: str) -> float:
        """Of a counter, a second. One that fell began anew with the exporter."""
        seconds = self.now.at - self.before.at
        grown = self.now.sum(name, **only) - self.before.sum(name, **only)
        return (grown if grown >= 0 else self.now.sum(name, **only)) / seconds if seconds > 0 else 0.0


def read(
    url: str, user: str | None = None, password: str | None = None, certificate: Path | None = None
) -> Scrape:
    """Scrape the exporter. `certificate`: a PEM file that its own is checked against, beside those that this machine
    trusts. Raises `OSError` where it does not answer, and `ValueError` where that is no exporter."""
    request = urllib.request.Request(url)
    if user is not None:
        request.add_header(
            "Authorization", "Basic " + b64encode(f"{user}:{password or ''}".encode()).decode()
        )
    context = ssl.create_default_context()
    if certificate is not None:
        context.load_verify_locations(certificate)
    with urllib.request.urlopen(request, timeout=ANSWER_SEC, context=context) as answer:
        text = answer.read().decode("utf-8", "replace")
    if f"{PREFIX}build_info" not in text:
        raise ValueError(f"{url} is no exporter of rollcage's")
    return Scrape(text, time.monotonic())


def render(change: Change) -> RenderableType:
    """All of it, for a terminal of 80 columns or more."""
    parts = [
        _headline(change),
        _jobs(change),
        _outcomes(change),
        _errors(change),
        _hosts(change),
        _policies(change),
    ]
    return Group(*(part for part in parts if part is not None))


def _headline(change: Change) -> RenderableType:
    now = change.now
    ended = change.rate("attempts_ended_total")
    infra = change.rate("attempts_total", domain=Domain.INFRA)
    return Text.assemble(
        (f"{change.rate('rollouts_total'):.2f}", "bold"),
        " rollouts/s   ",
        (f"{now.sum('attempts_in_flight'):.0f}", "bold"),
        " in flight   ",
        (f"{infra / ended:.1%}" if ended else "-", "bold red" if ended and infra / ended > 0.05 else "bold"),
        " infra errors   ",
        (f"{now.sum('host_up'):.0f}/{len(now.by('host_up', 'host'))}", "bold"),
        " hosts up",
    )


def _jobs(change: Change) -> RenderableType | None:
    total, ended, silent = (
        change.now.by(name, "job_id") for name in ("job_rollouts", "job_rollouts_ended", "job_silent_seconds")
    )
    if not total:
        return None
    table = _table("job", "ended", "of", "feed lag", "heard")
    for key in sorted(total):
        lag = change.now.by("feed_lag_groups", "job_id").get(key, 0.0)
        heard = Text(f"{silent.get(key, 0):.0f} s ago", "red" if silent.get(key, 0) > SILENT_SEC else "")
        table.add_row(Text(key[0]), f"{ended.get(key, 0):.0f}", f"{total[key]:.0f}", f"{lag:.0f}", heard)
    return table


def _outcomes(change: Change) -> RenderableType:
    counted = change.now.by("rollouts_total", "agent", "outcome")
    table = _table("agent", *Outcome, "valid pass rate")
    for agent in sorted({agent for agent, _ in counted}):
        passed, failed = (counted.get((agent, outcome), 0.0) for outcome in (Outcome.PASSED, Outcome.FAILED))
        cells = [Text(f"{counted.get((agent, one), 0):.0f}", _COLOURS[one]) for one in Outcome]
        table.add_row(Text(agent), *cells, f"{passed / (passed + failed):.1%}" if passed + failed else "-")
    return table


def _errors(change: Change) -> RenderableType | None:
    counted = change.now.by("attempts_total", "domain", "error_class")
    found = {key: count for key, count in counted.items() if count and key[1] != NONE}
    if not found:
        return None
    table = _table("domain", "error class", "attempts", "a second")
    for domain, name in sorted(found, key=lambda key: -found[key]):
        rate = change.rate("attempts_total", error_class=name)
        colour = "red" if domain == Domain.INFRA else ""
        table.add_row(Text(domain, colour), name, f"{found[domain, name]:.0f}", f"{rate:.2f}")
    return table


def _hosts(change: Change) -> RenderableType | None:
    hosts = change.now.by("host_up", "host")
    if not hosts:
        return None
    table = _table("host", "up", *LABELS["sandbox_state"], "leases", "leaked", "disk free")
    for (host,), up in sorted(hosts.items()):
        states = [
            f"{change.now.sum('sandboxes', host=host, state=state):.0f}" for state in LABELS["sandbox_state"]
        ]
        held, most = (change.now.sum(f"network_{what}", host=host) for what in ("leases", "capacity"))
        disk = f"{change.now.sum('disk_free_bytes', host=host) / 2**30:.0f} GiB"
        leaked = f"{change.now.sum('resources_leaked', host=host):.0f}"
        table.add_row(
            Text(host),
            Text("yes") if up else Text("no", "red"),
            *states,
            f"{held:.0f}/{most:.0f}",
            leaked,
            disk,
        )
    return table


def _policies(change: Change) -> RenderableType | None:
    policies = change.now.by("policy_turns_total", "policy")
    if not policies:
        return None
    table = _table("policy", "tokens/s", "running", "waiting", "KV cache", "ready", "version")
    for (policy,) in sorted(policies):
        tokens = change.rate("policy_tokens_total", kind="completion", policy=policy)
        requests = [
            f"{change.now.sum('policy_requests', state=s, policy=policy):.0f}" for s in ("running", "waiting")
        ]
        cache = f"{change.now.sum('policy_kv_cache_usage_ratio', policy=policy):.0%}"
        ready = f"{change.now.sum('policy_replicas', state='ready', policy=policy):.0f}"
        version = f"{change.now.sum('policy_version', policy=policy):.0f}"
        table.add_row(Text(policy), f"{tokens:.0f}", *requests, cache, ready, version)
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column(first)
    for other in others:
        table.add_column(other, justify="left" if other == "error class" else "right")
    return table
