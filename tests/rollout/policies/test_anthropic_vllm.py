"""Anthropic's policy against vLLM's own `/v1/messages`: the wire as a real server speaks it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.anthropic import AnthropicPolicy
from rollcage.rollout.policies.anthropic_client import Endpoint, check
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.prices import Prices
from rollcage.rollout.trajectory import Message

if TYPE_CHECKING:
    from conftest import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

GREEDY = Sampling(temperature=0.0, max_tokens=40)
BASH = Tool(
    "bash",
    "Run a shell command.",
    {
        "type": "object",
        "properties": {"command": {"enum": ["ls", "pwd"]}},
        "required": ["command"],
    },
)

Make = Callable[..., AnthropicPolicy]


@pytest_asyncio.fixture
async def make(vllm_server: VllmServer) -> AsyncIterator[Make]:
    made = []

    def policy(**extra_body: Any) -> AnthropicPolicy:
        there = Endpoint(vllm_server.name, base_url=vllm_server.url, extra_body=extra_body)
        made.append(AnthropicPolicy(there, prices=Prices(1, 2, cache_write=1)))
        return made[-1]

    yield policy
    for one in made:
        await one.close()


async def test_two_turns_their_usage_and_cost(make: Make) -> None:
    session = make().session("a-1", task="t", sample=0)
    system = Message("system", "You are a helpful assistant. " * 10)
    one, _ = await session.complete([system, Message("user", "What is the capital of France?")], GREEDY)
    assert (one.text, one.finish_reason) == ("The capital of France is Paris.", "stop")
    two, _ = await session.complete([Message("user", "And of Italy?")], replace(GREEDY, max_tokens=5))
    assert (two.finish_reason, two.completion_tokens, two.text) == ("length", 5, "The capital of Italy is")
    assert one.prompt_tokens is not None
    assert two.prompt_tokens is not None
    assert two.prompt_tokens > one.prompt_tokens > 60
    assert two.cached_tokens > 32, "the prefix cache has the first turn"
    uncached = two.prompt_tokens - two.cached_tokens
    assert two.cost_usd == pytest.approx((uncached + 0.1 * two.cached_tokens + 2 * 5) / 1e6)


async def test_a_call_of_a_tool_and_its_result(make: Make) -> None:
    policy = make(tool_choice={"type": "tool", "name": "bash"})
    session = policy.session("a-1", task="t", sample=0)
    made, _ = await session.complete([Message("user", "List the files.")], GREEDY, tools=[BASH])
    [call] = made.tool_calls
    assert call.name == "bash"
    if made.finish_reason == "tool_calls":
        assert json.loads(call.arguments)["command"] in ("ls", "pwd")
    else:  # the small model may go on until its call is cut off
        assert (made.finish_reason, made.completion_tokens) == ("length", 40)
    policy.endpoint.extra_body["tool_choice"] = {"type": "none"}  # type: ignore[index]
    result = [Message("tool", "a.txt b.txt", tool_call_id=call.id)]
    after, _ = await session.complete(result, GREEDY, tools=[BASH])
    assert after.text
    assert after.tool_calls == ()


async def test_an_answer_is_held_to_a_schema(make: Make) -> None:
    session = make().session("a-1", task="t", sample=0)
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
    asked = [Message("user", "Where is the Colosseum? Answer in JSON.")]
    made, _ = await session.complete(asked, GREEDY, structure=Structure(json_schema=schema))
    assert made.structured
    assert json.loads(made.text)["city"] in ("Paris", "Rome")


async def test_a_prompt_that_does_not_fit_is_the_agents_overflow(make: Make) -> None:
    session = make().session("a-1", task="t", sample=0)
    with pytest.raises(PolicyError) as error:
        await session.complete([Message("user", "word " * 3000)], GREEDY)
    assert error.value.error_class == "context_overflow"


async def test_a_model_that_is_not_there(vllm_server: VllmServer) -> None:
    await check(Endpoint(vllm_server.name, base_url=vllm_server.url))
    with pytest.raises(ValueError, match="other"):
        await check(Endpoint("other", base_url=vllm_server.url))
    policy = AnthropicPolicy(Endpoint("other", base_url=vllm_server.url))
    with pytest.raises(PolicyError, match="other") as error:
        await policy.session("a-1", task="t", sample=0).complete([Message("user", "hi")], GREEDY)
    assert (error.value.error_class, error.value.evidence.status) == ("policy_refused", 404)
    await policy.close()
