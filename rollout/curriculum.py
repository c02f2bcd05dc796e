"""Steering a stream from a trainer, with pyarrow alone: how often each task is drawn, and when it is enough.

    from rollcage.rollout.curriculum import finish, set_weights

    set_weights("runs/mine", {"rollcage/easy": 0, "rollcage/hard": 3})
    finish("runs/mine")

What is asked for lies in files below RUN/feed/, each whole or not at all, which the job looks at some times a second:

    weights.json    {"weights": {task: weight}, "at": unix time}
    finish.json     {"at": unix time}

What the job made of it is in RUN/curriculum.jsonl: a line for each change, with the weights that are in effect from
that draw on.
"""

from __future__ import annotations

import difflib
import json
import math
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from rollcage.rollout.arrow import Location, NoRun, RunError

WEIGHTS, FINISH, HISTORY = "feed/weights.json", "feed/finish.json", "curriculum.jsonl"

MOST_PROBLEMS = 5
"""Problems that one message names."""


class NoStream(RunError):
    """The run is of a job that draws each of its tasks once."""


def set_weights(run: str | Path | Location, weights: Mapping[str, float]) -> dict[str, float]:
    """Have these tasks drawn so often, relative to each other and to the rest; the tasks that are not named keep their
    weights (1 at first). 0: not drawn. Groups that are under way go on. Returns every weight that was set so far.

    Raises `ValueError` for an unknown task (with the nearest known one), for what is no weight, and where nothing would
    be left to draw; `NoRun` and `NoStream` where there is no run, or none of `mode: stream`.
    """
    location = Location.of(run)
    names, began = _stream(location)
    current = began | ((location.read_json(WEIGHTS) or {}).get("weights") or {})
    new = check_weights(dict.fromkeys(names, 1.0) | current, weights)
    _write(location, WEIGHTS, {"weights": current | new})
    return current | new


def finish(run: str | Path | Location) -> None:
    """Ask the job to draw no more, to finish what is under way, and to end. Raises `NoRun` and `NoStream`."""
    location = Location.of(run)
    _stream(location)
    _write(location, FINISH, {})


def read_history(run: str | Path | Location) -> list[dict[str, Any]]:
    """The weights that were in effect, the oldest first: `at` (unix time), `draw` (draws before them), `by` (`job` or
    `trainer`) and `weights` of the tasks that have one set. Raises `NoRun`."""
    location = Location.of(run)
    if not location.exists():
        raise NoRun(f"{location}: there is no run here (no job.json and no shard)")
    path = f"{location.path}/{HISTORY}"
    if location.filesystem.get_file_info(path).type is not pafs.FileType.File:
        return []
    with location.filesystem.open_input_stream(path) as source:
        return [json.loads(line) for line in source.read().decode().splitlines()]


def check_weights(current: Mapping[str, float], weights: Mapping[str, Any]) -> dict[str, float]:
    """`weights` as numbers. `current` has every task's. Raises `ValueError` with what is wrong."""
    problems: list[str] = []
    checked: dict[str, float] = {}
    for task, weight in weights.items():
        number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if task not in current:
            problems.append(f"no task is called {task!r} ({_nearest(str(task), current)})")
        elif not number or not math.isfinite(weight) or weight < 0:
            problems.append(f"the weight of {task} must be a number from 0 on, not {weight!r}")
        else:
            checked[task] = float(weight)
    if not problems and not any((dict(current) | checked).values()):
        problems.append("every task would have the weight 0, and nothing would be drawn: leave one above it")
    if problems:
        more = len(problems) - MOST_PROBLEMS
        raise ValueError("\n".join(problems[:MOST_PROBLEMS] + ([f"and {more} more"] if more > 0 else [])))
    return checked


def _nearest(name: str, known: Collection[str]) -> str:
    by_end = {task.rpartition("/")[2].lower(): task for task in known}
    close = difflib.get_close_matches(name, known, n=1) or [
        by_end[found] for found in difflib.get_close_matches(name.rpartition("/")[2].lower(), by_end, n=1)
    ]
    if close:
        return f"did you mean {close[0]!r}?"
    names = sorted(known)
    return "known: " + ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _stream(location: Location) -> tuple[list[str], dict[str, float]]:
    """The names of the job's tasks, and the weights that it began with."""
    job = location.read_json("job.json")
    if job is None:
        raise NoRun(f"{location}: there is no run here with a job.json")
    config = job.get("config") or {}
    if config.get("mode") != "stream":
        raise NoStream(
            f"{location} is of a job that draws each task once: only `mode: stream` has weights and an end"
        )
    return [task["task"] for task in job["tasks"]], dict(config["stream"]["curriculum"])


def _write(location: Location, name: str, value: dict[str, Any]) -> None:
    location.filesystem.create_dir(f"{location.path}/feed")
    location.write_json(name, {**value, "at": time.time()})
