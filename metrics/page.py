"""The report as one page that needs no network: numbers and plots that are there at once, and every rollout to read.

`html/page.html` is the template; the style sheet and the scripts beside it go into it as they are. A run's text reaches
the page in two ways only: escaped (`page_text.py`), and as base64 of compressed JSON that the script shows as text
nodes (`recordings.py`). A policy in the page's head allows its one script by its digest, and no connection to anywhere.
The rollouts are the page's end, so that all else can be used while the browser still reads them.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from rollcage.metrics import page_sections as sections
from rollcage.metrics import page_tables as tables
from rollcage.metrics.page_text import text
from rollcage.metrics.recordings import Recordings, SegmentColumn
from rollcage.metrics.report import summarize
from rollcage.rollout.arrow import Location, read_batches

LIMIT_BYTES = 48 << 20
"""Of a page's rollouts. A browser opens that much in about a second."""

_TRIES = ("agent", "task", "draw", "sample", "number", "outcome", "error_class", "host", "evidence", "started_at",
          "ended_at")  # fmt: skip
_PART = re.compile(r"\{\{(\w+)\}\}")


def write_page(
    run: str | Path | Location, target: str | Path, *, limit_bytes: int = LIMIT_BYTES
) -> dict[str, Any]:
    """Write the page of a run to the file `target`, whole or not at all, and return the report that it shows.

    `limit_bytes` is kept by cutting the longest texts of the rollouts, and their token ids; the numbers are of all.
    Raises `NoRun`, and `OSError` where the page cannot be written.
    """
    location = Location.of(run)
    report = summarize(location)
    target = Path(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with (
            tempfile.TemporaryFile("w+", encoding="ascii", dir=target.parent) as chunks,
            temporary.open("w", encoding="utf-8", errors="replace") as page,
        ):
            recordings = Recordings(chunks, report["rollouts"], limit_bytes)
            _record(location, recordings)
            columns = recordings.columns()
            chunks.seek(0)
            parts = _parts(report, recordings, columns)
            for literal, name in _template():
                page.write(literal)
                if name == "chunks":
                    shutil.copyfileobj(chunks, page)
                elif name:
                    page.write(parts[name]())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return report


def _record(location: Location, recordings: Recordings) -> None:
    """Every rollout with its trajectory, and the attempts before its last."""
    tries: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for batch in read_batches(location, "attempts", _TRIES):
        for row in batch.to_pylist():
            if row["error_class"]:
                tries[_key(row)].append(_try(row))
    for batch in read_batches(location, "rollouts"):
        segments = SegmentColumn(batch)
        for number, row in enumerate(batch.drop_columns(["segments"]).to_pylist()):
            before = [one for one in tries.get(_key(row), ()) if one["number"] < row["number"]]
            recordings.add(row, partial(segments.of, number), before)


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["agent"], row["task"], row["draw"], row["sample"]


def _try(row: dict[str, Any]) -> dict[str, Any]:
    times = row["started_at"], row["ended_at"]
    return {
        "number": row["number"],
        "outcome": row["outcome"],
        "error_class": row["error_class"],
        "host": row["host"],
        "message": (row["evidence"] or {}).get("message", ""),
        "seconds": None if None in times else (times[1] - times[0]).total_seconds(),
    }


def _template() -> Iterator[tuple[str, str]]:
    """The template as pairs of literal text and the name of the part that follows it."""
    pieces = _PART.split(_file("page.html"))
    yield from zip(pieces[::2], [*pieces[1::2], ""], strict=True)


def _parts(report: dict[str, Any], recordings: Recordings, columns: str) -> dict[str, Callable[[], str]]:
    script = f"'use strict';(() => {{\n{_file('rollout.js')}{_file('viewer.js')}}})();"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    unfinished = (
        '<p class="banner" role="status"><b>This run has not ended.</b> It is still going on, or was killed: this is '
        "what had been written when the page was made.</p>"
    )
    return {
        "digest": lambda: digest,
        "style": lambda: _file("style.css"),
        "script": lambda: script,
        "run": lambda: text(report["run"]),
        "title": lambda: text(Path(report["run"]).name or report["run"]),
        "made": lambda: datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "banner": lambda: "" if report["finished"] else unfinished,
        "headline": lambda: sections.headline(report),
        "outcomes": lambda: sections.outcomes(report),
        "over_time": lambda: sections.over_time(recordings.table),
        "rewards": lambda: sections.rewards(recordings.table),
        "pass_at_k": lambda: sections.pass_at_k(report),
        "phases": lambda: sections.phases(report),
        "errors": lambda: tables.errors(report),
        "band": lambda: tables.band(report),
        "tasks": lambda: tables.tasks(report),
        "columns": lambda: columns,
    }


def _file(name: str) -> str:
    return files("rollcage.metrics").joinpath("html", name).read_text(encoding="utf-8")
