"""What requests to a server of OpenAI's API hold, and what its answers hold, apart from any connection."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollcage.rollout.outcome import Evidence, PolicyError
from rollcage.rollout.policies.api_text import whole
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.engine import Parsed
from rollcage.rollout.trajectory import Message, ToolCall

VLLM, SGLANG = "vllm", "sglang"
"""What these servers call themselves in `owned_by` of their models."""

WANT_IDS: Mapping[str, dict[str, Any]] = {
    "/chat/completions": {"logprobs": True, "return_token_ids": True},
    "/completions": {"logprobs": 0, "return_token_ids": True},
}
"""What asks for token ids and the sampled tokens' log-probabilities, by path."""

_SAMPLES_ALL = {
    VLLM: {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
    SGLANG: {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0},
}
"""Both servers fill what a request leaves out from the model's generation_config.json: Qwen's asks for top_k 20, and
the log-probabilities would not be those of what was sampled from."""

_FINISHES = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "refusal",
}


@dataclass(frozen=True)
class Answer:
    """One answer of a server, taken apart. `ids` is None where it gave no ids or not every token's log-probability:
    `missing` then says which. `queue_seconds` and `prompt_tokens` are None where it does not say."""

    said: Parsed
    finish_reason: str
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None
    logprobs: list[float] = field(default_factory=list)
    missing: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    queue_seconds: float | None = None
    reasoning_field: str = ""


def sampling_fields(sampling: Sampling, server: str) -> dict[str, Any]:
    """The request's fields for how tokens are drawn; without `max_tokens`."""
    fields: dict[str, Any] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    fields |= _SAMPLES_ALL.get(server, {})
    if sampling.top_k != -1:
        fields["top_k"] = sampling.top_k
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
        fields |= {VLLM: {"include_stop_str_in_output": True}, SGLANG: {"no_stop_trim": True}}.get(server, {})
    if sampling.seed is not None:
        fields["seed"] = sampling.seed
    return fields | sampling.extra


def structure_fields(structure: Structure | None, server: str) -> dict[str, Any]:
    """The request's fields that hold the answer to `structure`; none where the server knows no such thing."""
    if structure is None:
        return {}
    if structure.json_schema is not None:
        schema = {"name": "answer", "schema": dict(structure.json_schema), "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    grammars: dict[str, dict[str, Any]] = {
        VLLM: {"structured_outputs": {"grammar": structure.grammar}},
        SGLANG: {"ebnf": structure.grammar},
    }
    return grammars.get(server, {})


def tool_fields(tools: Sequence[Tool]) -> dict[str, Any]:
    """The request's fields for tools."""
    if not tools:
        return {}
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
        for tool in tools
    ]
    return {"tools": [{"type": "function", "function": function} for function in functions]}


def message_fields(message: Message, reasoning_field: str = "reasoning") -> dict[str, Any]:
    """A message as the server takes it. What an assistant thought goes back in the field that it came in."""
    fields: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields[reasoning_field] = message.reasoning
    if message.tool_calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields


