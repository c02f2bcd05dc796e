"""`rollcage top`: the exporter's numbers in a terminal."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rollcage.cluster.cli import app
from rollcage.cluster.errors import InputError
from rollcage.metrics.exporter import Exporter
from rollcage.metrics.serving import serve
from rollcage.metrics.simulated import ticking
from rollcage.metrics.targets import write_targets
from rollcage.metrics.top import Change, Scrape, read, render


@pytest.fixture
def url(simulated: Exporter) -> Iterator[str]:
    server = serve(simulated, port=0, user="u", password="p")
    yield f"http://127.0.0.1:{server.port}/metrics"
    server.close()


def test_it_shows_what_the_exporter_has_counted(url: str, simulated: Exporter) -> None:
    options = ["--once", "--interval", "0.5", "--url", url, "--user", "u", "--password", "p"]
    command = [Path(sys.executable).parent / "rollcage", "top", *options]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in ("job-0", "job-1", "host-0", "host-2", "policy-1", "agent-0", "network_pool", "3/3 hosts up"):
        assert name in output
    passed = read(url, "u", "p").sum("rollouts_total", outcome="passed")
    assert f"{passed:.0f}" in next(line for line in output.splitlines() if "agent-0" in line)


@pytest.mark.parametrize(
    ("options", "said", "remedy"),
    [
        ([], "401", "--user and --password are those of its job"),
        (["--url", "http://127.0.0.1:1/metrics"], "refused", "--url names another"),
        (["--url", "https://127.0.0.1:{port}/metrics"], "SSL", "it speaks no TLS"),
    ],
)
def test_an_exporter_that_does_not_answer_is_named_with_a_remedy(
    url: str, options: list[str], said: str, remedy: str
) -> None:
    port = url.split(":")[2].split("/")[0]
    options = [option.replace("{port}", port) for option in options]
    found = CliRunner().invoke(app, ["top", "--once", "--url", url, *options])
    assert found.exit_code == 2
    assert said in found.stderr
    assert remedy in " ".join(found.stderr.split())


def test_an_address_without_its_scheme_is_bad_input() -> None:
    found = CliRunner().invoke(app, ["top", "--once", "--url", "127.0.0.1:9410"])
    assert isinstance(found.exception, InputError)
    assert "write http://HOST:PORT/metrics" in str(found.exception)


@pytest.mark.parametrize("place", ["rollcage/targets", "own"])
def test_the_exporter_that_a_job_of_this_user_started_is_found(
    simulated: Exporter, tmp_path: Path, place: str
) -> None:
    server = serve(simulated, port=0)
    write_targets(tmp_path / place / f"{server.port}.json", {"rollcage": [f"127.0.0.1:{server.port}"]})
    told = ["--targets", tmp_path / place] if place == "own" else []
    found = subprocess.run(
        [Path(sys.executable).parent / "rollcage", "top", "--interval", "0.5", *told],  # no terminal: once
        env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    server.close()
    assert (found.returncode, found.stderr) == (0, "")
    assert "job-0" in found.stdout


def test_a_directory_without_exporters_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no exporter has a file there"):
        CliRunner().invoke(app, ["top", "--targets", str(tmp_path)], catch_exceptions=False)


def test_a_job_whose_driver_is_not_heard_stands_out() -> None:
    texts = [
        f'rollcage_job_rollouts{{job_id="j"}} 9\nrollcage_job_silent_seconds{{job_id="j"}} {s}\n'
        for s in (3, 78)
    ]
    for text, colour in zip(texts, ("3 s ago", "\x1b[31m78 s ago"), strict=True):
        console = Console(width=100, force_terminal=True, color_system="standard", file=io.StringIO())
        console.print(render(Change(Scrape(text, 0), Scrape(text, 1))))
        assert colour in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_exporter_without_jobs_and_hosts_can_be_shown() -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(Exporter())
    scrape = Scrape(generate_latest(registry).decode(), 0)
    console = Console(width=80, record=True)
    console.print(render(Change(scrape, scrape)))
    assert "0/0 hosts up" in console.export_text()


def test_a_rate_is_what_was_added_a_second_and_of_a_counter_that_fell_what_it_has() -> None:
    texts = ["rollcage_commands_total 10\n", "rollcage_commands_total 16\n", "rollcage_commands_total 4\n"]
    first, second, third = (Scrape(text, 2.0 * number) for number, text in enumerate(texts))
    assert Change(first, second).rate("commands_total") == 3
    assert Change(second, third).rate("commands_total") == 2


def test_sources_that_go_on_show_rates() -> None:
    exporter = Exporter()
    steps = ticking(exporter, hosts=1)
    server = serve(exporter, port=0)
    try:
        next(steps)
        before = read(f"http://127.0.0.1:{server.port}/metrics")
        next(steps)
        now = read(f"http://127.0.0.1:{server.port}/metrics")
    finally:
        server.close()
    assert Change(before, now).rate("rollouts_total") > 0
