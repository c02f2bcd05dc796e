"""`rollcage run` on real Ray and real Docker: what a job gives, and what it leaves behind however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from local_ray import ray_cluster

from rollcage.rollout.arrow import read_attempts, read_rollouts
from rollcage.rollout.sandbox.engine import Engine

pytestmark = [pytest.mark.ray, pytest.mark.docker, pytest.mark.timeout(400)]

ROLLCAGE = Path(sys.executable).parent / "rollcage"
DOCKERFILE = "FROM debian:bookworm-slim\n"
SETTINGS = '[environment]\nmemory_mb = 64\nnetwork_mode = "no-network"\n'


class Job:
    """A `rollcage run` in a process group of its own, with a directory of its own for temporary files."""

    def __init__(self, engine: Engine, run: Path, scratch: str, *arguments: str | Path) -> None:
        self.engine = engine
        self.run = run
        self.scratch = scratch
        self.errors = run.parent / "stderr.txt"
        self.process = subprocess.Popen(
            [ROLLCAGE, "run", *arguments, "--output", run, "--json"],
            stdout=subprocess.PIPE,
            stderr=self.errors.open("wb"),
            env={**os.environ, "TMPDIR": scratch},
            start_new_session=True,
        )

    def until(self, condition: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + 200
        while not condition():
            assert self.process.poll() is None, self.errors.read_text()
            assert time.monotonic() < deadline, f"not within 200 s: {what}\n{self.errors.read_text()}"
            time.sleep(0.1)

    def ray_processes(self) -> list[str]:
        """Their names."""
        names = []
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                names.append(process.name())
        return names

    def kill_ray(self) -> None:
        """All of the Ray that the job has started, its actors too."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def end(self, *, reports: bool = True) -> tuple[int, dict[str, Any]]:
        """Wait for the end: status and report. Nothing may be left behind."""
        out, _ = self.process.communicate(timeout=120)
        said = self.errors.read_text()
        assert "Traceback" not in said, said
        assert self.containers() == [], said
        hosts = {row["host"] for row in read_attempts(self.run, ["host"]).to_pylist()}
        networks = self.engine.api.networks(filters={"label": "rollcage.host"})
        assert not [n for n in networks if n["Labels"]["rollcage.host"] in hosts]
        assert os.listdir(self.scratch) == [], "Ray's files"
        assert self.processes() == []
        return self.process.returncode, json.loads(out) if reports else {}

    def containers(self, state: str | None = None) -> list[str]:
        """Ids of the job's containers."""
        try:
            job = json.loads((self.run / "job.json").read_text())["job"]
        except FileNotFoundError:
            return []
        filters = {"label": f"rollcage.job={job}"} | ({"status": state} if state else {})
        return [container["Id"] for container in self.engine.api.containers(all=True, filters=filters)]

    def processes(self) -> list[psutil.Process]:
        """What lives of the job's processes, Ray's too: all of them have its directory in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == self.scratch and process.status() != "zombie":
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def host_actor(self) -> psutil.Process:
        [actor] = [p for p in self.processes() if any("ray::HostActor" in word for word in p.cmdline())]
        return actor

    @property
    def rollouts(self) -> Counter[tuple[str, str | None]]:
        rows = read_rollouts(self.run, ["outcome", "error_class"]).to_pylist()
        return Counter((row["outcome"], row["error_class"]) for row in rows)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture
def start(engine: Engine, tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start jobs; what is left of them when a test fails is removed."""
    jobs = []
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as scratch:  # short: it holds Ray's sockets

        def run(*arguments: str | Path) -> Job:
            jobs.append(Job(engine, tmp_path / "run", scratch, *arguments))
            return jobs[-1]

        yield run
        for job in jobs:
            for process in job.processes():
                process.kill()
            job.process.wait(30)
            for container in job.containers():
                engine.api.remove_container(container, force=True, v=True)


