"""Anthropic's policy against a server on this machine that speaks the Messages API's stream: what is sent, what is made
of answers and of every kind of failure. vLLM's own server is in `test_anthropic_vllm.py`."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from rollcage.rollout.outcome import Cancelled, PolicyError
from rollcage.rollout.policies.anthropic import AnthropicPolicy
from rollcage.rollout.policies.anthropic_client import Endpoint
from rollcage.rollout.policies.base import Completion, Sampling, Structure, Tool
from rollcage.rollout.policies.budget import LocalBudget
from rollcage.rollout.policies.prices import Prices
from rollcage.rollout.trajectory import Message, ToolCall

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]

USAGE = {
    "input_tokens": 100,
    "output_tokens": 1,
    "cache_creation_input_tokens": 40,
    "cache_read_input_tokens": 60,
}
BASH = Tool("bash", "Run a command.", {"type": "object", "properties": {"command": {"type": "string"}}})


def events(*blocks: dict[str, Any], stop: str | None = "end_turn", output: int = 20) -> list[dict[str, Any]]:
    """The stream of an answer: each block in two deltas, as the API sends them."""
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "usage": USAGE,
    }
    stream: list[dict[str, Any]] = [{"type": "message_start", "message": message}]
    for index, block in enumerate(blocks):
        begun, deltas = _deltas(block)
        stream.append({"type": "content_block_start", "index": index, "content_block": begun})
        stream += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        stream.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": stop, "stop_sequence": None}
    return [
        *stream,
        {"type": "ping"},
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": output}},
        {"type": "message_stop"},
    ]


def _deltas(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if block["type"] == "text":
        halves = block["text"][:3], block["text"][3:]
        return block | {"text": ""}, [{"type": "text_delta", "text": half} for half in halves]
    if block["type"] == "thinking":
        begun = {"type": "thinking", "thinking": "", "signature": ""}
        said = [
            {"type": "thinking_delta", "thinking": half}
            for half in (block["thinking"][:5], block["thinking"][5:])
        ]
        return begun, [*said, {"type": "signature_delta", "signature": block["signature"]}]
    if block["type"] == "tool_use":
        text = json.dumps(block["input"])
        parts = ["", text[:4], text[4:]]
        return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": part} for part in parts]
    return block, []


class Server:
    """Answers requests by its script, and keeps them. The last reply is for all that come after it."""

    def __init__(self) -> None:
        self.script: list[Reply] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self._came = asyncio.Condition()

    async def asked(self, times: int) -> None:
        """Wait until so many requests have come."""
        async with asyncio.timeout(20), self._came:
            await self._came.wait_for(lambda: len(self.bodies) >= times)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(json.loads(await request.text()))
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        async with self._came:
            self._came.notify_all()
        reply = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        return await reply(request)

    def policy(self, **settings: Any) -> AnthropicPolicy:
        own = {name: settings.pop(name) for name in list(settings) if name in Endpoint.__dataclass_fields__}
        own = {"model": "claude-opus-5", "base_url": self.url, "retry_sec": 20.0, **own}
        return AnthropicPolicy(Endpoint(**own), **settings)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    served = Server()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_post("/v1/messages", served.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield served
    await runner.cleanup()


def says(*blocks: dict[str, Any], cut: str = "", **ended: Any) -> Reply:
    """Stream an answer. `cut`: after its text has begun, close the connection, end the stream, or send nothing more."""

    async def reply(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events(*blocks, **ended):
            await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
            if cut and event["type"] == "content_block_delta":
                if cut == "reset":
                    assert request.transport is not None
                    request.transport.abort()
                elif cut == "hang":
                    await asyncio.sleep(30)
                elif cut != "end":
                    error = {"type": "error", "error": {"type": cut, "message": "sorry"}}
                    await response.write(f"event: error\ndata: {json.dumps(error)}\n\n".encode())
                return response
        return response

    return reply


def fails(status: int, kind: str, message: str = "no", *, headers: Any = None, **details: Any) -> Reply:
    """Answer with an error of the API's form."""

    async def reply(request: web.Request) -> web.StreamResponse:
        error = {"type": kind, "message": message} | ({"details": details} if details else {})
        return web.json_response({"type": "error", "error": error}, status=status, headers=headers)

    return reply


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


