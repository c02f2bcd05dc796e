"""The command line. Heavy imports happen inside the commands, so that `--help` and `report` are quick.

Exit status: 0 done, 1 bad input, 2 could not run, 3 done with quarantined tasks, with invalid rollouts, or with some
cancelled because a budget was spent, 130 ended by a signal (what ended before is written). Standard output has the
result and nothing else.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import redirect_stdout
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from rollcage.cluster.cli_again import regrade, replay
from rollcage.cluster.cli_common import DockerHost, Exit, Json, err, out
from rollcage.cluster.cli_common import print_json as _print_json
from rollcage.cluster.cli_export import export
from rollcage.cluster.cli_observe import observe
from rollcage.cluster.cli_policy import policy_app
from rollcage.cluster.cli_report import compare, report
from rollcage.cluster.cli_resume import compact, resume
from rollcage.cluster.cli_stream import curriculum, stop
from rollcage.cluster.cli_top import top
from rollcage.cluster.errors import CouldNotRun, InputError

if TYPE_CHECKING:
    from rollcage.cluster.job import RunResult

app = typer.Typer(
    name="rollcage",
    help="Run rollouts of terminal agents in Docker sandboxes, and say of every failure whose fault it was.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
tasks_app = typer.Typer(help="Check and import tasks.", no_args_is_help=True)
config_app = typer.Typer(help="What a job's YAML may say.", no_args_is_help=True)
app.add_typer(tasks_app, name="tasks")
app.add_typer(config_app, name="config")
app.add_typer(policy_app, name="policy")

app.command()(curriculum)
app.command()(stop)
app.command()(resume)
app.command()(compact)
app.command()(replay)
app.command()(regrade)
app.command()(export)
app.command()(report)
app.command()(compare)
app.command()(top)
app.command()(observe)

# typer brings a click of its own, whose base class it does not export.
UsageProblem: type[Exception] = next(
    kind
    for kind in typer.BadParameter.__mro__
    if kind.__name__ == "ClickException" and issubclass(kind, Exception)
)


@app.command()
def run(
    job: Annotated[
        list[str] | None, typer.Argument(help="The job's YAML file; behind --tasks, further tasks.")
    ] = None,
    tasks: Annotated[
        list[str] | None, typer.Option("--tasks", help="Task directories, directories of them, or globs.")
    ] = None,
    agent: Annotated[
        list[str] | None, typer.Option("--agent", help="Agent, by name or module:Class.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="A model (id, directory, smollm2) or a script (*.yaml).")
    ] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Rollouts of each task and agent.")] = None,
    concurrency: Annotated[int | None, typer.Option("--concurrency", help="Rollouts at once.")] = None,
    output: Annotated[
        str | None, typer.Option("--output", help="The run directory, or a URI: s3://bucket/run.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="Override a setting of the YAML: --set a.b=c")
    ] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="Join this Ray cluster instead of starting Ray here.")
    ] = None,
    skip_unready: Annotated[
        bool, typer.Option("--skip-unready", help="Leave out tasks whose variables are not set.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the run that the run directory holds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a job: every task by every agent, SAMPLES times."""
    from rollcage.cluster.job import RunOptions, run_job

    files, more_tasks = (job or [], []) if not tasks else ([], job or [])
    if tasks and job and job[0].endswith((".yaml", ".yml")):
        files, more_tasks = job[:1], job[1:]
    if len(files) > 1:
        raise InputError(f"one job at a time, not {len(files)}: {' '.join(files)}")
    options = RunOptions(
        job=Path(files[0]) if files else None,
        tasks=[*(tasks or []), *more_tasks],
        agents=agent or [],
        policy=policy,
        samples=samples,
        concurrency=concurrency,
        output=output,
        overrides=overrides or [],
        address=address,
        skip_unready=skip_unready,
        overwrite=overwrite,
    )
    with redirect_stdout(sys.stderr):  # Ray prints there, and so may an agent
        result = run_job(options, err)
    end_with(result, as_json=as_json)