def test_a_job_with_bad_tasks_among_good_ones(start: Callable[..., Job], write_task: Any) -> None:
    """CASES 9 and 26, from the command line to the files."""
    for name in ("a", "b", "c"):
        write_task(f"tasks/{name}", toml=SETTINGS)
    write_task("tasks/unbuildable", toml=SETTINGS, dockerfile=f"{DOCKERFILE}RUN echo this is why; exit 7\n")
    tasks = write_task("tasks/torn", toml="[environment\n").parent
    job = start(
        "--tasks", tasks, "--agent", "oracle", "--agent", "nop", "--samples", "2", "--concurrency", "4"
    )
    status, report = job.end()
    assert status == 3
    assert (report["rollouts"], report["attempts"]) == (20, 12)
    assert report["by_agent"]["oracle"]["passed"] == report["by_agent"]["nop"]["failed"] == 6
    assert report["by_error_class"] == {"task_malformed": 4, "image_build": 4}
    assert (report["passed"], report["failed"], report["invalid"], report["cancelled"]) == (6, 6, 8, 0)
    assert {task["task"] for task in report["quarantined"]} == {"torn", "unbuildable"}
    assert report["finished"]
    said = job.errors.read_text()
    assert "quarantined torn: task_malformed:" in said
    assert said.count("quarantined unbuildable: image_build:") == 1
    rows = read_rollouts(job.run, ["task", "outcome", "evidence"]).to_pylist()
    built = [row["evidence"] for row in rows if row["task"] == "unbuildable"]
    assert all(evidence["exit_code"] == 7 for evidence in built)
    assert all("this is why" in evidence["log_tail"] for evidence in built)
    [shown, *_] = report["evidence"]["image_build"]
    assert "this is why" in shown["log_tail"]


def test_ctrl_c_once_what_runs_ends_and_is_written(start: Callable[..., Job], write_task: Any) -> None:
    held = "#!/bin/sh\nuntil [ -e /go ]; do sleep 0.1; done\ntouch /app/hello\n"
    task = write_task("tasks/slow", toml=SETTINGS, solve=held)
    job = start("--tasks", task, "--agent", "oracle", "--samples", "6", "--concurrency", "2")
    job.until(lambda: len(job.containers("running")) == 2, "two sandboxes")
    os.killpg(job.process.pid, signal.SIGINT)  # as a terminal does: to Ray's processes, too
    job.until(lambda: "interrupted: no more rollouts" in job.errors.read_text(), "the signal")
    for container in job.containers("running"):
        job.engine.api.exec_start(job.engine.api.exec_create(container, ["touch", "/go"])["Id"])
    status, report = job.end()
    assert status == 130
    assert job.rollouts == {("passed", None): 2, ("cancelled", "cancelled"): 4}
    assert (report["attempts"], report["finished"]) == (2, True)
    assert job.errors.read_text().count("interrupted") == 1


def test_ctrl_c_twice_all_is_cancelled_at_once(start: Callable[..., Job], write_task: Any) -> None:
    task = write_task("tasks/slow", toml=SETTINGS, solve="#!/bin/sh\nsleep 600\n")
    job = start("--tasks", task, "--agent", "oracle", "--samples", "4", "--concurrency", "2")
    job.until(lambda: len(job.containers("running")) == 2, "two sandboxes")
    os.killpg(job.process.pid, signal.SIGINT)
    job.until(lambda: "interrupted: no more rollouts" in job.errors.read_text(), "the first")
    os.killpg(job.process.pid, signal.SIGINT)
    status, report = job.end()
    assert status == 130
    assert job.rollouts == {("cancelled", "cancelled"): 4}
    assert report["finished"]


@pytest.mark.parametrize(("number", "times"), [(signal.SIGINT, 1), (signal.SIGINT, 2), (signal.SIGTERM, 1)])
def test_a_signal_while_ray_starts_is_answered_at_once_and_leaves_nothing(
    start: Callable[..., Job], write_task: Any, number: signal.Signals, times: int
) -> None:
    task = write_task("tasks/one", toml=SETTINGS)
    job = start("--tasks", task, "--agent", "oracle")
    job.until(lambda: any("rollcage-ray-" in name for name in os.listdir(job.scratch)), "Ray's files")
    for sent in range(times):
        os.kill(job.process.pid, number)
        deadline = time.monotonic() + 2
        while len(re.findall("interrupted|terminated", job.errors.read_text())) <= sent:
            assert time.monotonic() < deadline, job.errors.read_text()
            time.sleep(0.02)
    out, _ = job.process.communicate(timeout=150)
    said = job.errors.read_text()
    assert (job.process.returncode, out) == (130, b""), said
    assert "Traceback" not in said
    assert (os.listdir(job.scratch), job.processes(), job.run.exists()) == ([], [], False), said