async def ask(
    policy: AnthropicPolicy, *messages: Message, sampling: Sampling | None = None, **more: Any
) -> Completion:
    session = policy.session("a-1", task="t", sample=0)
    asked = list(messages) or [Message("user", "hello")]
    completion, segment = await session.complete(asked, sampling or Sampling(), **more)
    assert segment is None
    assert session.segments == []
    return completion


# What is sent


async def test_system_examples_and_user_are_told_apart_and_marked_for_caching(server: Server) -> None:
    server.script = [says(text("one")), says(text("two")), says(text("three"))]
    session = server.policy(api_key="key-1").session("a-1", task="t", sample=0)
    opening = [
        Message("system", "Be brief."),
        Message("user", "example"),
        Message("assistant", "like this"),
        Message("user", "first"),
    ]
    for new in (opening, [Message("user", "second")], [Message("user", " ")]):
        await session.complete(new, Sampling())
    mark = {"cache_control": {"type": "ephemeral"}}
    assert server.bodies[2]["system"] == [text("Be brief.") | mark]
    assert server.bodies[2]["messages"] == [
        {"role": "user", "content": [text("example")]},
        {"role": "assistant", "content": [text("like this")]},
        {"role": "user", "content": [text("first")]},
        {"role": "assistant", "content": [text("one")]},
        {"role": "user", "content": [text("second") | mark]},
        {"role": "assistant", "content": [text("two")]},
        {"role": "user", "content": [text("(empty)") | mark]},
    ]
    assert all(json.dumps(body).count("cache_control") <= 4 for body in server.bodies)
    assert server.headers[0]["authorization"] == "Bearer key-1"
    assert {"stream": True, "max_tokens": 1024, "model": "claude-opus-5"}.items() <= server.bodies[0].items()


async def test_without_caching_nothing_is_marked(server: Server) -> None:
    server.script = [says(text("one"))]
    await ask(server.policy(cache=False), Message("system", "s"), Message("user", "u"), tools=[BASH])
    assert "cache_control" not in json.dumps(server.bodies)


async def test_sampling_goes_out_only_where_it_is_set_and_then_with_the_version_that_knows_it(
    server: Server,
) -> None:
    server.script = [says(text("one"))]
    policy = server.policy(extra_body={"service_tier": "standard_only"})
    await ask(policy)
    await ask(
        policy,
        sampling=Sampling(temperature=0.5, top_k=5, stop=("END",), extra={"metadata": {"user_id": "u"}}),
    )
    assert not {"temperature", "top_p", "top_k", "stop_sequences"} & server.bodies[0].keys()
    assert server.headers[0]["anthropic-version"] > "2026"
    assert {"temperature": 0.5, "top_k": 5, "stop_sequences": ["END"]}.items() <= server.bodies[1].items()
    assert {"service_tier": "standard_only", "metadata": {"user_id": "u"}}.items() <= server.bodies[1].items()
    assert server.headers[1]["anthropic-version"] == "2023-06-01"


