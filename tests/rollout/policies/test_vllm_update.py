"""New weights in an engine that runs, and engines that hang or fail. Two engines in all, with tiny models.

The tests follow each other: each leaves the weights that the next one begins with.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies import vllm
from rollcage.rollout.policies.base import Sampling, Structure
from rollcage.rollout.policies.engine import Generation
from rollcage.rollout.policies.vllm import VllmEngine
from rollcage.rollout.scratch import VLLM

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PROMPT = list(range(1000, 1020))
LONG = Sampling(max_tokens=10**9, seed=1, extra={"ignore_eos": True})
GREEDY = Sampling(temperature=0.0, max_tokens=12, extra={"ignore_eos": True})


@dataclass
class Served:
    """The engine, its models, and what was seen of them."""

    engine: VllmEngine
    first: Path
    second: Path
    adapters: tuple[Path, Path]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tiny_model: Callable[..., Path], tiny_adapter: Callable[..., Path]) -> AsyncIterator[Served]:
    first, second = tiny_model("first", seed=1), tiny_model("second", seed=2)
    adapters = tiny_adapter("one", seed=1), tiny_adapter("two", seed=2)
    engine = VllmEngine(
        str(first),
        {"max_model_len": 256, "max_num_seqs": 4},
        lora=("adapter", str(adapters[0])),
        reasoning_parser="qwen3",
        request_timeout_sec=120.0,
    )
    await engine.start()
    yield Served(engine, first, second, adapters)
    await engine.close()


async def probe(engine: VllmEngine, model: Path, adapter: Path) -> None:
    """The engine's log-probabilities are those of a forward pass with the adapter merged into the model."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    made = await engine.generate(PROMPT, GREEDY, request_id="probe")
    merged = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    low_rank = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for index, layer in enumerate(merged.model.layers):
            at = f"base_model.model.model.layers.{index}.self_attn.q_proj"
            layer.self_attn.q_proj.weight += low_rank[f"{at}.lora_B.weight"] @ low_rank[f"{at}.lora_A.weight"]
        logits = merged(torch.tensor([PROMPT + made.ids])).logits[0, len(PROMPT) - 1 : -1]
    fresh = torch.log_softmax(logits, dim=-1)[torch.arange(len(made.ids)), torch.tensor(made.ids)]
    assert made.logprobs == pytest.approx(fresh.tolist(), abs=1e-4)


def ask(engine: VllmEngine, requests: int) -> list[asyncio.Task[Generation]]:
    return [
        asyncio.create_task(engine.generate(PROMPT, LONG, request_id=f"long-{n}")) for n in range(requests)
    ]


async def test_thinking_is_free_before_a_structured_answer(served: Served) -> None:
    engine = served.engine
    schema = Structure(json_schema={"type": "object", "properties": {}, "additionalProperties": False})
    thought = engine.tokenizer.encode("<think>\n\n</think>\n\n", add_special_tokens=False)
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=24)
    thinking = await engine.generate(PROMPT, sampling, request_id="thinking", structure=schema)
    assert thinking.parsed is not None
    assert thinking.parsed.reasoning
    assert "{" not in thinking.parsed.reasoning[:1]
    answering = await engine.generate([*PROMPT, *thought], sampling, request_id="answering", structure=schema)
    assert engine.tokenizer.decode(answering.ids[:1], skip_special_tokens=True).lstrip()[:1] in ("{", "")
    said = engine.tokenizer.decode(answering.ids, skip_special_tokens=True)
    assert not said.strip("{} \n\r\t")
    assert "}" not in said or json.loads(said) == {}


async def test_requests_under_way_finish_on_the_weights_that_they_began_with(served: Served) -> None:
    engine, (one, _) = served.engine, served.adapters
    await probe(engine, served.first, one)
    asked = ask(engine, 6)  # 4 run, 2 wait
    await engine.check()
    assert await engine.update_weights(str(served.second), 1, in_flight="finish") == "reload"
    assert (engine.version, engine.model) == (1, str(served.second))
    for made in await asyncio.gather(*asked):
        assert (made.version, made.version_end, made.finish_reason) == (0, 0, "length")
    await probe(engine, served.second, one)
    with pytest.raises(AssertionError):  # or the probe would see no difference
        await probe(engine, served.first, one)


