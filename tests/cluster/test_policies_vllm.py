"""The real thing: vLLM replicas of a tiny model whose engine hangs, or whose actor is killed, under rollouts."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from local_ray import local_ray
from serving import until
from tiny_models import tiny_model

from rollcage.cluster.config_policies import VllmPolicyConfig
from rollcage.cluster.errors import InputError
from rollcage.cluster.policies import ServedPolicy
from rollcage.cluster.replica import PolicyReplica
from rollcage.rollout.policies.base import Completion, Sampling
from rollcage.rollout.policies.engine import Generation
from rollcage.rollout.trajectory import Message

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

TOKENS = 1500
LONG = Sampling(temperature=1.0, max_tokens=TOKENS, extra={"ignore_eos": True})
"""A second or two of the tiny model."""

GREEDY = Sampling(temperature=0.0, max_tokens=4)
PROMPT = list(range(1000, 1010))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with local_ray():
        yield


def processes(replica: PolicyReplica) -> tuple[int, list[int], int]:
    """In its actor: its process, its engine's, and the turns that are on the engine."""
    life: Any = replica._life
    return os.getpid(), [process.pid for process in life.engine._launched.processes], life.running


class Replica:
    """A replica, as its own actor knows it: what processes are called and whose children they are may change."""

    def __init__(self, served: ServedPolicy, number: int) -> None:
        self._served = served
        self._number = number

    async def look(self) -> tuple[psutil.Process, list[psutil.Process], int]:
        """Its actor's process, its engine's processes, and the turns that are on the engine."""
        actor, engine, running = await self._actor.__ray_call__.remote(processes)
        return psutil.Process(actor), [psutil.Process(pid) for pid in engine], running

    async def at_work(self) -> tuple[psutil.Process, list[psutil.Process]]:
        """The same once a turn is on the engine."""
        async with asyncio.timeout(200):
            while True:
                actor, engine, running = await self.look()
                if running:
                    return actor, engine
                await asyncio.sleep(0.01)

    async def generate(self, name: str) -> Generation:
        """An answer of this very replica."""
        made: Generation = await self._actor.generate.remote(PROMPT, GREEDY, name, "")
        return made

    @property
    def _actor(self) -> Any:
        return self._served._replicas[self._number].actor


def below(process: psutil.Process) -> set[psutil.Process]:
    """It, and what it has started."""
    return {process, *process.children(recursive=True)}


def below_actors() -> set[psutil.Process]:
    """The replicas' actors and what they have started, as it can be seen from outside: an engine that loads, too."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if PolicyReplica.__name__ in process.name():
                found |= below(process)
    return found


async def test_rollouts_go_on_when_an_engine_hangs_or_an_actor_is_killed_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    """An engine that is killed is `tests/faults/test_policies.py`'s."""
    said: list[str] = []
    model, other = (str(tiny_model(tmp_path / name, seed)) for seed, name in enumerate(("model", "other")))
    config = VllmPolicyConfig(
        kind="vllm",
        model=model,
        replicas=2,
        version=7,
        health_sec=1.0,
        engine_args={"max_model_len": 4096, "max_num_seqs": 8},
    )
    served = ServedPolicy("tiny", config, model, say=said.append, check_sec=10.0)
    await served.start()
    first, second = Replica(served, 1), Replica(served, 2)
    seen: set[psutil.Process] = set()
    rollouts: list[asyncio.Future[tuple[Completion, Completion]]] = []
    try:

        async def rollout(name: str) -> tuple[Completion, Completion]:
            session = served.policy.session(name, task="t", sample=0)
            long, _ = await session.complete([Message("user", "Count.")], LONG)
            short, at = await session.complete([Message("user", "Go on.")], GREEDY)
            await session.close()
            assert at == 0, "one segment, whichever engine made it"
            assert session.segments[0].ids == short.prompt_ids + short.ids
            assert short.prompt_ids[: len(long.prompt_ids) + len(long.ids)] == long.prompt_ids + long.ids
            return long, short

        async def begin(name: str) -> None:
            await served._sync()  # the router knows that both are well
            rollouts[:] = [asyncio.ensure_future(rollout(f"{name}-{i}")) for i in range(4)]

        async def end() -> None:
            for long, short in await asyncio.gather(*rollouts):
                assert len(long.ids) == len(long.logprobs) == TOKENS
                assert (long.version, long.version_end, short.version) == (8, 8, 8)

        assert await served.update(other, 8) == {1: "reload", 2: "reload"}
        reloaded = await first.generate("reloaded")
        await begin("hangs")
        (_, hung), _ = await asyncio.gather(first.at_work(), second.at_work())
        seen |= {*hung}
        for process in hung:
            process.send_signal(signal.SIGSTOP)
        await end()
        await until(lambda: served.status()[0]["restarts"] > 0, 200)
        assert any("hangs" in line for line in said), said
        assert not [process for process in hung if process.is_running()]
        await until(lambda: [replica["state"] for replica in served.status()] == ["ready"] * 2, 200)
        restarted = await first.generate("restarted")
        assert (restarted.version, restarted.ids) == (8, reloaded.ids)
        assert restarted.logprobs == pytest.approx(reloaded.logprobs, abs=1e-4)

        await begin("killed")
        (lives, _), (killed, ends) = await asyncio.gather(first.at_work(), second.at_work())
        seen |= {lives, *ends}
        killed.kill()
        _, alive = psutil.wait_procs(ends, timeout=60)
        assert not alive, "the engine outlived its actor"
        await end()
        await until(lambda: bool(below_actors() - below(lives)), 200)  # the second one is about to load
        assert (await first.generate("last")).version == 8
        _, last, _ = await first.look()
        assert last
        seen |= {lives, *last, *below_actors()}
    finally:
        for turn in rollouts:
            turn.cancel()
        await served.close()
    _, alive = psutil.wait_procs(seen, timeout=60)
    assert not alive


async def test_an_unknown_engine_argument_is_the_users_error() -> None:
    config = VllmPolicyConfig(kind="vllm", model="some-model", engine_args={"max_model_length": 5})
    with pytest.raises(InputError, match=r"policies\.p: replica 1 of 1: .*max_model_length"):
        await ServedPolicy("p", config, "some-model").start()
