"""A trainer reads whole groups of a run that goes on: each once, in order, shared by rank, from any cursor."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs
import pytest
from feed_runs import CANCELLED, Ending, a_group, a_run, end_rollouts, named, ready
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollcage.cluster.ledger import Ledger
from rollcage.rollout.arrow import Location, NoRun, RunError
from rollcage.rollout.feed import Feed
from rollcage.rollout.rewrite import compact
from rollcage.rollout.trajectory import RolloutKey

MIXED: dict[str, list[Ending]] = {
    "whole": [1.0, 0.0, 0.5],
    "even": [0.0, 0.0, 0.0],
    "short": [1.0, None, 0.0],
    "single": [None, 1.0, None],
    "lost": [None, None, None],
    "last": [0.0, 1.0, 1.0],
}


async def test_groups_come_once_they_are_closed_each_once_and_in_order(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {"job": "demo"})
    feed = Feed(tmp_path)
    assert feed.poll() is None
    assert not feed.ended
    await end_rollouts(ledger, "b", [1.0, 0.0], size=3)
    assert ready(feed) == [], "a group of which more is to come is nobody's"
    await a_group(ledger, "a", [0.0, 1.0])
    await a_group(ledger, "b", [0.5], size=3, first=2)
    [a, b] = ready(feed)
    assert (a.agent, a.task, a.draw, a.size, a.samples, a.rewards) == ("bash", "a", 0, 2, (0, 1), (0.0, 1.0))
    assert (b.task, b.samples, b.rewards, b.complete, b.short) == (
        "b",
        (0, 1, 2),
        (1.0, 0.0, 0.5),
        True,
        False,
    )
    assert b.table["attempt_id"].to_pylist() == ["b-0-0-1", "b-0-1-1", "b-0-2-1"]
    await a_group(ledger, "a", [0.0, 1.0], draw=1)
    await ledger.finish({})
    assert [(group.task, group.draw) for group in feed] == [("a", 1)]
    assert feed.ended
    assert named(list(Feed(tmp_path))) == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("group", "zero_variance", "tasks"),
    [
        ("complete", "keep", ["whole", "even", "last"]),
        ("complete", "drop", ["whole", "last"]),
        ("complete", "downweight", ["whole", "even", "last"]),
        ("at_least: 2", "keep", ["whole", "even", "short", "last"]),
        ("any", "keep", ["whole", "even", "short", "single", "last"]),
        ("any", "drop", ["whole", "short", "last"]),
    ],
)
async def test_a_trainer_says_which_groups_it_takes(
    tmp_path: Path, group: str, zero_variance: Any, tasks: list[str]
) -> None:
    run = await a_run(tmp_path, MIXED)
    feed = Feed(run, group, zero_variance=zero_variance)
    groups = list(feed)
    assert named(groups) == tasks
    for one in groups:
        assert one.samples == tuple(n for n, ending in enumerate(MIXED[one.task]) if ending is not None)
        assert one.table["reward"].to_pylist() == list(one.rewards)
        downweighted = zero_variance == "downweight" and one.task == "even"
        assert one.weight == (0.1 if downweighted else 1.0)
    assert feed.counts == {
        "complete": 3, "short": 3, "zero_variance": 2, "again": 0, "open": 0,
        "dropped": 6 - len(tasks), "stale": 0, "given": len(tasks),
    }  # fmt: skip


async def test_ranks_share_the_groups_that_are_given(tmp_path: Path) -> None:
    run = await a_run(tmp_path, MIXED | {f"more{n}": [0.0, 1.0] for n in range(7)})
    everything = named(list(Feed(run)))
    for world_size in (2, 3, 4):
        shares = [named(list(Feed(run, rank=rank, world_size=world_size))) for rank in range(world_size)]
        assert shares == [everything[rank::world_size] for rank in range(world_size)]


async def test_a_cursor_goes_on_behind_the_groups_that_were_given(tmp_path: Path) -> None:
    run = await a_run(tmp_path, MIXED)
    everything = named(list(Feed(run, "any")))
    cursors = [Feed(run, "any").cursor] + [group.cursor for group in Feed(run, "any")]
    for had, cursor in enumerate(cursors):
        again = Feed(run, "any", start=json.loads(json.dumps(cursor)))
        assert named(list(again)) == everything[had:]
    feed = Feed(run, "any")
    next(feed)
    assert feed.cursor == cursors[1]
    assert named(list(Feed(run, "any", start={"batch": 3}))) == ["single", "last"]


@settings(max_examples=20, deadline=None)
@example(worlds=[3, 1, 1, 2], seed=524289, lockstep=True)
@given(
    worlds=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    seed=st.integers(0, 2**32),
    lockstep=st.booleans(),
)
def test_no_group_is_lost_or_given_twice_by_another_number_of_readers(
    twenty: Path, worlds: list[int], seed: int, lockstep: bool
) -> None:
    chance = random.Random(seed)
    start: Any = None
    had: list[str] = []
    for world_size in worlds:
        steps = chance.randrange(5)
        feeds = [
            Feed(twenty, start=start, rank=rank, world_size=world_size, follow=False, columns=["sample"])
            for rank in range(world_size)
        ]
        for feed in feeds:
            # In lockstep: all have had as many, and one's cursor is enough.
            for _ in range(steps if lockstep else chance.randrange(5)):
                if group := feed.poll():
                    had.append(group.task)
        saved = json.loads(json.dumps([feed.cursor for feed in feeds]))
        # Where a reader was at the end already, they have no longer had as many.
        lockstep = lockstep and not any(feed.ended for feed in feeds)
        start = chance.choice(saved) if lockstep else saved
    had += named(list(Feed(twenty, start=start, columns=["sample"])))
    assert sorted(had) == sorted(f"t{n}" for n in range(20))


@pytest.fixture(scope="module")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 20 groups."""
    import asyncio

    path = tmp_path_factory.mktemp("twenty") / "run"
    return asyncio.run(a_run(path, {f"t{n}": [0.0, 1.0] for n in range(20)}))


