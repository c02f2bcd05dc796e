"""Requests to a server that speaks OpenAI's API: sent, bounded, watched, tried again, and their failures named.

The openai SDK is the wire, with its own retries off. Answers are not streamed: while one is awaited, `Pulse` tells a
slow server from one that is gone, and a request that has run out of time is ended by closing its connection, which
aborts it at the server.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import openai

from rollcage.rollout.outcome import Evidence, PolicyError
from rollcage.rollout.policies.api_keys import api_key
from rollcage.rollout.policies.faults import dead_engine, policy_fault
from rollcage.rollout.policies.openai_body import no_completion
from rollcage.rollout.policies.openai_lines import CONNECT_SEC, Lines
from rollcage.rollout.policies.pulse import PULSE_SEC, Pulse
from rollcage.rollout.policies.retry import Answered, retried

T = TypeVar("T")


@dataclass(frozen=True)
class ServerSettings:
    """How a server is reached. The fields are those of `OpenAIPolicyConfig`, and mean the same."""

    base_url: str
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    tokens: str = "auto"
    tokenizer: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    max_model_len: int | None = None
    version: int = 0
    max_connections: int = 1000
    retry_sec: float = 300.0
    request_timeout_sec: float = 600.0
    pulse_sec: float = PULSE_SEC


class Server:
    """Asks one server. It can be pickled: each process, and each event loop in it, makes a client of its own.

    `found`: the model has answered at this URL before. A 404 is then no mistake of the user's but one that can pass: of
    vLLM, whose adapter is between two versions or not loaded yet after a restart; of a proxy whose server is not back
    (while vLLM and SGLang load a model themselves they take no connection, or hold it).
    """

    def __init__(self, settings: ServerSettings, found: bool = False) -> None:
        self.settings = settings
        self.found = found
        self._lines: dict[asyncio.AbstractEventLoop, Lines] = {}

    def __reduce__(self) -> Any:
        return Server, (self.settings, self.found)

    async def ask(
        self,
        path: str,
        body: Mapping[str, Any],
        session_id: str,
        read: Callable[[dict[str, Any]], T],
        *,
        within_sec: float | None = None,
    ) -> Answered[T]:
        """POST `body` to `path` (below the base URL, or a whole URL), as often as it takes within `within_sec`
        (None: the settings' own). Returns what `read` makes of the answer's JSON object. Raises `PolicyError`."""
        lines = self._here()
        limit = self.settings.retry_sec if within_sec is None else within_sec

        async def once() -> T:
            return read(await self._post(lines, path, body, session_id))

        return await retried(once, lines.gate, within_sec=limit)

    async def models(self, *, within_sec: float) -> dict[str, Any]:
        """What the server says of its models. Raises `PolicyError`."""
        lines = self._here()
        return (await retried(lambda: self._get_models(lines), lines.gate, within_sec=within_sec)).value

    async def close(self) -> None:
        """Close this event loop's connections. The next request makes new ones."""
        lines = self._lines.pop(asyncio.get_running_loop(), None)
        if lines is not None:
            await lines.close()

    def _here(self) -> Lines:
        loop = asyncio.get_running_loop()
        if loop not in self._lines:
            for other in [other for other in self._lines if other.is_closed()]:
                del self._lines[other]
            settings = self.settings
            lines = Lines(settings.base_url, self._key(), settings.max_connections)
            lines.pulse = Pulse(lambda: self._alive(lines), every_sec=settings.pulse_sec)
            self._lines[loop] = lines
        return self._lines[loop]

    async def _post(
        self, lines: Lines, path: str, body: Mapping[str, Any], session_id: str
    ) -> dict[str, Any]:
        doing = f"have {self.settings.model} answer"
        timeout_sec = self.settings.request_timeout_sec
        try:
            async with asyncio.timeout(timeout_sec) as clock:
                with lines.pulse.watches(clock) as watched, lines.client() as client:
                    answer = await client.post(
                        path, body=dict(body), cast_to=object, options=self._options(session_id)
                    )
        except TimeoutError as error:
            if watched.lost:
                said = "the model server gave no sign of life any more, and no answer"
                raise PolicyError("policy_unavailable", said, Evidence(said, "policy server")) from error
            said = f"the model server gave no whole answer within {timeout_sec:.0f} s; the request was called off"
            raise PolicyError("policy_timeout", said, Evidence(said, "policy server")) from error
        except openai.OpenAIError as error:
            fault = self._fault(error, doing)
            if fault.evidence.status == 500 and await self._engine_is_dead(lines):
                fault = dead_engine(fault)
            raise fault from error
        except UnicodeEncodeError as error:
            raise policy_fault(error, doing) from error
        except (ValueError, RecursionError) as error:  # JSONDecodeError: the SDK lets it out
            raise no_completion(f"200 with what is no JSON: {error}") from error
        if not isinstance(answer, dict):
            raise no_completion(f"200 with no JSON object: {str(answer)[:200]!r}")
        return answer

    async def _get_models(self, lines: Lines) -> dict[str, Any]:
        doing = "list the server's models"
        try:
            async with asyncio.timeout(CONNECT_SEC):
                with lines.client() as client:
                    answer = await client.get("/models", cast_to=object, options=self._options("start"))
        except TimeoutError as error:
            raise policy_fault(error, doing) from error
        except openai.OpenAIError as error:
            raise self._fault(error, doing) from error
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    async def _alive(self, lines: Lines) -> None:
        """Any answer is a sign of life, a refusal too."""
        try:
            with lines.client() as client:
                await client.get("/models", cast_to=object, options=self._options("pulse"))
        except openai.APIStatusError:
            return
        except openai.OpenAIError as error:
            raise policy_fault(error, "see a sign of life") from error
        except ValueError:
            return

    async def _engine_is_dead(self, lines: Lines) -> bool:
        """Whether the server itself says so. One that has no such page says nothing."""
        url = f"{self.settings.base_url.rstrip('/').removesuffix('/v1')}/health"
        try:
            async with asyncio.timeout(CONNECT_SEC):
                with lines.client() as client:
                    await client.get(url, cast_to=object, options=self._options("health"))
        except openai.APIStatusError as error:
            return error.status_code == 503
        except (openai.OpenAIError, TimeoutError, ValueError):
            return False
        return False

    def _options(self, session_id: str) -> Any:
        """The SDK's, for one request: its headers. It wants a key where none is to be sent."""
        headers: dict[str, Any] = {
            name: value.replace("{session}", session_id) for name, value in self.settings.headers.items()
        }
        if self._key() is None and "authorization" not in map(str.lower, headers):
            headers["Authorization"] = openai.Omit()
        return {"headers": headers}

    def _key(self) -> str | None:
        try:
            return api_key(self.settings.api_key_env, os.environ)
        except ValueError as error:
            raise PolicyError("policy_error", str(error)) from error

    def _fault(self, error: openai.OpenAIError, doing: str) -> PolicyError:
        """As `policy_fault` names it; what only the user can mend is said plainly."""
        fault = policy_fault(error, doing)
        settings = self.settings
        if fault.evidence.status == 404 and self.found:
            said = f"the server knows no {settings.model} any more, which it knew before: {fault.message}"
            return PolicyError("policy_unavailable", said, fault.evidence, fault.retry_after_sec)
        plain = {
            401: f"the server wants a key, or another one: set {settings.api_key_env} on each host",
            403: f"the key of {settings.api_key_env} may not use {settings.model}",
            404: f"the server knows no {settings.model}, or {settings.base_url} is not where its API begins "
            "(it usually ends in /v1)",
        }.get(fault.evidence.status or 0)
        if plain is None or fault.error_class != "policy_refused":
            return fault
        return PolicyError("policy_refused", f"{plain}: {fault.message}", fault.evidence)