def test_terminated_with_all_of_ray_while_that_starts_it_does_not_wait_for_it(
    start: Callable[..., Job], write_task: Any
) -> None:
    job = start("--tasks", write_task("tasks/one", toml=SETTINGS), "--agent", "oracle")
    job.until(lambda: any("gcs_server" in name for name in job.ray_processes()), "Ray's first process")
    os.killpg(job.process.pid, signal.SIGTERM)
    began = time.monotonic()
    out, _ = job.process.communicate(timeout=150)
    said = job.errors.read_text()
    assert (job.process.returncode, out) == (130, b""), said
    assert time.monotonic() - began < 55, "Ray's own patience with what is gone"
    assert "Traceback" not in said
    assert (os.listdir(job.scratch), job.run.exists()) == ([], False), said


@pytest.mark.parametrize("to", ["the job", "its process group", "all of its processes"])
def test_terminated_all_is_cancelled_at_once(start: Callable[..., Job], write_task: Any, to: str) -> None:
    """`kill`; and `timeout`, systemd or SLURM, which end Ray's processes at the same time, at the worst all of them
    before the job has begun to end."""
    task = write_task("tasks/slow", toml=SETTINGS, solve="#!/bin/sh\nsleep 600\n")
    job = start("--tasks", task, "--agent", "oracle", "--samples", "4", "--concurrency", "2")
    job.until(lambda: len(job.containers("running")) == 2, "two sandboxes")
    if to == "its process group":
        os.killpg(job.process.pid, signal.SIGTERM)
    else:
        if to == "all of its processes":
            job.kill_ray()
        job.process.terminate()
    began = time.monotonic()
    status, report = job.end()
    assert status == 130
    assert time.monotonic() - began < 60, "Ray's own patience with what is gone"
    assert job.rollouts == {("cancelled", "cancelled"): 4}
    assert report["finished"]


def test_a_job_whose_own_ray_is_killed_says_so_and_leaves_nothing(
    start: Callable[..., Job], write_task: Any
) -> None:
    task = write_task("tasks/slow", toml=SETTINGS, solve="#!/bin/sh\nsleep 600\n")
    job = start("--tasks", task, "--agent", "oracle", "--samples", "2", "--concurrency", "2")
    job.until(lambda: len(job.containers("running")) == 2, "two sandboxes")
    job.kill_ray()
    assert job.end(reports=False)[0] == 2
    assert "Ray has ended on this machine under the job" in job.errors.read_text()
    assert job.rollouts == {("cancelled", "cancelled"): 2}


def test_a_killed_host_is_replaced_and_cleaned_up_after(start: Callable[..., Job], write_task: Any) -> None:
    """CASES 27, the host's actor."""
    task = write_task("tasks/slow", toml=SETTINGS, solve="#!/bin/sh\nsleep 4\ntouch /app/hello\n")
    job = start("--tasks", task, "--agent", "oracle", "--samples", "6", "--concurrency", "3")
    job.until(lambda: len(job.containers("running")) == 3, "three sandboxes")
    job.host_actor().kill()
    status, report = job.end()
    assert status == 0, job.errors.read_text()
    assert job.rollouts == {("passed", None): 6}
    attempts = read_attempts(job.run, ["error_class", "host", "evidence"]).to_pylist()
    lost = [row for row in attempts if row["error_class"] == "host_lost"]
    assert len(lost) == 3
    assert report["retries"] == 3
    assert len({row["host"] for row in attempts}) == 2
    assert len({row["host"] for row in lost}) == 1


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes on this machine."""
    with ray_cluster(nodes=2, num_cpus=1) as address:
        yield address


def test_a_job_joins_a_cluster_and_uses_each_of_its_nodes(
    start: Callable[..., Job], write_task: Any, two_nodes: str
) -> None:
    for name in ("a", "b", "c", "d"):
        write_task(f"tasks/{name}", toml=SETTINGS, solve="#!/bin/sh\nsleep 1\ntouch /app/hello\n")
    tasks = write_task("tasks/e", toml=SETTINGS).parent
    job = start(
        "--tasks", tasks, "--agent", "oracle", "--samples", "2", "--concurrency", "4", "--address", two_nodes
    )
    status, report = job.end()
    assert (status, report["passed"], report["invalid"]) == (0, 10, 0)
    assert len({row["host"] for row in read_attempts(job.run, ["host"]).to_pylist()}) == 2
    actors = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert not [command for command in actors if any("HostActor" in word for word in command)]