async def test_a_group_that_a_larger_job_opens_again_comes_whole_and_says_so(tmp_path: Path) -> None:
    run = await a_run(tmp_path, {"a": [1.0, 0.0], "b": [None, 1.0], "c": [1.0, 1.0]})
    reader = Feed(run)
    assert named(list(reader)) == ["a", "c"]
    ledger = Ledger.open(run)
    follower = Feed(run, start=reader.cursor)
    for task in ("b", "c", "a"):
        await a_group(ledger, task, [0.0, 0.5], first=2, size=4)
    [c, a] = ready(follower)
    assert (a.task, a.samples, a.rewards, a.size, a.again) == (
        "a",
        (0, 1, 2, 3),
        (1.0, 0.0, 0.0, 0.5),
        4,
        True,
    )
    assert (c.task, c.again) == ("c", True)
    assert [[list(map(int, one.ids)) for one in sample] for sample in a.segments] == [
        [[n + 1] * (n + 1), [7, 8]] for n in range(4)
    ]
    await ledger.finish({})
    assert follower.counts["short"] == 1, "b has one invalid rollout for good"
    assert [(group.task, group.again) for group in Feed(run)] == [
        ("a", False), ("c", False), ("c", True), ("a", True)
    ]  # fmt: skip
    assert named(list(Feed(run, "any"))) == ["a", "b", "c", "b", "c", "a"]


async def test_a_group_with_rollouts_that_were_called_off_waits_for_them(tmp_path: Path) -> None:
    run = await a_run(tmp_path, {"a": [1.0, CANCELLED, 0.0], "b": [CANCELLED], "c": [1.0]})
    feed = Feed(run, "any")
    assert named(list(feed)) == ["c"]
    assert feed.counts["open"] == 2
    ledger = Ledger.open(run)
    called_off = [RolloutKey("demo", "bash", task, sample) for task, sample in (("a", 1), ("b", 0))]
    await ledger.reopen(ledger.job, called_off, to_run=[])
    later = Feed(run, "any", start=feed.cursor)
    await a_group(ledger, "b", [0.0], number=2)
    await a_group(ledger, "a", [0.5], first=1, size=3, number=2)
    [b, a] = ready(later)
    assert (a.rewards, a.again, b.rewards, b.again) == ((1.0, 0.5, 0.0), False, (0.0,), False)
    await ledger.finish({})
    assert named(list(Feed(run, "any"))) == ["c", "b", "a"]


