"""The feed and the job: what a run does while it is read, and what its readers tell it."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from feed_runs import Ending, a_group, a_run, an_attempt, end_rollouts, named, ready
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcage.cluster.decisions import RolloutKey as ScheduledKey
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.scheduler import Scheduler
from rollcage.rollout import feed as feed_module
from rollcage.rollout.arrow import Location, RunBusy, read_attempts
from rollcage.rollout.curriculum import NoStream
from rollcage.rollout.feed import Feed, WriterGone, read_rollouts
from rollcage.rollout.feed_batches import Life, life
from rollcage.rollout.feed_files import acknowledged, acknowledgements
from rollcage.rollout.rewrite import compact

# CASE 31: out of order


@settings(max_examples=10, deadline=None)
@given(order=st.permutations([(task, sample) for task in "abc" for sample in range(3)]))
def test_groups_are_the_same_in_whatever_order_rollouts_end(order: list[tuple[str, int]]) -> None:
    """The slow ones fail more: whatever counted those that came first would be too good."""
    endings: dict[tuple[str, int], Ending] = {
        (task, sample): None if (task, sample) == ("c", 2) else float(sample < "abc".index(task) + 1)
        for task, sample in order
    }

    async def write(run: Path) -> None:
        ledger = Ledger.create(run, {"job": "demo"})
        left = dict.fromkeys("abc", 3)
        for task, sample in order:
            await end_rollouts(ledger, task, [endings[task, sample]], first=sample, size=3)
            left[task] -= 1
            if not left[task]:
                await ledger.commit_group("bash", task)
        await ledger.finish({})

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        asyncio.run(write(run))
        groups = {group.task: (group.samples, group.rewards) for group in Feed(run, "any")}
    assert groups == {
        "a": ((0, 1, 2), (1.0, 0.0, 0.0)),
        "b": ((0, 1, 2), (1.0, 1.0, 0.0)),
        "c": ((0, 1), (1.0, 1.0)),
    }


# CASE 32: one of eight dies of infra


async def test_one_sample_that_dies_of_infra_is_run_again_and_the_group_comes_whole(tmp_path: Path) -> None:
    keys = [ScheduledKey("demo", "bash", "a", "digest", sample) for sample in range(8)]
    scheduler = Scheduler(keys, concurrency=8, hosts={"h": 8})
    ledger = Ledger.create(tmp_path, {"job": "demo"})
    feed = Feed(tmp_path)
    now = 0.0
    while not scheduler.done:
        for preparation in scheduler.prepare(now):
            scheduler.prepared(preparation.preparation_id, None, None, now)
        for assignment in scheduler.next(now):
            lost = assignment.key.sample == 5 and assignment.number == 1
            sample, ending = assignment.key.sample, None if lost else 1.0
            attempt = an_attempt("a", sample, ending, number=assignment.number)
            await ledger.record_attempt(attempt)
            ended = scheduler.ended(assignment.attempt_id, attempt.outcome, attempt.error_class, None, now)
            assert ended is not None
            if ended.final:
                await ledger.record_rollout(attempt, assignment.number, 8)
        assert scheduler.done or ready(feed) == []
        now = max(now, scheduler.wake_at() or now)
    for group in scheduler.groups_done():
        await ledger.commit_group(group.agent, group.task, group.draw)
    await ledger.finish({})
    [group] = feed
    assert group.complete
    assert group.rewards == (1.0,) * 8
    assert group.table["attempts"].to_pylist() == [1, 1, 1, 1, 1, 2, 1, 1]
    assert read_attempts(tmp_path).num_rows == 9


# CASE 33: awkward shards


async def test_groups_of_nothing_but_nulls_and_of_nested_fields_are_read_alike(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {"job": "demo"})
    empty = an_attempt("empty", 0, 0.0)
    empty.trajectory = None
    await ledger.record_attempt(empty)
    await ledger.record_rollout(empty, 1, 1)
    await ledger.commit_group("bash", "empty")
    await a_group(ledger, "full", [1.0, 0.0])
    await ledger.finish({})
    none, full = Feed(tmp_path)
    assert none.table.schema == full.table.schema
    assert (none.segments, none.versions, none.token_count) == ([[]], (), 0)
    assert [tokens.ids.tolist() for tokens in full.segments[1]] == [[2, 2], [7, 8]]
    assert pa.concat_tables([none.table, full.table]).num_rows == 3
    text = [field for field in full.table.schema if pa.types.is_string(field.type)]
    assert text == [], "a column of text that overflows at 2 GiB"


# Following


async def test_shards_that_are_merged_while_they_are_read_change_nothing(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {"job": "demo"})
    feeds = [Feed(tmp_path, rank=rank, world_size=2) for rank in range(2)]
    slow, given = Feed(tmp_path), list[str]()
    for number in range(30):
        await a_group(ledger, f"t{number}", [0.0, 1.0])
        if number % 3 == 0:
            given += named(ready(feeds[number % 2]))
        if number % 10 == 9:
            assert next(slow).task == f"t{number // 10}"
            assert compact(ledger.location, "rollouts")
    given += [task for feed in feeds for task in named(ready(feed))]
    assert sorted(given) == sorted(f"t{number}" for number in range(30))
    assert len(Location(tmp_path).shards("rollouts")) == 1
    await ledger.finish({})
    assert named(list(slow)) == [f"t{number}" for number in range(3, 30)]
    assert named(list(Feed(tmp_path, start=slow.cursor))) == []
    assert named(list(Feed(tmp_path, start={"batch": 27}))) == ["t27", "t28", "t29"]


WRITER = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from feed_runs import Ledger, a_group, end_rollouts

async def main():
    ledger = Ledger.create({run!r}, {{"job": "demo"}})
    await a_group(ledger, "a", [1.0, 0.0])
    await end_rollouts(ledger, "b", [1.0], size=2)
    print("written", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose writer was killed within its second group."""
    monkeypatch.setattr(feed_module, "WRITER_SEC", 0.2)
    run = tmp_path / "run"
    code = WRITER.format(folder=str(Path(__file__).parent), run=str(run))
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert writer.stdout
    assert writer.stdout.readline() == "written\n"
    feed = Feed(run)
    assert named([next(feed)]) == ["a"]
    assert feed.poll(0.5) is None, "a writer that is only slow"
    assert not feed.ended
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    return run