async def test_requests_under_way_continue_with_the_new_weights(served: Served) -> None:
    engine, (one, _) = served.engine, served.adapters
    asked = ask(engine, 6)
    await engine.check()
    assert await engine.update_weights(str(served.first), 2, in_flight="continue") == "reload"
    late = await engine.generate(PROMPT, GREEDY, request_id="late")
    made = await asyncio.gather(*asked)
    assert (made[0].version, made[0].version_end) == (1, 2)
    assert {(answer.version, answer.version_end) for answer in made} <= {(1, 2), (2, 2)}
    assert all(len(answer.ids) == 256 - len(PROMPT) for answer in made)
    assert late.version == 2
    await probe(engine, served.first, one)


async def test_an_adapter_takes_the_place_of_another(served: Served) -> None:
    engine, (_, two) = served.engine, served.adapters
    with pytest.raises(AssertionError):
        await probe(engine, served.first, two)
    asked = ask(engine, 4)
    await engine.check()
    assert await engine.update_weights(str(two), 3, in_flight="continue") == "lora"
    assert engine.lora == ("adapter", str(two))
    for made in await asyncio.gather(*asked):
        assert (made.version_end, len(made.ids)) == (3, 256 - len(PROMPT))
    await probe(engine, served.first, two)


async def test_weights_that_cannot_be_loaded_leave_everything_as_it_was(
    served: Served, tiny_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    engine = served.engine
    unknown = tiny_adapter("unknown", seed=1, module="no_such_proj")
    for path, said in (
        (tmp_path / "gone", "no such directory"),
        (tmp_path, r"no config\.json"),
        (tiny_adapter("narrow", seed=1, hidden=32), "for another model"),
        (unknown, "vLLM does not take the LoRA adapter"),  # said by vLLM, when all was frozen
    ):
        with pytest.raises(ValueError, match=said):
            await engine.update_weights(str(path), 9, in_flight="continue")
    assert engine.version == 3
    await probe(engine, served.first, served.adapters[1])


async def test_a_hung_engine_is_noticed_and_replaced_by_one_with_the_new_weights(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served.engine
    other = Path(shutil.copytree(served.second, tmp_path / "other"))
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_start|>", "<|im_begin|>"))
    assert engine._launched is not None
    hung, scratch = engine._launched.processes, engine._launched._scratch[0]
    assert scratch.name.startswith(VLLM)
    os.kill(hung[0].pid, signal.SIGSTOP)
    monkeypatch.setattr(engine, "_timeout_sec", 1.0)
    with pytest.raises(PolicyError) as error:
        await engine.generate(PROMPT, GREEDY, request_id="hung")
    assert error.value.error_class == "policy_timeout"
    with pytest.raises(PolicyError) as error:
        await engine.check(timeout_sec=1.0)
    assert error.value.error_class == "policy_timeout"
    monkeypatch.undo()
    how = await engine.update_weights(str(other), 5, in_flight="continue")
    assert how.startswith("restart: the weights have other tensors, another configuration")
    assert not [process for process in hung if process.is_running()]
    assert not scratch.exists()
    await probe(engine, served.second, served.adapters[1])
    assert (await engine.load()).version == 5


async def test_an_engine_whose_update_failed_on_the_way_serves_nothing(
    served: Served, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served.engine
    assert engine._launched is not None
    processes = engine._launched.processes
    monkeypatch.setattr(vllm, "how_to_update", lambda *_: ("reload", ""))
    wide = tiny_model("wide", seed=3, hidden=96)
    (under_way,) = ask(engine, 1)
    await engine.check()
    with pytest.raises(PolicyError, match="half loaded") as error:
        await engine.update_weights(str(wide), 6, in_flight="continue")
    assert error.value.error_class == "policy_unavailable"
    for request in (
        under_way,
        engine.generate(PROMPT, GREEDY, request_id="next"),
        engine.check(),
        engine.load(),
    ):
        with pytest.raises(PolicyError) as error:
            await request
        assert error.value.error_class == "policy_unavailable"
    assert not [process for process in processes if process.is_running()]
