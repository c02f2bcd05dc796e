"""The ledger keeps what it acknowledges, through kills, full disks and careless callers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollcage.cluster import ledger as ledger_module
from rollcage.cluster.ledger import EndedTwice, Ledger
from rollcage.rollout.arrow import Location, NoRun, RunBusy, RunError, RunExists, read_attempts, read_rollouts
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.trajectory import Attempt, Message, Phase, Reward, RolloutKey, Trajectory


def an_attempt(task: str = "a", sample: int = 0, number: int = 0, **changes: Any) -> Attempt:
    attempt = Attempt(
        f"{task}-{sample}-{number}", "demo", task, "digest", sample, number, "bash", "model", "host",
        Outcome.PASSED, reward=Reward(1.0), started_at=1e9, ended_at=1e9 + 1, phases={Phase.AGENT.value: 1.0},
        trajectory=Trajectory([Message("user", "x" * 100)]),
    )  # fmt: skip
    return dataclasses.replace(attempt, **changes)


async def record(ledger: Ledger, attempt: Attempt, size: int = 2) -> None:
    await ledger.record_attempt(attempt)
    await ledger.record_rollout(attempt, attempts=1, group_size=size)


def files(run: Path) -> set[str]:
    return {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}


async def test_a_run_ends_as_shards_and_a_summary_and_nothing_else(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {"name": "demo", "output": tmp_path})
    for task in ("a", "b"):
        # Samples end in any order.
        await asyncio.gather(*(record(ledger, an_attempt(task, sample)) for sample in (1, 0)))
        await ledger.commit_group("bash", task)
    assert json.loads((tmp_path / "job.json").read_text()) == {"name": "demo", "output": str(tmp_path)}
    await ledger.finish({"wall_seconds": 2.0})
    assert files(tmp_path) == {
        "job.json",
        "summary.json",
        "attempts/part-00000.arrow",
        "rollouts/part-00000.arrow",
        "rollouts/part-00001.arrow",
    }
    assert not (tmp_path / "journal").exists()
    for number, task in enumerate(("a", "b")):
        shard = pa.ipc.open_file(tmp_path / f"rollouts/part-{number:05d}.arrow").read_all()
        assert shard.select(["task", "sample", "group_size"]).to_pylist() == [
            {"task": task, "sample": sample, "group_size": 2} for sample in range(2)
        ]
    assert read_attempts(tmp_path).num_rows == 4


async def test_what_is_acknowledged_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {})
    await record(ledger, an_attempt("a", 0))
    assert read_rollouts(tmp_path, ["task"]).num_rows == read_attempts(tmp_path).num_rows == 1
    assert not any(name.startswith("rollouts/") for name in files(tmp_path))
    await record(ledger, an_attempt("a", 1))
    await ledger.commit_group("bash", "a")
    await record(ledger, an_attempt("b", 0))
    assert read_rollouts(tmp_path, ["task"])["task"].to_pylist() == ["a", "a", "b"]
    ledger.close()


async def test_groups_of_two_agents_on_one_task_are_committed_apart(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {})
    for agent in ("bash", "oracle"):
        await record(ledger, an_attempt(agent=agent, attempt_id=agent), size=1)
    await ledger.commit_group("oracle", "a")
    assert pa.ipc.open_file(tmp_path / "rollouts/part-00000.arrow").read_all()["agent"].to_pylist() == [
        "oracle"
    ]
    await ledger.finish({})
    assert read_rollouts(tmp_path)["agent"].to_pylist() == ["oracle", "bash"]


async def test_nothing_ends_twice(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {})
    await record(ledger, an_attempt())
    with pytest.raises(EndedTwice, match="a-0-0"):
        await ledger.record_attempt(an_attempt())
    with pytest.raises(EndedTwice, match="has ended already"):
        await ledger.record_rollout(an_attempt(number=1), 2, 2)
    await ledger.finish({})
    again = Ledger.open(tmp_path)
    with pytest.raises(EndedTwice):
        await again.record_rollout(an_attempt(number=1), 2, 2)
    with pytest.raises(EndedTwice):
        await again.record_attempt(an_attempt())
    again.close()
    assert read_rollouts(tmp_path).num_rows == read_attempts(tmp_path).num_rows == 1


async def test_a_row_that_cannot_be_written_costs_nobody_else_theirs(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {})
    bad = an_attempt("bad", phases={"coffee": 1.0})
    calls = [record(ledger, attempt) for attempt in (an_attempt("a"), bad, an_attempt("b"))]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [type(None), ValueError, type(None)]
    await record(ledger, dataclasses.replace(bad, phases={}))
    await ledger.finish({})
    assert sorted(read_rollouts(tmp_path)["task"].to_pylist()) == ["a", "b", "bad"]


async def test_a_cancelled_call_has_its_row_written_all_the_same(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {})
    call = asyncio.create_task(ledger.record_attempt(an_attempt()))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await ledger.finish({})
    assert read_attempts(tmp_path).num_rows == 1


async def test_a_directory_with_a_run_is_refused_unless_it_is_to_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    first = Ledger.create(tmp_path, {"n": 1})
    await record(first, an_attempt())
    with pytest.raises(RunBusy, match="another process"):
        Ledger.create(tmp_path, {}, overwrite=True)
    with pytest.raises(RunBusy):
        Ledger.open(tmp_path)
    first.close()
    with pytest.raises(RunExists, match="holds a run already"):
        Ledger.create(tmp_path, {})
    assert read_rollouts(tmp_path).num_rows == 1
    second = Ledger.create(tmp_path, {"n": 2}, overwrite=True)
    assert files(tmp_path) == {"job.json", "notes.txt"}
    assert second.job == {"n": 2}
    second.close()


async def test_a_closed_ledger_takes_nothing(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {})
    ledger.close()
    ledger.close()
    with pytest.raises(RunError, match="closed"):
        await ledger.record_attempt(an_attempt())
    with pytest.raises(NoRun):
        Ledger.open(tmp_path / "nothing")


async def test_a_run_that_is_gone_on_with_knows_what_has_ended(tmp_path: Path) -> None:
    first = Ledger.create(tmp_path, {"n": 1})
    await record(first, an_attempt("a", 0))
    await record(first, an_attempt("a", 1))
    await first.commit_group("bash", "a")
    await record(first, an_attempt("b", 0))
    first.close()  # as a kill leaves it: b is in the journal only
    (tmp_path / "rollouts" / "part-00001.arrow.tmp").write_bytes(b"torn")

    second = Ledger.open(tmp_path)
    assert second.job == {"n": 1}
    ended = {RolloutKey("demo", "bash", task, sample) for task, sample in (("a", 0), ("a", 1), ("b", 0))}
    assert len(second.known) == 3
    assert all(key in second.known for key in ended)
    assert an_attempt("b", 1).key not in second.known
    await record(second, an_attempt("b", 1))
    await second.commit_group("bash", "b")
    shard = pa.ipc.open_file(tmp_path / "rollouts/part-00001.arrow").read_all()
    assert shard["sample"].to_pylist() == [0, 1], "the group is whole in one shard, across the kill"
    await second.finish({})
    assert read_rollouts(tmp_path).num_rows == read_attempts(tmp_path).num_rows == 4

    third = Ledger.open(tmp_path)
    assert (tmp_path / "summary.json").exists()
    await record(third, an_attempt("c", 0))
    assert not (tmp_path / "summary.json").exists(), "the run goes on"
    await third.finish({})
    assert read_rollouts(tmp_path).num_rows == 5


async def test_a_journal_does_not_outgrow_what_waits_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "JOURNAL_BYTES", 100_000)
    monkeypatch.setattr(ledger_module, "ATTEMPTS_A_SHARD", 8)
    ledger = Ledger.create(tmp_path, {})
    await record(ledger, an_attempt("waits", 0))
    for task in range(40):
        await record(ledger, an_attempt(f"t{task}"))
        await ledger.commit_group("bash", f"t{task}")
    assert sum(path.stat().st_size for path in (tmp_path / "journal").iterdir()) < 300_000
    assert len([name for name in files(tmp_path) if name.startswith("attempts/")]) == 5
    assert read_rollouts(tmp_path).num_rows == read_attempts(tmp_path).num_rows == 41
    ledger.close()
    again = Ledger.open(tmp_path)
    assert len(again.known) == 41
    await again.finish({})
    assert sorted(read_rollouts(tmp_path)["task"].to_pylist()) == sorted(
        ["waits", *(f"t{n}" for n in range(40))]
    )


async def test_small_shards_are_merged_while_the_run_goes_on_and_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "FAN", 4)
    ledger, most = Ledger.create(tmp_path, {}), 0
    for number in range(40):
        await record(ledger, an_attempt(f"t{number}"), size=1)
        await ledger.commit_group("bash", f"t{number}")
        rows = read_rollouts(tmp_path, ["task"])["task"].to_pylist()
        assert rows == [f"t{n}" for n in range(number + 1)], "whatever is merged just now"
        most = max(most, len(Location(tmp_path).shards("rollouts")))
    await ledger.finish({})
    assert ledger.not_merged is None
    assert most < 20
    assert read_rollouts(tmp_path)["task"].to_pylist() == [f"t{n}" for n in range(40)]
    again = Ledger.open(tmp_path)
    assert again.committed == 40
    again.close()


async def test_a_run_elsewhere_keeps_its_journal_here(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fsspec.filesystem("memory")))
    with pytest.raises(RunError, match="journal"):
        Ledger.create(Location("elsewhere/run", filesystem=memory), {})
    run = Location("elsewhere/run", journal=tmp_path, filesystem=memory)
    ledger = Ledger.create(run, {"n": 1})
    await record(ledger, an_attempt("a"), size=1)
    ledger.close()
    ledger = Ledger.open(run)
    await ledger.commit_group("bash", "a")
    await ledger.finish({})
    assert read_rollouts(run).num_rows == 1
    assert files(tmp_path) == set()


WRITER = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from test_ledger import Ledger, an_attempt, record

async def main():
    ledger = Ledger.create({run!r}, {{}})
    print("ready", flush=True)
    async def group(task):
        async def one(sample):
            await record(ledger, an_attempt(task, sample))
            print(task, sample, flush=True)
        await asyncio.gather(*map(one, range(4)))
        await ledger.commit_group("bash", task)
    number = 0
    while True:
        await asyncio.gather(*(group(f"t{{number + i}}") for i in range(3)))
        number += 3

asyncio.run(main())
"""