def test_a_killed_job_is_told_from_one_that_is_slow(killed: Path) -> None:
    feed = Feed(killed)
    assert next(feed).task == "a"
    with pytest.raises(WriterGone, match="rollcage resume"):
        next(feed)
    assert named(list(Feed(killed, on_dead="stop"))) == ["a"]
    waiting = Feed(killed, start=feed.cursor, on_dead="wait")
    assert waiting.poll(0.5) is None
    assert not waiting.ended

    async def resume() -> None:
        ledger = Ledger.open(killed)
        await a_group(ledger, "b", [0.5], first=1, size=2)
        await ledger.finish({})

    asyncio.run(resume())
    assert [(group.task, group.rewards) for group in waiting] == [("b", (1.0, 0.5))]


async def test_a_reader_that_looks_for_the_writer_does_not_keep_one_away(tmp_path: Path) -> None:
    Ledger.create(tmp_path, {"job": "demo"}).close()
    reader = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(reader, fcntl.LOCK_SH)
    threading.Timer(0.05, os.close, [reader]).start()
    ledger = Ledger.open(tmp_path)
    with pytest.raises(RunBusy):
        Ledger.open(tmp_path)
    assert life(Location(tmp_path), look_for_writer=True) is Life.WRITTEN
    ledger.close()


async def test_waiting_costs_next_to_nothing(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {"job": "demo"})
    await a_group(ledger, "a", [1.0])
    feed = Feed(tmp_path)
    next(feed)
    spent = time.thread_time()
    assert feed.poll(1.0) is None
    assert time.thread_time() - spent < 0.2, "measured at 0.005 s"
    ledger.close()


# Telling the job


async def test_readers_say_how_far_they_are(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {"job": "demo"})
    for number in range(4):
        await a_group(ledger, f"t{number}", [0.0, 1.0])
    assert acknowledged(acknowledgements(tmp_path)) == 0
    with Feed(tmp_path, rank=1, world_size=2) as second:
        assert next(second).task == "t1"
    assert acknowledged(acknowledgements(tmp_path)) == 0, "rank 0 has said nothing"
    with Feed(tmp_path, rank=0, world_size=2) as first:
        first.version = 7
        assert named(ready(first)) == ["t0", "t2"]
    said = json.loads((tmp_path / "feed" / "trainer-0.json").read_text())
    assert (said["batch"], said["rank"], said["world_size"], said["version"]) == (4, 0, 2, 7)
    assert said["at"] == pytest.approx(time.time(), abs=60)
    assert acknowledged(acknowledgements(tmp_path)) == 2
    with Feed(tmp_path, start=[first.cursor, second.cursor]) as alone:
        assert named(ready(alone)) == ["t3"]
    assert acknowledged(acknowledgements(tmp_path)) == 4, "the second rank is there no more"
    with Feed(tmp_path, name="eval") as other:
        next(other)
    assert acknowledged(acknowledgements(tmp_path)) == 1
    assert not [path.name for path in (tmp_path / "feed").iterdir() if path.suffix != ".json"]
    await ledger.finish({})