def read_answer(body: Mapping[str, Any]) -> Answer:
    """Raises `PolicyError` (`policy_error`) where the body is no completion, and `policy_unavailable` where the server
    called the answer off."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise no_completion(f"200 without a choice: {str(dict(body))[:500]}")
    choice, usage = choices[0], _mapping(body.get("usage"))
    finish = choice.get("finish_reason")
    if finish == "abort":
        raise called_off()
    if not isinstance(finish, str) or finish not in _FINISHES:
        raise no_completion(f"200 with an answer that ended as {finish!r}")
    said, reasoning_field = _said(choice)
    refused = bool(_mapping(choice.get("message")).get("refusal"))
    reason = "refusal" if refused else _FINISHES[finish]
    ids, logprobs = _numbers(choice.get("token_ids")), _logprobs(choice.get("logprobs"))
    prompt_ids = _numbers(choice.get("prompt_token_ids") or body.get("prompt_token_ids"))
    missing = _missing(prompt_ids, ids, logprobs)
    queue = _mapping(body.get("metrics")).get("queue_time_ms")
    return Answer(
        said=said,
        finish_reason="tool_calls" if said.tool_calls and reason == "stop" else reason,
        prompt_ids=None if missing else prompt_ids,
        ids=None if missing else ids,
        logprobs=[] if missing else logprobs or [],
        missing=missing,
        prompt_tokens=count_of(usage.get("prompt_tokens")),
        completion_tokens=count_of(usage.get("completion_tokens")),
        cached_tokens=count_of(_mapping(usage.get("prompt_tokens_details")).get("cached_tokens")) or 0,
        queue_seconds=queue / 1000 if isinstance(queue, int | float) else None,
        reasoning_field=reasoning_field,
    )


def _said(choice: Mapping[str, Any]) -> tuple[Parsed, str]:
    """The answer, and the field in which its reasoning came."""
    message = choice.get("message")
    if not isinstance(message, dict):
        text = choice.get("text")
        if not isinstance(text, str):
            raise no_completion(f"200 with a choice that holds no answer: {str(dict(choice))[:500]}")
        return Parsed(whole(text)), ""
    name = next((name for name in ("reasoning", "reasoning_content") if message.get(name)), "")
    listed = message.get("tool_calls")
    calls = tuple(
        ToolCall(
            str(call.get("id") or ""), str(function.get("name") or ""), _written(function.get("arguments"))
        )
        for call in map(_mapping, listed if isinstance(listed, list) else ())
        if (function := _mapping(call.get("function")))
    )
    text = _text(message.get("content")) or _text(message.get("refusal"))
    return Parsed(text, _text(message.get(name)), calls), name


def _text(value: Any) -> str:
    """A message's content: a text, or parts, of which those that are text count."""
    if isinstance(value, list):
        parts = map(_mapping, value)
        return "".join(_text(part.get("text")) for part in parts if part.get("type") == "text")
    return whole(value) if isinstance(value, str) else ""


def _written(arguments: Any) -> str:
    """A call's arguments as JSON text: some servers give the object itself."""
    if isinstance(arguments, dict):
        return json.dumps(arguments, ensure_ascii=False)
    return str(arguments or "")


def count_of(value: Any) -> int | None:
    """A server's count of tokens; None where it gives none."""
    return value if isinstance(value, int) and value >= 0 else None


def _logprobs(value: Any) -> list[float] | None:
    """Of the sampled tokens, from either API; None where one of them has none."""
    fields = _mapping(value)
    content, numbers = fields.get("content"), fields.get("token_logprobs")
    if isinstance(content, list):
        numbers = [_mapping(token).get("logprob") for token in content]
    if not isinstance(numbers, list):
        return None
    floats = [
        float(number) for number in numbers if isinstance(number, int | float) and math.isfinite(number)
    ]
    return floats if floats and len(floats) == len(numbers) else None


def _numbers(value: Any) -> list[int] | None:
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        return None
    return value


def _missing(prompt_ids: list[int] | None, ids: list[int] | None, logprobs: list[float] | None) -> str:
    if not prompt_ids:
        return "the ids of the prompt (prompt_token_ids)"
    if not ids:
        return "the ids of the answer (token_ids)"
    if logprobs is None:
        return "log-probabilities"
    if len(logprobs) != len(ids):
        return f"the log-probability of each token: {len(logprobs)} for {len(ids)} tokens"
    return ""


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def no_completion(why: str) -> PolicyError:
    """The server took the request, and what it answered is no completion."""
    said = f"the model server answered {why}"
    return PolicyError("policy_error", said, Evidence(said, "policy server", status=200))


def called_off() -> PolicyError:
    """The server ended the answer on its side, as it does when it is shut down."""
    said = "the model server called the answer off"
    return PolicyError("policy_unavailable", said, Evidence(said, "policy server"))


def is_refusal(error: PolicyError) -> bool:
    """Whether the server did not like what it was asked, rather than who asked, or how long it was."""
    return error.error_class == "policy_refused" and error.evidence.status in (400, 422)
