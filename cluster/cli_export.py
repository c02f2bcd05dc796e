"""The command `export`: a run's rollouts in the format of a trainer or a viewer."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from rollcage.cluster.cli_common import Json, err, out, print_json
from rollcage.cluster.errors import InputError

NAMES = "skyrl, skyrl-merged, verl, trl, trl-ids, prime-rl, atif, sharegpt or parquet"


def export(
    run: Annotated[str, typer.Argument(help="The run directory, or its URI. It is not changed.")],
    format: Annotated[str, typer.Option("--format", help=NAMES + ".")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", help="The file; of atif the directory. Default: lines go to standard output."
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where", help="Only rollouts of which this holds: \"outcome = 'passed' and reward > 0.5\""
        ),
    ] = None,
    agent: Annotated[
        list[str] | None, typer.Option("--agent", help="Only of this agent, or pattern of names.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option("--task", help="Only of this task, or pattern of names.")
    ] = None,
    complete: Annotated[
        bool, typer.Option("--complete", help="Only groups in which every sample has a valid reward.")
    ] = False,
    invalid: Annotated[bool, typer.Option("--invalid", help="Rollouts without a valid reward, too.")] = False,
    untruncated: Annotated[
        bool,
        typer.Option("--untruncated", help="Only rollouts of which no answer was cut at the token limit."),
    ] = False,
    shortest: Annotated[
        bool, typer.Option("--shortest", help="Of each task only the rollout with the fewest sampled tokens.")
    ] = False,
    distinct: Annotated[
        bool, typer.Option("--distinct", help="Of rollouts of a task with the same answers only the first.")
    ] = False,
    skip_unfit: Annotated[
        bool, typer.Option("--skip-unfit", help="Leave out rollouts that the format can't hold.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is at --output.")] = False,
    as_json: Json = False,
) -> None:
    """Write a run's rollouts in the format of a trainer or a viewer; what each one holds is in docs/formats.md."""
    from rollcage.rollout.arrow import RunError
    from rollcage.rollout.formats import FORMATS, Unfit
    from rollcage.rollout.formats.export import NothingToExport, OutputExists
    from rollcage.rollout.formats.export import export as write
    from rollcage.rollout.formats.select import Selection
    from rollcage.rollout.formats.where import Where, WhereError
    from rollcage.rollout.schema import SchemaVersionError

    chosen = FORMATS.get(format)
    if chosen is None:
        known = "".join(f"\n    {one.name:<13} {one.meaning}" for one in FORMATS.values())
        raise InputError(f"--format {format}: there is no such format; there are:{known}")
    if output is None and (chosen.file != "jsonl" or as_json):
        kind = "directory" if chosen.file == "json" else "file"
        raise InputError(f"{'--json' if as_json else format} needs --output: the {kind} to write")
    if complete and invalid:
        raise InputError(
            "--complete and --invalid exclude each other: a complete group has no invalid rollout"
        )
    try:
        selection = Selection(
            where=None if where is None else Where(where),
            agents=tuple(agent or ()),
            tasks=tuple(task or ()),
            complete=complete,
            invalid=invalid,
            untruncated=untruncated,
            shortest=shortest,
            distinct=distinct,
        )
        done = write(
            run,
            chosen,
            output or sys.stdout.buffer,
            selection,
            skip_unfit=skip_unfit,
            overwrite=overwrite,
            tools=_tools(run) if chosen.tools else {},
        )
    except BrokenPipeError:
        # Who reads has enough; Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except WhereError as error:
        raise InputError(f"--where: {error}") from error
    except Unfit as error:
        raise InputError(f"{error}\n--skip-unfit leaves them out") from error
    except OutputExists as error:
        raise InputError(f"--output: {error} (--overwrite)") from error
    except (RunError, SchemaVersionError, NothingToExport, OSError) as error:
        raise InputError(str(error)) from error
    counts = done.counts
    if as_json:
        print_json(
            {
                "format": chosen.name,
                "output": str(output),
                "rows": done.rows,
                "rollouts": counts.kept,
                "read": counts.read,
                "left_out": {why: count for why, count in counts.left_out.items() if count},
                "unfit": dict(counts.unfit),
            }
        )
        return
    console = err if output is None else out
    said = [
        f"{counts.kept} of {counts.read} rollouts as {chosen.name}: {done.rows} rows in {output or 'all'}"
    ]
    said += [f"left out {count}: {why}" for why, count in counts.left_out.most_common() if count]
    said += [f"left out {count}, unfit: {why}" for why, count in counts.unfit.most_common()]
    for line in said:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _tools(run: str) -> Mapping[str, Sequence[dict[str, Any]]]:
    """The tools that each agent of the job offers its policy. An agent that cannot be made here has none."""
    from rollcage.rollout.agents.base import load_agent
    from rollcage.rollout.arrow import Location
    from rollcage.rollout.formats.conversations import tool_definitions
    from rollcage.rollout.policies.base import Tool

    job = Location(run).read_json("job.json") or {}
    found = {}
    for settings in job.get("config", {}).get("agents", ()):
        name = settings["name"]
        try:
            made = load_agent(name, settings.get("options") or {})
        except ValueError as error:
            err.print(f"the tools of agent {name} are not known: {error}", markup=False, soft_wrap=True)
            continue
        tools = [tool for tool in getattr(made, "tools", ()) if isinstance(tool, Tool)]
        if tools and getattr(made, "calls_tools", True):
            found[settings.get("label") or name.rpartition(":")[2]] = tool_definitions(tools)
    return found
