"""vLLM itself, on the CPU, with the small model: exact tokens in and out, and how it fails.

One engine serves the whole folder; the test that kills it comes last.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_processes import NAME

from rollcage.rollout.agents.keys_parser import SCHEMA
from rollcage.rollout.agents.tool_table import TOOLS, call_structure
from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.engine import Parsed, TokenPolicy
from rollcage.rollout.policies.vllm import VllmEngine
from rollcage.rollout.policies.vllm_launch import root_cause, structured_outputs
from rollcage.rollout.policies.vllm_requests import translated
from rollcage.rollout.policies.vllm_update import how_to_update
from rollcage.rollout.policies.vllm_weights import how_to_load
from rollcage.rollout.trajectory import Message

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

CONTEXT = 512
"""The engine's (conftest.py)."""
GREEDY = Sampling(temperature=0.0, max_tokens=30)


ENDLESS = Sampling(max_tokens=10**9, extra={"ignore_eos": True})

BASH = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def parse(engine: VllmEngine, text: str, tools: list[Tool]) -> Parsed:
    assert engine._parser is not None
    ids = [*engine.tokenizer.encode(text, add_special_tokens=False), 2]
    return engine._parser.parse([5], ids, ended=True, tools=tools, session_id="conversation")


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
    sampling = ENDLESS
    made, _ = await session.complete(user("word " * (CONTEXT - 100)), sampling)
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
        assert error.value.error_class == "policy_refused"
    with pytest.raises(TypeError), translated("generate"):
        raise TypeError("of vLLM itself, which is nobody's parameter")


async def test_who_is_sent_the_tokenizer_does_not_load_vllm_for_it(engine: VllmEngine) -> None:
    assert b"vllm" not in pickle.dumps(engine.tokenizer)


async def test_on_a_cpu_one_worker_computes_in_the_engine_cores_own_process(engine: VllmEngine) -> None:
    assert engine._launched is not None
    assert [process.name()[: len(NAME)] for process in engine._launched.processes] == [NAME]


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
    assert (await engine.load()).unfinished == 0
    await engine.check()


async def test_an_answer_that_nobody_waits_for_is_ended_in_the_engine(engine: VllmEngine) -> None:
    async with requests(engine, 12, "left"):
        async with asyncio.timeout(60.0):
            while (load := await engine.load()).running < 8:
                await engine.check()
        assert (load.running, load.unfinished) == (8, 12)
        assert load.waiting >= 4  # and a check's own
        assert 0.0 < load.kv_use < 1.0
    assert (await engine.load()).running == 0
    await engine.generate([5], GREEDY, request_id="behind")
    assert engine._launched is not None
    said = engine._launched.recorder._last[0]  # the engine's own word: it knows of no other
    assert (said.num_running_reqs <= 1, said.num_waiting_reqs) == (True, 0)


async def test_health_does_not_queue_behind_the_requests_that_wait(engine: VllmEngine) -> None:
    async with requests(engine, 500, "many"):
        await engine.check(timeout_sec=60.0)
        assert (await engine.load()).unfinished == 500
    assert (await engine.load()).unfinished == 0


@asynccontextmanager
async def requests(engine: VllmEngine, count: int, name: str) -> AsyncIterator[None]:
    """So many requests that never end are under way; they are called off behind the block."""
    asked = [
        asyncio.ensure_future(engine.generate([5] * 20, ENDLESS, request_id=f"{name}-{n}"))
        for n in range(count)
    ]
    try:
        yield
    finally:
        for request in asked:
            request.cancel()
        await asyncio.wait(asked)


async def test_the_prefix_cache_shows_in_the_load(engine: VllmEngine) -> None:
    await engine.generate([5], GREEDY, request_id="first")  # what was aborted is counted by then
    before = await engine.load()
    for _ in range(2):
        made = await engine.generate(list(range(100, 300)), GREEDY, request_id="cached")
    after = await engine.load()
    assert made.cached_tokens > 0
    assert after.prefix_query_tokens - before.prefix_query_tokens == 400
    assert after.prefix_hit_tokens - before.prefix_hit_tokens == made.cached_tokens


