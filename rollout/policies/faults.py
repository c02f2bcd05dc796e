"""Names for a model server's failures, by exception type, HTTP status and the server's own wording.

The wording decides one thing only: whether a refused request was refused for its length. That is the agent's
doing (`context_overflow`), every other refusal the server's.
"""

from __future__ import annotations

import re

from rollcage.rollout.outcome import Evidence, PolicyError

OVERFLOW = re.compile(
    r"maximum context length"
    r"|max_tokens must be at least 1, got -?\d"
    r"|longer than the maximum (?:model|context) length"
    r"|(?:prompt|input).{0,60}exceeds? .{0,40}(?:max_model_len|context length|context window)",
    re.IGNORECASE | re.DOTALL,
)
"""How vLLM words it, in a 400 of its server as in the error of its engine; the second form is older servers'
for a prompt that leaves no room for an answer, the third that of engines before 0.9."""


def policy_fault(error: BaseException, doing: str, *, status: int | None = None) -> PolicyError:
    """The class of a failed request, with its evidence. `doing` completes "could not ...".

    `status` is the HTTP status where there was one, or the one that the engine's own error stands for.
    """
    if status is None:
        status = getattr(error, "status_code", None)
    said = str(error) or type(error).__name__
    evidence = Evidence(f"could not {doing}: {type(error).__name__}: {said}", "policy server", status=status)
    return PolicyError(_error_class(error, said, status), said, evidence, _retry_after(error))


def _error_class(error: BaseException, said: str, status: int | None) -> str:
    if isinstance(error, TimeoutError):
        return "policy_timeout"
    if isinstance(error, ConnectionError):
        return "policy_unavailable"
    refused = isinstance(error, ValueError) if status is None else status in (400, 413, 422)
    if refused and OVERFLOW.search(said):
        return "context_overflow"
    if status in (429, 529):
        return "rate_limited"
    if status in (408, 504):
        return "policy_timeout"
    if status in (502, 503):
        return "policy_unavailable"
    return "policy_error"


def _retry_after(error: BaseException) -> float | None:
    """Seconds of a `Retry-After` header; the form with a date is left to our own backoff."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    value = headers.get("retry-after", "")
    return float(value) if re.fullmatch(r"\d+(\.\d+)?", value) else None
