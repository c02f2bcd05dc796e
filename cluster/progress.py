"""Live progress of a job: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rollcage.rollout.outcome import Outcome

LINE_SEC = 10.0
"""Seconds between lines where there is no terminal."""

_COLOURS = {"passed": "green", "failed": "yellow", "invalid": "red", "cancelled": "dim"}


class JobProgress:
    """Counts what ends and shows it on `console` (standard error, so that `--json` stays clean). What it is told to
    say goes through `redact`. `total` is None where there is no end in sight."""

    def __init__(
        self, total: int | None, console: Console, redact: Callable[[str], str] = lambda text: text
    ) -> None:
        self.redact = redact
        self.so_far: dict[str, tuple[int, int]] = {}
        """By host: turns that its running attempts have had, and tokens that they have sampled."""
        self._console = console
        self._total = total
        self._outcomes: Counter[str] = Counter()
        self._retries: Counter[str] = Counter()
        self._started = time.monotonic()
        self._last_line = self._started
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[counts]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._row = self._bar.add_task("rollouts", total=total, counts="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(self.redact(line), highlight=False, markup=False, soft_wrap=True)

    def retried(self, error_class: str, in_flight: int) -> None:
        """Count an attempt whose rollout is tried again."""
        self._retries[error_class] += 1
        self.show(in_flight)

    def ended(self, outcome: Outcome, in_flight: int) -> None:
        """Count a rollout that has ended."""
        self._outcomes[outcome.value] += 1
        self.show(in_flight)

    def show(self, in_flight: int, preparing: int = 0) -> None:
        """Bring the bar up to date; print a line where there is none and the last is old."""
        done = self._outcomes.total()
        now = time.monotonic()
        self._bar.update(
            self._row, completed=done, counts=self._counts(in_flight, preparing, now, markup=True)
        )
        if not self._console.is_terminal and (now - self._last_line >= LINE_SEC or done == self._total):
            self._last_line = now
            of = "" if self._total is None else f"/{self._total}"
            self._console.print(
                f"{done}{of} rollouts, {self._counts(in_flight, preparing, now, markup=False)}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def _counts(self, in_flight: int, preparing: int, now: float, *, markup: bool) -> str:
        parts = []
        for outcome, colour in _COLOURS.items():
            if count := self._outcomes[outcome]:
                parts.append(f"[{colour}]{count} {outcome}[/]" if markup else f"{count} {outcome}")
        turns, tokens = (sum(counts) for counts in zip((0, 0), *self.so_far.values(), strict=True))
        so_far = f" ({turns} turns" + (f", {tokens} tokens" if tokens else "") + " so far)"
        parts.append(f"{in_flight} in flight" + (so_far if in_flight and turns else ""))
        if preparing:
            parts.append(f"{preparing} images in the making")
        parts.append(f"{self._outcomes.total() / max(now - self._started, 1e-9):.1f}/s")
        parts += [f"retried {name} {count}" for name, count in self._retries.most_common(3)]
        return ", ".join(parts)
