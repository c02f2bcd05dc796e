"""Writes the dashboards' JSON: `python -m rollcage.metrics.dashboards.build`."""

from __future__ import annotations

from pathlib import Path

from rollcage.metrics.dashboards.feed import FEED
from rollcage.metrics.dashboards.overview import OVERVIEW
from rollcage.metrics.dashboards.panels import Board, json_of
from rollcage.metrics.dashboards.policies import POLICIES
from rollcage.metrics.dashboards.sandboxes import SANDBOXES

BOARDS: tuple[Board, ...] = (OVERVIEW, SANDBOXES, POLICIES, FEED)


def path_of(board: Board) -> Path:
    """The file of a dashboard's JSON."""
    return Path(__file__).parent / f"{board.uid}.json"


if __name__ == "__main__":
    for one in BOARDS:
        path_of(one).write_text(json_of(one), encoding="utf-8")
