"""Shards are merged and rollouts leave them, and whoever reads meets every batch once, in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import datasets
import duckdb
import polars
import pyarrow as pa
import pyarrow.dataset
import pytest

from rollcage.rollout.arrow import Location, RunError, read_numbered, read_rollouts
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.rewrite import compact, due, groups, merge, withdraw
from rollcage.rollout.rows import rollouts_batch
from rollcage.rollout.shards import Shard, first_batch
from rollcage.rollout.trajectory import Attempt, Message, Reward, Trajectory

FAN = 4

Write = Callable[..., Location]


def a_group(number: int, samples: int = 2) -> pa.RecordBatch:
    rows = [
        Attempt(
            f"{number}-{sample}", "demo", f"t{number}", "digest", sample, 1, f"agent-{number % 3}", "model", "host",
            Outcome.PASSED, reward=Reward(1.0), trajectory=Trajectory([Message("user", "x" * 50)]),
        ) for sample in range(samples)
    ]  # fmt: skip
    return rollouts_batch([(row, 1, samples) for row in rows])


@pytest.fixture
def a_run(tmp_path: Path) -> Write:
    def write(commits: int, each: int = 1, *, place: str = "run") -> Location:
        run = Location(tmp_path / place)
        run.write_json("job.json", {})
        for commit in range(commits):
            run.write_shard("rollouts", [a_group(commit * each + number) for number in range(each)])
        return run

    return write


def files(run: Location) -> list[str]:
    return [path.rpartition("/")[2] for path in run.shards("rollouts")]


def tasks(run: Location, start: int = 0) -> list[tuple[int, str]]:
    return [
        (number, batch["task"][0].as_py())
        for number, batch in read_numbered(run, "rollouts", ["task"], start)
    ]


def test_batches_are_numbered_through_all_shards_and_can_be_read_from_any_of_them(a_run: Write) -> None:
    run = a_run(5, each=3)
    opened = [first_batch(run.open_shard(path, ["task"])) for path in run.shards("rollouts")]
    assert opened == [0, 3, 6, 9, 12]
    whole = [(number, f"t{number}") for number in range(15)]
    for start in range(17):
        assert tasks(run, start) == whole[start:]
    assert run.batches("rollouts") == 15
    again = Location(run.path)
    again.write_shard("rollouts", [a_group(15)])
    assert tasks(again, 14) == [(14, "t14"), (15, "t15")]


def test_a_merged_shard_has_the_batches_of_its_parts_in_their_places(a_run: Write) -> None:
    run = a_run(6, each=2)
    rows, before = read_rollouts(run), tasks(run)
    assert merge(run, "rollouts", run.shard_files("rollouts")[1:5])
    assert files(run) == ["part-00000.arrow", "part-00001-00004.arrow", "part-00005.arrow"]
    assert tasks(run) == before
    assert read_rollouts(run).equals(rows)
    [merged] = [path for path in run.shards("rollouts") if "00004" in path]
    assert first_batch(run.open_shard(merged, ["task"])) == 2
    run.write_shard("rollouts", [a_group(12)])
    assert files(run)[-1] == "part-00006.arrow"
    assert tasks(run)[-1] == (12, "t12")


def test_a_ledger_that_runs_has_few_files_and_writes_a_batch_few_times(a_run: Write) -> None:
    run, most = a_run(0), 0
    for number in range(70):
        run.write_shard("rollouts", [a_group(number)])
        compact(run, "rollouts", fan=FAN)
        most = max(most, len(files(run)))
    assert most <= 3 * FAN
    assert files(run)[0] == "part-00000-00063.arrow"
    assert tasks(run) == [(number, f"t{number}") for number in range(70)]


def test_on_demand_all_neighbours_that_fit_are_merged(a_run: Write) -> None:
    run = a_run(5)
    assert compact(run, "rollouts") == 4
    assert files(run) == ["part-00000-00004.arrow"]
    assert compact(run, "rollouts") == 0
    assert len(read_rollouts(run)) == 10


def test_large_shards_stay_as_they_are() -> None:
    sizes = [10, 300 << 20, 10, 10, 100 << 20, 200 << 20]
    shards = [Shard(f"{number}", number, number, size) for number, size in enumerate(sizes)]
    assert [[shard.first for shard in found] for found in groups(shards)] == [[2, 3, 4]]
    assert due(shards, 3) == shards[2:5]
    assert due(shards, 4) == []


@pytest.mark.parametrize("fan", [None, 2])
def test_over_a_shard_that_was_moved_away_nothing_is_merged(a_run: Write, fan: int | None) -> None:
    run = a_run(7)
    Path(run.shards("rollouts")[3]).unlink()
    assert run.missing("rollouts") == ["rollouts/part-00003"]
    compact(run, "rollouts", fan=fan)
    assert len(files(run)) < 6
    assert tasks(run) == [(number, f"t{number}") for number in (0, 1, 2, 4, 5, 6)]
    assert run.missing("rollouts") == ["rollouts/part-00003"]


def test_a_merge_that_is_called_off_changes_nothing(a_run: Write) -> None:
    run = a_run(4)
    assert compact(run, "rollouts", lambda: False, fan=FAN) == 0
    assert sorted(path.name for path in Path(run.path, "rollouts").iterdir()) == files(run)
    assert len(files(run)) == 4


def test_a_kill_between_the_merge_and_the_deletion_leaves_every_row_once(
    a_run: Write, tmp_path: Path
) -> None:
    run = a_run(4)
    parts = {path: Path(path).read_bytes() for path in run.shards("rollouts")}
    compact(run, "rollouts", fan=FAN)
    for path in list(parts)[1:3]:
        Path(path).write_bytes(parts[path])
    assert files(run) == ["part-00000-00003.arrow"]
    assert tasks(run) == [(number, f"t{number}") for number in range(4)]
    run.remove_torn()
    assert [path.name for path in (tmp_path / "run/rollouts").iterdir()] == ["part-00000-00003.arrow"]


def test_a_damaged_shard_is_named_and_nothing_is_merged(a_run: Write) -> None:
    run = a_run(4)
    path = Path(run.shards("rollouts")[2])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RunError, match=r"part-00002\.arrow: this shard is damaged"):
        compact(run, "rollouts", fan=FAN)
    assert len(files(run)) == 4


def test_whichever_bit_is_wrong_in_a_footer_the_shard_is_named(a_run: Write) -> None:
    run = a_run(1)
    path = Path(run.shards("rollouts")[0])
    whole, said = path.read_bytes(), list[str]()
    for place in range(len(whole) - 200, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            for _ in read_numbered(run, "rollouts", ["task"]):
                pass
        except RunError as error:
            said.append(str(error))
    assert said
    assert all(str(path) in line for line in said)


def test_a_file_of_the_run_that_is_no_json_is_named(a_run: Write) -> None:
    run = a_run(1)
    Path(run.path, "summary.json").write_text("{")
    with pytest.raises(RunError, match=r"summary\.json: this file is damaged"):
        run.read_json("summary.json")


def test_a_reader_that_follows_meets_every_batch_once_while_shards_are_merged(a_run: Write) -> None:
    run, total = a_run(1), 60
    seen: list[tuple[int, str]] = []
    failed: list[BaseException] = []

    def follow() -> None:
        location = Location(run.path)
        try:
            while len(seen) < total:
                seen.extend(tasks(location, len(seen)))
        except BaseException as error:
            failed.append(error)
            raise

    reader = threading.Thread(target=follow)
    reader.start()
    for number in range(1, total):
        run.write_shard("rollouts", [a_group(number)])
        compact(run, "rollouts", fan=FAN)
    reader.join(60)
    assert not failed
    assert seen == [(number, f"t{number}") for number in range(total)]


def test_rollouts_that_are_run_again_leave_and_their_batches_stay(a_run: Write) -> None:
    run = a_run(3, each=2)
    gone = {("demo", f"agent-{n % 3}", f"t{n}", 0, sample) for n, sample in ((1, 0), (4, 0), (4, 1), (9, 9))}
    assert withdraw(run, "rollouts", gone) == 3
    rows = read_rollouts(run, ["task", "sample"]).to_pylist()
    expected = [
        (n, sample) for n in range(6) for sample in range(2) if (n, sample) not in {(1, 0), (4, 0), (4, 1)}
    ]
    assert [(int(row["task"][1:]), row["sample"]) for row in rows] == expected
    assert [number for number, _ in read_numbered(run, "rollouts", ["task"])] == list(range(6))
    run.write_shard("rollouts", [a_group(4)])
    assert [number for number, _ in read_numbered(run, "rollouts", ["task"])][-1] == 6
    compact(run, "rollouts")
    assert read_rollouts(run)["task"].to_pylist() == [*(row["task"] for row in rows), "t4", "t4"]


def test_other_readers_take_merged_shards_and_batches_that_are_empty(a_run: Write, tmp_path: Path) -> None:
    run = a_run(3)
    withdraw(run, "rollouts", {("demo", "agent-1", "t1", 0, sample) for sample in (0, 1)})
    for merged in (False, True):
        if merged:
            compact(run, "rollouts")
        shards = pyarrow.dataset.dataset(f"{run.path}/rollouts", format="ipc")
        assert shards.to_table()["task"].to_pylist() == ["t0", "t0", "t2", "t2"]
        assert duckdb.sql("select count(*) from shards").fetchall() == [(4,)]
        assert (
            polars.read_ipc(f"{run.path}/rollouts/*.arrow")["agent"].to_list()
            == ["agent-0"] * 2 + ["agent-2"] * 2
        )
        read = datasets.load_dataset(
            "arrow",
            data_files=f"{run.path}/rollouts/*.arrow",
            split="train",
            cache_dir=str(tmp_path / f"cache-{merged}"),
        )
        assert [row["task"] for row in read] == ["t0", "t0", "t2", "t2"]
