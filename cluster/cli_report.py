"""The commands that read runs and change nothing: `report`, `compare`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rollcage.cluster.cli_common import Json, err, out, print_json
from rollcage.cluster.errors import CouldNotRun, InputError

Run = Annotated[str, typer.Argument(help="The run directory, or its URI (s3://bucket/run).")]


def report(
    run: Run,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write one page with plots and every rollout to this file.")
    ] = None,
    html_mb: Annotated[
        int,
        typer.Option(
            "--html-mb", min=1, help="Size of the rollouts in it: long outputs are cut until they fit."
        ),
    ] = 48,
    as_json: Json = False,
) -> None:
    """The outcome table of a run, from its files alone; also of one that is not finished."""
    from rollcage.metrics.report import render, summarize

    if html is not None:
        from rollcage.metrics.page import write_page

        if html.is_dir():
            raise InputError(f"{html} is a directory: --html names the file of the page")
        summary = _read(lambda: write_page(run, html, limit_bytes=html_mb << 20))
        err.print(f"written: {html}", highlight=False, markup=False, soft_wrap=True)
    else:
        summary = _read(lambda: summarize(run))
    if as_json:
        print_json(summary)
    elif html is None:
        out.print(render(summary))


def compare(
    run_a: Annotated[str, typer.Argument(help="The first run: what was.")],
    run_b: Annotated[str, typer.Argument(help="The second run: what is asked about. It may be the same.")],
    agent_a: Annotated[str | None, typer.Option("--agent-a", help="Agent of the first, by label.")] = None,
    agent_b: Annotated[str | None, typer.Option("--agent-b", help="Agent of the second, by label.")] = None,
    changed_tasks: Annotated[
        bool, typer.Option("--changed-tasks", help="Compare also tasks whose files differ between the runs.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare two runs task by task: difference of pass rates and of pass@k, its interval, and a permutation test."""
    from rollcage.metrics.comparison import NotComparable, render
    from rollcage.metrics.comparison import compare as carry_out

    try:
        done = _read(
            lambda: carry_out(run_a, run_b, agent_a=agent_a, agent_b=agent_b, changed_tasks=changed_tasks)
        )
    except NotComparable as error:
        raise InputError(str(error)) from error
    if as_json:
        print_json(done)
    else:
        out.print(render(done))


def _read(read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `read` gives, its errors as the command line's."""
    import pyarrow as pa

    from rollcage.rollout.arrow import RunError
    from rollcage.rollout.schema import SchemaVersionError

    try:
        return read()
    except (RunError, SchemaVersionError, pa.ArrowInvalid) as error:
        raise InputError(str(error)) from error
    except OSError as error:  # a store that does not answer, a disk that is full
        raise CouldNotRun(str(error)) from error
