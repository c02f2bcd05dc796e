"""vLLM's own server on the CPU, as a policy: exact tokens by ids and by messages, and its own ways to fail.

One server serves this folder's tests; the test that kills it comes last.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies import retry
from rollcage.rollout.policies.base import Completion, Sampling, Structure, Tool
from rollcage.rollout.policies.openai import openai_policy
from rollcage.rollout.policies.openai_wire import ServerSettings
from rollcage.rollout.tokens import load_tokenizer
from rollcage.rollout.trajectory import Message, Segment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GREEDY = Sampling(temperature=0.0, max_tokens=12)
ENDLESS = Sampling(temperature=1.0, seed=1, max_tokens=1900, extra={"ignore_eos": True})
TOOL = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})


def settings_of(server: Any, **changed: Any) -> ServerSettings:
    given = {"base_url": f"{server.url}/v1", "model": server.name, "tokens": "required", **changed}
    return ServerSettings(**given)


async def opened(server: Any, **changed: Any) -> Any:
    """A session, on the policy as it comes out of a pickle."""
    policy = pickle.loads(pickle.dumps(await openai_policy(settings_of(server, **changed), name="small")))
    return policy.session("attempt-1", task="t", sample=0)


def check_turn(made: Completion) -> None:
    assert made.ids
    assert len(made.ids) == len(made.logprobs)
    assert all(-100 < value <= 0 for value in made.logprobs)
    assert made.policy == "small"
    assert made.generate_seconds > 0


async def two_turns(session: Any) -> tuple[Completion, Completion, list[Segment]]:
    first, at = await session.complete([Message("user", "What is the capital of France?")], GREEDY)
    assert at == 0
    second, _ = await session.complete([Message("user", "And of Italy?")], GREEDY)
    check_turn(first)
    check_turn(second)
    assert "Paris" in first.text
    assert "Rome" in second.text
    return first, second, session.segments


async def test_with_ids_two_turns_are_one_segment_of_the_tokens_that_the_model_sampled(
    vllm_server: Any,
) -> None:
    session = await opened(vllm_server, tokenizer=str(vllm_server.model), version=4)
    first, second, segments = await two_turns(session)
    (segment,) = segments
    assert segment.ids == second.prompt_ids + second.ids
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.ids)] == first.prompt_ids + first.ids
    tokenizer = load_tokenizer(vllm_server.model)
    assert tokenizer.decode(first.ids, skip_special_tokens=True) == first.text
    assert second.version == 4
    assert second.cached_tokens > 0


async def test_with_messages_the_record_is_what_the_server_saw(vllm_server: Any) -> None:
    session = await opened(vllm_server)
    first, second, segments = await two_turns(session)
    tokenizer = load_tokenizer(vllm_server.model)
    asked: list[dict[str, str]] = [{"role": "user", "content": "What is the capital of France?"}]
    rendered = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert first.prompt_ids == tokenizer.encode(rendered, add_special_tokens=False)
    assert (first.prompt_tokens, first.completion_tokens) == (len(first.prompt_ids), len(first.ids))
    assert second.cached_tokens > 0
    assert session.max_model_len == vllm_server.max_model_len
    (segment,) = segments
    assert segment.ids == second.prompt_ids + second.ids
    assert sum(segment.loss_mask) == len(first.ids) + len(second.ids)


async def test_both_ways_give_the_same_tokens(vllm_server: Any) -> None:
    asked = [Message("user", "Count to three.")]
    by_ids, _ = await (await opened(vllm_server, tokenizer=str(vllm_server.model))).complete(asked, GREEDY)
    by_messages, _ = await (await opened(vllm_server)).complete(asked, GREEDY)
    assert by_ids.prompt_ids == by_messages.prompt_ids
    assert by_ids.ids == by_messages.ids
    assert by_ids.logprobs == pytest.approx(by_messages.logprobs, abs=1e-3)


@pytest.mark.parametrize("way", ["ids", "messages"])
async def test_an_answer_is_held_to_a_form(vllm_server: Any, way: str) -> None:
    session = await opened(vllm_server, tokenizer=str(vllm_server.model) if way == "ids" else None)
    form = Structure(grammar='root ::= "yes" | "no"')
    made, _ = await session.complete([Message("user", "Is water dry?")], GREEDY, structure=form)
    assert made.text in ("yes", "no")
    assert made.structured
    check_turn(made)


async def test_tools_are_read_by_the_servers_own_parser_both_ways(vllm_server: Any) -> None:
    call = '<tool_call>\\n{"name": "bash", "arguments": {"command": "ls"}}\\n</tool_call>'
    form = Structure(grammar=f'root ::= "{call.replace(chr(34), chr(92) + chr(34))}"')
    sampling = Sampling(temperature=0.0, max_tokens=60)
    for tokenizer in (str(vllm_server.model), None):
        session = await opened(vllm_server, tokenizer=tokenizer)
        asked = [Message("user", "List the files.")]
        made, _ = await session.complete(asked, sampling, tools=[TOOL], structure=form)
        [called] = made.tool_calls
        assert (called.name, called.arguments, made.finish_reason) == (
            "bash",
            '{"command": "ls"}',
            "tool_calls",
        )
        check_turn(made)


@pytest.mark.parametrize("way", ["ids", "messages"])
async def test_a_conversation_that_no_longer_fits_is_an_overflow(vllm_server: Any, way: str) -> None:
    session = await opened(vllm_server, tokenizer=str(vllm_server.model) if way == "ids" else None)
    with pytest.raises(PolicyError) as raised:
        await session.complete([Message("user", "word " * 3000)], GREEDY)
    assert raised.value.error_class == "context_overflow"
    made, _ = await session.complete([Message("user", "Hi")], GREEDY)
    check_turn(made)


async def test_a_stopped_server_is_unavailable_and_a_turn_waits_for_it(vllm_server: Any) -> None:
    session = await opened(vllm_server, pulse_sec=0.4, retry_sec=60.0)
    os.killpg(vllm_server.process.pid, signal.SIGSTOP)
    try:
        asking = asyncio.create_task(session.complete([Message("user", "Hi")], GREEDY))
        await asyncio.sleep(3)  # three signs of life that do not come, and some more
        assert not asking.done()
    finally:
        os.killpg(vllm_server.process.pid, signal.SIGCONT)
    made, _ = await asking
    check_turn(made)
    assert made.queue_seconds > 1.0


async def test_a_request_that_is_called_off_is_aborted_in_the_server(vllm_server: Any) -> None:
    session = await opened(vllm_server, request_timeout_sec=1.0)
    with pytest.raises(PolicyError) as raised:
        await session.complete([Message("user", "Go on and on.")], ENDLESS)
    assert raised.value.error_class == "policy_timeout"
    await until(vllm_server.url, running=0)


async def test_a_server_killed_in_the_middle_of_an_answer_is_unavailable(
    vllm_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_SEC", 0.05)
    session = await opened(vllm_server, retry_sec=0.5)
    asking = asyncio.create_task(session.complete([Message("user", "Go on and on.")], ENDLESS))
    await until(vllm_server.url, running=1)
    os.killpg(vllm_server.process.pid, signal.SIGKILL)
    with pytest.raises(PolicyError) as raised:
        await asking
    assert raised.value.error_class == "policy_unavailable"
    assert " tries in " in raised.value.evidence.message
    assert session.segments == []


async def until(url: str, *, running: int) -> None:
    """Wait for the server to work on so many requests."""
    async with aiohttp.ClientSession() as client, asyncio.timeout(120):
        async for found in _running(client, url):
            if found == running:
                return


async def _running(client: aiohttp.ClientSession, url: str) -> AsyncIterator[float]:
    while True:
        async with client.get(f"{url}/metrics") as response:
            text = await response.text()
        [line] = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running{")]
        yield float(line.rsplit(" ", 1)[1])
        await asyncio.sleep(0.1)
