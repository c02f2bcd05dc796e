"""One request to a server of the Messages API, through the anthropic SDK, and a name for each way in which it fails.

The stream is read event by event as it comes: the SDK's own models would put the fields of blocks that must go back
unchanged in another order, and give up at an input of a tool that is not JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rollcage.rollout.outcome import Evidence, PolicyError
from rollcage.rollout.policies.anthropic_wire import FINISH, PAUSED, Answer, StreamError
from rollcage.rollout.policies.faults import dead_engine, policy_fault
from rollcage.rollout.policies.retry import Gate, retried

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

API_URL = "https://api.anthropic.com"
"""Named, for the SDK would read another from a variable of the process that happens to ask."""

CONNECT_SEC = 30.0

START_SEC = 60.0
"""How long a server that does not answer yet is waited for before anything is begun."""

NO_KEY = "none"
"""Sent to a server that needs no key: the SDK must have one."""

HEALTH_SEC = 10.0

STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "api_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The HTTP status that stands for an error of this type. In the middle of a stream there is no other."""


@dataclass(frozen=True)
class Endpoint:
    """Where a server is and how it is asked. `base_url` None: `API_URL`. `api_key` None: it needs none, else `key_from`
    names where it came from.

    `request_timeout_sec` is for one whole answer, `retry_sec` for how long a turn is tried again.
    """

    model: str
    base_url: str | None = None
    api_key: str | None = field(default=None, repr=False)
    key_from: str = "ANTHROPIC_API_KEY"
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    max_connections: int = 1000
    retry_sec: float = 600.0
    request_timeout_sec: float = 600.0


def connect(there: Endpoint) -> AsyncAnthropic:
    """A client for the running event loop. It tries nothing again by itself: `retried` does, and counts the time."""
    import httpx2
    from anthropic import AsyncAnthropic, DefaultAsyncHttpxClient, Timeout

    connections = httpx2.Limits(max_connections=there.max_connections, max_keepalive_connections=100)
    return AsyncAnthropic(
        api_key=there.api_key or NO_KEY,
        base_url=there.base_url or API_URL,
        max_retries=0,
        timeout=Timeout(None, connect=CONNECT_SEC),
        http_client=DefaultAsyncHttpxClient(limits=connections),
    )


async def check(there: Endpoint) -> None:
    """Have the server count the tokens of a word, which costs nothing.

    Raises `ValueError` for what the user must change (the key, the model's name, the URL), and `PolicyError` where no
    server is there for `START_SEC`. Whatever else it answers says nothing of the answers that are to come.
    """
    client = connect(there)
    try:
        await retried(lambda: _count(client, there), Gate(1), within_sec=min(there.retry_sec, START_SEC))
    except PolicyError as fault:
        if fault.error_class in ("policy_error", "policy_refused"):
            raise ValueError(fault.message) from fault
        raise
    finally:
        await client.close()


async def _count(client: AsyncAnthropic, there: Endpoint) -> None:
    import anthropic

    doing = f"ask for {there.model}"
    try:
        async with asyncio.timeout(START_SEC):
            await client.messages.count_tokens(
                model=there.model, messages=[{"role": "user", "content": "Hello"}]
            )
    except TimeoutError as error:
        raise policy_fault(error, doing) from error
    except anthropic.APIStatusError as error:
        fault = _refused(there, error, doing, error.status_code, error.error_code)
        # A server that counts no tokens has a 404 for that path, too, but not in the API's form.
        unknown = (
            error.status_code == 404 and isinstance(error.body, dict) and error.body.get("type") == "error"
        )
        if unknown or error.status_code in (401, 403) or fault.error_class == "policy_unavailable":
            raise fault from error
    except anthropic.APIConnectionError as error:
        raise policy_fault(error, doing) from error
    except (anthropic.APIError, ValueError):
        return


async def ask_once(
    client: AsyncAnthropic, there: Endpoint, body: Mapping[str, Any], answer: Answer
) -> Answer:
    """One request and its whole answer, put into `answer` as it comes: what there is of it stays where this raises.
    Raises `PolicyError`."""
    import anthropic
    import httpx2

    doing = f"have an answer of {there.model}"
    begun = False
    try:
        async with (
            asyncio.timeout(there.request_timeout_sec),
            client.messages.with_streaming_response.create(**body) as response,
        ):
            begun = True
            _require_stream(response.headers.get("content-type", ""))
            async for event in anthropic.AsyncStream.raw_events(response.http_response):
                answer.add(event.json() if event.data else {"type": event.event})
    except anthropic.APIStatusError as error:
        fault = _refused(there, error, doing, error.status_code, error.error_code)
        raise await _with_health(client, there, fault) from error
    except StreamError as error:
        fault = _refused(there, error, doing, STATUS.get(error.kind, 500))
        raise await _with_health(client, there, fault) from error
    except TimeoutError as error:
        said = f"no whole answer within {there.request_timeout_sec:g} s"
        raise policy_fault(TimeoutError(said), doing) from error
    except (anthropic.APIConnectionError, httpx2.RequestError) as error:
        raise policy_fault(error, doing) from error
    except (anthropic.APIError, ValueError) as error:
        # Before the stream it is a request that cannot be sent, in it an answer that was torn on its way.
        raise policy_fault(error, doing, status=500 if begun else 400) from error
    if not answer.ended:
        raise policy_fault(ConnectionError("the stream ended in the middle of the answer"), doing)
    if answer.stop_reason not in FINISH and answer.stop_reason != PAUSED:
        said = f"the server ended the answer as {answer.stop_reason!r}"
        raise PolicyError("policy_error", said, Evidence(said, "policy server"))
    return answer


def _require_stream(content_type: str) -> None:
    """Raises `PolicyError` where a 200 is no stream of events: another kind of server listens there."""
    if content_type.partition(";")[0].strip().lower() != "text/event-stream":
        said = f"the server answered 200 with {content_type or 'no type'} instead of a stream of events"
        raise PolicyError("policy_error", said, Evidence(said, "policy server", status=200))


async def _with_health(client: AsyncAnthropic, there: Endpoint, fault: PolicyError) -> PolicyError:
    """A 500 of a server that is not Anthropic's own may be its engine's death, which its `/health` tells."""
    import anthropic

    if fault.evidence.status != 500 or there.base_url is None:
        return fault
    try:
        async with asyncio.timeout(HEALTH_SEC):
            await client.get("/health", cast_to=object)
    except anthropic.APIStatusError as error:
        return dead_engine(fault) if error.status_code == 503 else fault
    except (anthropic.APIError, TimeoutError, ValueError):
        return fault
    return fault


def _refused(
    there: Endpoint, error: Exception, doing: str, status: int, error_code: str | None = None
) -> PolicyError:
    """What the server's own error says: its HTTP status, or in a stream the one that its type stands for."""
    if status == 429 and (error_code or "").endswith("spend_limit_reached"):
        status = 402  # no wait of ours ends it
    fault = policy_fault(error, doing, status=status)
    if status in (401, 403):
        said = f"the server does not accept the key of {there.key_from}: {fault.message}"
        return PolicyError(fault.error_class, said, replace(fault.evidence, message=said))
    return fault