def end_with(result: RunResult, *, as_json: bool) -> None:
    """Print what came of a job, and exit with its status."""
    if as_json:
        _print_json(result.summary | {"run": str(result.run)})
    else:
        from rollcage.metrics.report import render

        out.print(render(result.summary))
        out.print(
            f"\nTrajectories: {result.run}/rollouts/*.arrow, and in Python:\n"
            "    from rollcage.rollout.feed import read_rollouts\n"
            f"    table = read_rollouts({str(result.run)!r})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    if result.interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    incomplete = any(result.summary[name] for name in ("invalid", "quarantined", "cancelled"))
    raise typer.Exit(Exit.INCOMPLETE if incomplete else Exit.DONE)


@app.command(name="try")
def try_(
    task: Annotated[Path, typer.Argument(help="The task's directory.")],
    agent: Annotated[str, typer.Option("--agent", help="Agent, by name or module:Class.")] = "oracle",
    policy: Annotated[
        str | None, typer.Option("--policy", help="A model (id, directory, smollm2) or a script (*.yaml).")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="An option of the agent: --option turns=5")
    ] = None,
    sample: Annotated[int, typer.Option("--sample", help="Which sample this is, for scripts and seeds.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the sandbox for a look, until Ctrl-C.")] = False,
    keep_states: Annotated[
        str,
        typer.Option("--keep-states", help="none, failed or all: save what the agent leaves, as an image."),
    ] = "none",
    docker_host: DockerHost = None,
    as_json: Json = False,
) -> None:
    """Run one rollout in the foreground and show what happens, for people who write tasks."""
    from rollcage.cluster.foreground import as_dict, render, try_task

    with redirect_stdout(sys.stderr):  # an agent may print there
        attempt = try_task(
            task,
            agent,
            policy,
            option or [],
            sample=sample,
            keep=keep,
            keep_states=keep_states,
            docker_host=docker_host,
            console=err,
            show=lambda record: _print_json(as_dict(record)) if as_json else render(record, out),
        )
    if attempt.error_class == "cancelled":
        raise typer.Exit(Exit.INTERRUPTED)
    raise typer.Exit(Exit.DONE if attempt.reward_valid else Exit.INCOMPLETE)


@tasks_app.command("check")
def tasks_check(
    paths: Annotated[list[str], typer.Argument(help="Task directories, directories of them, or globs.")],
    as_json: Json = False,
) -> None:
    """Report every problem of every task with file, line and remedy; exit status 1 where there is any."""
    from rollcage.cluster.checks import check_tasks

    checked = check_tasks(paths)
    bad = [task for task in checked if task["problems"]]
    if as_json:
        _print_json({"tasks": checked, "checked": len(checked), "with_problems": len(bad)})
    else:
        for task in checked:
            _print_problems(task["problems"])
            _print_problems(task["warnings"], heading="[yellow]warning[/]")
        out.print(f"{len(checked)} tasks checked, {len(bad)} with problems")
    raise typer.Exit(Exit.BAD_INPUT if bad else Exit.DONE)


@tasks_app.command("import")
def tasks_import(
    source: Annotated[Path, typer.Argument(help="An old Terminal-Bench task, or a directory of them.")],
    target: Annotated[Path, typer.Argument(help="Where the Harbor tasks are written.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace tasks that are there.")] = False,
    as_json: Json = False,
) -> None:
    """Write Harbor tasks from old Terminal-Bench tasks, and report as `tasks check` does."""
    from rollcage.cluster.checks import import_tasks

    reports = import_tasks(source, target, overwrite=overwrite)
    if as_json:
        _print_json({"tasks": reports})
    else:
        for report in reports:
            mark = "imported" if report["written"] else "[red]not imported[/]"
            said = f"{mark} {escape(report['source'])} -> {escape(report['target'])}"
            out.print(said, highlight=False, soft_wrap=True)
            _print_problems(report["problems"])
            for note in report["notes"]:
                out.print(f"note: {escape(note)}", highlight=False, soft_wrap=True)
    raise typer.Exit(Exit.BAD_INPUT if any(report["problems"] for report in reports) else Exit.DONE)


