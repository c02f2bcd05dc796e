"""What Prometheus shows of a job under faults is what its ledger holds: a real Prometheus, a real cluster, real kills.

Each of the driver, the host and the exporter is killed `ROLLCAGE_KILLS` times (1 where it is not set) while the job
runs; it is scraped all the time meanwhile.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest
import yaml
from local_ray import ray_cluster
from prometheus_client.parser import text_string_to_metric_families

from rollcage.cluster.driver import job_counts
from rollcage.cluster.earlier import count_earlier
from rollcage.cluster.plan import AgentPlan, JobPlan
from rollcage.metrics.dashboards.build import BOARDS, path_of
from rollcage.metrics.definitions import BY_NAME, FAMILIES
from rollcage.rollout.arrow import Location, read_attempts, read_rollouts

sys.path.insert(0, str(Path(__file__).parents[1] / "metrics"))

from real_prometheus import RULES, Prometheus, prometheus

pytestmark = [pytest.mark.docker, pytest.mark.ray, pytest.mark.timeout(1800)]

KILLS = int(os.environ.get("ROLLCAGE_KILLS", "1"))
ROLLCAGE = Path(sys.executable).with_name("rollcage")
IMAGE = "FROM debian:bookworm-slim\nWORKDIR /app\n"
PASSES = (
    "#!/bin/sh\n[ -e /app/done ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt\n"
)
WORKS = "#!/bin/sh\nsleep 1\ntouch /app/done\n"

TASKS = {
    "good": {},
    "wrong": {"solution/solve.sh": "#!/bin/sh\ntrue\n"},
    "silent": {"tests/test.sh": "#!/bin/sh\ntrue\n"},
    "unbuildable": {"environment/Dockerfile": IMAGE + "RUN exit 7\n"},
    "refused": {},
}
"""By name, the files in which a task differs from one that the oracle passes."""

ANSWERS = {
    "tokens": True,
    "tasks": {"refused": [{"error": "policy_refused", "message": "no"}]},
    "default": ["```bash\nls\n```"],
}
"""The bash agent never submits, so that it ends of its limit of turns; the server refuses one task."""

CLASSES = {"turn_limit", "reward_missing", "image_build", "policy_refused", "host_lost", "container_lost"}
"""What is injected: two faults of tasks, two of the policy's side, two of the infrastructure."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray cluster that outlives the job's driver."""
    with ray_cluster() as address:
        yield address


class Scrapes:
    """Looks at the exporter over and over: the counting identity holds, and no counter falls."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}/metrics"
        self.number = 0
        self.wrong: list[str] = []
        self._over = Event()
        self._before: dict[Any, float] = {}
        self._thread = Thread(target=self._look, daemon=True)
        self._thread.start()

    def values(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        with urllib.request.urlopen(self.url, timeout=30) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }

    def _look(self) -> None:
        while not self._over.wait(0.02):
            try:
                now = self.values()
            except (OSError, HTTPException):
                continue  # it was killed a moment ago
            self.number += 1
            begun, ended, left, runs = (
                now[f"rollcage_attempts_{name}", ()]
                for name in ("dispatched_total", "ended_total", "abandoned_total", "in_flight")
            )
            if begun != ended + left + runs:
                self.wrong.append(f"{begun} dispatched, {ended} ended, {left} abandoned, {runs} in flight")
            for key, value in now.items():
                own = key[0].startswith("rollcage_exporter")  # these are its process's
                if key[0].endswith("_total") and not own and value < self._before.get(key, 0.0):
                    self.wrong.append(f"{key} fell from {self._before[key]} to {value}")
            self._before |= now

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def free_port() -> int:
    """Not 9410, which a job of another test takes as soon as the exporter here is killed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Job:
    """One job, whose driver is killed and goes on."""

    def __init__(self, folder: Path, address: str) -> None:
        self.run = folder / "run"
        self.said = folder / "said"
        self.address = address
        self.file = self._written(folder)
        self.process = self._start("run", self.file, "--output", self.run)

    def _written(self, folder: Path) -> Path:
        for name, other in TASKS.items():
            files = {
                "task.toml": 'version = "1.0"\n',
                "instruction.md": "Make /app/done.\n",
                "environment/Dockerfile": IMAGE,
                "solution/solve.sh": WORKS,
                "tests/test.sh": PASSES,
            } | other
            for place, text in files.items():
                path = folder / "tasks" / name / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        (folder / "answers.yaml").write_text(yaml.safe_dump(ANSWERS))
        job = {
            "name": "metrics",
            "tasks": [str(folder / "tasks")],
            "agents": [
                {"name": "oracle", "samples": 8 + 8 * KILLS},
                {"name": "bash", "samples": 2, "options": {"max_turns": 2}, "policy": "p"},
            ],
            "policies": {"p": {"kind": "scripted", "file": str(folder / "answers.yaml")}},
            "concurrency": 4,
            "retries": {"host_lost": 50, "container_lost": 50},
            "sandbox": {"network": {"insecure_network": True}},
            "metrics": {"targets": str(folder / "targets"), "listen": f"127.0.0.1:{free_port()}"},
        }
        file = folder / "job.yaml"
        file.write_text(yaml.safe_dump(job))
        return file

    def _start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        with self.said.open("ab") as said:
            return subprocess.Popen(
                [ROLLCAGE, *arguments, "--address", self.address, "--json"], stdout=said, stderr=said
            )

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + 200
        while not (found := condition()):
            assert time.monotonic() < deadline, f"not within 200 s: {what}\n{self.said.read_text()}"
            assert self.process.poll() is None, f"the job ended\n{self.said.read_text()}"
            time.sleep(0.1)
        return found

    def ended(self) -> int:
        """Attempts in the ledger."""
        try:
            return len(read_attempts(self.run, ["attempt_id"]))
        except (OSError, ValueError):
            return 0

    def until_more_have_ended(self, than: int) -> None:
        self.until(lambda: self.ended() > than, f"more than {than} attempts")

    def kill_driver(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process = self._start("resume", self.run)

    def kill_actor(self, name: str) -> None:
        def look() -> list[psutil.Process]:
            found = []
            for process in psutil.process_iter():
                try:
                    if f"ray::{name}" in " ".join(process.cmdline()) and self.is_ours(process):
                        found.append(process)
                except psutil.Error:
                    continue
            return found

        for process in self.until(look, name):
            process.kill()

    def is_ours(self, process: psutil.Process) -> bool:
        """Of this cluster: other tests have theirs."""
        return os.getpid() in [parent.pid for parent in process.parents()]

    def kill_container(self) -> None:
        """Of a sandbox in which an agent is at work."""

        def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=False)

        def killed() -> bool:
            running = docker("ps", "--quiet", "--filter", f"label=rollcage.job={self.job}").stdout.split()
            at_work = (one for one in running if "sleep 1" in docker("top", one).stdout)
            return any(docker("kill", one).returncode == 0 for one in at_work)

        self.until(killed, "a sandbox with an agent at work")

    @property
    def job(self) -> str:
        return str(json.loads((self.run / "job.json").read_text())["job"])


def test_what_prometheus_shows_under_faults_is_what_the_ledger_holds(cluster: str, tmp_path: Path) -> None:
    """CASES 34."""
    job, dice = Job(tmp_path, cluster), random.Random(0)
    targets = job.until(lambda: list((tmp_path / "targets").glob("*.json")), "the file for Prometheus")[0]
    address = f"127.0.0.1:{targets.stem}"
    with prometheus(tmp_path / "prometheus", address) as there:
        scrapes = Scrapes(address)
        try:
            before = 0
            for round_ in range(KILLS):
                for fault in (
                    job.kill_container,
                    lambda: job.kill_actor("HostActor"),
                    lambda: job.kill_actor("ExporterActor"),
                    job.kill_driver,
                ):
                    job.until_more_have_ended(before)
                    before = job.ended()
                    time.sleep(dice.random())
                    fault()
                if round_ == 0:  # later some of it is too long ago: ratios of nothing have no value
                    assert_every_panel_and_rule_has_data(job, there)
            while scrapes.number < 1000 and job.process.poll() is None:
                time.sleep(0.1)
            assert job.process.wait(600) == 3, job.said.read_text()  # some rollouts are invalid
            deadline = time.monotonic() + 200
            while scrapes.number < 1000:
                assert time.monotonic() < deadline, (
                    f"{scrapes.number} scrapes, and the exporter answers no more"
                )
                time.sleep(0.1)
        finally:
            scrapes.end()
            job.process.kill()
        assert scrapes.wrong == []
        assert_counters_are_the_ledgers(job, scrapes)
        assert_each_fault_has_its_own_series(job, there)
    print(f"{scrapes.number} scrapes, {job.ended()} attempts, {KILLS} kills of each")


def assert_counters_are_the_ledgers(job: Job, scrapes: Scrapes) -> None:
    """To the unit: whatever was killed, nothing is lost and nothing counted twice."""
    held = job_counts(
        JobPlan(job.job, (AgentPlan("oracle", "", 1), AgentPlan("bash", "", 1, policy="p")), {})
    )
    count_earlier(Location(job.run), held, ())
    expected, found = held.snapshot().values, scrapes.values()
    for family in FAMILIES:
        if family.ledger and family.name != "attempts_dispatched":
            for labels, value in expected[family.name].items():
                key = tuple(sorted(zip(family.label_names, labels, strict=True)))
                assert found[family.full_name, key] == value, (family.full_name, labels)
    attempts = read_attempts(job.run, ["outcome", "error_class"]).to_pylist()
    by_class = Counter(row["error_class"] or "none" for row in attempts)
    shown: Counter[str] = Counter()
    for (name, labels), value in found.items():
        if name == "rollcage_attempts_total" and value:
            shown[dict(labels)["error_class"]] += int(value)
    assert shown == by_class
    rollouts = read_rollouts(job.run, ["outcome"])["outcome"].to_pylist()
    assert sum(found[key] for key in found if key[0] == "rollcage_rollouts_total") == len(rollouts)
    in_flight = found["rollcage_attempts_in_flight", ()]
    abandoned = found["rollcage_attempts_abandoned_total", ()]
    assert found["rollcage_attempts_dispatched_total", ()] == len(attempts) + abandoned + in_flight
    assert in_flight == 0
    gone = [key for key in found if key[0].startswith(("rollcage_job_", "rollcage_host_up"))]
    assert gone == [], "gauges of what has ended"


def assert_each_fault_has_its_own_series(job: Job, there: Prometheus) -> None:
    """As Prometheus has them: after its next scrape."""
    time.sleep(2)
    shown = {
        one["metric"]["error_class"]: float(one["value"][1])
        for one in there.query('sum by (error_class) (rollcage_attempts_total{error_class!="none"}) > 0')
    }
    classes = read_attempts(job.run, ["error_class"])["error_class"].to_pylist()
    assert shown == Counter(filter(None, classes))
    assert shown.keys() | {"image_build"} == CLASSES
    rollouts = there.query('sum by (error_class) (rollcage_rollouts_total{outcome="invalid"}) > 0')
    assert {one["metric"]["error_class"] for one in rollouts} >= {
        "image_build",
        "reward_missing",
        "policy_refused",
    }
    assert there.query('sum(rollcage_image_builds_total{result="task_fault"})')[0]["value"][1] != "0"
    [ratio] = there.query("cluster:rollcage_infra_errors:ratio_rate5m")
    assert 0 < float(ratio["value"][1]) < 1
    [lost] = there.query("max_over_time(cluster:rollcage_infra_errors:ratio_rate5m[10m])")
    assert math.isfinite(float(lost["value"][1]))


def rules() -> list[dict[str, str]]:
    return [
        rule
        for file in ("recording.yaml", "alerts.yaml")
        for group in yaml.safe_load((RULES / file).read_text("utf-8"))["groups"]
        for rule in group["rules"]
    ]


def assert_every_panel_and_rule_has_data(job: Job, there: Prometheus) -> None:
    """While the job runs, for its gauges go with it: windows and recorded series need some scrapes."""
    job.until(lambda: not without_data(there), "data for all queries")
    for rule in rules():
        there.query(rule["expr"])  # an alert's that is wrong raises; without its fault it has no data


def without_data(there: Prometheus) -> set[str]:
    """Of the panels' and recording rules' queries those that have no data now. vLLM's own are left out."""
    queries = {rule["expr"] for rule in rules() if "record" in rule}
    for board in BOARDS:
        for panel in json.loads(path_of(board).read_text("utf-8"))["panels"]:
            queries |= {target["expr"] for target in panel.get("targets", ())}

    def asked(query: str) -> str:
        return re.sub(r"\$(cluster|host|policy)", ".*", query.replace("$__rate_interval", "5m"))

    return {query for query in queries if "vllm:" not in query and not there.query(asked(query))}


def test_no_family_of_the_ledger_is_left_out_of_the_comparison() -> None:
    assert {name for name, family in BY_NAME.items() if family.ledger} >= {
        "attempts",
        "rollouts",
        "retries",
        "groups",
    }
