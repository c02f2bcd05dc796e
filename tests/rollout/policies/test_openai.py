"""A server of OpenAI's API that does what servers do: in order, in disorder, and not at all.

The server is a real one on this machine, which answers what a test tells it to. What vLLM itself answers is in
test_openai_vllm.py.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies import openai as openai_module
from rollcage.rollout.policies import retry
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.openai import openai_policy
from rollcage.rollout.policies.openai_chat import ChatPolicy
from rollcage.rollout.policies.openai_ids import ServerEngine
from rollcage.rollout.policies.openai_probe import Offer
from rollcage.rollout.policies.openai_wire import Server, ServerSettings
from rollcage.rollout.policies.scripted import ByteTokenizer
from rollcage.rollout.trajectory import Message, ToolCall

Reply = Callable[[web.Request], Awaitable[web.StreamResponse]]

HI = [Message("user", "Hi")]
SOME = Sampling(max_tokens=8, seed=5)
TOOL = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
OVERFLOW = "This model's maximum context length is 16384 tokens. However, you requested 20000 tokens"


@dataclass
class Scripted:
    """Answers each POST with the next of `replies`, the last of them for ever, and each GET with its models."""

    url: str = ""
    replies: list[Reply] = field(default_factory=list)
    models: Reply | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    requests: list[web.Request] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    dropped: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            return await (self.models or listed("m"))(request)
        self.times.append(time.monotonic())
        self.requests.append(request)
        self.bodies.append(await request.json())
        self.reached.set()
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        try:
            return await reply(request)
        except asyncio.CancelledError:
            self.dropped.set()
            raise

    def settings(self, **changed: Any) -> ServerSettings:
        return ServerSettings(**{"base_url": f"{self.url}/v1", "model": "m", "retry_sec": 20.0, **changed})

    def policy(self, offer: Offer | None = None, **changed: Any) -> ChatPolicy:
        return ChatPolicy(Server(self.settings(**changed)), offer or Offer(), name="small")


def listed(*names: str, owned_by: str = "someone", **more: Any) -> Reply:
    """A list of models."""
    cards = [{"id": name, "object": "model", "owned_by": owned_by, **more} for name in names]

    async def reply(_: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": cards})

    return reply


def completion(text: str = "fine", finish: str | None = "stop", ids: bool = False, **message: Any) -> Reply:
    """An answer of the chat API."""

    async def reply(request: web.Request) -> web.StreamResponse:
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        choice["message"] = {"role": "assistant", "content": text, **message}
        body = {"object": "chat.completion", "choices": [choice]}
        body["usage"] = {
            "prompt_tokens": 11,
            "completion_tokens": 2,
            "prompt_tokens_details": {"cached_tokens": 7},
        }
        if ids:
            seen = len((await request.json())["messages"])
            body["prompt_token_ids"] = [1, 2, 3, 4][: 2 * seen]
            choice |= {"token_ids": [3, 4], "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}}
        return web.json_response(body)

    return reply


def refusal(status: int, message: str = "no", *, code: Any = None, **headers: str) -> Reply:
    """An error as OpenAI words it."""

    async def reply(_: web.Request) -> web.StreamResponse:
        error = {"message": message, "type": "error", "param": None, "code": code}
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.json_response({"error": error}, status=status, headers=sent)

    return reply


def body_of(text: str, content_type: str = "application/json") -> Reply:
    """A 200 that holds this."""

    async def reply(_: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=content_type)

    return reply


async def reset(request: web.Request) -> web.StreamResponse:
    """The connection is gone before there is an answer."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def half(request: web.Request) -> web.StreamResponse:
    """The connection is gone in the middle of one."""
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"choices": [{"index"')
    assert request.transport is not None
    request.transport.close()
    return response


async def endless(request: web.Request) -> web.StreamResponse:
    """Goes on and on."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    while True:
        await response.write(b" " * 64)
        await asyncio.sleep(0.02)


async def silent(_: web.Request) -> web.StreamResponse:
    """Takes the request, and says nothing."""
    await asyncio.sleep(3600)
    return web.Response()


@pytest_asyncio.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scripted]:
    monkeypatch.setattr(retry, "FIRST_PAUSE_SEC", 0.01)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    scripted = Scripted()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", scripted.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port = runner.addresses[0][:2]
    scripted.url = f"http://{host}:{port}"
    yield scripted
    await runner.cleanup()


async def turn(policy: ChatPolicy, sampling: Sampling = SOME, **given: Any) -> Any:
    """The first answer of a session."""
    made, _ = await policy.session("attempt-1", task="t", sample=0).complete(HI, sampling, **given)
    return made


async def fault_of(policy: ChatPolicy) -> PolicyError:
    with pytest.raises(PolicyError) as raised:
        await turn(policy)
    return raised.value


async def test_an_answer_says_what_it_used_and_who_gave_it(server: Scripted) -> None:
    server.replies = [completion("Paris.")]
    made = await turn(server.policy(version=3))
    assert (made.text, made.finish_reason, made.policy, made.version) == ("Paris.", "stop", "small", 3)
    assert (made.prompt_tokens, made.completion_tokens, made.cached_tokens) == (11, 2, 7)
    assert (made.ids, made.prompt_ids, made.structured) == ([], [], False)
    assert made.generate_seconds > 0
    assert made.queue_seconds >= 0
    [sent] = server.bodies
    assert sent["messages"] == [{"role": "user", "content": "Hi"}]
    assert (sent["model"], sent["max_tokens"], sent["temperature"], sent["seed"]) == ("m", 8, 1.0, 6)
    assert not {"top_k", "logprobs", "return_token_ids", "tools", "stop"} & set(sent)


async def test_ids_go_on_in_one_segment_while_the_server_sees_them_so(server: Scripted) -> None:
    server.replies = [completion("a", ids=True)]
    session = server.policy(Offer("vllm", 100, ids=True)).session("a", task="t", sample=0)
    first, at = await session.complete(HI, SOME)
    assert (first.prompt_ids, first.ids, first.logprobs, at) == ([1, 2], [3, 4], [-0.5, -0.25], 0)
    second, at = await session.complete([Message("user", "And?")], SOME)
    assert (second.prompt_ids, at) == ([1, 2, 3, 4], 0)
    assert session.segments[0].ids == [1, 2, 3, 4, 3, 4]
    assert [body["messages"][-1]["content"] for body in server.bodies] == ["Hi", "And?"]
    assert server.bodies[1]["messages"][1] == {"role": "assistant", "content": "a"}
    session.restart()
    _, at = await session.complete(HI, SOME)
    assert at == 1
    assert len(server.bodies[2]["messages"]) == 1
    assert server.bodies[0]["top_k"] == -1  # else the model's generation_config.json decides


async def test_a_turn_without_ids_is_kept_without_and_the_next_begins_a_segment(server: Scripted) -> None:
    server.replies = [completion(ids=True), completion(), completion(ids=True)]
    session = server.policy(Offer("vllm", 100, ids=True)).session("a", task="t", sample=0)
    assert [(await session.complete(HI, SOME))[1] for _ in range(3)] == [0, None, 1]


async def test_a_run_that_needs_ids_takes_no_turn_without(server: Scripted) -> None:
    server.replies = [completion()]
    fault = await fault_of(server.policy(Offer(ids=True), tokens="required"))
    assert fault.error_class == "policy_error"
    assert "the ids of the prompt" in fault.message


async def test_tools_are_offered_and_their_calls_read_and_sent_back(server: Scripted) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    thought = {"reasoning_content": "Hm.", "tool_calls": [call]}
    server.replies = [completion("", "tool_calls", **thought), completion()]
    session = server.policy().session("a", task="t", sample=0)
    made, _ = await session.complete(HI, SOME, tools=[TOOL])
    assert made.tool_calls == (ToolCall("c1", "bash", '{"command": "ls"}'),)
    assert (made.finish_reason, made.reasoning, made.text) == ("tool_calls", "Hm.", "")
    await session.complete([Message("tool", "file", tool_call_id="c1")], SOME, tools=[TOOL])
    [offered] = server.bodies[0]["tools"]
    assert offered == {
        "type": "function",
        "function": {"name": "bash", "description": "Runs a command.", "parameters": TOOL.parameters},
    }
    _, answer, output = server.bodies[1]["messages"]
    assert answer == {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]}
    assert output == {"role": "tool", "content": "file", "tool_call_id": "c1"}


async def test_a_form_is_asked_for_and_given_up_where_the_server_refuses_it(server: Scripted) -> None:
    form = Structure(json_schema={"type": "object"})
    server.replies = [completion("{}"), refusal(400, "response_format is not supported"), completion("{}")]
    session = server.policy().session("a", task="t", sample=0)
    assert (await session.complete(HI, SOME, structure=form))[0].structured
    assert not (await session.complete(HI, SOME, structure=form))[0].structured
    assert not (await session.complete(HI, SOME, structure=form))[0].structured
    assert ["response_format" in body for body in server.bodies] == [True, True, False, False]
    assert server.bodies[0]["response_format"]["json_schema"]["schema"] == {"type": "object"}
    grammar = Structure(grammar='root ::= "a"')
    assert not (await turn(server.policy(), structure=grammar)).structured
    assert (await turn(server.policy(Offer("vllm")), structure=grammar)).structured
    assert server.bodies[-1]["structured_outputs"] == {"grammar": 'root ::= "a"'}


async def test_headers_name_the_session_and_the_key_is_the_hosts_own(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies = [completion()]
    policy = server.policy(headers={"X-Session-ID": "of {session}"}, api_key_env="A_KEY")
    await turn(policy)
    assert server.requests[0].headers["X-Session-ID"] == "of attempt-1"
    assert "Authorization" not in server.requests[0].headers
    monkeypatch.setenv("A_KEY", "secret")
    moved = pickle.loads(pickle.dumps(policy))
    assert b"secret" not in pickle.dumps(policy)
    await turn(moved)
    assert server.requests[1].headers["Authorization"] == "Bearer secret"


@pytest.mark.parametrize(
    ("reply", "error_class", "said"),
    [
        (refusal(400, OVERFLOW), "context_overflow", "16384"),
        (refusal(400, "max_tokens must be at least 1, got -186"), "context_overflow", "-186"),
        (refusal(400, "Too much.", code="context_length_exceeded"), "context_overflow", "Too much"),
        (refusal(400, "temperature must be non-negative"), "policy_refused", "temperature"),
        (refusal(401, "bad key"), "policy_refused", "set OPENAI_API_KEY on each host"),
        (refusal(403, "not you"), "policy_refused", "may not use m"),
        (refusal(404, "what?"), "policy_refused", "knows no m, or"),
        (body_of("<html>Welcome</html>", "text/html"), "policy_error", "no JSON object"),
        (body_of("{broken"), "policy_error", "no JSON"),
        (body_of('{"choices": []}'), "policy_error", "without a choice"),
        (body_of('{"choices": [{"index": 0, "finish_reason": "stop"}]}'), "policy_error", "holds no answer"),
        (completion(finish=None), "policy_error", "ended as None"),
        (completion(finish="error"), "policy_error", "ended as 'error'"),
        (completion(finish={}), "policy_error", "ended as {}"),  # type: ignore[arg-type]
        (body_of("[" * 100_000), "policy_error", "no JSON"),
    ],
)
async def test_what_no_other_try_mends_ends_the_turn_at_once(
    server: Scripted, reply: Reply, error_class: str, said: str
) -> None:
    server.replies = [reply]
    fault = await fault_of(server.policy())
    assert fault.error_class == error_class
    assert said in fault.message
    assert len(server.bodies) == (2 if error_class == "context_overflow" else 1)
    assert fault.evidence.said_by == "policy server"


async def test_a_model_that_was_there_and_is_loaded_anew_is_waited_for(server: Scripted) -> None:
    server.replies = [completion()]
    policy = pickle.loads(pickle.dumps(await openai_policy(server.settings(tokens="none"))))
    server.replies = [refusal(404, "The model `m` does not exist."), completion("back")]
    assert (await turn(policy)).text == "back"
    server.replies = [refusal(404, "The model `m` does not exist.")]
    fault = await fault_of(ChatPolicy(Server(server.settings(retry_sec=0.1), found=True), Offer()))
    assert (fault.error_class, fault.evidence.status) == ("policy_unavailable", 404)
    assert "knows no m any more" in fault.message


async def test_what_servers_word_in_their_own_way_is_read(server: Scripted) -> None:
    parts = [
        {"type": "thinking", "thinking": "Hm."},
        {"type": "text", "text": "two "},
        {"type": "text", "text": "parts"},
    ]
    calls = [
        {"id": "c", "function": {"name": "bash", "arguments": {"command": "ü"}}},
        "what?",
        {"function": None},
    ]
    server.replies = [
        completion(parts, tool_calls=calls),  # type: ignore[arg-type]
        completion("ab\ud83d", tool_calls="none"),
        body_of(
            '{"choices": [{"finish_reason": "stop", "message": {"content": "a"}, "logprobs": {"token_logprobs": 5}}], '
            '"usage": {"prompt_tokens": "many", "prompt_tokens_details": [1]}}'
        ),
    ]
    one, two, three = [await turn(server.policy()) for _ in range(3)]
    assert (one.text, one.tool_calls) == ("two parts", (ToolCall("c", "bash", '{"command": "ü"}'),))
    assert (two.text, two.tool_calls) == ("ab\ufffd", ())
    assert (three.text, three.prompt_tokens, three.cached_tokens) == ("a", None, 0)


async def test_a_request_that_cannot_be_sent_is_said_at_once_and_without_the_key(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.replies = [completion()]
    monkeypatch.setenv("A_KEY", "secret\n")
    said = await refused_at_start(server.settings(api_key_env="A_KEY"))
    assert "the variable A_KEY holds white space" in said
    faults = [
        await fault_of(server.policy(api_key_env="A_KEY")),
        await fault_of(server.policy(headers={"X-Key": "secret\n"})),
        await fault_of(server.policy(headers={"X-Key": "é"})),
        await fault_of(server.policy(base_url=server.url.replace("http:", "https:"))),
    ]
    assert {fault.error_class for fault in faults} <= {"policy_error", "policy_refused"}
    assert not any(" tries " in fault.evidence.message for fault in faults)
    assert not any("200" in fault.evidence.message for fault in faults)
    assert not any("secret" in f"{said} {fault} {fault.evidence}" for fault in faults)
    assert server.bodies == []


async def test_a_turn_that_failed_has_left_nothing_behind(server: Scripted) -> None:
    server.replies = [refusal(400, "no"), completion()]
    session = server.policy().session("a", task="t", sample=0)
    with pytest.raises(PolicyError):
        await session.complete(HI, SOME)
    await session.complete(HI, SOME)
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "Hi"}]
    assert session.segments == []


async def test_an_answer_takes_what_room_there_is(server: Scripted) -> None:
    server.replies = [refusal(400, OVERFLOW), completion("short", "length")]
    made = await turn(server.policy())
    assert (made.text, made.finish_reason) == ("short", "length")
    assert ["max_tokens" in body for body in server.bodies] == [True, False]


@pytest.mark.parametrize(
    ("message", "finish", "text"),
    [({"content": None, "refusal": "I will not."}, "stop", "I will not."), ({}, "content_filter", "fine")],
)
async def test_a_refusal_is_called_one(
    server: Scripted, message: dict[str, Any], finish: str, text: str
) -> None:
    server.replies = [completion(finish=finish, **message) if message else completion(finish=finish)]
    made = await turn(server.policy())
    assert (made.finish_reason, made.text) == ("refusal", text)


@pytest.mark.parametrize(
    "broken",
    [
        refusal(429),
        refusal(429, retry_after="0"),
        refusal(500),
        refusal(502),
        refusal(503),
        refusal(504),
        refusal(408),
        reset,
        half,
        completion(finish="abort"),
    ],
)
async def test_what_passes_is_waited_for_and_the_agent_is_not_charged(
    server: Scripted, broken: Reply
) -> None:
    server.replies = [broken, broken, completion()]
    started = time.monotonic()
    made = await turn(server.policy())
    assert made.text == "fine"
    assert len(server.bodies) == 3
    assert made.queue_seconds + made.generate_seconds == pytest.approx(time.monotonic() - started, abs=0.5)


@pytest.mark.parametrize(
    ("broken", "error_class"),
    [
        (refusal(429), "rate_limited"),
        (refusal(500), "policy_error"),
        (refusal(503), "policy_unavailable"),
        (refusal(504), "policy_timeout"),
        (reset, "policy_unavailable"),
        (half, "policy_unavailable"),
    ],
)
async def test_what_does_not_pass_is_named_by_the_last_try(
    server: Scripted, broken: Reply, error_class: str
) -> None:
    server.replies = [refusal(502), broken]
    fault = await fault_of(server.policy(retry_sec=0.2))
    assert fault.error_class == error_class
    assert fault.evidence.message.startswith(f"{len(server.bodies)} tries in ")


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    settings = ServerSettings(base_url="http://127.0.0.1:9/v1", model="m", retry_sec=0.2)
    fault = await fault_of(ChatPolicy(Server(settings), Offer()))
    assert fault.error_class == "policy_unavailable"


@pytest.mark.parametrize("dated", [False, True])
async def test_the_wait_that_a_server_asks_for_is_kept(server: Scripted, dated: bool) -> None:
    asked = {"retry_after": formatdate(time.time() + 2, usegmt=True) if dated else "0.5"}
    server.replies = [refusal(429, **asked), completion()]
    policy = server.policy()
    await turn(policy)
    first, second = server.times
    assert second - first >= 0.5  # a date has no fractions of a second


async def test_while_a_server_asks_for_a_wait_no_request_of_the_policy_goes_out(server: Scripted) -> None:
    server.replies = [refusal(429, retry_after="0.6"), completion()]
    policy = server.policy()
    first = asyncio.create_task(turn(policy))
    await server.reached.wait()
    await asyncio.sleep(0.2)  # for the refusal to arrive
    made = await asyncio.gather(first, *(turn(policy) for _ in range(30)))
    assert len(server.times) == 32
    assert min(server.times[1:]) - server.times[0] >= 0.6
    assert all(one.queue_seconds >= 0.3 for one in made)


async def test_an_answer_that_never_ends_is_called_off(server: Scripted) -> None:
    server.replies = [endless]
    fault = await fault_of(server.policy(request_timeout_sec=0.4))
    assert fault.error_class == "policy_timeout"
    assert "within 0 s" in fault.message
    assert len(server.bodies) == 1
    async with asyncio.timeout(5):
        await server.dropped.wait()


async def test_a_rollout_that_is_called_off_calls_its_request_off(server: Scripted) -> None:
    server.replies = [silent]
    asked = asyncio.create_task(turn(server.policy()))
    await server.reached.wait()
    asked.cancel()
    async with asyncio.timeout(5):
        await server.dropped.wait()


async def test_a_server_that_gives_no_sign_of_life_is_unavailable_and_a_slow_one_is_not(
    server: Scripted,
) -> None:
    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.8)
        return await completion("slow")(request)

    server.replies = [slow]
    assert (await turn(server.policy(pulse_sec=0.2))).text == "slow"
    server.models = refusal(503)  # an answer, all the same
    assert (await turn(server.policy(pulse_sec=0.2))).text == "slow"
    server.models, server.replies = silent, [silent, completion("back")]
    policy = server.policy(pulse_sec=0.2)
    assert (await turn(policy)).text == "back"
    server.replies = [silent]
    fault = await fault_of(server.policy(pulse_sec=0.1, retry_sec=0.05))
    assert fault.error_class == "policy_unavailable"
    assert "no sign of life" in fault.message


# Before anything is spent: what a server is asked for at the start


async def refused_at_start(settings: ServerSettings) -> str:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        await openai_policy(settings)
    return str(raised.value)


async def test_auto_takes_the_ids_that_are_there_and_none_asks_for_none(server: Scripted) -> None:
    server.models, server.replies = listed("m", owned_by="vllm", max_model_len=99), [completion(ids=True)]
    policy = await openai_policy(server.settings())
    session = policy.session("a", task="t", sample=0)
    assert (await session.complete(HI, SOME))[1] == 0
    assert session.max_model_len == 99  # type: ignore[attr-defined]
    policy = await openai_policy(server.settings(tokens="none"))
    await policy.session("a", task="t", sample=0).complete(HI, SOME)
    assert ["return_token_ids" in body for body in server.bodies] == [True, True, False, False]
    assert (server.bodies[0]["max_tokens"], len(server.bodies)) == (1, 4)


async def test_auto_works_with_a_server_that_refuses_to_be_asked_for_ids(server: Scripted) -> None:
    server.replies = [refusal(400, "Unrecognized request argument: return_token_ids"), completion()]
    policy = await openai_policy(server.settings())
    await policy.session("a", task="t", sample=0).complete(HI, SOME)
    assert ["return_token_ids" in body for body in server.bodies] == [True, False, False]


async def test_a_model_that_knows_max_completion_tokens_only_is_asked_so(server: Scripted) -> None:
    wrong = refusal(400, "'max_tokens' is not supported with this model", code="unsupported_parameter")
    server.replies = [wrong, wrong, completion()]
    policy = await openai_policy(server.settings())
    await policy.session("a", task="t", sample=0).complete(HI, SOME)
    assert server.bodies[-1]["max_completion_tokens"] == 8
    assert "max_tokens" not in server.bodies[-1]


async def test_required_refuses_a_server_without_ids_or_log_probabilities(server: Scripted) -> None:
    server.replies = [completion()]
    said = await refused_at_start(server.settings(tokens="required"))
    assert "answers without the ids of the prompt" in said
    assert "set `tokens` to auto" in said

    async def no_logprobs(_: web.Request) -> web.StreamResponse:
        message = {"role": "assistant", "content": "a"}
        choice = {"index": 0, "finish_reason": "stop", "message": message, "token_ids": [3], "logprobs": None}
        return web.json_response({"choices": [choice], "prompt_token_ids": [1]})

    server.replies = [no_logprobs]
    assert "answers without log-probabilities" in await refused_at_start(server.settings(tokens="required"))
    server.replies = [refusal(400, "Unrecognized request argument: return_token_ids")]
    said = await refused_at_start(server.settings(tokens="required"))
    assert "refuses a request for token ids" in said
    assert "Unrecognized request argument" in said


async def test_a_wrong_model_key_or_url_is_told_at_the_start(server: Scripted) -> None:
    server.models, server.replies = listed("big", "small"), [refusal(404, "no such model")]
    said = await refused_at_start(server.settings())
    assert "has no model 'm'; it has big, small" in said
    server.models, server.replies = refusal(401, "no key"), [completion()]
    said = await refused_at_start(server.settings(api_key_env="A_KEY"))
    assert "set A_KEY on each host" in said
    server.models = server.replies[0] = refusal(404, "not here")
    said = await refused_at_start(server.settings())
    assert "is not where its API begins" in said
    server.models = server.replies[0] = body_of("<html>Welcome</html>", "text/html")
    assert "no JSON object" in await refused_at_start(server.settings())
    server.models, server.replies = None, [refusal(503)]
    with pytest.raises(PolicyError) as raised:
        await openai_policy(server.settings(retry_sec=0.1))
    assert raised.value.error_class == "policy_unavailable"


async def test_a_tokenizer_needs_a_server_that_takes_and_gives_ids(
    server: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = await refused_at_start(server.settings(tokenizer="/nowhere"))
    assert "the tokenizer /nowhere cannot be loaded" in said
    assert server.requests == [], "that is told before a server is waited for"
    monkeypatch.setattr(openai_module, "load_tokenizer", lambda _path: ByteTokenizer())
    server.replies = [body_of('{"choices": [{"index": 0, "finish_reason": "stop", "text": "a"}]}')]
    assert "leave `tokenizer` out" in await refused_at_start(server.settings(tokenizer="/nowhere"))
    server.replies = [refusal(400, "prompt must be a string")]
    said = await refused_at_start(server.settings(tokenizer="/nowhere"))
    assert "prompt must be a string" in said
    assert "leave it out" in await refused_at_start(server.settings(tokenizer="/nowhere", tokens="none"))


async def test_tools_that_nobody_would_read_the_calls_of_are_refused_with_the_remedy(
    server: Scripted,
) -> None:
    engine = ServerEngine(Server(server.settings()), ByteTokenizer(), 100, kind="vllm", parses=False)
    with pytest.raises(PolicyError, match="--enable-scale-out"):
        await engine.generate([1], SOME, request_id="r", session_id="s", tools=[TOOL])
    assert server.bodies == []


async def test_sglang_takes_and_gives_ids_at_its_own_generate(server: Scripted) -> None:
    async def generate(_: web.Request) -> web.StreamResponse:
        about = {
            "finish_reason": {"type": "stop", "matched": 257},
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "cached_tokens": 1,
            "output_token_logprobs": [[-0.5, 104, None], [-0.25, 257, None]],
        }
        return web.json_response({"text": "h", "meta_info": about})

    server.replies = [generate]
    engine = ServerEngine(Server(server.settings()), ByteTokenizer(), 100, kind="sglang", parses=False)
    made = await engine.generate([1, 2, 3], replace(SOME, stop=("x",)), request_id="r", session_id="s")
    assert (made.ids, made.logprobs, made.finish_reason) == ([104, 257], [-0.5, -0.25], "stop")
    assert made.cached_tokens == 1
    assert server.requests[0].path == "/generate"
    assert server.bodies[0]["input_ids"] == [1, 2, 3]
    params = server.bodies[0]["sampling_params"]
    assert (params["max_new_tokens"], params["top_k"], params["stop"]) == (8, -1, ["x"])