async def test_ranks_agree_although_a_retried_rollout_left_its_group_for_some_of_them(tmp_path: Path) -> None:
    """Rank 0 has passed the short group before its invalid rollout is run again, and rank 1 has not begun."""
    run = await a_run(tmp_path, {"a": [1.0, 0.0], "b": [None, 1.0], "c": [None, None], "d": [1.0, 0.0]})
    ahead = Feed(run, "any", rank=0, world_size=2)
    early = ahead.poll()
    late = ahead.poll()
    assert early
    assert late
    assert [early.task, late.task] == ["a", "d"]
    ledger = Ledger.open(run)
    retried = [RolloutKey("demo", "bash", task, sample) for task, sample in (("b", 0), ("c", 0), ("c", 1))]
    await ledger.reopen(ledger.job, retried, to_run=[])
    await a_group(ledger, "c", [0.0, 1.0], number=2)
    await a_group(ledger, "b", [0.5], size=2, number=2)
    await a_group(ledger, "e", [0.0])
    await ledger.finish({})
    compact(Location(run), "rollouts")

    whole = [(group.task, group.samples, group.again) for group in Feed(run, "any")]
    assert whole == [
        ("a", (0, 1), False), ("b", (1,), False), ("d", (0, 1), False),
        ("c", (0, 1), False), ("b", (0, 1), True), ("e", (0,), False),
    ]  # fmt: skip
    assert [group.task for group in Feed(run)] == ["a", "d", "c", "b", "e"]
    left = named(list(Feed(run, "any", rank=0, world_size=2, start=late.cursor)))
    other = named(list(Feed(run, "any", rank=1, world_size=2)))
    assert (left, other) == (["b"], ["b", "c", "e"])
    behind = Feed(run, "any", rank=1, world_size=2)
    assert behind.poll()
    cursors = [late.cursor, behind.cursor]
    three = [Feed(run, "any", rank=rank, world_size=3, start=cursors) for rank in range(3)]
    assert sorted(task for feed in three for task in named(list(feed))) == ["b", "c", "e"]


async def test_stale_groups_are_left_out_and_counted(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {"job": "demo"})
    for version in range(5):
        await a_group(ledger, f"t{version}", [0.0, 1.0], version=version)
    await end_rollouts(ledger, "mixed", [1.0], size=2, version=1)
    await a_group(ledger, "mixed", [0.0], size=2, first=1, version=4)
    feed = Feed(tmp_path, max_staleness=1, columns=["reward"])
    first = next(feed)
    assert first.versions == (0,), "before the trainer has said its version nothing is stale"
    feed.version = 4
    assert [(group.task, group.versions) for group in ready(feed)] == [("t3", (3,)), ("t4", (4,))]
    assert feed.counts["stale"] == 3
    assert named(ready(Feed(tmp_path, max_staleness=1, start=feed.cursor))) == ["mixed"]
    ledger.close()


async def test_batches_are_of_so_many_groups_or_tokens(tmp_path: Path) -> None:
    # Each sample n has n + 1 tokens and a segment of 2.
    run = await a_run(tmp_path, {f"t{n}": [1.0] * (n + 1) for n in range(5)})
    assert [named(batch) for batch in Feed(run).batches(groups=2)] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    tokens = [group.token_count for group in Feed(run)]
    assert tokens == [3, 7, 12, 18, 25]
    feed = Feed(run)
    seen = []
    for batch in feed.batches(tokens=19):
        seen.append(named(batch))
        assert named(list(Feed(run, start=feed.cursor))) == [f"t{n}" for n in range(sum(map(len, seen)), 5)]
    assert seen == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
    feed = Feed(run)
    next(feed.batches(tokens=11))
    assert named(list(feed)) == ["t2", "t3", "t4"], "what did not fit is not lost"
    for wrong in ({}, {"groups": 0}, {"groups": 1, "tokens": 1}):
        with pytest.raises(ValueError, match="either groups or tokens"):
            next(feed.batches(**wrong))


async def test_token_arrays_are_views_of_the_batch(tmp_path: Path) -> None:
    run = await a_run(tmp_path, {"whole": [1.0] * 4, "short": [1.0, None, None, 0.0]})
    for group in Feed(run, "any"):
        held = []
        for chunk in group.table["segments"].chunks:
            for name in ("ids", "loss_mask", "logprobs"):
                data = chunk.values.field(name).values.buffers()[1]
                held.append(range(data.address, data.address + data.size))
        for segments in group.segments:
            for array in (array for tokens in segments for array in tokens):
                address = array.__array_interface__["data"][0]
                assert any(address in memory for memory in held)
                assert not array.flags.writeable
        lists = [row[0] for row in group.table["segments"].to_pylist()]
        assert [one[0].ids.tolist() for one in group.segments] == [row["ids"] for row in lists]
        assert [one[0].loss_mask.tolist() for one in group.segments] == [row["loss_mask"] for row in lists]
        assert [one[0].logprobs.tolist() for one in group.segments] == [row["logprobs"] for row in lists]


