"""A run in an object store: written, killed, gone on with, merged, reported, all through a server that speaks S3."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rollcage.cluster import ledger as ledger_module
from rollcage.cluster.ledger import Ledger
from rollcage.metrics.report import summarize
from rollcage.rollout.arrow import Location, NoRun, RunBusy, RunError, RunExists, read_attempts, read_rollouts
from rollcage.rollout.feed import Feed, read_groups
from rollcage.rollout.feed_files import acknowledgements
from rollcage.rollout.location import default_journal
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.trajectory import Attempt, Reward

ROLLCAGE = Path(sys.executable).parent / "rollcage"


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's state directory, in which the journals of such runs lie."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


async def record(ledger: Ledger, task: str, sample: int = 0) -> None:
    attempt = Attempt(
        f"{task}-{sample}",
        "demo",
        task,
        "d",
        sample,
        1,
        "nop",
        "",
        "host",
        Outcome.PASSED,
        reward=Reward(1.0),
    )
    await ledger.record_attempt(attempt)
    await ledger.record_rollout(attempt, 1, 1)
    await ledger.commit_group("nop", task)


def tasks(run: str) -> list[str]:
    return sorted(read_rollouts(run, ["task"])["task"].to_pylist())


def files(state: Path) -> list[str]:
    return sorted(path.name for path in state.rglob("*") if path.is_file())


def journals(state: Path) -> list[Path]:
    return list(state.rglob("journals/*"))


async def test_a_run_is_written_to_a_bucket_killed_and_gone_on_with(bucket: str, state: Path) -> None:
    run = f"{bucket}/killed"
    with pytest.raises(NoRun):
        Ledger.open(run)
    first = Ledger.create(run, {"n": 1})
    with pytest.raises(RunBusy):
        Ledger.create(run, {})
    await record(first, "a")
    attempt = Attempt("b-0", "demo", "b", "d", 0, 1, "nop", "", "host", Outcome.FAILED, reward=Reward(0.0))
    await first.record_attempt(attempt)
    await first.record_rollout(attempt, 1, 1)
    assert files(state) == ["attempts-00000.arrows", "rollouts-00000.arrows"]
    assert tasks(run) == ["a", "b"], "also what is only in the journal, on this machine"
    first.close()  # as a kill leaves it
    with pytest.raises(RunExists, match=f"rollcage resume {run}"):
        Ledger.create(run, {})

    second = Ledger.open(run)
    assert len(second.known) == 2
    await record(second, "c")
    await second.finish({"wall_seconds": 1.0})
    assert tasks(run) == ["a", "b", "c"]
    assert read_attempts(run).num_rows == 3
    assert journals(state) == []
    assert summarize(run)["finished"]
    assert sorted(group["task"][0].as_py() for group in read_groups(run)) == ["a", "b", "c"]

    third = Ledger.create(run, {"n": 2}, overwrite=True)
    assert read_rollouts(run).num_rows == 0
    third.close()


async def test_a_trainer_follows_a_run_in_a_bucket_and_goes_on_from_its_cursor(bucket: str) -> None:
    run = f"{bucket}/followed"
    ledger = Ledger.create(run, {"job": "demo"})
    await record(ledger, "a")
    with Feed(run, columns=["sample"]) as feed:
        first = feed.poll()
        assert first
        following = asyncio.create_task(asyncio.to_thread(feed.poll, None))
        await record(ledger, "b")
        second = await following
        await record(ledger, "c")
        await ledger.finish({})
        assert second
        assert [first.task, second.task, *(group.task for group in feed)] == ["a", "b", "c"]
        assert feed.ended
    assert [one.batch for one in acknowledgements(run)] == [3]
    assert [group.task for group in Feed(run, start=first.cursor, columns=["sample"])] == ["b", "c"]


async def test_objects_are_merged_while_the_run_goes_on(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "FAN", 4)
    run = f"{bucket}/merged"
    ledger = Ledger.create(run, {})
    for number in range(10):
        await record(ledger, f"t{number:02d}")
    await ledger.finish({})
    assert ledger.not_merged is None
    assert len(Location(run).shards("rollouts")) < 8
    assert tasks(run) == [f"t{number:02d}" for number in range(10)]


def test_keys_are_not_told_and_do_not_make_another_journal(bucket: str) -> None:
    server = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://").replace(":", "%3A")
    plain = Location(f"{bucket}/one")
    full = Location(f"s3://who:secret@runs/one/?region=us-east-1&scheme=http&endpoint_override={server}")
    assert (full.path, full.journal) == (plain.path, plain.journal)
    assert str(full) == "s3://runs/one/"
    assert default_journal("s3://other/one") != plain.journal
    with pytest.raises(RunError, match="no run can lie there"):
        Location("nothing://a/b")


@pytest.mark.docker
def test_a_job_writes_to_a_bucket_and_its_commands_read_it(
    bucket: str, write_task: Any, run_here: Callable[[Mapping[str, Any]], Path], tmp_path: Path
) -> None:
    run = f"{bucket}/job"
    task = write_task("tasks/a", toml='[environment]\nmemory_mb = 64\nnetwork_mode = "no-network"\n')
    settings = {"tasks": [str(task)], "agents": ["oracle"], "output": run, "journal": str(tmp_path / "j")}
    run_here(settings | {"samples": 2})

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(ROLLCAGE), *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done

    report = json.loads(command("report", run, "--json").stdout)
    assert (report["passed"], report["finished"]) == (2, True)
    again = command("resume", run, "--json")
    assert json.loads(again.stdout)["passed"] == 2, again.stderr
    refused = command("run", "--tasks", str(task), "--agent", "nop", "--output", run)
    assert refused.returncode == 1
    assert f"rollcage resume {run}" in refused.stderr
    merged = json.loads(command("compact", run, "--json").stdout)
    assert merged["files"] == {"attempts": 1, "rollouts": 1}
    assert read_rollouts(run).num_rows == 2
    place = Location(run)
    assert place.is_there("runs/job/summary.json")
