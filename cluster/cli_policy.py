"""The commands that talk to a job that runs: `policy update`, `policy status`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from rollcage.cluster.cli_common import Exit, Json, err, out, print_json

policy_app = typer.Typer(help="The policies of a job that runs.", no_args_is_help=True)

RUNS = "runs"

Run = Annotated[
    str | None,
    typer.Option(
        "--run", help="The run directory, or its URI; default: of the one job that runs below ./runs."
    ),
]
Policy = Annotated[str | None, typer.Option("--policy", help="Its name; default: the only one.")]


@policy_app.command("update")
def update(
    path: Annotated[
        Path, typer.Option("--path", help="Of the weights: a model's directory, or a LoRA adapter's.")
    ],
    version: Annotated[
        int, typer.Option("--version", min=0, help="Theirs; higher than that of those before.")
    ],
    run: Run = None,
    policy: Policy = None,
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait.")] = 3600.0,
    as_json: Json = False,
) -> None:
    """Give a policy other weights, and wait until its replicas have them. The job goes on meanwhile. Exit status 3
    where some replica could not take them yet."""
    from rollcage.cluster.control import Replicas, only_running_job, update_policy

    shown = ""

    def show(replicas: Replicas) -> None:
        nonlocal shown
        line = ", ".join(
            f"replica {one['replica']} {one['state']} (version {one['version']})" for one in replicas
        )
        if line != shown:
            shown = line
            err.print(line, highlight=False, markup=False, soft_wrap=True)

    done = update_policy(
        run or only_running_job(RUNS), path, version, policy=policy, timeout_sec=timeout, on_progress=show
    )
    if as_json:
        print_json(asdict(done))
    else:
        said = f"policy {done.policy}: version {done.version} after {done.seconds:.1f} s"
        out.print(escape(said), highlight=False, soft_wrap=True)
        for number, how in done.replicas.items():
            out.print(escape(f"replica {number}: {how_told(how)}"), highlight=False, soft_wrap=True)
    raise typer.Exit(Exit.INCOMPLETE if done.failed else Exit.DONE)


@policy_app.command("status")
def status(run: Run = None, policy: Policy = None, as_json: Json = False) -> None:
    """How the replicas of a job's policies are, and the version of their weights."""
    from rollcage.cluster.control import only_running_job, policy_status

    found = policy_status(run or only_running_job(RUNS), policy=policy)
    if as_json:
        print_json({name: asdict(one) for name, one in found.items()})
        return
    for name, one in found.items():
        where = "" if one.path is None else f" from {one.path}"
        said = "starting" if one.starting else f"version {one.version}{where}"
        out.print(escape(f"policy {name}: {said}"), highlight=False, soft_wrap=True)
        if one.starting:
            continue
        table = Table(*_COLUMNS, "said", box=None)
        for replica in one.replicas:
            row = (
                f"{replica[column]:.2f}" if column == "kv_use" else str(replica[column])
                for column in _COLUMNS
            )
            table.add_row(*row, escape(replica["said"].partition("\n")[0]))
        out.print(table, highlight=False)
    if not found:
        out.print("this job serves no policy with vLLM")


_COLUMNS = ("replica", "state", "version", "kv_use", "running", "waiting", "sessions", "restarts")

_WORDS = {
    "reload": "loaded them in place (reload)",
    "lora": "swapped its adapter (lora)",
    "restart": "started its engine anew with them (restart)",
    "same": "has this version already (same)",
    "later": "is about to start, with them (later)",
    "lost": "is lost, and starts again with them (lost)",
}


def how_told(how: str) -> str:
    """How a replica took its weights (`PolicyUpdate.replicas`), for people."""
    word, colon, why = how.partition(": ")
    return f"{_WORDS[word]}{colon}{why}" if word in _WORDS else how