async def test_calls_of_tools_go_out_and_their_results_in_one_message_before_text(server: Server) -> None:
    calls = [
        {"type": "tool_use", "id": f"t{i}", "name": "bash", "input": {"command": f"ls {i}"}}
        for i in (1, 2, 3)
    ]
    server.script = [says(text("I look."), *calls, stop="tool_use"), says(text("done"))]
    session = server.policy().session("a-1", task="t", sample=0)
    made, _ = await session.complete([Message("user", "go")], Sampling(), tools=[BASH])
    assert server.bodies[0]["tools"] == [
        {
            "name": "bash",
            "description": "Run a command.",
            "input_schema": dict(BASH.parameters),
            "cache_control": {"type": "ephemeral"},
        }
    ]
    assert (made.text, made.finish_reason) == ("I look.", "tool_calls")
    assert [(call.id, call.name, call.arguments) for call in made.tool_calls] == [
        (f"t{i}", "bash", f'{{"command": "ls {i}"}}') for i in (1, 2, 3)
    ]
    answers = [
        Message("user", "and hurry"),
        Message("tool", "one", tool_call_id="t1"),
        Message("tool", "two", tool_call_id="t2"),
    ]
    await session.complete(answers, Sampling(), tools=[BASH])
    _, asked, sent = server.bodies[1]["messages"]
    assert asked == {"role": "assistant", "content": [text("I look."), *calls]}
    assert sent["content"][-1].pop("cache_control")
    missing = {"is_error": True, "content": "This call was not carried out."}
    assert sent["content"] == [
        {"type": "tool_result", "tool_use_id": "t3", **missing},
        {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
        {"type": "tool_result", "tool_use_id": "t2", "content": "two"},
        text("and hurry"),
    ]


async def test_what_the_model_thought_goes_back_byte_for_byte(server: Server) -> None:
    first = [
        {"type": "thinking", "thinking": "Let me see… ü", "signature": "EqQBCgIYAh=="},
        {"type": "redacted_thinking", "data": "EmwKAhgBEgy3va3pzix/LafPsn4a"},
        {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls", "b": 1.50, "a": None}},
    ]
    second = [
        {"type": "thinking", "thinking": "Between calls.", "signature": "c2lnbmF0dXJl"},
        text("It is done."),
    ]
    server.script = [says(*first, stop="tool_use"), says(*second), says(text("bye"))]
    policy = server.policy(thinking={"type": "adaptive", "display": "summarized"})
    session = policy.session("a-1", task="t", sample=0)
    one, _ = await session.complete([Message("user", "go")], Sampling(), tools=[BASH])
    two, _ = await session.complete([Message("tool", "out", tool_call_id="t1")], Sampling(), tools=[BASH])
    await session.complete([Message("user", "more")], Sampling(), tools=[BASH])
    assert server.bodies[0]["thinking"] == {"type": "adaptive", "display": "summarized"}
    sent = [
        json.dumps(message["content"])
        for message in server.bodies[2]["messages"]
        if message["role"] == "assistant"
    ]
    assert sent == [json.dumps(first), json.dumps(second)]
    assert [json.dumps(json.loads(made.blocks)) for made in (one, two)] == sent
    assert (one.reasoning, one.text, two.reasoning, two.text) == (
        "Let me see… ü",
        "",
        "Between calls.",
        "It is done.",
    )


async def test_an_answer_of_another_conversation_is_sent_as_it_was_kept(server: Server) -> None:
    blocks = [{"type": "thinking", "thinking": "x", "signature": "s"}, text("  "), text("said")]
    server.script = [says(text("ok"))]
    kept = Message("assistant", "said", blocks=json.dumps(blocks))
    await ask(server.policy(), Message("user", "u"), kept, Message("user", "v"))
    assert server.bodies[0]["messages"][1]["content"] == [blocks[0], blocks[2]]


@pytest.mark.parametrize(
    ("arguments", "sent"),
    [
        ('{"a": 1}', {"a": 1}),
        ("{", {}),
        ("[1]", {}),
        ('{"a": NaN}', {}),
        ('{"a": 1e999}', {}),
        ('{"a": "\\ud800"}', {}),
    ],
)
async def test_arguments_that_are_no_json_object_do_not_stop_the_talk(
    server: Server, arguments: str, sent: Any
) -> None:
    server.script = [says(text("ok"))]
    called = Message("assistant", "", tool_calls=(ToolCall("t1", "bash", arguments),))
    await ask(server.policy(), Message("user", "u"), called, Message("tool", "no", tool_call_id="t1"))
    assert server.bodies[0]["messages"][1]["content"][0]["input"] == sent


async def test_a_schema_is_asked_for_until_the_server_refuses_it(server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}
    server.script = [
        says(text('{"n": 1}')),
        fails(400, "invalid_request_error", "output_config?"),
        says(text("1")),
    ]
    policy = server.policy(extra_body={"output_config": {"effort": "low"}})
    structure = Structure(json_schema=schema)
    made = await ask(policy, structure=structure)
    asked = server.bodies[0]["output_config"]
    assert (made.structured, asked["effort"], asked["format"]["type"]) == (True, "low", "json_schema")
    assert asked["format"]["schema"]["additionalProperties"] is False
    assert [(await ask(policy, structure=structure)).structured for _ in range(2)] == [False, False]
    assert ["format" in body["output_config"] for body in server.bodies] == [True, True, False, False]
    assert not (await ask(policy, structure=Structure(grammar="root ::= 'a'"))).structured


async def test_a_new_conversation_begins_from_nothing(server: Server) -> None:
    server.script = [says(text("ok"))]
    session = server.policy().session("a-1", task="t", sample=0)
    await session.complete([Message("system", "s"), Message("user", "u")], Sampling())
    session.restart()
    await session.complete([Message("user", "v")], Sampling())
    assert "system" not in server.bodies[1]
    assert len(server.bodies[1]["messages"]) == 1


# What answers come to


async def test_usage_and_cost_of_every_kind_of_token(server: Server) -> None:
    server.script = [says(text("ok"))]
    made = await ask(server.policy(prices=Prices(10, 50)))
    assert (made.prompt_tokens, made.completion_tokens, made.cached_tokens) == (200, 20, 60)
    assert made.cost_usd == pytest.approx((100 * 10 + 40 * 12.5 + 60 * 1 + 20 * 50) / 1e6)
    assert (await ask(server.policy())).cost_usd == pytest.approx(
        (100 * 5 + 40 * 6.25 + 60 * 0.5 + 20 * 25) / 1e6
    )
    assert (await ask(server.policy(model="some-other"))).cost_usd is None
    assert 0 < made.generate_seconds < 10
    assert made.policy == "anthropic"


@pytest.mark.parametrize(
    ("stop", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "refusal"),
    ],
)
async def test_why_an_answer_stopped(server: Server, stop: str, finish: str) -> None:
    server.script = [says(text("part"), stop=stop)]
    made = await ask(server.policy())
    assert (made.text, made.finish_reason) == ("part", finish)


async def test_a_refusal_without_a_word_is_an_empty_answer_and_the_talk_goes_on(server: Server) -> None:
    server.script = [says(stop="refusal"), says(text("ok"))]
    session = server.policy().session("a-1", task="t", sample=0)
    made, _ = await session.complete([Message("user", "u")], Sampling())
    assert (made.text, made.finish_reason) == ("", "refusal")
    await session.complete([Message("user", "v")], Sampling())
    [only] = server.bodies[1]["messages"]
    assert [block["text"] for block in only["content"]] == ["u", "v"]


async def test_a_call_that_was_cut_off_is_no_valid_json_and_gets_a_result(server: Server) -> None:
    async def cut(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        call = {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "make everything"}}
        for event in events(call, stop="max_tokens"):
            if event.get("delta", {}).get("partial_json", "").endswith("}"):
                event["delta"]["partial_json"] = 'mand": "ma'
            await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        return response

    server.script = [cut, says(text("ok"))]
    session = server.policy().session("a-1", task="t", sample=0)
    made, _ = await session.complete([Message("user", "u")], Sampling(), tools=[BASH])
    assert made.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(made.tool_calls[0].arguments)
    await session.complete([Message("user", "too long")], Sampling(), tools=[BASH])
    _, asked, sent = server.bodies[1]["messages"]
    assert asked["content"][0]["input"] == {}
    assert [block["type"] for block in sent["content"]] == ["tool_result", "text"]


async def test_an_answer_that_pauses_is_sent_back_to_go_on(server: Server) -> None:
    server.script = [says(text("first "), stop="pause_turn"), says(text("second"))]
    budget = LocalBudget(1.0)
    made = await ask(server.policy(prices=Prices(10, 50), budget=budget))
    assert (made.text, made.finish_reason, made.completion_tokens) == ("first second", "stop", 40)
    assert server.bodies[1]["messages"][-1] == {"role": "assistant", "content": [text("first ")]}
    assert await budget.spent() == pytest.approx(made.cost_usd)


# What goes wrong


@pytest.mark.parametrize("cut", ["overloaded_error", "api_error", "internal_error", "reset", "end"])
async def test_an_answer_that_breaks_off_is_no_answer_and_the_turn_is_tried_again(
    server: Server, cut: str
) -> None:
    server.script = [says(text("half of it"), cut=cut), says(text("whole"))]
    budget = LocalBudget(1.0)
    made = await ask(server.policy(budget=budget))
    assert (made.text, made.completion_tokens, len(server.bodies)) == ("whole", 20, 2)
    assert server.bodies[0] == server.bodies[1]
    counted = (100 * 5 + 40 * 6.25 + 60 * 0.5 + 1 * 25) / 1e6
    assert await budget.spent() == pytest.approx(made.cost_usd + counted), "what broke off had its price, too"


@pytest.mark.parametrize("ended", ["by its time", "by its rollout"])
async def test_an_answer_that_is_called_off_is_paid_for(server: Server, ended: str) -> None:
    server.script = [says(text("slow"), cut="hang")]
    budget = LocalBudget(1.0)
    policy = server.policy(budget=budget, request_timeout_sec=0.5 if ended == "by its time" else 60.0)
    asked = asyncio.ensure_future(ask(policy))
    await server.asked(1)
    if ended == "by its rollout":
        await asyncio.sleep(0.5)  # for the answer to begin
        asked.cancel()
    await asyncio.wait({asked})
    assert await budget.spent() == pytest.approx(0.000805)


@pytest.mark.parametrize(
    "event",
    [
        {"type": "message_start", "message": "m"},
        {"type": "message_start", "message": {"usage": "many"}},
        {"type": "content_block_start", "index": 0, "content_block": {"text": "of no type"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": None}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "input": {}}},
        {"type": "content_block_delta", "index": 7, "delta": {"type": "text_delta", "text": "x"}},
        {"type": "message_delta", "delta": {"stop_reason": ["end_turn"]}},
        ["no event"],
    ],
)
async def test_events_that_do_not_fit_are_the_servers_error(server: Server, event: Any) -> None:
    async def reply(request: web.Request) -> web.StreamResponse:
        return web.Response(text=f"data: {json.dumps(event)}\n\n", content_type="text/event-stream")

    server.script = [reply]
    with pytest.raises(PolicyError) as error:
        await ask(server.policy(retry_sec=0.01))
    assert (error.value.error_class, error.value.evidence.status) == ("policy_error", 500)


async def test_what_is_no_stream_of_events_is_not_asked_for_again(server: Server) -> None:
    async def welcome(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>Welcome</html>", content_type="text/html")

    async def packed(request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=b"no gzip", headers={"content-type": "text/event-stream", "content-encoding": "gzip"}
        )

    for reply in (welcome, packed):
        server.script = [reply]
        with pytest.raises(PolicyError) as error:
            await ask(server.policy())
        assert error.value.error_class == "policy_error"
    assert len(server.bodies) == 2


@pytest.mark.parametrize("wrong", ["no scheme", "no TLS", "a key with a line break"])
async def test_a_request_that_cannot_be_sent_is_said_at_once_and_without_the_key(
    server: Server, wrong: str
) -> None:
    settings: dict[str, dict[str, str]] = {
        "no scheme": {"base_url": server.url.removeprefix("http://")},
        "no TLS": {"base_url": server.url.replace("http:", "https:")},
        "a key with a line break": {"api_key": "secret-key\n"},
    }
    with pytest.raises(PolicyError) as error:
        await ask(server.policy(**settings[wrong]))
    assert (error.value.error_class, server.bodies) == ("policy_error", [])
    assert " tries " not in error.value.evidence.message
    assert "secret-key" not in str(error.value) + str(error.value.evidence)


async def test_a_hosts_own_variables_do_not_send_the_key_elsewhere(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_BASE_URL", server.url)
    client = server.policy(base_url=None, api_key="key").line.client
    assert client.base_url.host == "api.anthropic.com"


async def test_halves_of_a_character_are_joined_and_one_that_is_alone_is_replaced(server: Server) -> None:
    server.script = [says(text("ab\ud83d\ude00 c\ud800")), says(text("ok"))]
    session = server.policy().session("a-1", task="t", sample=0)
    made, _ = await session.complete([Message("user", "u")], Sampling())
    assert made.text == "ab\U0001f600 c\ufffd"
    await session.complete([Message("user", "v")], Sampling())
    assert server.bodies[1]["messages"][1]["content"] == [text(made.text)]


@pytest.mark.parametrize(
    "reply",
    [
        fails(429, "rate_limit_error", headers={"retry-after": "0.2"}),
        fails(529, "overloaded_error"),
        fails(500, "api_error"),
        fails(503, "api_error"),
        fails(504, "timeout_error"),
    ],
)
async def test_a_server_that_cannot_answer_now_is_asked_again(server: Server, reply: Reply) -> None:
    server.script = [reply, says(text("ok"))]
    made = await ask(server.policy())
    assert (made.text, len(server.bodies)) == ("ok", 2)


@pytest.mark.parametrize(
    ("reply", "error_class", "status"),
    [
        (fails(429, "rate_limit_error", headers={"retry-after": "60"}), "rate_limited", 429),
        (fails(529, "overloaded_error"), "rate_limited", 529),
        (says(text("half"), cut="overloaded_error"), "rate_limited", 529),
        (fails(500, "api_error"), "policy_error", 500),
        (fails(504, "timeout_error"), "policy_timeout", 504),
        (says(text("half"), cut="reset"), "policy_unavailable", None),
        (says(text("half"), cut="end"), "policy_unavailable", None),
    ],
)
async def test_a_server_that_never_answers_names_the_attempt(
    server: Server, reply: Reply, error_class: str, status: int | None
) -> None:
    server.script = [reply]
    with pytest.raises(PolicyError) as error:
        await ask(server.policy(retry_sec=0.3))
    assert (error.value.error_class, error.value.evidence.status) == (error_class, status)


@pytest.mark.parametrize(
    ("reply", "error_class", "said"),
    [
        (
            fails(413, "request_too_large", "Request exceeds the maximum size"),
            "context_overflow",
            "maximum size",
        ),
        (
            fails(400, "invalid_request_error", "prompt is too long: 250000 tokens > 200000 maximum"),
            "context_overflow",
            "250000",
        ),
        (
            fails(
                400, "invalid_request_error", "input length and `max_tokens` exceed context limit: 9 + 9 > 12"
            ),
            "context_overflow",
            "9 > 12",
        ),
        (
            fails(
                400, "invalid_request_error", "Your credit balance is too low to access the Anthropic API."
            ),
            "policy_refused",
            "credit balance",
        ),
        (fails(400, "invalid_request_error", "temperature: Extra inputs"), "policy_refused", "temperature"),
        (fails(401, "authentication_error", "invalid x-api-key"), "policy_refused", "the key of CLAUDE_KEY"),
        (fails(402, "billing_error", "pay"), "policy_refused", "pay"),
        (fails(403, "permission_error", "not yours"), "policy_refused", "the key of CLAUDE_KEY"),
        (fails(404, "not_found_error", "model: claude-x"), "policy_refused", "claude-x"),
        (
            fails(429, "rate_limit_error", "your limit", error_code="enforced_spend_limit_reached"),
            "policy_refused",
            "your limit",
        ),
        (says(text("?"), stop=None), "policy_error", "ended the answer as None"),
        (says(text("?"), cut="invalid_request_error"), "policy_refused", "sorry"),
    ],
)
async def test_a_request_that_is_refused_is_not_sent_again(
    server: Server, reply: Reply, error_class: str, said: str
) -> None:
    server.script = [reply]
    session = server.policy(key_from="CLAUDE_KEY").session("a-1", task="t", sample=0)
    with pytest.raises(PolicyError, match=said) as error:
        await session.complete([Message("user", "u")], Sampling())
    assert (error.value.error_class, len(server.bodies)) == (error_class, 1)
    server.script = [says(text("ok"))]
    await session.complete([Message("user", "v")], Sampling())
    [only] = server.bodies[1]["messages"]
    assert [block["text"] for block in only["content"]] == ["v"], "nothing was appended"


async def test_an_answer_that_takes_too_long_is_a_timeout_and_not_waited_for_again(server: Server) -> None:
    server.script = [says(text("slow"), cut="hang")]
    with pytest.raises(PolicyError) as error:
        await ask(server.policy(request_timeout_sec=0.3))
    assert (error.value.error_class, len(server.bodies)) == ("policy_timeout", 1)


async def test_nobody_listens(server: Server) -> None:
    with pytest.raises(PolicyError) as error:
        await ask(server.policy(base_url="http://127.0.0.1:9", retry_sec=0.1))
    assert error.value.error_class == "policy_unavailable"
    assert "127.0.0.1" in str(error.value) or "connect" in str(error.value).lower()


async def test_tokens_that_do_not_hold_the_thinking_are_the_agents_limit(server: Server) -> None:
    policy = server.policy(thinking={"type": "enabled", "budget_tokens": 2048})
    with pytest.raises(PolicyError) as error:
        await ask(policy, sampling=Sampling(max_tokens=2048))
    assert (error.value.error_class, server.bodies) == ("token_limit", [])


# Budget, processes, threads


async def test_once_the_budget_is_spent_no_answer_begins(server: Server) -> None:
    server.script = [says(text("ok"), output=1000)]
    budget = LocalBudget(0.06)
    policy = server.policy(budget=budget)
    session = policy.session("a-1", task="t", sample=0)
    for _ in range(3):
        await session.complete([Message("user", "u")], Sampling())
    with pytest.raises(Cancelled, match=r"the job's budget of \$0.06 is spent"):
        await session.complete([Message("user", "u")], Sampling())
    assert len(server.bodies) == 3
    assert await budget.spent() == pytest.approx(3 * 0.02578)


async def test_a_turn_that_waits_to_be_tried_again_ends_at_once_when_the_budget_is_spent(
    server: Server,
) -> None:
    server.script = [fails(429, "rate_limit_error", headers={"retry-after": "800"}), says(text("ok"))]
    budget = LocalBudget(0.06)
    waiting = asyncio.ensure_future(ask(server.policy(budget=budget, retry_sec=1000.0)))
    await server.asked(1)
    await budget.charge(0.06)
    async with asyncio.timeout(60):
        with pytest.raises(Cancelled, match=r"the job's budget of \$0.06 is spent"):
            await waiting
    assert len(server.bodies) == 1


async def test_a_budget_needs_prices(server: Server) -> None:
    with pytest.raises(ValueError, match="prices"):
        server.policy(model="somebody-elses", budget=LocalBudget(1.0))


async def test_a_copy_in_another_process_has_a_client_of_its_own(server: Server) -> None:
    server.script = [says(text("ok"))]
    policy = server.policy(api_key="secret-key", name="claude")
    await ask(policy)
    copy = pickle.loads(pickle.dumps(policy))
    assert (await ask(copy)).policy == "claude"
    assert server.headers[1]["authorization"] == "Bearer secret-key"
    assert "secret-key" not in repr(policy.endpoint)
    await copy.close()
    assert (await ask(copy)).text == "ok"


async def test_sessions_that_wait_hold_no_thread(server: Server) -> None:
    release = asyncio.Event()

    async def held(request: web.Request) -> web.StreamResponse:
        await release.wait()
        return await says(text("ok"))(request)

    server.script = [held]
    policy = server.policy()
    before = threading.active_count()
    waiting = [asyncio.ensure_future(ask(policy)) for _ in range(200)]
    await server.asked(200)
    assert threading.active_count() <= before + 8
    release.set()
    assert {made.text for made in await asyncio.gather(*waiting)} == {"ok"}