@pytest.mark.parametrize("lines", [1, 6, 17, 40])
def test_a_killed_driver_loses_nothing_that_was_acknowledged(tmp_path: Path, lines: int) -> None:
    run = tmp_path / "run"
    code = WRITER.format(folder=str(Path(__file__).parent), run=str(run))
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert writer.stdout
    for _ in range(lines):
        writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    said = [line.split() for line in writer.stdout.read().splitlines() if line.endswith(tuple("0123"))]
    writer.wait()
    before = read_rollouts(run, ["task", "sample"]).to_pylist()

    async def go_on() -> Ledger:
        ledger = Ledger.open(run)
        await ledger.finish({})
        return ledger

    ended = asyncio.run(go_on()).known
    rows = [(row["task"], row["sample"]) for row in read_rollouts(run, ["task", "sample"]).to_pylist()]
    assert {(task, int(sample)) for task, sample in said} <= set(rows)
    assert len(rows) == len(set(rows)) == len(ended) == len(before)
    attempts = read_attempts(run)["attempt_id"].to_pylist()
    assert len(attempts) == len(set(attempts)) >= len(rows)
    assert not (run / "journal").exists()


FULL_DISK = """
import asyncio, resource, sys
sys.path.insert(0, {folder!r})
from test_ledger import Ledger, an_attempt, record
from rollcage.rollout.trajectory import Message, Trajectory

async def main():
    ledger = Ledger.create({run!r}, {{}})
    await record(ledger, an_attempt("before"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    large = an_attempt("large", trajectory=Trajectory([Message("user", "x" * 200_000)]))
    await ledger.record_attempt(large)
    try:
        await ledger.record_rollout(large, 1, 2)
    except OSError as error:
        print("refused:", error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await record(ledger, an_attempt("after"))
    await ledger.record_rollout(large, 1, 2)
    import os; os._exit(9)

asyncio.run(main())
"""


def test_a_disk_that_was_full_costs_only_what_was_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    code = FULL_DISK.format(folder=str(Path(__file__).parent), run=str(run))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stderr
    assert "refused:" in done.stdout
    assert sorted(read_rollouts(run)["task"].to_pylist()) == ["after", "before", "large"]
    assert os.listdir(run / "journal")
