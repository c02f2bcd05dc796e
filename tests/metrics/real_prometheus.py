"""A real Prometheus for tests: its own directory, any free port of loopback, a scrape each second."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollcage.metrics.provisioning import PROMETHEUS_OPTIONS

RULES = Path(__file__).parents[2] / "metrics" / "rules"
WAIT_SEC = 120.0
"""As long as a loaded machine may take to do what takes seconds."""


class Prometheus:
    """The HTTP API at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The result of an instant query. Raises `HTTPError` for one that cannot be evaluated."""
        return self._get("query", query=expression)["result"]  # type: ignore[no-any-return]

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """The result of a query as soon as it has numbers in it. Raises `AssertionError` after `WAIT_SEC`."""
        until = time.monotonic() + WAIT_SEC
        while time.monotonic() < until:
            found = self.query(expression)
            if any(one["value"][1] not in ("NaN", "+Inf", "-Inf") for one in found):
                return found
            time.sleep(0.3)
        raise AssertionError(f"no data for {expression}: {self.query(expression)}")

    def exemplars(self, expression: str) -> list[dict[str, Any]]:
        """Those of the last minute, of each series that the expression looks at: `seriesLabels` and `exemplars`."""
        now = time.time()
        return self._get("query_exemplars", query=expression, start=f"{now - 60}", end=f"{now}")  # type: ignore[no-any-return]

    def _get(self, path: str, **parameters: str) -> Any:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(address, timeout=60) as answer:
            return json.loads(answer.read())["data"]


@contextmanager
def prometheus(directory: Path, target: str, **others: str) -> Iterator[Prometheus]:
    """One that scrapes `target` (host:port) as the job rollcage and `others` as theirs, and has Rollcage's rules, each
    second."""
    jobs = {"rollcage": target, **others}.items()
    scrapes = [{"job_name": job, "static_configs": [{"targets": [address]}]} for job, address in jobs]
    with prometheus_with(directory, scrapes) as started:
        yield started


@contextmanager
def prometheus_with(directory: Path, scrapes: list[dict[str, Any]]) -> Iterator[Prometheus]:
    """One that has these `scrape_configs`, and Rollcage's rules."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in ("recording.yaml", "alerts.yaml"):
        shutil.copy(RULES / file, directory)
    recording = (directory / "recording.yaml").read_text("utf-8").replace("interval: 15s", "interval: 1s")
    (directory / "recording.yaml").write_text(recording)
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["recording.yaml", "alerts.yaml"],
        "scrape_configs": scrapes,
    }
    (directory / "prometheus.yml").write_text(json.dumps(configuration))
    log = directory / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            "exec prometheus --config.file=prometheus.yml --storage.tsdb.path=data --web.listen-address=127.0.0.1:0 "
            + " ".join(PROMETHEUS_OPTIONS),
            shell=True,
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Prometheus(f"http://127.0.0.1:{_port(process, log)}")
    finally:
        process.terminate()
        process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    until = time.monotonic() + WAIT_SEC
    while time.monotonic() < until:
        text = log.read_text("utf-8")
        ports = re.findall(r"address=127\.0\.0\.1:([1-9]\d*)", text)
        if ports and "Server is ready to receive web requests" in text:
            return int(ports[0])
        assert process.poll() is None, text
        time.sleep(0.1)
    raise AssertionError(log.read_text("utf-8"))