async def test_a_group_that_is_trained_on_is_not_said_to_be_done(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {"job": "demo"})
    for number in range(3):
        await a_group(ledger, f"t{number}", [0.0, 1.0])
    feed = Feed(tmp_path)
    next(feed)
    assert acknowledged(acknowledgements(tmp_path)) == 0
    feed.close()
    assert acknowledged(acknowledgements(tmp_path)) == 1
    ledger.close()


async def test_reading_leaves_no_trace_where_nobody_listens(tmp_path: Path) -> None:
    run = await a_run(tmp_path, {"a": [1.0]})
    with Feed(run) as feed:
        list(feed)
    ledger = Ledger.open(run)
    with Feed(run, acknowledge=False) as feed:
        ready(feed)
    ledger.close()
    assert not (run / "feed").exists()


async def test_only_a_stream_can_be_asked_to_end(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {"job": "demo", "tasks": [], "config": {"mode": "batch"}})
    with pytest.raises(NoStream):
        Feed(tmp_path).finish()
    ledger.close()
    config: dict[str, Any] = {"mode": "stream", "stream": {"curriculum": {}}}
    ledger = Ledger.create(tmp_path, {"job": "demo", "tasks": [], "config": config}, overwrite=True)
    Feed(tmp_path).finish()
    assert (tmp_path / "feed" / "finish.json").exists()
    ledger.close()


# Other libraries


def test_the_feed_needs_pyarrow_alone_to_read(tmp_path: Path) -> None:
    asyncio.run(a_run(tmp_path / "run", {"a": [1.0, 0.0]}))
    code = """
import importlib.abc, sys, time
import pyarrow, pyarrow.fs, numpy

class Nothing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in {"rollcage", "pyarrow", "numpy"} and top not in sys.stdlib_module_names:
            raise ImportError(f"{name} is asked for")

editable = [finder for finder in sys.meta_path if "Editable" in str(finder)]
sys.meta_path[:] = editable + [Nothing()] + [one for one in sys.meta_path if one not in editable]
started = time.process_time()
from rollcage.rollout.feed import Feed
seconds = time.process_time() - started
[group] = Feed(sys.argv[1])
print(seconds, [tokens.ids.tolist() for sample in group.segments for tokens in sample])
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    seconds, _, ids = done.stdout.partition(" ")
    assert json.loads(ids) == [[1], [7, 8], [2, 2], [7, 8]]
    # Processor time, beside pyarrow's own; measured 0.03 s.
    assert float(seconds) < 0.3


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_loads_groups(twelve: Path, workers: int) -> None:
    from torch.utils.data import DataLoader

    from rollcage.rollout.feed_torch import FeedDataset

    dataset = FeedDataset(twelve, rank=1, world_size=2, columns=["segments"])
    # Not forked: this process has threads of other tests.
    context = "spawn" if workers else None
    groups = list(DataLoader(dataset, batch_size=None, num_workers=workers, multiprocessing_context=context))
    assert sorted(named(groups)) == sorted(
        f"t{number}" for number in range(12) if number // max(workers, 1) % 2
    )
    assert all(group.segments[1][0].ids.tolist() == [2, 2] for group in groups)


def test_datasets_load_the_merged_shards(twelve: Path, tmp_path: Path) -> None:
    import datasets

    files = Location(twelve).shards("rollouts")
    read = datasets.load_dataset("arrow", data_files=files, split="train", cache_dir=str(tmp_path))
    assert read["task"][:4] == ["t0", "t0", "t1", "t1"]
    assert len(read) == read_rollouts(twelve).num_rows == 24
    assert read[1]["segments"][0]["ids"] == [2, 2]


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of twelve groups."""
    path = tmp_path_factory.mktemp("twelve") / "run"
    return asyncio.run(a_run(path, {f"t{number}": [0.0, 1.0] for number in range(12)}))


def test_the_examples_of_the_page_run(
    twelve: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(twelve)
    monkeypatch.chdir(tmp_path)
    page = Path(__file__).resolve().parents[2] / "docs" / "feed.md"
    about_the_feed = page.read_text().partition("\n## Streams")[0]
    examples = re.findall(r"```python\n(.*?)```", about_the_feed, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        exec(compile(example, str(page), "exec"), {})
    assert "10 groups are left" in capsys.readouterr().out
