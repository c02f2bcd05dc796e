"""Prometheus, and Grafana where it is installed, in the foreground beside a job: `rollcage observe`.

    asyncio.run(observe(Watch(targets, data), say=print))

Everything that is written goes below `Watch.data`: configurations, logs, and what Prometheus and Grafana keep. Both
listen on loopback and end with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rollcage.metrics.exporter import Exporter
from rollcage.metrics.provisioning import (
    DASHBOARDS,
    PROMETHEUS_OPTIONS,
    RULES,
    Login,
    grafana_dashboards,
    grafana_data_sources,
    grafana_settings,
    prometheus_config,
)
from rollcage.metrics.server_process import CannotObserve, check_port, first_to_end, server, url_of
from rollcage.metrics.serving import serve
from rollcage.metrics.simulated import ticking
from rollcage.metrics.targets import remove_ended, write_targets

TICK_SEC = 2.0
"""Between two snapshots of the demo's sources, as of real ones."""

INSTALL = (
    "Prometheus is not installed. On Debian or Ubuntu: apt-get install prometheus "
    "(`make prometheus` does it without starting the package's service). Elsewhere: put the binary of a release from "
    "https://prometheus.io/download/ on the PATH."
)


@dataclass(frozen=True)
class Watch:
    """What to look at, and where. `targets`: the directory in which each exporter keeps a file (`targets.py`); it may
    come later. `data`: a directory, made where there is none. `demo`: look at simulated sources, and not at
    `targets`."""

    targets: Path
    data: Path
    port: int = 9090
    grafana_port: int = 3000
    login: Login | None = None
    demo: bool = False


async def observe(watch: Watch, say: Callable[[str], None]) -> None:
    """Start what there is, say where it is, and go on until cancelled. Raises `CannotObserve`, and `OSError` where
    `watch.data` cannot be written."""
    program = shutil.which("prometheus")
    if program is None:
        raise CannotObserve(INSTALL)
    check_port("Prometheus", watch.port, "--port")
    watch.data.mkdir(parents=True, exist_ok=True)
    data = watch.data.resolve()
    watch = replace(watch, data=data, targets=watch.targets.resolve())
    async with AsyncExitStack() as stack:
        if watch.demo:
            watch = replace(watch, targets=data / "demo-targets", login=None)
            exporter = await stack.enter_async_context(_demo(watch.targets))
            say(f"a demo: simulated hosts and jobs at {exporter}")
        else:
            for path in remove_ended(watch.targets):
                say(f"{path} is of an exporter that is gone, and removed")
        if not any(watch.targets.glob("*.json")):
            say(f"nothing to scrape in {watch.targets} yet: a job writes it. --demo has simulated sources.")
        prometheus = await stack.enter_async_context(_prometheus(program, watch))
        say(f"Prometheus: {url_of(watch.port)} (alerts: {url_of(watch.port)}/alerts)")
        running = {"Prometheus": prometheus}
        found = grafana_program()
        if found is None:
            say(how_to_import(watch.port))
        else:
            running["Grafana"] = await stack.enter_async_context(_grafana(found, watch))
            say(f"Grafana: {url_of(watch.grafana_port)}/dashboards?tag=rollcage")
        say("Ctrl-C ends it.")
        await first_to_end(running, data)


def grafana_program() -> list[str] | None:
    """How Grafana's server is called here, or None. Releases before 9.4 have `grafana-server` alone."""
    if found := shutil.which("grafana"):
        return [found, "server"]
    return [found] if (found := shutil.which("grafana-server")) else None


def how_to_import(port: int) -> str:
    """For a Grafana that runs somewhere else."""
    return (
        "Grafana is not installed here (https://grafana.com/grafana/download; docs/observe.md has Compose and "
        f"Kubernetes).\nThe dashboards are {DASHBOARDS}/*.json. For a Grafana elsewhere:\n"
        f"  1. Connections, Data sources, Add, Prometheus: {url_of(port)}\n"
        "  2. Dashboards, New, Import: each of these files; or all at once:\n"
        f"     for file in {DASHBOARDS}/*.json; do\n"
        '       (printf \'{"overwrite": true, "dashboard": \'; cat "$file"; printf \'}\') |\n'
        "         curl --user admin --header 'Content-Type: application/json' --data-binary @- "
        "http://GRAFANA:3000/api/dashboards/db\n"
        "     done"
    )


@asynccontextmanager
async def _demo(targets: Path) -> AsyncIterator[str]:
    """An exporter of simulated sources, on any free port."""
    exporter = Exporter(exemplars=True)
    steps = ticking(exporter, hosts=3, jobs=2, policies=2, agents=2)
    next(steps)

    async def tick() -> None:
        while True:
            await asyncio.sleep(TICK_SEC)
            next(steps)

    served = serve(exporter, port=0)
    ticks = asyncio.create_task(tick())
    try:
        address = f"127.0.0.1:{served.port}"
        write_targets(targets / "demo.json", {"rollcage": [address]})
        yield f"http://{address}/metrics"
    finally:
        ticks.cancel()
        await asyncio.gather(ticks, return_exceptions=True)
        served.close()


@asynccontextmanager
async def _prometheus(program: str, watch: Watch) -> AsyncIterator[Process]:
    file = watch.data / "prometheus.yml"
    config = prometheus_config(str(watch.targets), str(RULES), watch.login)
    file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    command = [
        program,
        f"--config.file={file}",
        f"--storage.tsdb.path={watch.data / 'prometheus'}",
        f"--web.listen-address=127.0.0.1:{watch.port}",
        *PROMETHEUS_OPTIONS,
    ]
    async with server("Prometheus", command, port=watch.port, ready="/-/ready", data=watch.data) as process:
        yield process


@asynccontextmanager
async def _grafana(program: list[str], watch: Watch) -> AsyncIterator[Process]:
    check_port("Grafana", watch.grafana_port, "--grafana-port")
    home, provisioning = watch.data / "grafana", watch.data / "grafana" / "provisioning"
    files = {
        "datasources": grafana_data_sources(url_of(watch.port)),
        "dashboards": grafana_dashboards(str(DASHBOARDS)),
    }
    for kind, content in files.items():
        (provisioning / kind).mkdir(parents=True, exist_ok=True)
        (provisioning / kind / "rollcage.yaml").write_text(json.dumps(content, indent=2), encoding="utf-8")
    settings = {
        "GF_PATHS_DATA": str(home / "data"),
        "GF_PATHS_LOGS": str(home / "logs"),
        "GF_PATHS_PLUGINS": str(home / "plugins"),
        "GF_PATHS_PROVISIONING": str(provisioning),
        **grafana_settings(watch.grafana_port, str(DASHBOARDS)),
    }
    command = [*program, *(["--homepath", str(where)] if (where := _grafana_home(program[0])) else [])]
    async with server(
        "Grafana", command, port=watch.grafana_port, ready="/api/health", data=watch.data, settings=settings
    ) as process:
        yield process


def _grafana_home(program: str) -> Path | None:
    """Where Grafana has its defaults, which it looks for where it is started: beside its program in a release,
    elsewhere in a package."""
    told = os.environ.get("GF_PATHS_HOME")
    places = [Path(told)] if told else []
    places += [Path(program).resolve().parent.parent, Path("/usr/share/grafana")]
    return next((place for place in places if (place / "conf" / "defaults.ini").is_file()), None)