async def test_an_answer_is_held_to_a_json_schema(engine: VllmEngine) -> None:
    session = TokenPolicy(engine).session("s", task="t", sample=0)
    schema = {
        "type": "object",
        "properties": {"warm": {"enum": ["yes", "no"]}},
        "required": ["warm"],
        "additionalProperties": False,
    }
    made, _ = await session.complete(user("Is it warm?"), GREEDY, structure=Structure(json_schema=schema))
    assert json.loads(made.text)["warm"] in ("yes", "no")
    assert made.structured
    free, _ = await session.complete(user("Is it?"), GREEDY)
    assert not free.structured


async def test_between_the_fields_of_a_structured_answer_there_is_no_free_white_space(
    engine: VllmEngine,
) -> None:
    closed = {"required": ["a", "b"], "additionalProperties": False}
    flags = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}, **closed}
    nested = {"type": "object", "properties": {"a": flags, "b": flags}, **closed}
    for seed in range(2):
        hot = Sampling(temperature=2.0, seed=seed, max_tokens=60)
        made = await engine.generate([5], hot, request_id="flags", structure=Structure(json_schema=nested))
        text = engine.tokenizer.decode(made.ids, skip_special_tokens=True)
        assert json.loads(text)
        assert len(text) - len("".join(text.split())) <= text.count(","), "at most one behind each comma"
    for structure, begins in (
        (Structure(json_schema=SCHEMA), '{"analysis":"'),
        (call_structure(TOOLS), '{"tool":"'),
    ):
        short = replace(hot, max_tokens=8)
        made = await engine.generate([5], short, request_id="agents", structure=structure)
        text = engine.tokenizer.decode(made.ids)
        assert text
        assert begins.startswith(text[: len(begins)])


async def test_the_form_of_structured_answers_is_an_engine_argument_like_others() -> None:
    assert structured_outputs({}).disable_any_whitespace
    spaced = structured_outputs({"disable_any_whitespace": False})
    assert (spaced.backend, spaced.disable_any_whitespace) == ("xgrammar", False)
    own = structured_outputs({"backend": "auto"})
    assert (own.backend, own.disable_any_whitespace) == ("auto", False)
    with pytest.raises(ValueError, match="structured_outputs_config: backen: Unexpected"):
        structured_outputs({"backen": "auto"})


async def test_a_structure_that_vllm_refuses_is_the_jobs_fault(engine: VllmEngine) -> None:
    for structure, form in (
        (Structure(grammar="root ::= ("), "grammar"),
        (Structure(json_schema={"type": "string", "pattern": "["}), "JSON schema"),
    ):
        with pytest.raises(ValueError, match=f"cannot hold an answer to this {form}"):
            await engine.generate([5], GREEDY, request_id="refused", structure=structure)
    await engine.check()


async def test_tool_calls_are_taken_out_of_an_answer(engine: VllmEngine) -> None:
    session = TokenPolicy(engine).session("s", task="t", sample=0)
    escaped = CALL.replace("\n", "\\n").replace('"', '\\"')
    structure = Structure(grammar=f'root ::= "Listing. {escaped}"')
    ids = set()
    for _ in range(2):
        made, _ = await session.complete(
            user("List the files."), replace(GREEDY, max_tokens=60), tools=[BASH], structure=structure
        )
        (call,) = made.tool_calls
        assert (call.name, json.loads(call.arguments)) == ("bash", {"command": "ls"})
        assert (made.text.strip(), made.finish_reason) == ("Listing.", "tool_calls")
        ids.add(call.id)
    assert len(ids) == 2


async def test_without_tools_the_text_of_a_call_is_text(engine: VllmEngine) -> None:
    made = parse(engine, CALL, [])
    assert (made.text, made.tool_calls) == (CALL, ())


