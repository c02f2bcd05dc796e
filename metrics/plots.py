"""Plots as inline SVG, made of text alone: bars that are stacked by kind, and curves with a band.

Each plot is drawn twice, for a wide and for a narrow window (`both`), so that its text has its own size on a phone.
Colours are classes, which the page's style sheet knows in light and dark; marks have titles to point at.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

HEIGHT = 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 34
"""Around the plot, in pixels: room for the numbers of the axes."""
WIDE, NARROW = 560, 330


@dataclass(frozen=True)
class Bar:
    """One bar: its kinds from the bottom up as (class, amount), and what is said when it is pointed at."""

    title: str
    parts: tuple[tuple[str, float], ...]

    @property
    def height(self) -> float:
        return sum(amount for _, amount in self.parts)


@dataclass(frozen=True)
class Point:
    """A point of a curve with its interval, where there is one."""

    x: float
    y: float
    low: float | None
    high: float | None
    title: str


def both(draw: Callable[[int], str]) -> str:
    """The plot that `draw` makes of a width, for wide and for narrow windows."""
    return f'<div class="wide">{draw(WIDE)}</div><div class="narrow">{draw(NARROW)}</div>'


def bars(said: str, found: Sequence[Bar], labels: Sequence[tuple[float, str]], width: int) -> str:
    """Bars side by side. `labels`: (where, what) below the axis, where counts bars from 0 at the first one's left."""
    ticks = nice_ticks(max((bar.height for bar in found), default=0.0))
    frame = _Frame(width, max(len(found), 1), ticks[-1])
    marks = []
    for number, bar in enumerate(found):
        left, right, base = frame.x(number), frame.x(number + 1), 0.0
        gap = min(2.0, (right - left) * 0.15)
        rects = []
        for kind, amount in bar.parts:
            if amount:
                top, bottom = frame.y(base + amount), frame.y(base)
                rects.append(
                    f'<rect class="{kind}" x="{left + gap / 2:.1f}" y="{top:.1f}" '
                    f'width="{right - left - gap:.1f}" height="{bottom - top:.1f}"/>'
                )
                base += amount
        if rects:
            marks.append(f"<g><title>{escape(bar.title)}</title>{''.join(rects)}</g>")
    return frame.svg(said, [(tick, f"{tick:,.0f}") for tick in ticks], labels, "".join(marks))


def curves(said: str, found: Sequence[tuple[str, Sequence[Point]]], width: int) -> str:
    """Curves of rates, 0 to 1, over whole numbers from 1, each as (class, points)."""
    most = int(max((point.x for _, points in found for point in points), default=1))
    frame = _Frame(width, max(most - 1, 1), 1.0)
    marks = []
    for kind, points in found:
        at = [(frame.x(point.x - 1), frame.y(point.y)) for point in points]
        band = [point for point in points if point.low is not None and point.high is not None]
        if len(band) > 1:
            around = [(frame.x(p.x - 1), frame.y(p.high or 0)) for p in band]
            around += [(frame.x(p.x - 1), frame.y(p.low or 0)) for p in reversed(band)]
            marks.append(f'<polygon class="band {kind}" points="{_path(around)}"/>')
        elif band:
            x = frame.x(band[0].x - 1)
            low, high = frame.y(band[0].low or 0), frame.y(band[0].high or 0)
            marks.append(
                f'<line class="whisker {kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            )
        marks.append(f'<polyline class="curve {kind}" points="{_path(at)}"/>')
        for (x, y), point in zip(at, points, strict=True):
            marks.append(
                f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{4 if most <= 32 else 2}">'
                f"<title>{escape(point.title)}</title></circle>"
            )
    ks = [k for k in range(1, most + 1) if most <= 10 or k.bit_count() == 1 or k == most]
    ks = [k for k in ks if k == most or most <= 10 or most - k > most / 12]
    rates = [(tick / 4, f"{25 * tick}%") for tick in range(5)]
    return frame.svg(said, rates, [(k - 1, f"k={k}") for k in ks], "".join(marks))


def nice_ticks(most: float) -> list[float]:
    """Four to six whole numbers from 0 to at least `most`."""
    if most <= 1:
        return [0.0, 1.0]
    power = 10 ** math.floor(math.log10(most / 4)) if most >= 4 else 1
    step = next(step for step in (1, 2, 2.5, 5, 10) if step * power >= most / 5 and step * power % 1 == 0)
    return [step * power * number for number in range(math.ceil(most / (step * power)) + 1)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


@dataclass(frozen=True)
class _Frame:
    """Axes around a plot: `across` units from left to right, `up` from the bottom to the top."""

    width: int
    across: float
    up: float

    def x(self, value: float) -> float:
        return LEFT + value / self.across * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - value / self.up * (HEIGHT - TOP - BOTTOM)

    def svg(
        self, said: str, ticks: Sequence[tuple[float, str]], labels: Sequence[tuple[float, str]], marks: str
    ) -> str:
        lines = "".join(
            f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" y1="{self.y(at):.1f}" y2="{self.y(at):.1f}"/>'
            f'<text x="{LEFT - 8}" y="{self.y(at) + 4:.1f}" text-anchor="end">{escape(text)}</text>'
            for at, text in ticks
        )
        below = "".join(
            f'<text x="{self.x(at):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="{self._anchor(at)}">'
            f"{escape(text)}</text>"
            for at, text in labels
        )
        return (
            f'<svg class="plot" viewBox="0 0 {self.width} {HEIGHT}" width="{self.width}" height="{HEIGHT}" '
            f'role="img" aria-label="{escape(said)}">{lines}{below}{marks}</svg>'
        )

    def _anchor(self, at: float) -> str:
        """So that the first and the last label stay inside."""
        return "start" if at <= 0 else "end" if at >= self.across else "middle"
