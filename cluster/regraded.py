"""What came of `rollcage regrade`, and how it is told."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from rollcage.cluster.recorded_run import shortened
from rollcage.cluster.verdicts import shown
from rollcage.rollout.outcome import Outcome


@dataclass
class Regraded:
    """What came of it. `rollouts` were meant; `then` and `now` count those that were graded. `missing` and
    `carried_over`: why others were not, by rollout; only of the first something was lost."""

    run: Path
    changed_tests: list[str]
    rollouts: int = 0
    then: Counter[str] = field(default_factory=Counter)
    now: Counter[str] = field(default_factory=Counter)
    regraded: int = 0
    changed: list[dict[str, Any]] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    carried_over: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        counts = {"then": dict(self.then), "now": dict(self.now)}
        return {**vars(self), **counts, "run": str(self.run)}


def render_regraded(result: Regraded, console: Console) -> None:
    """Print counts then and now, each rollout that changed, and what had no state."""

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    say(f"regraded {result.regraded} of {result.rollouts} rollouts")
    if result.changed_tests:
        say(f"files changed since: {escape(shortened(result.changed_tests, ', '))}")
    if result.regraded:
        say("then: " + _counts(result.then))
        say("now:  " + _counts(result.now))
    for change in result.changed:
        ends = f"{shown(change['then'])} then and {shown(change['now'])} now"
        say(escape(f"{change['rollout']} by {change['agent']}: {ends}"))
    for word, reasons in (("no state", result.missing), ("as it was", result.carried_over)):
        by_reason = Counter(reasons.values())
        for reason, count in by_reason.items():
            names = [name for name, why in reasons.items() if why == reason]
            say(escape(f"{word}: {count} ({reason}): {shortened(names, ', ')}"))
    say(escape(f"\nTrajectories: {result.run}/rollouts/*.arrow"))


def _counts(outcomes: Counter[str]) -> str:
    return ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in Outcome if outcomes[outcome])
