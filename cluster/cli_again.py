"""The commands that do a run again: `replay`, `regrade`."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from rollcage.cluster.cli_common import DockerHost, Exit, Json, err, out, print_json

Run = Annotated[str, typer.Argument(help="The run directory, or its URI. It is not changed.")]
Output = Annotated[Path | None, typer.Option("--output", help="The new run directory.")]
Concurrency = Annotated[int | None, typer.Option("--concurrency", min=1, help="At once; default: the run's.")]


def replay(
    run: Run,
    rollout: Annotated[
        str | None, typer.Option("--rollout", help="One rollout: an attempt's id, or task#sample.")
    ] = None,
    task: Annotated[
        str | None, typer.Option("--task", help="Tasks of this name, or pattern of names.")
    ] = None,
    sample: Annotated[int | None, typer.Option("--sample", help="One rollout: this sample.")] = None,
    agent: Annotated[str | None, typer.Option("--agent", help="The agent of this label.")] = None,
    draw: Annotated[
        int | None, typer.Option("--draw", help="Of tasks that were drawn several times: this draw.")
    ] = None,
    output: Output = None,
    changed_tasks: Annotated[
        bool,
        typer.Option("--changed-tasks", help="Use tasks whose files have changed since, as they are now."),
    ] = False,
    keep_states: Annotated[
        str, typer.Option("--keep-states", help="none, failed or all: as sandbox.keep_states of a job.")
    ] = "none",
    concurrency: Concurrency = None,
    address: Annotated[str | None, typer.Option("--address", help="Join this Ray cluster.")] = None,
    docker_host: DockerHost = None,
    as_json: Json = False,
) -> None:
    """Run a run's rollouts again with the answers that its policies gave: without a policy. One rollout is shown as
    `try` shows it; several make a new run."""
    from rollcage.cluster.foreground import as_dict, render
    from rollcage.cluster.recorded_run import Selection
    from rollcage.cluster.replay import ReplayOptions, render_comparison
    from rollcage.cluster.replay import replay as carry_out

    options = ReplayOptions(
        run,
        Selection(rollout, task, sample, agent, draw),
        output=output,
        changed_tasks=changed_tasks,
        docker_host=docker_host,
        concurrency=concurrency,
        address=address,
        keep_states=keep_states,
    )
    with redirect_stdout(sys.stderr):  # Ray prints there, and so may an agent
        done = carry_out(options, err, show=lambda attempt: None if as_json else render(attempt, out))
    if as_json:
        record = {} if done.attempt is None else {"attempt": as_dict(done.attempt)}
        made = {} if done.result is None else {"run": str(done.result.run)}
        print_json({**done.comparison, **made, **record})
    else:
        render_comparison(done.comparison, out)
        if done.result is not None:
            trajectories = f"\nTrajectories: {done.result.run}/rollouts/*.arrow"
            out.print(trajectories, highlight=False, markup=False, soft_wrap=True)
    if done.interrupted:
        raise typer.Exit(Exit.INTERRUPTED)
    raise typer.Exit(Exit.INCOMPLETE if done.incomplete else Exit.DONE)


def regrade(
    run: Run,
    task: Annotated[
        str | None, typer.Option("--task", help="Tasks of this name, or pattern of names.")
    ] = None,
    output: Output = None,
    changed_environment: Annotated[
        bool,
        typer.Option(
            "--changed-environment", help="Grade also states of another environment than the task has now."
        ),
    ] = False,
    concurrency: Concurrency = None,
    docker_host: DockerHost = None,
    as_json: Json = False,
) -> None:
    """Run only the verifiers again, with the tests as they are now, on the sandbox states that the job kept here. Exit
    status 3 where states are missing or a verifier gave no reward."""
    from rollcage.cluster.regrade import RegradeOptions
    from rollcage.cluster.regrade import regrade as carry_out
    from rollcage.cluster.regraded import render_regraded

    options = RegradeOptions(run, task, output, changed_environment, docker_host, concurrency)
    done = carry_out(options, err)
    if as_json:
        print_json(done.as_dict())
    else:
        render_regraded(done, out)
    raise typer.Exit(Exit.INCOMPLETE if done.missing or done.now["invalid"] else Exit.DONE)
