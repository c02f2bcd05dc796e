"""vLLM itself, on the CPU, with the small model: exact tokens in and out, and how it fails.

One engine serves the whole file; the test that kills it comes last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import pytest_asyncio

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies import smollm2
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.engine import TokenPolicy
from rollcage.rollout.policies.vllm import VllmEngine
from rollcage.rollout.trajectory import Message

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

CONTEXT = 512
GREEDY = Sampling(temperature=0.0, max_tokens=30)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(str(smollm2.prepare()), {"max_model_len": CONTEXT, "max_num_seqs": 8})
    await engine.start()
    yield engine
    await engine.close()


def user(text: str) -> list[Message]:
    return [Message("user", text)]


async def test_it_answers_and_the_sequence_goes_on_with_what_it_sampled(engine: VllmEngine) -> None:
    session = TokenPolicy(engine, name="small").session("s", task="t", sample=0)
    first, at = await session.complete(user("What is the capital of France?"), GREEDY)
    assert first.text == "The capital of France is Paris."
    assert (first.finish_reason, first.policy, at) == ("stop", "small", 0)
    assert len(first.ids) == len(first.logprobs)
    assert all(value <= 0.0 for value in first.logprobs)
    assert first.generate_seconds > 0.0
    second, _ = await session.complete(user("And of Italy?"), GREEDY)
    assert "Rome" in second.text
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.ids)] == first.prompt_ids + first.ids
    (segment,) = session.segments
    assert segment.ids == second.prompt_ids + second.ids
    await session.close()


async def test_log_probabilities_are_those_of_the_same_weights_in_transformers(engine: VllmEngine) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    session = TokenPolicy(engine).session("s", task="t", sample=0)
    sampling = Sampling(temperature=1.0, seed=7, max_tokens=40)
    made, _ = await session.complete(user("Tell me about rivers."), sampling)
    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([made.prompt_ids + made.ids])).logits[0]
    at = torch.arange(len(made.prompt_ids) - 1, len(made.prompt_ids) + len(made.ids) - 1)
    fresh = torch.log_softmax(logits[at], dim=-1)[torch.arange(len(made.ids)), torch.tensor(made.ids)]
    # Both compute in float32, in another order: the difference is that of rounding over 30 layers.
    assert torch.max(torch.abs(fresh - torch.tensor(made.logprobs))) < 2e-3


async def test_a_seed_gives_the_same_rollout_again_but_not_the_same_turn(engine: VllmEngine) -> None:
    async def rollout(seed: int) -> list[list[int]]:
        session = TokenPolicy(engine).session("s", task="t", sample=0)
        sampling = Sampling(seed=seed, max_tokens=12)
        return [(await session.complete(user("Say a word."), sampling))[0].ids for _ in range(2)]

    assert await rollout(1) == await rollout(1)
    assert await rollout(1) != await rollout(2)


async def test_an_answer_that_fills_the_context_says_length_and_the_next_overflows(
    engine: VllmEngine,
) -> None:
    session = TokenPolicy(engine).session("s", task="t", sample=0)
    sampling = Sampling(max_tokens=4096, extra={"ignore_eos": True})
    made, _ = await session.complete(user("Count."), sampling)
    assert made.finish_reason == "length"
    assert len(made.prompt_ids) + len(made.ids) == CONTEXT
    before = list(session.segments[0].ids)
    with pytest.raises(PolicyError) as error:
        await session.complete(user("Go on."), sampling)
    assert error.value.error_class == "context_overflow"
    assert session.segments[0].ids == before


async def test_the_engines_own_word_on_a_long_prompt_is_an_overflow_too(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "max_model_len", 1 << 20)
    for length in (CONTEXT, CONTEXT + 1):
        with pytest.raises(PolicyError) as error:
            await engine.generate([5] * length, GREEDY, request_id=f"long-{length}")
        assert error.value.error_class == "context_overflow"
        assert error.value.evidence.said_by == "policy server"


async def test_sampling_that_vllm_refuses_is_not_called_an_overflow(engine: VllmEngine) -> None:
    for wrong in (Sampling(temperature=-1.0), Sampling(extra={"no_such_field": 1})):
        with pytest.raises(PolicyError) as error:
            await engine.generate([5], wrong, request_id="wrong")
        assert error.value.error_class == "policy_error"


async def test_stop_strings_end_an_answer_and_stay_in_it(engine: VllmEngine) -> None:
    session = TokenPolicy(engine).session("s", task="t", sample=0)
    made, _ = await session.complete(
        user("What is the capital of France?"), replace(GREEDY, stop=(" France",))
    )
    assert made.text == "The capital of France"
    assert made.finish_reason == "stop"


async def test_an_answer_past_its_time_is_a_timeout_and_the_engine_goes_on(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_timeout_sec", 0.2)
    with pytest.raises(PolicyError) as error:
        await engine.generate(
            [5] * 20, Sampling(max_tokens=400, extra={"ignore_eos": True}), request_id="slow"
        )
    assert error.value.error_class == "policy_timeout"
    monkeypatch.undo()
    await engine.check()


async def test_an_engine_argument_that_vllm_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="max_model_length"):
        await VllmEngine("some-model", {"max_model_length": 3}).start()


async def test_a_killed_engine_is_unavailable(engine: VllmEngine) -> None:
    def core() -> Any:
        return next(p for p in psutil.Process().children(recursive=True) if "EngineCore" in p.name())

    waiting = asyncio.ensure_future(
        engine.generate([5] * 20, Sampling(max_tokens=400, extra={"ignore_eos": True}), request_id="cut")
    )
    await engine.check()
    core().kill()
    for request in (waiting, engine.generate([5], GREEDY, request_id="next"), engine.check()):
        with pytest.raises(PolicyError) as error:
            await request
        assert error.value.error_class == "policy_unavailable"
    await engine.close()
    assert not [p for p in psutil.Process().children(recursive=True) if "VLLM" in p.name()]