@app.command()
def doctor(docker_host: DockerHost = None, as_json: Json = False) -> None:
    """Say whether this machine is fit to run jobs, and what to do where it is not."""
    from rollcage.cluster.doctor import examine

    checks = asyncio.run(examine(docker_host))
    if as_json:
        _print_json({"fit": all(check.ok for check in checks), "checks": [vars(check) for check in checks]})
    else:
        for check in checks:
            mark = "[green]ok[/]  " if check.ok else "[red]bad[/] "
            out.print(f"{mark} {check.name:<16} {escape(check.said)}", highlight=False, soft_wrap=True)
            if not check.ok:
                out.print(f"      {'':<16} [bold]{escape(check.remedy)}[/]", highlight=False, soft_wrap=True)
    raise typer.Exit(Exit.DONE if all(check.ok for check in checks) else Exit.COULD_NOT_RUN)


@app.command()
def gc(
    job: Annotated[
        str | None,
        typer.Option("--job", help="Everything of this job (`job` in its job.json), also if it lives."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Everything of ours, also if it lives.")] = False,
    images: Annotated[bool, typer.Option("--images", help="The cached task images, too.")] = False,
    states: Annotated[
        bool, typer.Option("--states", help="Saved sandbox states, too: the job's, or all.")
    ] = False,
    docker_host: DockerHost = None,
    as_json: Json = False,
) -> None:
    """Remove what dead jobs left on the engine: containers, networks, dangling images; by label only."""
    from rollcage.cluster.checks import collect_garbage

    removed = asyncio.run(
        collect_garbage(docker_host, job=job, everything=everything, images=images, states=states)
    )
    if as_json:
        _print_json(removed)
    else:
        stuck, left, size = (
            removed.pop(name) for name in ("stuck_networks", "states_left", "states_left_bytes")
        )
        out.print("removed: " + ", ".join(f"{count} {name}" for name, count in removed.items()))
        if left:
            remedy = " (--states removes them)" if not states else ""
            out.print(
                f"kept: {left} sandbox state(s), {size / 2**20:,.0f} MiB beyond the images that they share{remedy}",
                highlight=False,
                soft_wrap=True,
            )
        if stuck:
            out.print(
                f"left: {stuck} network(s) whose endpoints the engine has lost count of (moby issue 42119): "
                "restart it when nothing runs"
            )


@config_app.command("schema")
def config_schema() -> None:
    """The JSON schema of a job's YAML."""
    from rollcage.cluster.config import job_schema

    _print_json(job_schema())


def main() -> None:
    """Entry point: every error that a user can mend is one message and an exit status."""
    sys.path.append(str(Path.cwd()))  # where a `module:Class` of the user's own is looked for
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # as standard error: tasks have names that ASCII has not
    try:
        status = app(standalone_mode=False)
    except UsageProblem as error:
        show = getattr(error, "show", None)
        show() if show else err.print(str(error))
        status = Exit.BAD_INPUT
    except InputError as error:
        err.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        status = Exit.BAD_INPUT
    except CouldNotRun as error:
        err.print(f"[red]could not run:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        status = Exit.COULD_NOT_RUN
    except (typer.Abort, KeyboardInterrupt):
        status = Exit.INTERRUPTED
    sys.exit(status or 0)


def _print_problems(problems: list[dict[str, Any]], heading: str | None = None) -> None:
    for problem in problems:
        place = problem["file"] + (f":{problem['line']}" if problem["line"] else "")
        head = heading or f"[red]{problem['error_class']}[/]"
        out.print(
            f"{head} {escape(place)}: {escape(problem['message'])} [dim]({escape(problem['remedy'])})[/]",
            soft_wrap=True,
            highlight=False,
        )
