"""The commands that steer what a job draws: `curriculum`, `stop`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.markup import escape
from rich.table import Table

from rollcage.cluster.cli_common import Json, out, print_json
from rollcage.cluster.errors import InputError

Run = Annotated[
    str, typer.Argument(help="The run directory, or its URI, of a job that runs on this machine.")
]


def curriculum(
    run: Annotated[str, typer.Argument(help="The run directory, or its URI.")],
    weights: Annotated[
        Path | None,
        typer.Option(
            "--weights", help="JSON or YAML: {task: weight}. The tasks that it does not name keep theirs."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """How often a stream draws which task; with --weights, other weights for one that runs."""
    from rollcage.cluster.control import set_weights
    from rollcage.rollout.arrow import RunError
    from rollcage.rollout.curriculum import read_history

    if weights is not None:
        draw = set_weights(run, _read(weights))
        if as_json:
            print_json({"draw": draw})
        else:
            out.print(f"in effect from draw {draw} on")
        return
    try:
        history = read_history(run)
    except RunError as error:
        raise InputError(str(error)) from error
    if as_json:
        print_json(history)
        return
    if not history:
        out.print("this run draws each task once: only one of `mode: stream` has weights")
        return
    table = Table("from draw", "set by", "task", "weight", box=None)
    for change in history:
        about = str(change["draw"]), change["by"]
        for task, weight in change["weights"].items() or [("every task", 1)]:
            table.add_row(*about, escape(task), f"{weight:g}")
            about = "", ""
    out.print(table, highlight=False)


def stop(run: Run) -> None:
    """Have a job begin no more groups; what is under way ends, and then the job. `rollcage resume` goes on with it."""
    from rollcage.cluster.control import stop_job

    stop_job(run)
    out.print("it begins no more groups, and ends with those that are under way")


def _read(path: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f":{mark.line + 1}"
        raise InputError(
            f"{path}{line}: this is neither JSON nor YAML: {error.problem} (mend this line)"
        ) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"{path} cannot be read: {error} (name a JSON or YAML file of weights)") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: weights are a mapping {{task: weight}}, not {type(found).__name__}")
    return {str(task): weight for task, weight in found.items()}
