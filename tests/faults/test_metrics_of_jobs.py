"""What Prometheus is told when jobs share a cluster, and when a job with a Ray of its own ends."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_ray import ray_cluster
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from rollcage.metrics.definitions import MOST, OTHER
from rollcage.rollout.arrow import read_attempts

pytestmark = [pytest.mark.docker, pytest.mark.ray, pytest.mark.timeout(900)]

ROLLCAGE = Path(sys.executable).with_name("rollcage")
FILES = {
    "task.toml": 'version = "1.0"\n',
    "instruction.md": "Make /app/done.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
    "solution/solve.sh": "#!/bin/sh\ntouch /app/done\n",
    "tests/test.sh": "#!/bin/sh\n[ -e /app/done ] && echo 1 >/logs/verifier/reward.txt\n",
}
SLOW = {"solution/solve.sh": "#!/bin/sh\nsleep 600\n"}

Series = dict[tuple[str, str], float]


class Job:
    """A job of its own process group."""

    def __init__(
        self, folder: Path, name: str, agents: int, *, port: int, address: str | None = None, **files: str
    ) -> None:
        self.folder, self.said = folder, folder / f"{name}.said"
        for place, text in {**FILES, **files}.items():
            path = folder / name / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        job = {
            "name": name,
            "tasks": [str(folder / name)],
            "agents": [{"name": "oracle", "label": f"{name}-{number}"} for number in range(agents)],
            "concurrency": 2,
            "sandbox": {"network": {"insecure_network": True}},
            "metrics": {
                "targets": str(folder / "targets"),
                "listen": f"127.0.0.1:{port}",
                "exemplars": True,
            },
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(job))
        arguments = [ROLLCAGE, "run", folder / f"{name}.yaml", "--output", folder / f"{name}-run"]
        with self.said.open("wb") as said:
            self.process = subprocess.Popen(
                [*arguments, *(["--address", address] if address else [])],
                stdout=said,
                stderr=said,
                start_new_session=True,
            )

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 200
        while not condition():
            assert time.monotonic() < deadline, f"not within 200 s: {what}\n{self.said.read_text()}"
            assert self.process.poll() is None, f"the job ended\n{self.said.read_text()}"
            time.sleep(0.1)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def start(name: str, agents: int = 1, **settings: Any) -> Job:
        made.append(Job(tmp_path, name, agents, **settings))
        return made[-1]

    yield start
    for one in made:
        one.kill()


@pytest.fixture
def cluster() -> Iterator[str]:
    with ray_cluster() as address:
        yield address


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def scraped(port: int, name: str, label: str) -> Series:
    """The series of a name, added up by one label."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found: Series = {}
    for family in families:
        for sample in family.samples:
            if sample.name == name:
                key = (name, sample.labels.get(label, ""))
                found[key] = found.get(key, 0.0) + sample.value
    return found


def exemplars(port: int) -> list[dict[str, str]]:
    """Labels of all of them."""
    asked = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(asked, timeout=30) as answer:
        families = list(openmetrics(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return [sample.exemplar.labels for sample in samples if sample.exemplar is not None]


def test_two_jobs_at_once_with_more_agents_than_there_may_be_are_counted_whole(
    job: Callable[..., Job], cluster: str, tmp_path: Path
) -> None:
    """CASES 34: a name too many is no reason to lose a count, nor to have one series more."""
    port = free_port()
    both = [job(name, agents, port=port, address=cluster) for name, agents in (("a", 12), ("b", 10))]
    for one in both:
        assert one.process.wait(600) == 0, one.said.read_text()
    rollouts = scraped(port, "rollcage_rollouts_total", "agent")
    assert sum(rollouts.values()) == 22
    assert len(rollouts) == MOST["agent"]
    assert rollouts["rollcage_rollouts_total", OTHER] == 22 - (MOST["agent"] - 1)
    named = exemplars(port)
    assert len(named) == MOST["agent"]
    ended = {
        identity
        for one in "ab"
        for identity in read_attempts(tmp_path / f"{one}-run", ["attempt_id"])["attempt_id"].to_pylist()
    }
    assert {one["attempt_id"] for one in named} <= ended
    said = "".join(one.said.read_text() for one in both)
    assert f"more than {MOST['agent']} values of the label 'agent' in all" in said
    assert scraped(port, "rollcage_job_rollouts", "job_id") == {}
    assert scraped(port, "rollcage_host_up", "host") == {}
    assert scraped(port, "rollcage_attempts_dispatched_total", "") == {
        ("rollcage_attempts_dispatched_total", ""): 22.0
    }


def test_a_job_with_a_ray_of_its_own_leaves_no_target_and_removes_that_of_one_that_was_killed(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    targets = tmp_path / "targets"
    killed = job("killed", port=free_port(), **SLOW)
    killed.until(lambda: list(targets.glob("*.json")), "targets")
    [left] = targets.glob("*.json")
    killed.kill()
    assert left.exists()
    port = free_port()
    ended = job("ended", port=port, **SLOW)
    ended.until(lambda: [path.stem for path in targets.glob("*.json")] == [str(port)], "its targets alone")
    ended.until(lambda: scraped(port, "rollcage_attempts_in_flight", "").popitem()[1] == 1, "an attempt")
    os.killpg(ended.process.pid, signal.SIGTERM)  # Ray and the exporter, too
    assert ended.process.wait(200) == 130, ended.said.read_text()
    assert list(targets.glob("*.json")) == []
    assert "Traceback" not in ended.said.read_text()
