"""A stream is driven for as long as its readers read. Hosts are scripted; ledger, feed and files are real."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from test_driver import World, broken_task, until

from rollcage.cluster.control import set_weights as ask_weights
from rollcage.cluster.control import stop_job
from rollcage.cluster.control_requests import job_control
from rollcage.cluster.errors import InputError
from rollcage.cluster.host import Prepared
from rollcage.cluster.stream import StreamPlan
from rollcage.rollout.arrow import read_rollouts
from rollcage.rollout.curriculum import NoStream, finish, read_history, set_weights
from rollcage.rollout.feed import Feed
from rollcage.rollout.outcome import Evidence
from rollcage.rollout.task import Task


def stream(run: Path, *, tasks: int = 3, samples: int = 2, concurrency: int = 4, **settings: Any) -> World:
    """A stream of `tasks`, and a run whose `job.json` says so."""
    agents = settings.pop("agents", ("a",))
    others = {name: settings.pop(name) for name in ("broken", "max_quarantined_tasks") if name in settings}
    plan = StreamPlan(**settings)
    world = World(
        run, tasks=tasks, samples=samples, concurrency=concurrency, stream=plan, agents=agents, **others
    )
    named = [{"task": key.name, "digest": key.digest, "path": ""} for key in world.plan.task_keys()]
    config = {"mode": "stream", "stream": {"curriculum": dict(plan.weights)}}
    world.ledger.location.write_json("job.json", {"job": "job-1", "config": config, "tasks": named})
    return world


@asynccontextmanager
async def driven(world: World) -> AsyncIterator[asyncio.Task[None]]:
    """The job, under way; at the end of the block it must have ended well."""
    async with asyncio.timeout(60):
        driving = asyncio.create_task(world.driver.run())
        try:
            yield driving
            await driving
        finally:
            driving.cancel()
            await asyncio.wait({driving})
        await world.ledger.finish({})


def groups(world: World) -> list[tuple[str, int]]:
    """(task, draw) of every rollout that was asked for, in order, each once."""
    return list(dict.fromkeys((spec.task.name, spec.draw) for spec in world.asked))


def whole(run: Path, samples: int = 2) -> Counter[tuple[str, str, int]]:
    """The groups that the run holds; each must have all of its samples."""
    rows = read_rollouts(run, ["agent", "task", "draw", "sample"]).to_pylist()
    counts = Counter((row["agent"], row["task"], row["draw"]) for row in rows)
    assert set(counts.values()) <= {samples}
    return counts


async def settled(world: World, asked: int) -> None:
    """Return once so many attempts were asked for and nothing more comes, though the job looks about it many times."""
    await until(lambda: len(world.asked) >= asked)
    await asyncio.sleep(0.5)  # nothing is to happen: there is no condition to wait for
    assert len(world.asked) == asked


async def test_a_stream_ends_after_so_many_draws_each_a_group_of_every_agent(tmp_path: Path) -> None:
    world = stream(tmp_path, tasks=3, draws=7, agents=("a", "b"))
    async with driven(world):
        pass
    assert len(whole(tmp_path)) == 14
    assert sorted(Counter(task for task, _ in groups(world)).values()) == [2, 2, 3]
    assert {draw for task, draw in groups(world)} == {0, 1, 2}
    assert world.plan.total() == 28


async def test_without_a_reader_the_job_waits_at_the_bound_and_a_slow_one_lets_it_go_on(
    tmp_path: Path,
) -> None:
    world = stream(tmp_path, max_lag_groups=5, samples=2)
    async with driven(world):
        await settled(world, 10)
        assert "5 groups wait for a reader" in world.text
        feed = Feed(tmp_path)
        next(feed)
        await settled(world, 10)
        next(feed), next(feed)
        feed.close()
        await settled(world, 16)
        feed.finish()
    assert len(whole(tmp_path)) == 8
    assert "the trainer has enough" in world.text


async def test_the_slowest_rank_counts_and_one_that_has_not_begun_has_read_nothing(tmp_path: Path) -> None:
    world = stream(tmp_path, max_lag_groups=4)
    async with driven(world):
        await settled(world, 8)
        first = Feed(tmp_path, rank=0, world_size=2)
        next(first), next(first)
        first.close()
        await settled(world, 8)
        second = Feed(tmp_path, rank=1, world_size=2)
        next(second)
        second.close()
        await settled(world, 12)
        finish(tmp_path)


async def test_weights_that_a_trainer_sets_count_and_are_on_record(tmp_path: Path) -> None:
    world = stream(tmp_path, tasks=3, max_lag_groups=4, weights={"task2": 0.0}, concurrency=2)
    async with driven(world):
        feed = Feed(tmp_path)
        for _ in range(4):
            await asyncio.to_thread(next, feed)
        with pytest.raises(ValueError, match="did you mean 'task1'"):
            set_weights(tmp_path, {"tsk1": 2})
        assert set_weights(tmp_path, {"task2": 5, "task0": 0}) == {"task2": 5.0, "task0": 0.0}
        await until(lambda: len(read_history(tmp_path)) == 2)
        changed = read_history(tmp_path)[-1]
        for _ in range(16):
            await asyncio.to_thread(next, feed)
        with pytest.raises(ValueError, match="every task would have the weight 0"):
            await world.driver.set_weights({"task2": 0, "task1": 0})
        assert await world.driver.set_weights({"task2": 1}) > changed["draw"]
        feed.finish()
    drawn = [task for task, _ in groups(world)]
    assert set(drawn[: changed["draw"]]) == {"task0", "task1"}
    after = Counter(drawn[changed["draw"] :])
    assert "task0" not in after
    assert after["task2"] > 3 * after["task1"]
    history = read_history(tmp_path)
    assert [line["by"] for line in history] == ["job", "trainer", "trainer"]
    assert history[0]["weights"] == {"task2": 0.0}
    assert history[2]["weights"] == {"task2": 1.0, "task0": 0.0}


async def test_a_trainer_that_has_enough_gets_every_group_whole_and_what_was_not_begun_never_was(
    tmp_path: Path,
) -> None:
    world = stream(tmp_path, samples=3, concurrency=3)
    gate = asyncio.Event()

    async def held() -> str:
        await gate.wait()
        return "passed"

    world.attempt = lambda spec, _host: held() if spec.sample == 1 else "passed"
    async with driven(world):
        await until(lambda: len(world.hosts[0].running) == 3)
        finish(tmp_path)
        await until(lambda: "the trainer has enough" in world.text)
        gate.set()
    found = whole(tmp_path, samples=3)
    assert set(found) == {("a", task, draw) for task, draw in groups(world)}
    assert {row["outcome"] for row in read_rollouts(tmp_path, ["outcome"]).to_pylist()} == {"passed"}
    summary = world.driver._scheduler.counts()
    assert summary.rollouts == 3 * len(found)


async def test_an_interrupted_stream_begins_nothing_more_and_cancels_what_it_began(tmp_path: Path) -> None:
    world = stream(tmp_path)
    never = asyncio.Event()

    async def held() -> str:
        await never.wait()
        return "passed"

    world.attempt = lambda _spec, _host: held()
    async with driven(world):
        await until(lambda: len(world.hosts[0].running) == 4)
        world.driver.stop()
        world.driver.stop()
    assert {row["outcome"] for row in read_rollouts(tmp_path, ["outcome"]).to_pylist()} == {"cancelled"}
    assert len(read_rollouts(tmp_path, ["outcome"])) == 4


async def test_a_task_that_cannot_be_loaded_or_built_is_drawn_once(tmp_path: Path) -> None:
    world = stream(tmp_path, tasks=3, draws=12, broken=(broken_task("bad"),))
    bad = Evidence("RUN exit 7 returned 7", "builder", exit_code=7)
    world.build = lambda task, _host: (
        Prepared(error_class="image_build", evidence=bad) if task.name == "task1" else Prepared()
    )
    async with driven(world):
        pass
    rows = read_rollouts(tmp_path, ["task", "draw", "error_class"]).to_pylist()
    invalid = Counter((row["task"], row["error_class"]) for row in rows if row["error_class"])
    assert invalid.pop(("bad", "task_malformed")) == 2
    [(task, error_class)] = invalid
    assert (task, error_class) == ("task1", "image_build")
    assert len({(row["task"], row["draw"]) for row in rows}) == 12


async def test_an_image_that_takes_long_to_build_does_not_keep_other_tasks_waiting(tmp_path: Path) -> None:
    world = stream(tmp_path, tasks=3, samples=4, concurrency=4, draws=12)
    gate, prepare = asyncio.Event(), world.hosts[0].prepare

    async def slow(task: Task) -> Prepared:
        if task.name == "task0":
            await gate.wait()
        return await prepare(task)

    world.hosts[0].prepare = slow  # type: ignore[method-assign]
    async with driven(world):
        await until(lambda: len(groups(world)) >= 6)
        assert "task0" not in {task for task, _ in groups(world)}
        gate.set()
    assert len(whole(tmp_path, samples=4)) == 12


async def test_with_no_task_left_to_draw_the_stream_ends(tmp_path: Path) -> None:
    world = stream(tmp_path, tasks=1, samples=2)
    world.attempt = lambda _spec, _host: "reward_malformed"
    async with driven(world):
        pass
    assert "quarantined task0: reward_malformed" in world.text
    assert "no task is left to draw" in world.text
    assert not [
        row for row in read_rollouts(tmp_path, ["outcome"]).to_pylist() if row["outcome"] != "invalid"
    ]


async def test_what_lies_in_the_feed_and_is_no_progress_is_said_once_and_not_heeded(tmp_path: Path) -> None:
    world = stream(tmp_path, max_lag_groups=2)
    (tmp_path / "feed").mkdir()
    async with driven(world):
        await settled(world, 4)
        (tmp_path / "feed/trainer-0.json").write_text('{"batch": ')
        (tmp_path / "feed/weights.json").write_text("[1]")
        await until(lambda: "is not heeded" in world.text)
        (tmp_path / "feed/trainer-0.json").unlink()
        await settled(world, 4)
        assert world.text.count("is not heeded") <= 2
        (tmp_path / "feed/weights.json").write_text(json.dumps({"weights": {"nope": 1}}))
        await until(lambda: "no task is called 'nope'" in world.text)
        finish(tmp_path)
    assert [line["by"] for line in read_history(tmp_path)] == ["job"]


async def test_a_job_that_draws_each_task_once_has_no_weights_and_no_finish(tmp_path: Path) -> None:
    world = World(tmp_path)
    with pytest.raises(ValueError, match="only `mode: stream` has weights"):
        await world.driver.set_weights({"task0": 1})
    with pytest.raises(NoStream, match="draws each task once"):
        finish(tmp_path)
    await world.drive()


# Asked from outside


async def test_a_running_stream_is_asked_for_weights_and_for_its_end(tmp_path: Path) -> None:
    world = stream(tmp_path, tasks=2, max_lag_groups=4)
    said: list[str] = []
    async with job_control(tmp_path, said.append) as control, control.serving({}):
        control.steers(world.driver)
        async with driven(world):
            await settled(world, 8)
            assert await asyncio.to_thread(ask_weights, tmp_path, {"task0": 0}) == 4
            for weights, words in [({"tsk0": 1}, "did you mean 'task0'"), ({"task1": 0}, "every task would")]:
                with pytest.raises(InputError, match=words):
                    await asyncio.to_thread(ask_weights, tmp_path, weights)
            feed = Feed(tmp_path)
            groups_ = [await asyncio.to_thread(next, feed) for _ in range(6)]
            await asyncio.to_thread(stop_job, tmp_path)
    assert [group.task for group in groups_[4:]] == ["task1", "task1"]
    assert set(whole(tmp_path)) == {("a", task, draw) for task, draw in groups(world)}
    assert [line["weights"] for line in read_history(tmp_path)] == [{}, {"task0": 0.0}]
    assert [line for line in said if "asked to stop" in line]


async def test_a_job_that_is_asked_to_stop_ends_with_the_groups_that_it_began(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=5, samples=2, concurrency=2)
    gate = asyncio.Event()

    async def held() -> str:
        await gate.wait()
        return "passed"

    world.attempt = lambda _spec, _host: held()
    async with job_control(tmp_path, lambda _line: None) as control, control.serving({}):
        control.steers(world.driver)
        async with driven(world):
            await until(lambda: len(world.hosts[0].running) == 2)
            with pytest.raises(InputError, match="only `mode: stream` has weights"):
                await asyncio.to_thread(ask_weights, tmp_path, {"task0": 0})
            await asyncio.to_thread(stop_job, tmp_path)
            gate.set()
    assert whole(tmp_path) == {("a", "task0", 0): 2}
