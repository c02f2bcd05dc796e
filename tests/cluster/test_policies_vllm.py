"""The real thing: vLLM replicas of a tiny model whose engine, or whose actor, is killed or stopped under rollouts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from serving import until

from rollcage.cluster.config_policies import VllmPolicyConfig
from rollcage.cluster.errors import InputError
from rollcage.cluster.policies import ServedPolicy
from rollcage.cluster.replica import PolicyReplica
from rollcage.rollout.policies import smollm2
from rollcage.rollout.policies.base import Completion, Sampling
from rollcage.rollout.trajectory import Message

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(600)]

LONG = Sampling(temperature=1.0, max_tokens=3000, extra={"ignore_eos": True})
"""Some seconds of the tiny model."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=128 << 20,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two random Llamas of two layers with the small model's tokenizer."""
    return [tiny_model(tmp_path_factory.mktemp("tiny"), seed) for seed in (1, 2)]


def tiny_model(folder: Path, seed: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small = smollm2.prepare()
    torch.manual_seed(seed)
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=False,  # tied ones are not loaded in place on a CPU
        **tokens,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(small / name, folder / name)
    return folder


def engines() -> list[psutil.Process]:
    """Those in actors: other tests of this process may hold one of their own."""
    found = [p for p in psutil.Process().children(recursive=True) if "VLLM" in p.name()]
    return [p for p in found if any(PolicyReplica.__name__ in _named(parent) for parent in p.parents())]


def _named(process: psutil.Process) -> str:
    return " ".join([process.name(), *process.cmdline()])


def actor_of(engine: psutil.Process) -> psutil.Process:
    return next(p for p in engine.parents() if PolicyReplica.__name__ in _named(p))


async def test_rollouts_go_on_when_an_engine_is_killed_or_stopped_and_nothing_is_left(
    tiny_models: list[Path],
) -> None:
    said: list[str] = []
    model, other = map(str, tiny_models)
    config = VllmPolicyConfig(
        kind="vllm",
        model=model,
        replicas=2,
        version=7,
        health_sec=3.0,
        engine_args={"max_model_len": 4096, "max_num_seqs": 8},
    )
    served = ServedPolicy("tiny", config, model, say=said.append, check_sec=10.0)
    await served.start()
    try:

        async def rollout(name: str) -> tuple[Completion, Completion]:
            session = served.policy.session(name, task="t", sample=0)
            first, _ = await session.complete([Message("user", "Count.")], LONG)
            second, at = await session.complete([Message("user", "Go on.")], Sampling(max_tokens=4))
            await session.close()
            assert at == 0, "one segment, whichever engine made it"
            assert session.segments[0].ids == second.prompt_ids + second.ids
            assert second.prompt_ids[: len(first.prompt_ids) + len(first.ids)] == first.prompt_ids + first.ids
            return first, second

        async def rollouts_under(signum: signal.Signals) -> None:
            await served._sync()  # the router knows that both are well
            rollouts = [asyncio.ensure_future(rollout(f"{signum.name}-{i}")) for i in range(4)]
            await until(lambda: all(replica["running"] for replica in served.status()), 200)
            engine = next(p for p in engines() if "EngineCore" in p.name())
            engine.send_signal(signum)
            for first, second in await asyncio.gather(*rollouts):
                assert len(first.ids) == len(first.logprobs) == 3000
                assert (first.version, first.version_end, second.version) == (8, 8, 8)
            assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
            await until(lambda: [replica["state"] for replica in served.status()] == ["ready"] * 2, 200)

        async def answer(name: str) -> Completion:
            session = served.policy.session(name, task="t", sample=0)
            greedy = Sampling(temperature=0.0, max_tokens=4)
            made, _ = await session.complete([Message("user", "Count.")], greedy)
            await session.close()
            return made

        assert await served.update(other, 8) == {1: "reload", 2: "reload"}
        reloaded = await answer("reloaded")
        await rollouts_under(signal.SIGKILL)
        await rollouts_under(signal.SIGSTOP)
        assert sum(replica["restarts"] for replica in served.status()) == 2
        assert any("hangs" in line for line in said)
        await served._sync()
        for restarted in await asyncio.gather(*(answer(f"restarted-{i}") for i in range(4))):
            assert (restarted.version, restarted.ids) == (8, reloaded.ids)
            assert restarted.logprobs == pytest.approx(reloaded.logprobs, abs=1e-4)

        engine = next(p for p in engines() if "EngineCore" in p.name())
        os.kill(actor_of(engine).pid, signal.SIGKILL)
        _, alive = psutil.wait_procs([engine], timeout=20)
        assert not alive, "the engine outlived its actor"
        assert (await answer("after")).version == 8
    finally:
        last = engines()  # from now on: once its actor is gone, an engine is nobody's child
        await served.close()
    assert last
    _, alive = psutil.wait_procs(last, timeout=20)
    assert not alive


async def test_an_unknown_engine_argument_is_the_users_error() -> None:
    config = VllmPolicyConfig(kind="vllm", model="some-model", engine_args={"max_model_length": 5})
    with pytest.raises(InputError, match=r"policies\.p: replica 1 of 1: .*max_model_length"):
        await ServedPolicy("p", config, "some-model").start()
