"""Policy replicas in Ray: routing, and what becomes of a rollout's turn when one dies.

Routing is tested on actors that answer at once; the last test is the real thing, a killed vLLM and a killed
actor.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
import ray

from rollcage.cluster.policies import (
    PolicyReplica,
    ReplicaInfo,
    Replicas,
    replica_policy,
    start_replicas,
    stop_replicas,
)
from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies import smollm2
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.engine import Generation
from rollcage.rollout.policies.scripted import ByteTokenizer
from rollcage.rollout.trajectory import Message

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False)
    yield
    ray.shutdown()


class AnswersAtOnce:
    """An actor with `PolicyReplica`'s calls: the process's id is its one token."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()
        self.well = asyncio.Event()
        self.well.set()

    async def info(self) -> ReplicaInfo:
        await self.well.wait()
        return ReplicaInfo(ByteTokenizer(), 4096)

    async def generate(self, prompt_ids: Any, sampling: Sampling, request_id: str, session_id: str) -> Any:
        if sampling.max_tokens == 2:
            self.well.clear()
            raise PolicyError("policy_unavailable", "vLLM's engine is dead")
        if sampling.max_tokens == 3:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        return Generation([os.getpid()], [0.0], "stop", 0.0, 0.0)

    async def was_cancelled(self) -> bool:
        return await self.cancelled.wait()

    async def mend(self) -> None:
        self.well.set()


@pytest_asyncio.fixture
async def actors() -> AsyncIterator[list[Any]]:
    made = [
        ray.remote(AnswersAtOnce).options(num_cpus=0, max_restarts=-1, max_concurrency=99).remote()
        for _ in range(2)
    ]
    yield made
    for actor in made:
        ray.kill(actor, no_restart=True)


async def replicas(actors: list[Any]) -> Replicas:
    return Replicas(actors, await actors[0].info.remote(), request_timeout_sec=60.0)


async def who(engine: Replicas, session: str, max_tokens: int = 1) -> int:
    sampling = Sampling(max_tokens=max_tokens)
    made = await engine.generate([1], sampling, request_id=f"{session}-r", session_id=session)
    return made.ids[0]


async def test_sessions_stay_with_their_replica_and_new_ones_go_where_there_are_fewest(
    actors: list[Any],
) -> None:
    engine = await replicas(actors)
    first = [await who(engine, f"s{i}") for i in range(6)]
    assert sorted(first.count(pid) for pid in set(first)) == [3, 3]
    assert [await who(engine, f"s{i}") for i in range(6)] == first
    for i, pid in enumerate(first):
        if pid == first[0]:
            await engine.release(f"s{i}")
    assert [await who(engine, f"new{i}") for i in range(3)] == [first[0]] * 3


async def test_each_process_that_is_given_the_replicas_routes_on_its_own(actors: list[Any]) -> None:
    engine = await replicas(actors)
    there = await who(engine, "s")
    copy = pickle.loads(pickle.dumps(engine))
    assert await who(copy, "other") == there
    assert copy.max_model_len == 4096


async def test_a_dead_engine_is_unavailable_and_left_out_until_it_is_well(actors: list[Any]) -> None:
    engine = await replicas(actors)
    dead = await who(engine, "s")
    with pytest.raises(PolicyError) as error:
        await who(engine, "s", max_tokens=2)
    assert type(error.value) is PolicyError
    assert error.value.error_class == "policy_unavailable"
    assert error.value.message == "vLLM's engine is dead"
    await engine.release("s")
    others = {await who(engine, f"beside{i}") for i in range(3)}
    assert len(others) == 1
    assert dead not in others
    await asyncio.gather(*(actor.mend.remote() for actor in actors))
    async with asyncio.timeout(20):
        await asyncio.gather(*engine._recovering.values())
    assert await who(engine, "well") == dead


async def test_a_killed_actor_is_unavailable_and_rollouts_go_on_elsewhere(actors: list[Any]) -> None:
    engine = await replicas(actors)
    pid = await who(engine, "s")
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=10)
    waiting = [asyncio.ensure_future(who(engine, "s")) for _ in range(3)]
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    for answer in answers:  # refused while it was down, or answered by the one that Ray started in its place
        assert isinstance(answer, int) or getattr(answer, "error_class", "") == "policy_unavailable"
    await engine.release("s")
    assert await who(engine, "next") != pid


async def test_a_request_that_is_called_off_is_called_off_at_the_replica(actors: list[Any]) -> None:
    engine = await replicas(actors[:1])
    pid = await who(engine, "s")
    waiting = asyncio.ensure_future(who(engine, "s", max_tokens=3))
    assert await who(engine, "s") == pid  # it has been sent: the actor takes calls in their order
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    async with asyncio.timeout(20):
        assert await actors[0].was_cancelled.remote()


async def test_an_unknown_engine_argument_is_the_users_error() -> None:
    actors = start_replicas("some-model", {"max_model_length": 5})
    try:
        with pytest.raises(ValueError, match="max_model_length"):
            await replica_policy(actors)
    finally:
        await stop_replicas(actors)


def processes() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "VLLM" in p.name()]


@pytest.mark.vllm
async def test_vllm_is_replaced_when_its_engine_or_its_actor_is_killed() -> None:
    actors = start_replicas(str(smollm2.prepare()), {"max_model_len": 512, "max_num_seqs": 8})
    try:
        policy = await replica_policy(actors, name="small")

        async def ask(session_id: str, max_tokens: int = 12) -> str:
            session = policy.session(session_id, task="t", sample=0)
            sampling = Sampling(temperature=0.0, max_tokens=max_tokens, extra={"ignore_eos": max_tokens > 12})
            try:
                completion, _ = await session.complete(
                    [Message("user", "What is the capital of France?")], sampling
                )
                return completion.text
            finally:
                await session.close()

        assert await ask("first") == "The capital of France is Paris."

        waiting = asyncio.ensure_future(ask("cut", 400))
        await ask("beside")  # the engine is at work on the long answer too
        next(p for p in processes() if "EngineCore" in p.name()).kill()
        with pytest.raises(PolicyError) as error:
            await waiting
        assert error.value.error_class == "policy_unavailable"
        assert await ask("after the engine") == "The capital of France is Paris."

        engines = processes()
        actor = engines[0].parents()
        pid = next(p.pid for p in actor if PolicyReplica.__name__ in " ".join([p.name(), *p.cmdline()]))
        os.kill(pid, signal.SIGKILL)
        _, alive = psutil.wait_procs(engines, timeout=20)
        assert not alive, "the engine's processes outlived their actor"
        assert await ask("after the actor") == "The capital of France is Paris."
    finally:
        await stop_replicas(actors)
    _, alive = psutil.wait_procs(processes(), timeout=20)
    assert not alive
