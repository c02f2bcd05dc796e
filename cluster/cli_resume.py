"""The commands that go on with what a run holds: `resume`, `compact`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from rollcage.cluster.cli_common import Exit, Json, err, out, print_json
from rollcage.cluster.errors import CouldNotRun, InputError

Run = Annotated[str, typer.Argument(help="The run directory, or its URI (s3://bucket/run).")]
Journal = Annotated[
    Path | None,
    typer.Option("--journal", help="Of a run at a URI: its journal's directory, where it is not the job's."),
]


def resume(
    run: Run,
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=1, help="Rollouts of each task and agent: as many, or more."),
    ] = None,
    tasks: Annotated[list[str] | None, typer.Option("--tasks", help="Further tasks.")] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting of the run's job: --set a.b=c")
    ] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", min=1, help="Rollouts at once.")] = None,
    address: Annotated[
        str | None,
        typer.Option(
            "--address",
            help="Join this Ray cluster, not that of the run; `local` starts Ray on this machine.",
        ),
    ] = None,
    skip_unready: Annotated[
        bool, typer.Option("--skip-unready", help="Leave out tasks whose variables are not set.")
    ] = False,
    retry_invalid: Annotated[
        bool, typer.Option("--retry-invalid", help="Run invalid rollouts again, with new budgets.")
    ] = False,
    allow_changed: Annotated[
        bool,
        typer.Option(
            "--allow-changed", help="Go on although tasks, agents or policies are others than then."
        ),
    ] = False,
    journal: Journal = None,
    as_json: Json = False,
) -> None:
    """Go on with a run that was killed, interrupted or finished, with its own job or a larger one. What has ended is
    not run again, but for cancelled rollouts."""
    from rollcage.cluster.cli import end_with
    from rollcage.cluster.resume import ResumeOptions
    from rollcage.cluster.resume import resume as carry_out

    options = ResumeOptions(
        run=run,
        samples=samples,
        tasks=tasks or [],
        overrides=overrides or [],
        concurrency=concurrency,
        address=address,
        skip_unready=skip_unready,
        allow_changed=allow_changed,
        retry_invalid=retry_invalid,
        journal=journal,
    )
    with redirect_stdout(sys.stderr):  # Ray prints there, and so may an agent
        result = carry_out(options, err)
    end_with(result, as_json=as_json)


def compact(run: Run, journal: Journal = None, as_json: Json = False) -> None:
    """Merge a run's small files into large ones. A job that runs does it by itself."""
    from rollcage.cluster.recorded_run import open_run
    from rollcage.rollout.arrow import TABLES, RunError
    from rollcage.rollout.rewrite import compact as merge_all
    from rollcage.rollout.schema import SchemaVersionError

    location = open_run(run, journal).location
    try:
        with location.locked():
            location.remove_torn()
            gone = {table: merge_all(location, table) for table in TABLES}
    except (RunError, SchemaVersionError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise CouldNotRun(f"{location} cannot be written: {error}") from error
    left = {table: len(location.shards(table)) for table in TABLES}
    if as_json:
        print_json({"merged": gone, "files": left})
    else:
        for table in TABLES:
            out.print(f"{table}: {left[table]} files, {gone[table]} fewer than before", highlight=False)
    raise typer.Exit(Exit.DONE)
