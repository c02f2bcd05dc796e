"""What a model server's failure is called."""

from __future__ import annotations

import time
from email.utils import formatdate
from types import SimpleNamespace
from typing import Any

import anthropic
import openai
import pytest

from rollcage.rollout.policies.faults import policy_fault


class ServerError(Exception):
    """An error of an HTTP client, as openai and anthropic make them."""

    def __init__(self, status: int, said: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(said)
        self.status_code = status
        self.response = SimpleNamespace(headers=headers or {})


WINDOW = "This model's maximum context length is 16384 tokens. However, you requested 20000 tokens"
NO_ROOM = "max_tokens must be at least 1, got -186"
SGLANG = "The input (61709 tokens) is longer than the model's context length (40960 tokens)."
PROMPT = "The decoder prompt (length 9000) is longer than the maximum model length of 8192. Make sure that"


@pytest.mark.parametrize(
    ("error", "error_class"),
    [
        (ServerError(400, WINDOW), "context_overflow"),
        (ServerError(400, NO_ROOM), "context_overflow"),
        (ValueError(WINDOW), "context_overflow"),
        (ValueError(NO_ROOM), "context_overflow"),
        (ValueError(PROMPT), "context_overflow"),
        (ServerError(400, SGLANG), "context_overflow"),
        (ServerError(400, "temperature must be non-negative"), "policy_refused"),
        (ServerError(500, WINDOW), "policy_error"),
        (RuntimeError(WINDOW), "policy_error"),
        (ServerError(429, "slow down"), "rate_limited"),
        (ServerError(529, "overloaded"), "rate_limited"),
        (ServerError(503, "no replica"), "policy_unavailable"),
        (ServerError(502, "bad gateway"), "policy_unavailable"),
        (ConnectionRefusedError("refused"), "policy_unavailable"),
        (ConnectionResetError(), "policy_unavailable"),
        (TimeoutError(), "policy_timeout"),
        (ServerError(504, "gateway timeout"), "policy_timeout"),
        (ServerError(500, "boom"), "policy_error"),
        (ServerError(401, "no key"), "policy_refused"),
        (ServerError(413, "Request Entity Too Large"), "policy_refused"),
        (ServerError(404, "no such model"), "policy_refused"),
        (ServerError(409, "in the middle of something"), "policy_error"),
        (ValueError("top_p must be in (0, 1]"), "policy_refused"),
    ],
)
def test_failures_are_named_by_type_status_and_the_servers_word(error: Exception, error_class: str) -> None:
    fault = policy_fault(error, "generate")
    assert fault.error_class == error_class
    assert fault.evidence.said_by == "policy server"
    assert fault.evidence.message.startswith(f"could not generate: {type(error).__name__}")


@pytest.mark.parametrize("sdk", [openai, anthropic])
def test_what_an_sdk_calls_a_connection_error_is_one_whatever_is_behind_it(sdk: Any) -> None:
    for behind, error_class in (
        (RuntimeError("the handler is closed"), "policy_unavailable"),
        (ConnectionResetError(104, "reset"), "policy_unavailable"),
        (OSError(113, "no route"), "policy_unavailable"),
        (TimeoutError(), "policy_timeout"),
    ):
        error = sdk.APIConnectionError(request=None)
        error.__cause__ = behind
        assert policy_fault(error, "generate").error_class == error_class


def test_the_wait_that_a_server_asks_for_is_kept() -> None:
    assert policy_fault(ServerError(429, "x", {"retry-after": "7"}), "generate").retry_after_sec == 7.0
    assert policy_fault(ServerError(429, "x", {"retry-after-ms": "1500"}), "generate").retry_after_sec == 1.5
    past = ServerError(429, "x", {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"})
    assert policy_fault(past, "generate").retry_after_sec == 0.0
    future = formatdate(time.time() + 100, usegmt=True)
    asked = policy_fault(ServerError(429, "x", {"retry-after": future}), "generate").retry_after_sec
    assert asked == pytest.approx(100, abs=20)
    assert policy_fault(ServerError(429, "x", {"retry-after": "soon"}), "generate").retry_after_sec is None
