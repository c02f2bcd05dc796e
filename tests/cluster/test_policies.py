"""Policy replicas in Ray: what becomes of a rollout's turn when a replica dies, hangs, drains or is full.

Engines are fake and answer at once (`fake_engine.py`), actors are real; `test_policies_vllm.py` has the real thing.
"""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import signal
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import psutil
import pytest
import pytest_asyncio
import ray
from fake_engine import DIE, DIE_ONCE, END_ACTOR, GATE, HANG, HANG_ONCE, OVERFLOW, REFUSE, WAIT, fake_engine
from local_ray import local_ray
from rich.console import Console
from serving import Serving, serving, until

from rollcage.cluster import policies
from rollcage.cluster.config import JobConfig
from rollcage.cluster.errors import CouldNotRun
from rollcage.cluster.job import _served_policies
from rollcage.cluster.progress import JobProgress
from rollcage.cluster.replica import PolicyReplica
from rollcage.cluster.replica_protocol import ReplicaSettings, ReplicaState
from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.leash import Leash

pytestmark = [pytest.mark.ray, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray(num_gpus=4):
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_replicas(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    async with serving(tmp_path_factory.mktemp("model")) as p:
        assert sorted(line.split(" after")[0] for line in p.said) == [
            "policy p: replica 1 of 2 ready",
            "policy p: replica 2 of 2 ready",
        ]
        yield p


@pytest_asyncio.fixture(loop_scope="module")
async def p(two_replicas: Serving) -> Serving:
    """Two replicas that are well."""
    return await two_replicas.fresh()


async def test_sessions_stay_where_they_are_and_all_processes_share_one_router(p: Serving) -> None:
    first = [await p.who(f"s{i}") for i in range(4)]
    other = pickle.loads(pickle.dumps(p.engine))  # as in another process
    more = [await p.who(f"t{i}", other) for i in range(4)]
    assert set(Counter(first + more).values()) == {4}
    assert [await p.who(f"s{i}") for i in range(4)] == first
    assert [await p.who(f"t{i}", other) for i in range(4)] == more
    left = first[0]
    for i, pid in enumerate(first):
        if pid == left:
            await p.engine.release(f"s{i}")
    await until(lambda: len(p.noted("released")) == 2)
    for i in range(2):
        await p.served._sync()
        assert await p.who(f"new{i}", other) == left
    for session in (*(f"t{i}" for i in range(4)), "new0", "new1"):
        await other.release(session)


async def test_a_turn_whose_engine_dies_is_answered_by_another_and_only_its_wait_is_seen(p: Serving) -> None:
    at = await p.who("s")
    beside = asyncio.ensure_future(p.turn("s", GATE))
    await until(lambda: f"{at} s {GATE}" in p.noted("turns"))
    made = await p.turn("s", DIE_ONCE)
    assert made.ids != [at]
    assert made.queue_seconds > 0.0
    assert await p.who("s") == made.ids[0], "the session has moved"
    (p.model / "gate").touch()
    assert (await beside).ids == made.ids
    await until(lambda: sorted(p.restarts) == [0, 1])
    assert any("is well again (the engine is dead)" in line for line in p.said)
    await p.until_ready()
    assert {await p.who(f"new{i}") for i in range(4)} == {at, made.ids[0]}


async def test_a_request_that_engines_die_of_does_not_take_others_with_it(p: Serving) -> None:
    """Ten turns are beside it on both engines; it is told from them, and they are all answered."""
    beside = [asyncio.ensure_future(p.turn(f"s{i}", GATE)) for i in range(10)]
    await until(lambda: len(p.noted("turns")) == 10)
    with pytest.raises(PolicyError, match="engines ended") as error:
        await p.turn("poison", DIE)
    assert error.value.error_class == "policy_error"
    (p.model / "gate").touch()
    assert len(await asyncio.gather(*beside)) == 10
    assert sum(p.restarts) <= 3


async def test_what_an_engine_says_of_the_request_itself_is_not_tried_again(p: Serving) -> None:
    for what, error_class in ((OVERFLOW, "context_overflow"), (REFUSE, "policy_error")):
        with pytest.raises(PolicyError) as error:
            await p.turn("s", what)
        assert error.value.error_class == error_class
    assert len(p.noted("turns")) == 2
    assert p.restarts == [0, 0]


async def test_a_hung_engine_is_noticed_and_replaced_and_its_turns_go_on(p: Serving) -> None:
    at = await p.who("s")
    beside = asyncio.ensure_future(p.turn("s", WAIT))
    await until(lambda: f"{at} s {WAIT}" in p.noted("turns"))
    made = await p.turn("s", HANG_ONCE)
    assert made.ids != [at]
    assert made.queue_seconds > 1.0
    beside.cancel()
    await until(lambda: sorted(p.restarts) == [0, 1])
    assert any("hangs: it generated no token within 1 s" in line for line in p.said)
    assert str(at) in p.noted("closed")


async def test_where_there_is_no_replica_for_too_long_the_turn_says_what_was_wrong(tmp_path: Path) -> None:
    async with serving(tmp_path, replicas=1, retry_sec=1.5) as p:
        await p.who("s")
        (tmp_path / "refuse").write_text("no memory left")
        with pytest.raises(PolicyError) as error:
            await p.turn("s", DIE)
        assert error.value.error_class == "policy_unavailable"
        assert "the engine is dead" in error.value.message
        with pytest.raises(
            PolicyError, match=r"replica 1: down \(policy_unavailable: no memory left\)"
        ) as error:
            await p.turn("t")
        (tmp_path / "refuse").unlink()
        await p.until_ready(1)
        assert await p.who("t")


async def test_a_turn_on_engines_that_hang_ends_as_a_timeout(tmp_path: Path) -> None:
    async with serving(tmp_path, replicas=1, retry_sec=0.2) as p:
        (tmp_path / "gate").touch()
        await p.who("s")
        hanging = asyncio.ensure_future(p.turn("s", HANG))
        await until(lambda: len(p.noted("turns")) == 2)
        (tmp_path / "refuse").write_text("no memory left")
        with pytest.raises(PolicyError) as error:
            await hanging
        assert error.value.error_class == "policy_timeout"


async def test_a_killed_actor_is_started_again_and_rollouts_go_on(tmp_path: Path) -> None:
    async with serving(tmp_path, replicas=1) as p:
        pid = await p.who("s")
        turns = [asyncio.ensure_future(p.turn(f"s{i}", GATE)) for i in range(3)]
        await until(lambda: len(p.noted("turns")) == 4)
        os.kill(pid, signal.SIGKILL)
        (tmp_path / "gate").touch()
        answers = await asyncio.gather(*turns)
        assert {answer.ids[0] for answer in answers} != {pid}
        assert all(answer.queue_seconds > 0.5 for answer in answers)
        assert p.served.status()[0]["restarts"] == 1


async def test_a_request_that_ends_actors_ends_too(p: Serving) -> None:
    with pytest.raises(PolicyError) as error:
        await p.turn("s", END_ACTOR)
    assert error.value.error_class == "policy_error"
    await p.until_ready()
    assert await p.who("t")


async def test_a_request_that_is_called_off_is_called_off_at_the_replica(p: Serving) -> None:
    waiting = asyncio.ensure_future(p.turn("s", WAIT))
    await until(lambda: len(p.noted("turns")) == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: len(p.noted("cancelled")) == 1)
    await until(lambda: p.served.status()[0]["running"] == 0)


async def test_the_routers_death_loses_no_rollout_and_no_count(p: Serving) -> None:
    at = {f"s{i}": await p.who(f"s{i}") for i in range(4)}
    running = asyncio.ensure_future(p.turn("s0", GATE))
    ray.kill(p.served._router, no_restart=False)
    answers = await asyncio.gather(*(p.who(f"new{i}") for i in range(4)))
    assert {session: await p.who(session) for session in at} == at
    (p.model / "gate").touch()
    assert (await running).ids == [at["s0"]]
    assert set(answers) <= set(at.values())
    await until(lambda: sum(replica["sessions"] for replica in p.served.status()) == 8)


async def test_a_router_that_hangs_is_started_again_and_no_turn_waits_for_ever(
    p: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = await p.who("s")
    monkeypatch.setattr(policies, "ANSWER_SEC", 1.0)
    router = next(q for q in psutil.Process().children(recursive=True) if "Router" in q.name())
    router.suspend()
    new = await p.turn("new")
    assert not router.is_running()
    assert new.queue_seconds > 0.0
    assert await p.who("s") == at
    assert any("router hangs" in line for line in p.said)


async def test_a_session_that_ends_without_a_place_is_not_counted(p: Serving) -> None:
    """Its engine has ended, or it was called off while it waited for a place."""
    await p.turn("s", DIE_ONCE)
    p.engine._places.clear()  # as when its engine is lost once more
    await p.engine.release("s")
    await until(lambda: sum(replica["sessions"] for replica in p.served.status()) == 0)


async def test_an_actor_that_ray_ends_leaves_nothing_of_its_engine(tmp_path: Path) -> None:
    """Ray kills an actor's children with it; what an engine has in temporary files they would leave."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    class Holder:
        def hold(self) -> int:
            self.leash = Leash(scratch=scratch)
            engine = ["sh", "-c", "sleep 600 & echo $!"]
            environment = {**os.environ, "TMPDIR": str(scratch)}
            with subprocess.Popen(engine, stdout=subprocess.PIPE, env=environment) as started:
                assert started.stdout is not None
                return int(started.stdout.readline())

    holder = ray.remote(Holder).options(num_cpus=0).remote()
    worker = await holder.hold.remote()
    ray.kill(holder)
    await until(lambda: not scratch.exists())
    assert not psutil.pid_exists(worker) or psutil.Process(worker).status() == psutil.STATUS_ZOMBIE


async def test_scaling_down_drains_and_scaling_up_starts_more(tmp_path: Path) -> None:
    async with serving(tmp_path) as p:
        stays, goes = await p.who_is(1), await p.who_is(2)
        at = {f"s{i}": await p.who(f"s{i}") for i in range(4)}
        there = next(session for session, pid in at.items() if pid == goes)
        running = asyncio.ensure_future(p.turn(there, GATE))
        await until(lambda: f"{goes} {there} {GATE}" in p.noted("turns"))
        scaling = asyncio.ensure_future(p.served.scale(1))
        await until(lambda: p.served._replicas[2]._draining)
        async with asyncio.timeout(20):
            while await p.who(there) != stays:  # the call that tells the replica is under way
                continue
        assert {await p.who(session) for session in ("new", *at)} == {stays}
        assert not scaling.done()
        (tmp_path / "gate").touch()
        assert (await running).ids == [goes], "what runs on a replica that drains ends there"
        await scaling
        assert [replica["replica"] for replica in p.served.status()] == [1]
        await p.served.scale(3)
        assert [replica["replica"] for replica in p.served.status()] == [1, 2, 3]
        assert len({await p.who(f"more{i}") for i in range(6)}) == 3
        with pytest.raises(ValueError, match="at least one"):
            await p.served.scale(0)


@pytest.fixture
def two_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobConfig:
    """A job whose policies `slow` and `other` are served by fake engines; that of `slow` loads as long as there is a
    file of that name."""
    monkeypatch.setattr(policies, "ServedPolicy", partial(policies.ServedPolicy, make_engine=fake_engine))
    for name in ("slow", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "slow" / "loads").touch()
    return JobConfig.model_validate(
        {
            "tasks": ["t"],
            "agents": [{"name": "bash", "label": name, "policy": name} for name in ("slow", "other")],
            "policies": {name: {"kind": "vllm", "model": str(tmp_path / name)} for name in ("slow", "other")},
        }
    )


@pytest.mark.parametrize("certificate", [None, Path("/nowhere/certificate.pem")])
async def test_a_replicas_own_metrics_are_scraped_as_the_exporter_is(certificate: Path | None) -> None:
    guard = {
        "host": "127.0.0.1",
        "user": "u",
        "password": "p",
        "certificate": certificate,
        "key": certificate,
    }
    status = await PolicyReplica(ReplicaSettings("m", metrics=guard)).status()
    if certificate is not None:
        assert (status.metrics, status.state) == ("", ReplicaState.NEW)
        assert "its metrics are not served" in status.said
        return
    with pytest.raises(HTTPError, match="401"):
        await asyncio.to_thread(urlopen, f"http://{status.metrics}/metrics")


async def test_two_policies_start_side_by_side(two_policies: JobConfig, tmp_path: Path) -> None:
    said: list[str] = []
    progress = JobProgress(1, Console(file=io.StringIO()))
    progress.say = said.append  # type: ignore[method-assign]

    async def serve() -> list[str]:
        async with _served_policies(two_policies, progress) as served:
            return list(served)

    serving_both = asyncio.create_task(serve())
    await until(lambda: any(line.startswith("policy other is ready") for line in said))
    (tmp_path / "slow" / "loads").unlink()
    assert await serving_both == ["slow", "other"]


async def test_a_policy_that_does_not_start_ends_the_start_of_the_others(
    two_policies: JobConfig, tmp_path: Path
) -> None:
    (tmp_path / "other" / "loads").touch()
    (tmp_path / "other" / "refuse").write_text("no room for it")
    starts = [tmp_path / name / "starts" for name in ("slow", "other")]

    async def serve() -> None:
        async with _served_policies(two_policies, JobProgress(1, Console(file=io.StringIO()))):
            pytest.fail("a policy is missing")

    serving_both = asyncio.create_task(serve())
    await until(lambda: all(file.exists() for file in starts))
    pids = [int(file.read_text().split()[0]) for file in starts]
    (tmp_path / "other" / "loads").unlink()
    with pytest.raises(CouldNotRun, match=r"policy other: replica 1 of 1: .*no room for it") as failed:
        await serving_both
    assert failed.value.setting == ("policies", "other", "model")
    await until(lambda: not any(map(psutil.pid_exists, pids)))
