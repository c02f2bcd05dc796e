"""`rollcage try`: one rollout in the foreground, on the real engine, for people who write tasks."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollcage.cluster.foreground import render
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.trajectory import Attempt

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120)]

ROLLCAGE = Path(sys.executable).parent / "rollcage"
SETTINGS = '[environment]\nmemory_mb = 64\nnetwork_mode = "no-network"\n'


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


def rollcage(*arguments: str | Path, cwd: Path | None = None) -> Any:
    done = subprocess.run(
        [ROLLCAGE, *arguments], capture_output=True, text=True, timeout=100, cwd=cwd, check=False
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done


def containers(engine: Engine, **labels: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = engine.api.containers(
        all=True, filters={"label": [f"rollcage.{key}={value}" for key, value in labels.items()]}
    )
    return found


def test_what_happens_is_streamed_and_the_result_is_shown(write_task: Any) -> None:
    done = rollcage("try", write_task("tasks/one", toml=SETTINGS))
    assert done.returncode == 0
    assert done.stdout.startswith("passed\nreward 1 from reward.txt")
    assert [line for line in done.stderr.splitlines() if line in ("agent oracle", "verifier", "reward 1")]


def test_the_record_as_json(write_task: Any, engine: Engine) -> None:
    done = rollcage(
        "try", write_task("tasks/one", toml=SETTINGS), "--agent", "nop", "--sample", "3", "--json"
    )
    record = json.loads(done.stdout)
    assert done.returncode == 0
    assert (record["outcome"], record["sample"], record["agent"]) == ("failed", 3, "nop")
    assert record["reward"]["value"] == 0.0
    assert containers(engine, job=record["job"]) == []


def test_an_agent_of_the_users_own_is_found_where_they_stand(write_task: Any, tmp_path: Path) -> None:
    task = write_task("tasks/one", toml=SETTINGS)
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    name = 'mine'\n"
        "    needs_policy = False\n"
        "    def __init__(self, word='x'): self.word = word\n"
        "    async def run(self, context):\n"
        "        print('printed by an agent')\n"
        "        await context.shell.run(f'echo {self.word} >/app/hello', timeout=10)\n"
    )
    done = rollcage("try", task, "--agent", "mine:Mine", "--option", "word=hi", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcome"] == "passed"
    assert "printed by an agent" in done.stderr


def test_a_task_that_cannot_be_built_says_what_the_builder_said(write_task: Any) -> None:
    done = rollcage("try", write_task("tasks/one", dockerfile="FROM debian:bookworm-slim\nRUN exit 7\n"))
    assert done.returncode == 3
    assert done.stdout.startswith("invalid  image_build")
    assert "exit 7" in done.stdout


def test_a_broken_task_is_bad_input(write_task: Any) -> None:
    done = rollcage("try", write_task("tasks/one", toml="[environment\n"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "task_malformed" in done.stderr
    assert "task.toml:2" in done.stderr


def test_time_that_was_lost_says_what_was_waited_for() -> None:
    said = StringIO()
    attempt = Attempt(
        "a", "j", "t", "d", 0, 1, "tools", "p", "h", Outcome.PASSED, phases={"agent": 20.0}, infra_seconds=16.3
    )  # fmt: skip
    render(attempt, Console(file=said, width=1000))
    assert (
        "agent 20.00 s; of the agent's, 16.30 s waited for the policy (its queue, retries" in said.getvalue()
    )


def begin(*arguments: str | Path) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [ROLLCAGE, "try", *arguments], stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def read_until(job: subprocess.Popen[str], pattern: str) -> str:
    """What the pattern's group finds on the standard error of a job that goes on."""
    assert job.stderr is not None
    seen = ""
    for line in job.stderr:
        seen += line
        if found := re.search(pattern, line):
            return found[1]
    raise AssertionError(f"it ended without {pattern!r}: {seen}")


def test_a_kept_sandbox_is_there_until_ctrl_c(write_task: Any, engine: Engine) -> None:
    with begin(write_task("tasks/one", toml=SETTINGS), "--keep") as job:
        name = read_until(job, r"kept: docker exec -it (\S+) sh")
        command = engine.api.exec_create(name, ["cat", "/app/hello"])["Id"]
        assert engine.api.exec_start(command) == b"hello\n"
        assert job.stdout is not None
        assert job.stdout.readline() == "passed\n"
        job.send_signal(signal.SIGINT)
        _, said = job.communicate(timeout=60)
    assert (job.returncode, said) == (0, "removing it\n")
    assert not [c for c in engine.api.containers(all=True) if f"/{name}" in c["Names"]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_the_agent_works_it_cleans_up(
    write_task: Any, engine: Engine, number: signal.Signals
) -> None:
    dockerfile = f"FROM debian:bookworm-slim\nWORKDIR /app\nLABEL test={time.time()}\n"
    task = write_task("tasks/one", toml=SETTINGS, dockerfile=dockerfile, solve="#!/bin/sh\nsleep 600\n")
    with begin(task) as job:
        image = read_until(job, r"sandbox of (\S+)")
        read_until(job, r"(solve\.sh)")
        job.send_signal(number)
        out, said = job.communicate(timeout=60)
    assert job.returncode == 130, said
    assert "Traceback" not in said
    assert out.startswith("cancelled")
    assert engine.api.containers(all=True, filters={"ancestor": image}) == []
    engine.api.remove_image(image, noprune=True)  # two at once would meet at its parents


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_builds_it_cleans_up(
    write_task: Any, engine: Engine, number: signal.Signals
) -> None:
    step = f"sleep 600; echo {time.time()}"
    task = write_task("tasks/one", dockerfile=f"FROM debian:bookworm-slim\nRUN {step}\n")

    def builds() -> list[dict[str, Any]]:
        return [c for c in engine.api.containers(all=True) if step in c["Command"]]

    with begin(task) as job:
        deadline = time.monotonic() + 60
        while not builds():
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.1)
        job.send_signal(number)
        out, said = job.communicate(timeout=60)
    assert (job.returncode, out) == (130, ""), said
    assert "Traceback" not in said
    assert builds() == []
