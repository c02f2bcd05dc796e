"""Names for a model server's failures, by exception type, HTTP status and the server's own wording.

The wording decides one thing only: whether a refused request was refused for its length. That is the agent's
doing (`context_overflow`). Every other refusal is `policy_refused`: the same request would be refused again.
"""

from __future__ import annotations

import re
import ssl
import sys
import time
from dataclasses import replace
from email.utils import parsedate_to_datetime

from rollcage.rollout.outcome import Evidence, PolicyError

OVERFLOW = re.compile(
    r"maximum context length"
    r"|max_tokens must be at least 1, got -?\d"
    r"|longer than the maximum (?:model|context) length"
    r"|longer than the model's context length"
    r"|(?:prompt|input).{0,60}exceeds? .{0,40}(?:max_model_len|context length|context window)"
    r"|prompt is too long: \d+ tokens > \d+ maximum"
    r"|input length and `max_tokens` exceed context limit",
    re.IGNORECASE | re.DOTALL,
)
"""How vLLM words it, in a 400 of its server as in the error of its engine; the second form is older servers'
for a prompt that leaves no room for an answer, the third that of engines before 0.9, the fourth SGLang's. The last
two are Anthropic's."""

OVERFLOW_CODES = ("context_length_exceeded", "request_too_large")
"""OpenAI's own code for it, and Anthropic's for a request of too many bytes."""

PASSING = (409, 425)
"""Statuses of 4xx, beside those that have a class of their own, by which a server asks for another try."""

NOT_SENT = "the request has a header that HTTP cannot carry"
"""Instead of the HTTP client's own words, which hold the header, and that may be the key."""

NO_TLS = "the server speaks http, not TLS: write http:// in base_url"

OURS = ("UnsupportedProtocol", "LocalProtocolError", "DecodingError", "TooManyRedirects")
"""Failures of the HTTP client that another try ends in just so: they are about what was asked, and where."""


def policy_fault(error: BaseException, doing: str, *, status: int | None = None) -> PolicyError:
    """The class of a failed request, with its evidence. `doing` completes "could not ...".

    `status` is the HTTP status where there was one, or the one that the engine's own error stands for.
    """
    if status is None:
        status = getattr(error, "status_code", None)
    error = _transport_error(error)
    said = NOT_SENT if isinstance(error, _http_errors("LocalProtocolError")) else str(error)
    said = NO_TLS if _speaks_no_tls(error) else said
    said = said or type(error).__name__
    evidence = Evidence(f"could not {doing}: {type(error).__name__}: {said}", "policy server", status=status)
    return PolicyError(_error_class(error, said, status), said, evidence, _retry_after(error))


def dead_engine(fault: PolicyError) -> PolicyError:
    """The same, of a server whose engine is dead while its port goes on answering: every request fails with 500, and
    the server's own `/health` (vLLM's, SGLang's) says 503."""
    said = f"the server answers, but its /health says 503: its engine is dead: {fault.message}"
    return PolicyError("policy_unavailable", said, replace(fault.evidence, message=said))


def _error_class(error: BaseException, said: str, status: int | None) -> str:
    if isinstance(error, TimeoutError):
        return "policy_timeout"
    if isinstance(error, _transport_errors()):
        return _transport_class(error)
    if isinstance(error, (ConnectionError, *_sdk_errors("APIConnectionError"))):
        return "policy_unavailable"
    refused = isinstance(error, ValueError) if status is None else status in (400, 413, 422)
    if refused and _too_long(error, said):
        return "context_overflow"
    if status in (429, 529):
        return "rate_limited"
    if status in (408, 504):
        return "policy_timeout"
    if status in (502, 503):
        return "policy_unavailable"
    if refused or (status is not None and 400 <= status < 500 and status not in PASSING):
        return "policy_refused"
    return "policy_error"


def _too_long(error: BaseException, said: str) -> bool:
    """A 413 alone is not enough: a proxy on the way has limits of its own."""
    body = getattr(error, "body", None)
    inner = body.get("error") if isinstance(body, dict) else None
    kind = inner.get("type") if isinstance(inner, dict) else None
    return (
        getattr(error, "code", None) in OVERFLOW_CODES
        or kind in OVERFLOW_CODES
        or bool(OVERFLOW.search(said))
    )


def _transport_error(error: BaseException) -> BaseException:
    """What is behind the connection error of an SDK, which says nothing itself."""
    cause = error.__cause__
    says_more: tuple[type[BaseException], ...] = (*_transport_errors(), ConnectionError, TimeoutError)
    return cause if isinstance(cause, says_more) else error


def _transport_class(error: BaseException) -> str:
    """A server that takes no connection is not slow, it is not there."""
    if isinstance(error, _http_errors(*OURS)) or _not_trusted(error):
        return "policy_error"
    slow = isinstance(error, _http_errors("TimeoutException"))
    return (
        "policy_timeout"
        if slow and not isinstance(error, _http_errors("ConnectTimeout"))
        else "policy_unavailable"
    )


def _not_trusted(error: BaseException) -> bool:
    """Whether the server has no certificate that is trusted, or speaks no TLS at all."""
    return isinstance(_tls_error(error), ssl.SSLCertVerificationError) or _speaks_no_tls(error)


def _speaks_no_tls(error: BaseException) -> bool:
    behind = _tls_error(error)
    return behind is not None and behind.reason == "WRONG_VERSION_NUMBER"


def _tls_error(error: BaseException) -> ssl.SSLError | None:
    """What is behind it, where that is TLS's."""
    behind, seen = error, set[int]()
    while not isinstance(behind, ssl.SSLError):
        seen.add(id(behind))
        further = behind.__cause__ or behind.__context__
        if further is None or id(further) in seen:  # an SDK's errors may stand behind each other
            return None
        behind = further
    return behind


def _transport_errors() -> tuple[type[BaseException], ...]:
    return (*_http_errors("RequestError"), ssl.SSLError)


def _http_errors(*names: str) -> tuple[type[BaseException], ...]:
    """These exceptions of httpx, by whichever of its names an SDK has loaded it."""
    return _of_modules(("httpx", "httpx2"), names)


def _sdk_errors(*names: str) -> tuple[type[BaseException], ...]:
    return _of_modules(("openai", "anthropic"), names)


def _of_modules(modules: tuple[str, ...], names: tuple[str, ...]) -> tuple[type[BaseException], ...]:
    """The exceptions of these names, of the modules that are loaded: of another one there is no exception."""
    loaded = [sys.modules[module] for module in modules if module in sys.modules]
    return tuple(getattr(module, name) for module in loaded for name in names)


def _retry_after(error: BaseException) -> float | None:
    """Seconds that a server asks us to wait: `retry-after-ms` (OpenAI's), or `Retry-After` in seconds or as a date (RFC
    9110, 10.2.3). None where it asks for nothing that can be read."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    millis, value = headers.get("retry-after-ms", ""), headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d+)?", millis):
        return float(millis) / 1000
    if re.fullmatch(r"\d+(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
