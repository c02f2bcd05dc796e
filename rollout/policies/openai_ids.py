"""A server that is sent token ids and returns token ids, as a `TokenEngine`.

vLLM's completions API takes a prompt of ids and returns the sampled ones (`return_token_ids`). SGLang's returns none;
its own `/generate` does. Tools: vLLM takes sampled ids apart with its parsers at `/v1/chat/completions/derender`, so
that an answer's calls and reasoning are known and nothing is tokenized; its server must have been started with
`--enable-scale-out`. Any other server's answers come as text.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.engine import Generation, Parsed, require_room
from rollcage.rollout.policies.openai_body import (
    SGLANG,
    VLLM,
    WANT_IDS,
    Answer,
    called_off,
    count_of,
    is_refusal,
    no_completion,
    read_answer,
    sampling_fields,
    structure_fields,
    tool_fields,
)
from rollcage.rollout.policies.openai_wire import Server, ServerSettings
from rollcage.rollout.tokens import Tokenizer

DERENDER = "/chat/completions/derender"

NO_PARSER = (
    "the server does not take sampled ids apart, so that calls of tools cannot be told from text: start vLLM with "
    "--enable-scale-out --enable-auto-tool-choice --tool-call-parser NAME, or leave the policy's `tokenizer` out, or "
    "set the agent's `structured: true`"
)

PROMPT_TAIL = 16
"""Ids of the prompt that vLLM looks at to see how the first token of the answer is spelt."""


class ServerEngine:
    """Generates on `server`, which is of this `kind`. `parses`: it has `DERENDER`. It can be pickled."""

    def __init__(
        self, server: Server, tokenizer: Tokenizer, max_model_len: int, *, kind: str, parses: bool
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._server = server
        self._kind = kind
        self._parses = parses
        self._holds_form = kind in (VLLM, SGLANG)

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> Generation:
        """See `TokenEngine`. `queue_seconds` holds what was waited here, other tries included, and the server's own
        queue where it tells of it. Raises `policy_error` for tools whose calls nobody would tell from the text: the
        answers would be called malformed, and that is not the model's doing."""
        require_room(len(prompt_ids), self.max_model_len)
        if tools and structure is None and not self._parses:
            raise PolicyError("policy_error", NO_PARSER)
        begun = time.monotonic()
        form = structure if self._holds_form else None
        try:
            answer, seconds = await self._answer(prompt_ids, sampling, form, session_id)
        except PolicyError as error:
            if form is None or not is_refusal(error):
                raise
            self._holds_form, form = False, None
            answer, seconds = await self._answer(prompt_ids, sampling, None, session_id)
        if answer.ids is None:
            raise no_completion(f"200 without {answer.missing}")
        if answer.prompt_ids not in (None, list(prompt_ids)):
            raise no_completion(
                f"200 for a prompt of {len(answer.prompt_ids or ())} ids that is not the one it was sent"
            )
        working = max(0.0, seconds - (answer.queue_seconds or 0.0))
        waited = max(0.0, time.monotonic() - begun - working)
        parsed = await self._parsed(prompt_ids, answer, tools, session_id) if tools and self._parses else None
        return Generation(
            ids=answer.ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            queue_seconds=waited,
            generate_seconds=working,
            cached_tokens=answer.cached_tokens,
            version=self._server.settings.version,
            parsed=parsed,
            structured=form is not None,
        )

    async def release(self, session_id: str) -> None:
        """The server keeps nothing for a session but its prefix cache, which evicts by itself."""

    async def _answer(
        self, prompt_ids: Sequence[int], sampling: Sampling, structure: Structure | None, session_id: str
    ) -> tuple[Answer, float]:
        """The answer, and the seconds of the try that got it."""
        path, body = ids_request(self._kind, self._server.settings, prompt_ids, sampling, structure)
        answered = await self._server.ask(path, body, session_id, reader_of(self._kind))
        return answered.value, answered.seconds

    async def _parsed(
        self, prompt_ids: Sequence[int], answer: Answer, tools: Sequence[Tool], session_id: str
    ) -> Parsed:
        body = derender_request(self._server.settings, prompt_ids, answer, tools)
        answered = await self._server.ask(DERENDER, body, session_id, read_answer)
        return answered.value.said


