"""A policy behind a server that speaks OpenAI's API: vLLM, SGLang, any other.

Two ways. With a tokenizer, prompts are made here and sent as token ids (`openai_ids.ServerEngine`, a `TokenEngine`):
nothing that was sampled is tokenized again, and a session is a `TokenSession`. Without, messages go to the chat API
(`openai_chat.ChatSession`), the server makes the prompt, and the token record is kept from the ids that it says it saw
and sampled; where it gives none there is no record.
"""

from __future__ import annotations

import os

from rollcage.rollout.policies.api_keys import api_key
from rollcage.rollout.policies.base import Policy
from rollcage.rollout.policies.engine import TokenPolicy
from rollcage.rollout.policies.openai_chat import ChatPolicy
from rollcage.rollout.policies.openai_ids import ServerEngine
from rollcage.rollout.policies.openai_probe import probe
from rollcage.rollout.policies.openai_wire import Server, ServerSettings
from rollcage.rollout.tokens import Tokenizer, load_tokenizer


async def openai_policy(settings: ServerSettings, *, name: str = "openai") -> Policy:
    """A policy on a server that has answered with one token. It can be pickled.

    Raises `ValueError` for settings that the server cannot serve, saying what was missing and what to do, and
    `PolicyError` where the server fails.
    """
    if settings.tokenizer and settings.tokens == "none":
        raise ValueError("a tokenizer is for exact tokens: leave it out, or set `tokens` to required")
    api_key(settings.api_key_env, os.environ)
    tokenizer = _tokenizer(settings.tokenizer) if settings.tokenizer else None
    server = Server(settings)
    try:
        offer = await probe(server)
    finally:
        await server.close()
    server.found = True
    if tokenizer is None:
        return ChatPolicy(server, offer, name=name)
    if offer.max_model_len is None:
        raise ValueError(f"{settings.base_url} does not say how long its context is: set `max_model_len`")
    engine = ServerEngine(server, tokenizer, offer.max_model_len, kind=offer.kind, parses=offer.parses)
    return TokenPolicy(engine, name=name, template_kwargs=settings.template_kwargs)


def _tokenizer(name: str) -> Tokenizer:
    """Raises `ValueError`, before a server is waited for."""
    try:
        return load_tokenizer(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"the tokenizer {name} cannot be loaded: {error}") from error
