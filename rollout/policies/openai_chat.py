"""Sessions on a chat API: messages go out, the server makes the prompt, and says which ids it saw and sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Completion, Sampling, Structure, Tool
from rollcage.rollout.policies.openai_body import (
    WANT_IDS,
    Answer,
    is_refusal,
    message_fields,
    no_completion,
    read_answer,
    sampling_fields,
    structure_fields,
    tool_fields,
)
from rollcage.rollout.policies.openai_probe import Offer
from rollcage.rollout.policies.openai_wire import Server
from rollcage.rollout.policies.served_tokens import record_turn
from rollcage.rollout.trajectory import Message, Segment

PATH = "/chat/completions"


class ChatPolicy:
    """Serves sessions on `server`, which gives what `offer` says. It can be pickled."""

    def __init__(self, server: Server, offer: Offer, *, name: str = "openai") -> None:
        self.name = name
        self._server = server
        self._offer = offer

    def session(self, session_id: str, *, task: str, sample: int) -> ChatSession:
        """See `Policy`."""
        return ChatSession(session_id, self._server, self._offer, self.name)


class ChatSession:
    """One rollout's conversation."""

    def __init__(self, session_id: str, server: Server, offer: Offer, policy: str) -> None:
        self.segments: list[Segment] = []
        self._id = session_id
        self._policy = policy
        self._server = server
        self._offer = offer
        self._messages: list[dict[str, Any]] = []
        self._turns = 0
        self._begins = True
        self._holds_form = True

    @property
    def max_model_len(self) -> int | None:
        """See `MeasuresTokens`."""
        return self._offer.max_model_len

    def count_tokens(self, text: str) -> int | None:
        """See `MeasuresTokens`: the tokenizer is the server's."""
        return None

    async def complete(
        self,
        new_messages: list[Message],
        sampling: Sampling,
        *,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> tuple[Completion, int | None]:
        """See `PolicySession`. A seed is moved on with every turn: with one and the same, a model answers what it
        answered before."""
        begun = time.monotonic()
        messages = [*self._messages, *map(message_fields, new_messages)]
        drawn = replace(sampling, seed=None if sampling.seed is None else sampling.seed + self._turns + 1)
        body = self._body(messages, drawn, tools)
        form = structure_fields(structure, self._offer.kind) if self._holds_form else {}
        try:
            answer, seconds = await self._answer(body, sampling, form)
        except PolicyError as error:
            if not form or not is_refusal(error):
                raise
            self._holds_form, form = False, {}
            answer, seconds = await self._answer(body, sampling, form)
        if answer.ids is None and self._server.settings.tokens == "required":
            raise no_completion(f"200 without {answer.missing}, and `tokens` is required")
        working = max(0.0, seconds - (answer.queue_seconds or 0.0))
        self._turns += 1
        said = answer.said
        reply = Message("assistant", said.text, tool_calls=said.tool_calls, reasoning=said.reasoning)
        self._messages = [*messages, message_fields(reply, answer.reasoning_field)]
        completion = Completion(
            text=said.text,
            finish_reason=answer.finish_reason,
            prompt_ids=answer.prompt_ids or [],
            ids=answer.ids or [],
            logprobs=answer.logprobs,
            policy=self._policy,
            version=self._server.settings.version,
            queue_seconds=max(0.0, time.monotonic() - begun - working),
            generate_seconds=working,
            prompt_tokens=answer.prompt_tokens,
            completion_tokens=answer.completion_tokens,
            cached_tokens=answer.cached_tokens,
            structured=bool(form),
            reasoning=said.reasoning,
            tool_calls=said.tool_calls,
        )
        return completion, self._record(answer)

    def restart(self) -> None:
        """See `PolicySession`."""
        self._messages = []
        self._begins = True

    async def close(self) -> None:
        """The server keeps nothing for a session but its prefix cache, which evicts by itself."""

    def _body(
        self, messages: list[dict[str, Any]], sampling: Sampling, tools: Sequence[Tool]
    ) -> dict[str, Any]:
        """A request without the bound on its answer."""
        settings = self._server.settings
        template = (
            {"chat_template_kwargs": dict(settings.template_kwargs)} if settings.template_kwargs else {}
        )
        return {
            "model": settings.model,
            "messages": messages,
            **sampling_fields(sampling, self._offer.kind),
            **tool_fields(tools),
            **template,
            **(WANT_IDS[PATH] if self._offer.ids else {}),
            **settings.extra_body,
        }

    async def _answer(
        self, body: dict[str, Any], sampling: Sampling, form: dict[str, Any]
    ) -> tuple[Answer, float]:
        """The answer, and the seconds of the try that got it.

        Only the server knows how many tokens its prompt has. Where it refuses prompt and `max_tokens` together, the
        room that there is is less than that: the answer is asked for without a bound, and ends where the room does.
        """
        most = min(sampling.max_tokens, self._offer.max_model_len or sampling.max_tokens)
        try:
            bounded = {self._offer.limit_field: most, **body, **form}
            answered = await self._server.ask(PATH, bounded, self._id, read_answer)
        except PolicyError as error:
            if error.error_class != "context_overflow":
                raise
            answered = await self._server.ask(PATH, {**body, **form}, self._id, read_answer)
        return answered.value, answered.seconds

    def _record(self, answer: Answer) -> int | None:
        """What the server saw, into the segments. Behind a turn without ids nothing is continued."""
        if answer.ids is None or answer.prompt_ids is None:
            self._begins = True
            return None
        at = record_turn(self.segments, answer.prompt_ids, answer.ids, answer.logprobs, begins=self._begins)
        self._begins = False
        return at