def ids_request(
    kind: str,
    settings: ServerSettings,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    structure: Structure | None = None,
) -> tuple[str, dict[str, Any]]:
    """Path and body of a request with a prompt of ids."""
    if kind == SGLANG:
        root = settings.base_url.rstrip("/").removesuffix("/v1")
        return f"{root}/generate", {
            "input_ids": list(prompt_ids),
            "return_logprob": True,
            "sampling_params": _sglang_params(sampling, structure),
            **settings.extra_body,
        }
    return "/completions", {
        "model": settings.model,
        "prompt": list(prompt_ids),
        **sampling_fields(sampling, kind),
        "max_tokens": sampling.max_tokens,
        **structure_fields(structure, kind),
        **WANT_IDS["/completions"],
        **settings.extra_body,
    }


def reader_of(kind: str) -> Callable[[Mapping[str, Any]], Answer]:
    """What takes the answer to an `ids_request` apart. Raises as `read_answer`."""
    return _read_generate if kind == SGLANG else read_answer


def derender_request(
    settings: ServerSettings, prompt_ids: Sequence[int], answer: Answer, tools: Sequence[Tool]
) -> dict[str, Any]:
    """The body with which vLLM's server takes an answer apart. The conversation's messages play no part in that."""
    choice = {"index": 0, "token_ids": answer.ids, "finish_reason": answer.finish_reason}
    return {
        "model": settings.model,
        "generate_response": {"request_id": "derender", "choices": [choice]},
        "prompt_token_ids": list(prompt_ids[-PROMPT_TAIL:]),
        "chat_request": {
            "model": settings.model,
            "messages": [{"role": "user", "content": ""}],
            **tool_fields(tools),
        },
    }


def _sglang_params(sampling: Sampling, structure: Structure | None) -> dict[str, Any]:
    """SGLang's own names. Its `sampling_seed` counts only where the server is deterministic, and older servers refuse
    it: `extra` may hold it."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "max_new_tokens": sampling.max_tokens,
    }
    if sampling.stop:
        params |= {"stop": list(sampling.stop), "no_stop_trim": True}
    if structure is not None and structure.json_schema is not None:
        params["json_schema"] = json.dumps(structure.json_schema)
    elif structure is not None:
        params["ebnf"] = structure.grammar
    return params | sampling.extra


def _read_generate(body: Mapping[str, Any]) -> Answer:
    """An answer of SGLang's `/generate`: `meta_info` has [log-probability, id, text] of each sampled token."""
    about = body.get("meta_info")
    tokens = about.get("output_token_logprobs") if isinstance(about, dict) else None
    if not isinstance(about, dict) or not isinstance(tokens, list) or not tokens:
        raise no_completion(f"200 without ids and log-probabilities: {str(dict(body))[:500]}")
    end = about.get("finish_reason")
    finish = end.get("type") if isinstance(end, dict) else None
    if finish == "abort":
        raise called_off()
    if finish not in ("stop", "length"):
        raise no_completion(f"200 with an answer that ended as {end!r}")
    try:
        logprobs, ids = [float(token[0]) for token in tokens], [int(token[1]) for token in tokens]
    except (TypeError, ValueError, LookupError) as error:
        raise no_completion(f"200 with a token that is not [log-probability, id, text]: {error}") from error
    if not all(map(math.isfinite, logprobs)):
        raise no_completion("200 with a log-probability that is no number")
    return Answer(
        said=Parsed(str(body.get("text") or "")),
        finish_reason=finish,
        ids=ids,
        logprobs=logprobs,
        prompt_tokens=count_of(about.get("prompt_tokens")),
        completion_tokens=count_of(about.get("completion_tokens")),
        cached_tokens=count_of(about.get("cached_tokens")) or 0,
    )
