"""The command `top`: the exporter's numbers, live."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from rollcage.cluster.cli_common import Exit, err, out

Address = Annotated[str, typer.Option("--url", help="The exporter's.")]


def top(
    url: Address = "http://127.0.0.1:9410/metrics",
    user: Annotated[str | None, typer.Option("--user", help="Where the exporter asks for one.")] = None,
    password: Annotated[
        str | None, typer.Option("--password", envvar="ROLLCAGE_EXPORTER_PASSWORD", help="The user's.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="PEM: what the exporter's own is checked against.")
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.5, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print once and end.")] = False,
) -> None:
    """What the cluster does now: jobs, outcomes, errors by class, hosts and policies. Ended by Ctrl-C."""
    from rich.live import Live

    from rollcage.metrics.top import Change, read, render

    try:
        before = read(url, user, password, certificate)
        time.sleep(interval)
        now = read(url, user, password, certificate)
        if once:
            out.print(render(Change(before, now)))
            return
        with Live(render(Change(before, now)), console=out, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                before, now = now, read(url, user, password, certificate)
                live.update(render(Change(before, now)), refresh=True)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.DONE) from None
    except (OSError, ValueError) as error:
        err.print(f"could not read the exporter at {url}: {error}; --url names another", markup=False)
        raise typer.Exit(Exit.COULD_NOT_RUN) from error
