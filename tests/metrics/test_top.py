"""`rollcage top`: the exporter's numbers in a terminal."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rollcage.cluster.cli import app
from rollcage.metrics.exporter import Exporter
from rollcage.metrics.serving import serve
from rollcage.metrics.simulated import ticking
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
    ("options", "said"), [([], "401"), (["--url", "http://127.0.0.1:1/metrics"], "refused")]
)
def test_an_exporter_that_does_not_answer_is_named_with_a_remedy(
    url: str, options: list[str], said: str
) -> None:
    found = CliRunner().invoke(app, ["top", "--once", "--url", url, *options])
    assert found.exit_code == 2
    assert said in found.stderr
    assert "--url names another" in found.stderr.replace("\n", " ")


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