@pytest.mark.parametrize("text", ["<tool_call>\n{'name': ", "<tool_call>[1, 2]</tool_call>", "<tool_call>"])
async def test_an_answer_that_the_parser_cannot_read_is_its_text(engine: VllmEngine, text: str) -> None:
    made = parse(engine, text, [BASH])
    assert (made.text, made.reasoning, made.tool_calls) == (text, "", ())


async def test_two_calls_of_one_conversation_never_have_one_id(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.tool_parsers.hermes_tool_parser import Hermes2ProToolParser

    found = Hermes2ProToolParser.extract_tool_calls

    def numbered(self: Any, text: str, request: Any) -> Any:  # as the model itself writes it for Kimi K2
        made = found(self, text, request)
        for call in made.tool_calls:
            call.id = f"functions.{call.function.name}:0"
        return made

    monkeypatch.setattr(Hermes2ProToolParser, "extract_tool_calls", numbered)
    first, second = (parse(engine, f"{CALL}\n{CALL}", [BASH]).tool_calls for _ in range(2))
    assert first[0].id == "functions.bash:0"
    assert len({call.id for call in (*first, *second)}) == 4
    await engine.release("conversation")
    assert parse(engine, CALL, [BASH]).tool_calls[0].id == "functions.bash:0"


async def test_a_parser_that_vllm_does_not_have_is_named_with_those_that_it_has() -> None:
    with pytest.raises(ValueError, match=r"no tool parser 'hermess'; it has .*hermes"):
        await VllmEngine("some-model", tool_parser="hermess").start()
    with pytest.raises(ValueError, match=r"no reasoning parser 'qwen'; it has .*qwen3"):
        await VllmEngine("some-model", reasoning_parser="qwen").start()


async def test_weights_whose_output_layer_is_the_embedding_need_another_engine_on_a_cpu(
    engine: VllmEngine,
) -> None:
    assert engine._launched is not None
    assert how_to_load(engine.model, Path(engine.model)) == "reload"
    how, why = how_to_update(engine._launched.llm, engine.model, None, Path(engine.model), None)
    assert (how, why) == ("restart", "tied embeddings cannot be loaded in place on a CPU")


async def test_a_model_that_is_not_there_is_said_to_be_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no .*nowhere"):
        await VllmEngine(str(tmp_path / "nowhere")).start()


async def test_of_an_engine_that_fails_in_a_process_of_its_own_the_reason_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    before = log.write_text("ValueError: of another engine\n")
    with log.open("a") as file:
        file.write("(Worker pid=1) ERROR 11-29 [x.py:9]     raise ValueError(\n")
        file.write("(Worker pid=1) ERROR 11-29 [x.py:9] ValueError: no room for the KV cache\n")
        file.write("(EngineCore pid=2) Exception: WorkerProc initialization failed due to ...\n")
    assert root_cause(log, before) == "ValueError: no room for the KV cache"
    assert root_cause(tmp_path / "nowhere", 0) == ""


async def test_a_full_disk_does_not_end_who_starts_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(PolicyError, match="did not start") as error:
        await VllmEngine(str(tmp_path)).start()
    assert error.value.error_class == "policy_unavailable"


async def test_an_engine_argument_that_vllm_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match="max_model_length"):
        await VllmEngine("some-model", {"max_model_length": 3}).start()


async def test_a_killed_engine_is_unavailable(engine: VllmEngine) -> None:
    waiting = asyncio.ensure_future(
        engine.generate([5] * 20, Sampling(max_tokens=400, extra={"ignore_eos": True}), request_id="cut")
    )
    await engine.check()
    assert engine._launched is not None
    [core] = engine._launched.processes
    core.kill()
    for request in (waiting, engine.generate([5], GREEDY, request_id="next"), engine.check()):
        with pytest.raises(PolicyError) as error:
            await request
        assert error.value.error_class == "policy_unavailable"
    await engine.close()
    assert not [p for p in psutil.Process().children(recursive=True) if "VLLM" in p.name()]