async def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    run = await a_run(tmp_path, MIXED)
    [group, *_] = Feed(run, columns=["segments"])
    assert "messages" not in group.table.column_names
    assert group.segments[1][0].ids.tolist() == [2, 2]
    with pytest.raises(ValueError, match="does not read the column 'turns'"):
        _ = group.versions


async def test_a_run_elsewhere_is_followed_too(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory = pa.fs.PyFileSystem(pa.fs.FSSpecHandler(fsspec.filesystem("memory")))
    run = Location(f"{tmp_path.name}/run", journal=tmp_path, filesystem=memory)
    ledger = Ledger.create(run, {"job": "demo"})
    feed = Feed(run)
    await a_group(ledger, "a", [1.0, 0.0])
    assert named(ready(feed)) == ["a"]
    await a_group(ledger, "b", [1.0, 0.0])
    await ledger.finish({})
    assert named(list(feed)) == ["b"]
    assert named(list(Feed(run, start=feed.cursor))) == []


async def test_what_cannot_be_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(NoRun):
        Feed(tmp_path / "nothing")
    run = await a_run(tmp_path / "run", MIXED)
    cursor = list(Feed(run))[-1].cursor
    for problem, settings_ in [
        ("'complete', 'any' or 'at_least: N'", {"group": "most"}),
        ("rank must be", {"rank": 2, "world_size": 2}),
        ("a feed's name", {"name": "../up"}),
        ("zero_variance must be one of keep, drop, downweight", {"zero_variance": "discard"}),
        ("on_dead must be one of", {"on_dead": "cry"}),
        ("columns must be one of", {"columns": ["reward", "thoughts"]}),
        ("no cursor of a feed", {"start": {"group": 3}}),
        ("cursor is of the policy 'complete'", {"start": cursor, "group": "any"}),
        ("cursor is of the job 'other'", {"start": {**cursor, "job": "other"}}),
        ("at batch 60, and the run has 6", {"start": {**cursor, "batch": 60}}),
        ("those of all ranks of one world", {"start": [cursor, cursor]}),
    ]:
        with pytest.raises(ValueError, match=problem):
            Feed(run, **settings_)  # type: ignore[arg-type]


async def test_a_shard_that_is_missing_or_damaged_is_not_passed_over(tmp_path: Path) -> None:
    run = await a_run(tmp_path, MIXED)
    (tmp_path / "rollouts" / "part-00001.arrow").rename(tmp_path / "away")
    feed = Feed(run)
    assert next(feed).task == "whole"
    with pytest.raises(RunError, match=r"batches 1 to 1 are missing .*start=\{\"batch\": 2\}"):
        next(feed)
    assert named(list(Feed(run, start={"batch": 2}))) == ["last"]
    (tmp_path / "rollouts" / "part-00001.arrow").write_bytes(b"ARROW1")
    with pytest.raises(RunError, match=r"part-00001\.arrow: this shard is damaged"):
        list(Feed(run))


async def test_a_group_that_cannot_be_decoded_is_not_passed_over(tmp_path: Path) -> None:
    run = await a_run(tmp_path, {"a": [0.0, 1.0], "b": [0.0, 1.0]})
    shard = tmp_path / "rollouts" / "part-00000.arrow"
    data = shard.read_bytes()
    middle = data.index(b"\x04\x22\x4d\x18", len(data) // 3)  # where an lz4 frame begins
    shard.write_bytes(data[:middle] + b"\xff" * 4 + data[middle + 4 :])
    for world_size in (1, 2):
        feed = Feed(run, world_size=world_size)
        for _ in range(2):
            with pytest.raises(RunError, match=r"part-00000\.arrow: this shard is damaged"):
                next(feed)
        assert feed.cursor["batch"] == 0
    assert named(list(Feed(run, rank=1, world_size=2))) == ["b"]


async def test_a_run_that_is_begun_anew_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {"job": "demo"})
    await a_group(ledger, "a", [0.0, 1.0])
    feed = Feed(tmp_path)
    assert next(feed).task == "a"
    ledger.close()
    Ledger.create(tmp_path, {"job": "demo"}, overwrite=True).close()
    with pytest.raises(RunError, match="begun anew"):
        feed.poll()
