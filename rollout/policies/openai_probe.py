"""What a server is and gives, found out with its list of models and one token, before anything is spent on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Sampling, Tool
from rollcage.rollout.policies.openai_body import (
    SGLANG,
    VLLM,
    WANT_IDS,
    Answer,
    is_refusal,
    read_answer,
    sampling_fields,
)
from rollcage.rollout.policies.openai_ids import DERENDER, derender_request, ids_request, reader_of
from rollcage.rollout.policies.openai_wire import Server

START_SEC = 60.0
"""How long a server that does not answer yet is waited for: it may be starting."""

USERS = ("policy_error", "policy_refused")
"""Classes of what the user may be able to mend, where it is no failure of the server's side."""

ONE_TOKEN = Sampling(max_tokens=1)

REMEDY = "vLLM's own server gives both; for rollouts that nobody trains on, set `tokens` to auto"


@dataclass(frozen=True)
class Offer:
    """What a server gives. `kind` is vllm, sglang or empty. `ids`: token ids and log-probabilities with each answer.
    `limit_field` is its name for `max_tokens`. `parses`: it takes sampled ids apart."""

    kind: str = ""
    max_model_len: int | None = None
    ids: bool = False
    limit_field: str = "max_tokens"
    parses: bool = False


async def probe(server: Server) -> Offer:
    """Raises `ValueError` for what the user must change (the URL, the key, the model's name, `tokens`), and
    `PolicyError` where the server fails."""
    settings = server.settings
    cards = await _models(server)
    card = next((card for card in cards if card.get("id") == settings.model), {})
    owner = str((card or (cards[0] if cards else {})).get("owned_by") or "")
    length = settings.max_model_len or card.get("max_model_len")
    offer = Offer(owner if owner in (VLLM, SGLANG) else "", length if isinstance(length, int) else None)
    try:
        return await (_with_ids if settings.tokenizer else _with_messages)(server, offer)
    except PolicyError as error:
        raise _explained(error, server, [str(card.get("id")) for card in cards]) from error


async def _with_ids(server: Server, offer: Offer) -> Offer:
    settings = server.settings
    prompt_ids = [1]
    path, body = ids_request(offer.kind, settings, prompt_ids, ONE_TOKEN)
    without = f"{settings.base_url} gives no token ids and log-probabilities for a prompt of ids: leave `tokenizer` out"
    try:
        answer = await _ask(server, path, body, reader_of(offer.kind))
    except PolicyError as error:
        if is_refusal(error):
            raise ValueError(f"{without}; it says: {error.message}") from error
        raise
    if answer.ids is None:
        raise ValueError(f"{without}; it answers without {answer.missing}")
    return replace(offer, ids=True, parses=offer.kind == VLLM and await _parses(server, prompt_ids, answer))


async def _parses(server: Server, prompt_ids: list[int], answer: Answer) -> bool:
    """Servers of vLLM before 0.20 do not, and those that hide this path."""
    tool = Tool("done", "Ends.", {"type": "object", "properties": {}})
    try:
        body = derender_request(server.settings, prompt_ids, answer, [tool])
        await _ask(server, DERENDER, body, read_answer)
    except PolicyError as error:
        status = error.evidence.status
        if status is None or status == 429:
            raise
        return False
    return True


async def _with_messages(server: Server, offer: Offer) -> Offer:
    settings = server.settings
    if settings.tokens != "none":
        try:
            answer = await _chat(server, offer, ids=True)
        except PolicyError as error:
            if not is_refusal(error):
                raise
            if settings.tokens == "required":
                raise ValueError(
                    f"{settings.base_url} refuses a request for token ids and log-probabilities, and `tokens` is "
                    f"required: {REMEDY}; it says: {error.message}"
                ) from error
        else:
            if settings.tokens == "required" and answer.ids is None:
                raise ValueError(
                    f"{settings.base_url} answers without {answer.missing}, and `tokens` is required: {REMEDY}"
                )
            return replace(offer, ids=answer.ids is not None)
    try:
        await _chat(server, offer)
    except PolicyError as error:
        if not is_refusal(error):
            raise
        offer = replace(offer, limit_field="max_completion_tokens")  # of OpenAI's models that reason
        await _chat(server, offer)
    return offer


async def _chat(server: Server, offer: Offer, *, ids: bool = False) -> Answer:
    path = "/chat/completions"
    body = {
        "model": server.settings.model,
        "messages": [{"role": "user", "content": "Say a word."}],
        **sampling_fields(ONE_TOKEN, offer.kind),
        offer.limit_field: 1,
        **(WANT_IDS[path] if ids else {}),
        **server.settings.extra_body,
    }
    return await _ask(server, path, body, read_answer)


async def _ask(
    server: Server, path: str, body: dict[str, Any], read: Callable[[Mapping[str, Any]], Answer]
) -> Answer:
    within_sec = min(server.settings.retry_sec, START_SEC)
    return (await server.ask(path, body, "start", read, within_sec=within_sec)).value


async def _models(server: Server) -> list[dict[str, Any]]:
    """The server's models; none where it has no such list."""
    try:
        answer = await server.models(within_sec=min(server.settings.retry_sec, START_SEC))
    except PolicyError as error:
        if error.evidence.status in (401, 403):
            raise ValueError(error.message) from error
        if error.evidence.status in (404, 405):
            return []
        raise
    data = answer.get("data")
    return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []


def _explained(error: PolicyError, server: Server, names: list[str]) -> Exception:
    """What the user can mend, as `ValueError`; any other as it is."""
    settings, status = server.settings, error.evidence.status
    if status is None or not 200 <= status < 500 or error.error_class not in USERS:
        return error
    if names and settings.model not in names:
        known = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
        said = "" if status == 404 else f": {error.message}"
        return ValueError(f"{settings.base_url} has no model {settings.model!r}; it has {known}{said}")
    return ValueError(error.message)
