"""`rollcage resume`: what is run again, what is refused, and a job that is killed and gone on with for real."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from rollcage.cluster.config import ConfigError, load_job
from rollcage.cluster.errors import InputError
from rollcage.cluster.job import RunOptions, job_record, run_job
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.plan_tasks import make_plan
from rollcage.cluster.recorded_run import open_run
from rollcage.cluster.records import own_record
from rollcage.cluster.resume import Left, ResumeOptions, planned, read_left, resume
from rollcage.cluster.scheduler import Scheduler
from rollcage.metrics.report import summarize
from rollcage.rollout.arrow import Location, read_attempts, read_rollouts, read_shards
from rollcage.rollout.outcome import Outcome

ROLLCAGE = Path(sys.executable).parent / "rollcage"
SETTINGS = '[environment]\nmemory_mb = 64\nnetwork_mode = "no-network"\n'
SCRIPT = 'default: ["```bash\\nsleep 0.5\\n```", "```bash\\necho hello >/app/hello\\nsubmit\\n```"]\n'
QUIET = Console(quiet=True)

Ends = Mapping[tuple[str, int], Sequence[str | None]]
"""By task and sample: how each attempt ended, a class or None for one that passed; the last one decided."""


@pytest.fixture
def a_run(tmp_path: Path, write_task: Any) -> Callable[..., Path]:
    """Write what a job of two tasks and two samples leaves that ended so; nothing is run."""
    (tmp_path / "script.yaml").write_text(SCRIPT)

    def write(ends: Ends, *, finished: bool = False, **settings: Any) -> Path:
        tasks = [str(write_task(f"tasks/{name}", toml=SETTINGS)) for name in ("a", "b")]
        options = {
            "tasks": tasks,
            "agents": ["bash"],
            "samples": 2,
            "output": str(tmp_path / "run"),
            "policies": {"p": {"kind": "scripted", "file": str(tmp_path / "script.yaml")}},
        }
        config = load_job(None, (), options | settings)
        plan = make_plan(config)
        ledger = Ledger.create(tmp_path / "run", job_record(config, plan, {}))
        asyncio.run(_record(ledger, plan, ends, finished))
        ledger.close()
        return tmp_path / "run"

    return write


async def _record(ledger: Ledger, plan: JobPlan, ends: Ends, finished: bool) -> None:
    for key in plan.rollouts():
        classes = ends.get((key.task, key.sample), ())
        for number, error_class in enumerate(classes, 1):
            outcome = Outcome.INVALID if error_class else Outcome.PASSED
            if error_class == "cancelled":
                outcome = Outcome.CANCELLED
            name = f"{key.task}{key.sample}-{number}"
            attempt = own_record(
                key,
                outcome,
                error_class or "internal_error",
                None,
                number=number,
                policy="p",
                attempt_id=name,
            )
            attempt = dataclasses.replace(attempt, error_class=error_class)
            await ledger.record_attempt(attempt)
            if number == len(classes) and classes[-1] != "host_lost":
                await ledger.record_rollout(attempt, number, 2)
        await ledger.commit_group(key.agent, key.task)
    if finished:
        await ledger.finish({"job": plan.job, "wall_seconds": 3.0})


def left(run: Path, **options: Any) -> Left:
    recorded = open_run(run)
    plan = planned(recorded, ResumeOptions(str(run), **options)).plan
    return read_left(recorded, plan, retry_invalid=options.get("retry_invalid", False))


def named(places: Any) -> list[str]:
    return sorted(f"{task}{sample}" for _, task, _, sample in places)


ENDS: Ends = {
    ("a", 0): [None],
    ("a", 1): ["docker_timeout", "docker_timeout", "docker_timeout", "docker_timeout"],
    ("b", 0): ["network_pool", "cancelled"],
    ("b", 1): ["image_pull", "host_lost"],  # and was to be tried again when the job was killed
}


@pytest.mark.parametrize(
    ("was_on", "told", "joined"),
    [
        ("10.0.0.1:6379", None, "10.0.0.1:6379"),
        ("10.0.0.1:6379", "10.0.0.2:6379", "10.0.0.2:6379"),
        ("10.0.0.1:6379", "local", None),
        (None, None, None),
    ],
)
def test_a_run_goes_on_where_it_was_unless_told(
    a_run: Any, was_on: str | None, told: str | None, joined: str | None
) -> None:
    run = a_run(ENDS, ray={"address": was_on})
    assert planned(open_run(run), ResumeOptions(str(run), address=told)).config.ray.address == joined


def test_only_what_has_not_ended_and_what_was_cancelled_is_run(a_run: Any) -> None:
    found = left(a_run(ENDS))
    assert named(found.chosen) == ["b0", "b1"]
    assert [(key.task, key.sample) for key in found.withdrawn] == [("b", 0)]
    assert found.earlier == {
        ("bash", "b", 0, 0): ["network_pool", "cancelled"],
        ("bash", "b", 0, 1): ["image_pull", "host_lost"],
    }


def test_invalid_ones_are_run_again_where_that_is_asked_for_with_budgets_of_their_own(a_run: Any) -> None:
    run = a_run(ENDS, finished=True)
    found = left(run, retry_invalid=True)
    assert named(found.chosen) == ["a1", "b0", "b1"]
    assert found.earlier["bash", "a", 0, 1] == ["cancelled"] * 4, "numbers go on, budgets do not"
    recorded = open_run(run)
    whole = planned(recorded, ResumeOptions(str(run))).plan
    [key] = [key for key in whole.rollouts() if key.place == ("bash", "a", 0, 1)]
    scheduler = Scheduler([key], concurrency=1, hosts={"h": 1}, earlier={key: found.earlier[key.place]})
    [preparation] = scheduler.prepare(0)
    scheduler.prepared(preparation.preparation_id, None, None, 0)
    [assignment] = scheduler.next(0)
    assert assignment.number == 5
    end = scheduler.ended(assignment.attempt_id, Outcome.INVALID, "docker_timeout", None, 0)
    assert end is not None
    assert not end.final


def test_a_larger_job_runs_what_there_is_more_of_it(a_run: Any, write_task: Any) -> None:
    run = a_run(ENDS)
    more = write_task("more/c", toml=SETTINGS)
    found = left(run, samples=3, tasks=[str(more)])
    assert named(found.chosen) == ["a2", "b0", "b1", "b2", "c0", "c1", "c2"]


def test_what_is_run_again_leaves_the_rollouts_and_its_attempts_stay(a_run: Any) -> None:
    run = a_run(ENDS, finished=True)
    gone = left(run).withdrawn

    async def reopen() -> None:
        ledger = Ledger.open(run)
        await ledger.reopen({"job": "x"}, gone, set())
        assert len(ledger.known) == 2
        ledger.close()

    asyncio.run(reopen())
    rows = read_rollouts(run, ["task", "sample"]).to_pylist()
    assert [(row["task"], row["sample"]) for row in rows] == [("a", 0), ("a", 1)]
    assert read_attempts(run).num_rows == 9
    assert not (run / "summary.json").exists()


def test_a_group_that_was_whole_and_not_committed_when_the_job_was_killed_is_there_at_once(
    a_run: Any,
) -> None:
    run = a_run({("a", 0): [None]})

    async def record() -> None:
        plan = planned(open_run(run), ResumeOptions(str(run))).plan
        ledger = Ledger.open(run)
        for key in plan.rollouts():
            if key.task == "b" or key.sample == 1:
                attempt = own_record(
                    key, Outcome.INVALID, "host_lost", None, number=1, policy="p", attempt_id=f"{key.place}"
                )
                await ledger.record_rollout(attempt, 1, 3 if key.task == "a" else 2)
        ledger.close()
        ledger = Ledger.open(run)
        await ledger.reopen({"job": "x"}, (), {("bash", "a", 0)})
        assert ledger.committed == 2
        ledger.close()

    asyncio.run(record())
    [_, last] = list(read_shards(Location(run), "rollouts", ["task", "sample"]))
    assert last.to_pylist() == [{"task": "b", "sample": 0}, {"task": "b", "sample": 1}]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"samples": 1}, "has 2 samples of each task by bash, and 1 are asked for"),
        (
            {"overrides": ["agents.bash.options.max_turns=3"]},
            "agent bash: options: was {}, is {'max_turns': 3}",
        ),
        ({"overrides": ["policies.p.sampling.temperature=0.5"]}, "policies.p.sampling: was"),
        ({"overrides": ["pass_threshold=0.5"]}, "pass_threshold: was 1.0, is 0.5"),
        ({"overrides": ["agents=[nop]"]}, "agent bash: the job does not have it any more"),
        ({"overrides": ["concurency=3"]}, "did you mean 'concurrency'"),
        ({"overrides": ["mode=stream"]}, "cannot become stream"),
    ],
)
def test_another_job_is_refused_and_what_changed_is_named(
    a_run: Any, options: dict[str, Any], said: str
) -> None:
    run = a_run(ENDS)
    before = read_rollouts(run)
    with pytest.raises((InputError, ConfigError)) as raised:
        resume(ResumeOptions(str(run), **options), QUIET)
    assert said in str(raised.value)
    assert read_rollouts(run).equals(before)
    if "was" in said:
        assert "--allow-changed" in str(raised.value)


def test_changed_tasks_are_refused_unless_told(a_run: Any, tmp_path: Path) -> None:
    run = a_run(ENDS)
    (tmp_path / "tasks/b/instruction.md").write_text("Something else.\n")
    with pytest.raises(InputError, match="task b: its files have changed"):
        resume(ResumeOptions(str(run)), QUIET)
    job = planned(open_run(run), ResumeOptions(str(run)))
    assert job.changes == ["task b: its files have changed"]
    assert job.plan.job == json.loads((run / "job.json").read_text())["job"], "the job keeps its name"


def test_a_run_that_is_written_or_is_not_there_cannot_be_gone_on_with(a_run: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no run here"):
        resume(ResumeOptions(str(tmp_path / "none")), QUIET)
    run = a_run(ENDS)
    ledger = Ledger.open(run)
    with pytest.raises(InputError, match=r"another process .*is writing this run"):
        resume(ResumeOptions(str(run)), QUIET)
    ledger.close()


def test_the_same_job_sent_twice_is_one_job(a_run: Any) -> None:
    """CASE 35."""
    all_ended: Ends = {(task, sample): [None] for task in "ab" for sample in (0, 1)}
    run = a_run(all_ended, finished=True)
    config = open_run(run).config
    again = RunOptions(None, config.tasks, ["nop"], None, 2, None, run, [], None, False)
    with pytest.raises(InputError, match=f"rollcage resume {run}"):
        run_job(again, QUIET)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    first = resume(ResumeOptions(str(run)), QUIET).summary
    assert first == resume(ResumeOptions(str(run)), QUIET).summary == summarize(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_run_that_was_killed_when_all_had_ended_is_summed_up(a_run: Any) -> None:
    all_ended: Ends = {(task, sample): [None] for task in "ab" for sample in (0, 1)}
    run = a_run(all_ended)
    assert not summarize(run)["finished"]
    assert resume(ResumeOptions(str(run)), QUIET).summary["finished"]


def test_a_stream_goes_on_with_its_open_draws_and_the_next_ones(a_run: Any) -> None:
    run = a_run({}, mode="stream", stream={"draws": 5})
    recorded = open_run(run)
    plan = planned(recorded, ResumeOptions(str(run))).plan

    async def record() -> None:
        ledger = Ledger.open(run)
        for task, draw, sample in (("a", 0, 0), ("a", 0, 1), ("a", 1, 1), ("b", 0, 0)):
            drawn = plan.drawn(next(key for key in plan.tasks if key.name == task), draw)
            key = next(key for key in drawn if key.sample == sample)
            attempt = own_record(
                key, Outcome.INVALID, "internal_error", None, number=1, policy="p", attempt_id=str(key)
            )
            await ledger.record_attempt(attempt)
            await ledger.record_rollout(attempt, 1, 2)
        ledger.close()

    asyncio.run(record())
    found = left(run)
    assert found.drawn == {"a": 2, "b": 1}
    assert sorted(found.chosen) == [("bash", "a", 1, 0), ("bash", "b", 0, 1)]


# For real


@pytest.fixture
def scratch() -> Iterator[str]:
    """A directory for temporary files; whatever process still has it in its environment at the end is killed."""
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as place:  # short: it holds Ray's sockets
        yield place
        for process in psutil.process_iter():
            try:
                if process.environ().get("TMPDIR") == place:
                    process.kill()
            except psutil.Error:
                continue


@pytest.mark.ray
@pytest.mark.docker
@pytest.mark.timeout(400)
def test_a_killed_job_goes_on_and_a_finished_one_grows(tmp_path: Path, write_task: Any, scratch: str) -> None:
    (tmp_path / "script.yaml").write_text(SCRIPT)
    for name in ("a", "b"):
        write_task(f"tasks/{name}", toml=SETTINGS)
    run = tmp_path / "run"
    environ = {**os.environ, "TMPDIR": scratch}

    def command(*words: str) -> list[str]:
        return [str(ROLLCAGE), *words, "--json"]

    def finish(*words: str) -> tuple[int, dict[str, Any], str]:
        done = subprocess.run(command(*words), env=environ, capture_output=True, text=True, timeout=200)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout), done.stderr

    words = f"--agent bash --policy {tmp_path}/script.yaml --samples 3 --concurrency 2 --output {run}".split()
    with (tmp_path / "errors").open("wb") as errors:
        process = subprocess.Popen(
            command("run", "--tasks", str(tmp_path / "tasks"), *words),
            env=environ, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 200
    while not (run / "job.json").exists() or read_rollouts(run, ["task"]).num_rows < 2:
        assert process.poll() is None, (tmp_path / "errors").read_text()
        assert time.monotonic() < deadline, (tmp_path / "errors").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = read_rollouts(run, ["task", "sample", "attempt_id"]).to_pylist()
    assert 2 <= len(before) < 6

    status, report, said = finish("resume", str(run))
    assert (status, report["passed"], report["finished"]) == (0, 6, True), said
    assert f"{len(before)} rollouts have ended, {6 - len(before)} are to be run" in said
    rows = read_rollouts(run, ["task", "sample", "attempt_id"]).to_pylist()
    assert sorted((row["task"], row["sample"]) for row in rows) == [(t, s) for t in "ab" for s in range(3)]
    assert all(row in rows for row in before), "what had ended is as it was"

    status, report, said = finish("resume", str(run), "--samples", "4")
    assert (status, report["passed"], report["rollouts"]) == (0, 8, 8), said
    assert {row["attempt_id"] for row in rows} <= set(
        read_attempts(run, ["attempt_id"])["attempt_id"].to_pylist()
    )
    assert read_attempts(run).num_rows == 8
