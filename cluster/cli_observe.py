"""The command `observe`: Prometheus and Grafana beside a job."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollcage.cluster.cli_common import Exit, out
from rollcage.cluster.errors import CouldNotRun, InputError

if TYPE_CHECKING:
    from rollcage.metrics.observe import Watch

CACHE = Path("~/.cache/rollcage")
PASSWORD_FILE = "exporter-password"


def observe(
    targets: Annotated[
        Path | None,
        typer.Option(
            "--targets",
            help="The directory with the files of exporters: what there is to scrape. A job's metrics.targets; by "
            "default rollcage/targets in the user's state directory.",
        ),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Prometheus' port.")] = 9090,
    grafana_port: Annotated[
        int, typer.Option("--grafana-port", min=1, max=65535, help="Grafana's port, where it is installed.")
    ] = 3000,
    data: Annotated[
        Path, typer.Option("--data", help="Where both keep what they know, their configurations and logs.")
    ] = CACHE / "observe",
    demo: Annotated[
        bool,
        typer.Option("--demo", help="Simulated hosts and jobs, without a cluster; --targets is not read."),
    ] = False,
    user: Annotated[str | None, typer.Option("--user", help="Where the exporter asks for one.")] = None,
    password: Annotated[
        str | None, typer.Option("--password", envvar="ROLLCAGE_EXPORTER_PASSWORD", help="The user's.")
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--certificate", help="PEM: ask the exporter by TLS, and check its certificate against it."
        ),
    ] = None,
) -> None:
    """Watch runs: start Prometheus, and Grafana where it is installed, in the foreground. Ended by Ctrl-C."""
    from rollcage.metrics.observe import Watch
    from rollcage.metrics.provisioning import Login
    from rollcage.metrics.server_process import CannotObserve
    from rollcage.rollout.location import state_directory

    targets = (state_directory() / "targets") if targets is None else targets.expanduser()
    if targets.exists() and not targets.is_dir():
        raise InputError(
            f"--targets: {targets} is no directory; a job's metrics.targets is one, of *.json files"
        )
    if (user is None) != (password is None):
        raise InputError("--user and --password (or ROLLCAGE_EXPORTER_PASSWORD) go together")
    if certificate is not None and not certificate.is_file():
        raise InputError(f"--certificate: {certificate} is no file")
    data = data.expanduser()
    try:
        login = None
        if user is not None or certificate is not None:
            login = Login(
                user,
                str(_kept(data, password)) if password is not None else None,
                str(certificate.resolve()) if certificate is not None else None,
            )
        watch = Watch(targets, data, port, grafana_port, login, demo)
        asyncio.run(_until_ended(watch))
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise typer.Exit(Exit.DONE) from None
    except (CannotObserve, OSError) as error:
        raise CouldNotRun(str(error)) from error


async def _until_ended(watch: Watch) -> None:
    from rollcage.metrics.observe import observe

    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    await observe(watch, lambda line: out.print(line, markup=False, highlight=False, soft_wrap=True))


def _kept(data: Path, password: str) -> Path:
    """The password in a file that nobody else may read: Prometheus takes it from there, not from a command line."""
    data.mkdir(parents=True, exist_ok=True)
    path = data.resolve() / PASSWORD_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(password)
    return path
