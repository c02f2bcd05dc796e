"""The command `top`: the exporter's numbers, live."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from rollcage.cluster.cli_common import Exit, err, out
from rollcage.cluster.errors import InputError

REMEDIES = {
    "HTTP Error 401": "--user and --password are those of its job",
    "CERTIFICATE_VERIFY_FAILED": "--certificate is that of its job, and must name the host of --url",
    "WRONG_VERSION_NUMBER": "it speaks no TLS: --url http://...",
    "UNEXPECTED_EOF": "it may speak TLS: --url https://...",
    "closed connection without response": "it may speak TLS: --url https://...",
}
"""By what an error's text has in it."""


def top(
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            help="The exporter's, http://127.0.0.1:9410/metrics. By default the one that was started last of those in "
            "--targets.",
        ),
    ] = None,
    targets: Annotated[
        Path | None,
        typer.Option(
            "--targets",
            help="The directory with the files of exporters, a job's metrics.targets; by default rollcage/targets in "
            "the user's state directory.",
        ),
    ] = None,
    user: Annotated[str | None, typer.Option("--user", help="Where the exporter asks for one.")] = None,
    password: Annotated[
        str | None, typer.Option("--password", envvar="ROLLCAGE_EXPORTER_PASSWORD", help="The user's.")
    ] = None,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="PEM: what the exporter's own is checked against.")
    ] = None,
    interval: Annotated[float, typer.Option("--interval", min=0.5, help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, print once and end; so it is where no terminal is.")
    ] = False,
) -> None:
    """What the cluster does now: jobs, outcomes, errors by class, hosts and policies. Ended by Ctrl-C."""
    from rich.live import Live

    from rollcage.metrics.top import Change, read, render

    url = url or _found(certificate, targets)
    if "://" not in url:
        raise InputError(f"--url {url}: write http://HOST:PORT/metrics, or https:// where it speaks TLS")
    try:
        before = read(url, user, password, certificate)
        time.sleep(interval)
        now = read(url, user, password, certificate)
        if once or not out.is_terminal:
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
        remedy = next((what for said, what in REMEDIES.items() if said in str(error)), "--url names another")
        err.print(f"could not read the exporter at {url}: {error}; {remedy}", markup=False)
        raise typer.Exit(Exit.COULD_NOT_RUN) from error


def _found(certificate: Path | None, targets: Path | None) -> str:
    """Where a job's exporter listens on this machine, by the files for Prometheus; else where it would."""
    from rollcage.metrics.serving import METRICS_PATH, PORT
    from rollcage.metrics.targets import exporters
    from rollcage.rollout.location import state_directory

    scheme = "http" if certificate is None else "https"
    found = []
    directory = state_directory() / "targets" if targets is None else targets.expanduser()
    for path in directory.glob("*.json"):
        with suppress(FileNotFoundError):  # its cluster has ended just now
            written_at = path.stat().st_mtime
            found += [(written_at, address) for address in exporters(path)]
    if targets is not None and not found:
        raise InputError(
            f"--targets {targets}: no exporter has a file there; a job's metrics.targets is what it means"
        )
    return f"{scheme}://{max(found)[1] if found else f'127.0.0.1:{PORT}'}{METRICS_PATH}"
