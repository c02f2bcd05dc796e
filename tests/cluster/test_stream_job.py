"""A stream for real: Ray, Docker, a scripted policy, a slow reader, other weights, and an end that is asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from rollcage.rollout.arrow import read_rollouts
from rollcage.rollout.curriculum import read_history
from rollcage.rollout.feed import Feed, Group

pytestmark = [pytest.mark.ray, pytest.mark.docker, pytest.mark.timeout(240)]

ROLLCAGE = Path(sys.executable).parent / "rollcage"
LAG, SAMPLES = 3, 2
HELLO, OTHER = (f"```bash\necho hello >/app/{name}\nsubmit\n```" for name in ("hello", "other"))


@pytest.fixture
def scratch() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as scratch:  # short: it holds Ray's sockets
        yield scratch


def until(condition: Callable[[], bool], job: subprocess.Popen[str], errors: Path) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert job.poll() is None, errors.read_text()
        assert time.monotonic() < deadline, errors.read_text()
        time.sleep(0.05)


def ended(run: Path) -> int:
    return len(read_rollouts(run, ["task"]))


def curriculum(run: Path, folder: Path, weights: dict[str, int]) -> subprocess.CompletedProcess[str]:
    (folder / "weights.json").write_text(json.dumps(weights))
    command = [ROLLCAGE, "curriculum", run, "--weights", folder / "weights.json", "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def taken(feed: Feed, count: int) -> list[Group]:
    groups = [next(feed) for _ in range(count)]
    assert all(group.complete and group.rewards == (1.0, 0.0) for group in groups)
    return groups


def test_a_slow_reader_holds_the_job_back_and_steers_and_ends_it(
    tmp_path: Path, write_task: Callable[..., Path], scratch: str
) -> None:
    for name in ("a", "b", "c"):
        write_task(f"tasks/{name}")
    script = {"*": {"samples": {0: [HELLO]}, "turns": [OTHER]}}
    (tmp_path / "answers.yaml").write_text(yaml.safe_dump({"tasks": script, "default": [OTHER]}))
    job = {
        "mode": "stream",
        "stream": {"max_lag_groups": LAG, "curriculum": {"c": 0}},
        "tasks": ["tasks"],
        "agents": [{"name": "bash", "policy": "script"}],
        "policies": {"script": {"kind": "scripted", "file": "answers.yaml"}},
        "samples": SAMPLES,
        "concurrency": 2,
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    run, errors = tmp_path / "run", tmp_path / "stderr.txt"
    with errors.open("w") as stderr:
        running = subprocess.Popen(
            [ROLLCAGE, "run", tmp_path / "job.yaml", "--output", run, "--json"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env={**os.environ, "TMPDIR": scratch},
            start_new_session=True,
        )
    try:
        until((run / "job.json").exists, running, errors)
        until(lambda: ended(run) == LAG * SAMPLES, running, errors)
        feed = Feed(run)
        first = taken(feed, 1)
        assert ended(run) == LAG * SAMPLES, "a reader that holds on to the first group has made no room"
        first += taken(feed, 3)
        told = curriculum(run, tmp_path, {"rollcage-c": 1})
        assert told.returncode == 1
        assert "no task is called 'rollcage-c' (known: a, b, c)" in told.stderr
        told = curriculum(run, tmp_path, {"a": 0, "b": 0, "c": 1})
        assert told.returncode == 0, told.stderr
        changed = json.loads(told.stdout)["draw"]
        later = taken(feed, changed + 2 - len(first))
        feed.finish()
        rest = list(feed)
        out, _ = running.communicate(timeout=120)
    finally:
        if running.poll() is None:
            running.terminate()
            running.wait(60)
    assert running.returncode == 0, errors.read_text()
    groups = first + later + rest
    by_task = Counter(group.task for group in groups)
    assert by_task["c"] >= 2
    assert abs(by_task["a"] - by_task["b"]) <= 1, "the two were drawn in turn"
    assert sum(by_task.values()) - by_task["c"] == changed
    # Everything that was begun is there, whole, and was read once.
    assert len({(group.task, group.draw) for group in groups}) == len(groups)
    assert len(read_rollouts(run, ["task"])) == SAMPLES * len(groups)
    summary = json.loads(out)
    assert (summary["passed"], summary["failed"]) == (len(groups), len(groups))
    assert [(line["by"], line["draw"]) for line in read_history(run)] == [("job", 0), ("trainer", changed)]
    assert "3 groups wait for a reader" in errors.read_text()
