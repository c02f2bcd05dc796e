"""vLLM as a policy: tokens in, tokens and their log-probabilities out.

`VllmEngine` is vLLM's `AsyncLLM` in this process (its core runs in a process of its own). `VllmPolicy` serves
sessions on any `TokenEngine`: a local engine, or replicas behind Ray (`cluster/policies.py`).

vllm is imported only here, and only when an engine starts.
"""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import psutil

from rollcage.rollout.outcome import Evidence, PolicyError
from rollcage.rollout.policies.base import Completion, Sampling
from rollcage.rollout.policies.faults import policy_fault
from rollcage.rollout.policies.leash import Leash
from rollcage.rollout.tokens import ChatRenderer, RunningTokens, Tokenizer
from rollcage.rollout.trajectory import Message, Segment

REQUEST_TIMEOUT_SEC = 600.0
"""A whole answer of 8,192 tokens at the 20 tokens/s of a busy CPU takes 410 s."""

CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Where the user sets none. 1 GiB of KV cache, not half of the machine's memory; threads unbound, because the
engine shares the cores with the sandboxes."""

CPU_ARGUMENTS = {"enforce_eager": True, "dtype": "float32"}
"""Likewise. vLLM's own choice, bfloat16, is half as fast on a CPU without instructions for it."""

QUIET_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class Generation:
    """What an engine returned for one prompt. `ids` and `logprobs` have one length.

    `queue_seconds`: from the engine's receipt of the request until it was first scheduled;
    `generate_seconds`: from then to the last token. `finish_reason` is `stop` or `length`.
    """

    ids: list[int]
    logprobs: list[float]
    finish_reason: str
    queue_seconds: float
    generate_seconds: float
    cached_tokens: int = 0
    version: int = 0


class TokenEngine(Protocol):
    """Generates tokens for token prompts. Errors are `PolicyError`s."""

    tokenizer: Tokenizer
    max_model_len: int

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str
    ) -> Generation:
        """Requests of one `session_id` go to one replica where there are several."""
        ...

    async def release(self, session_id: str) -> None:
        """The session is over. Never raises."""
        ...


class VllmEngine:
    """One vLLM engine. `engine_args` are vLLM's `AsyncEngineArgs` by name.

    `start` raises `ValueError` for an engine argument that vLLM does not have, and `PolicyError`
    (`policy_unavailable`) where the engine does not come up.
    """

    tokenizer: Tokenizer
    max_model_len: int

    def __init__(
        self,
        model: str,
        engine_args: Mapping[str, Any] | None = None,
        *,
        request_timeout_sec: float = REQUEST_TIMEOUT_SEC,
        version: int = 0,
    ) -> None:
        self.model = model
        self.version = version
        self._engine_args = dict(engine_args or {})
        self._timeout_sec = request_timeout_sec
        self._llm: Any = None
        self._sockets: str | None = None
        self._leash: Leash | None = None

    async def start(self) -> None:
        """Load the model and prove with one token that it generates. `close` is due also when this fails."""
        before = {child.pid for child in _children()}
        loading = asyncio.ensure_future(asyncio.to_thread(self._load))
        try:
            self._llm = await asyncio.shield(loading)
        except asyncio.CancelledError:  # a thread cannot be called off: wait for what it makes, to close it
            await asyncio.wait([loading])
            if not loading.cancelled() and loading.exception() is None:
                self._llm = loading.result()
            raise
        self._leash = Leash(child.pid for child in _children() if child.pid not in before)
        self.max_model_len = self._llm.model_config.max_model_len
        self.tokenizer = self._llm.get_tokenizer()
        await self.check()

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, session_id: str = ""
    ) -> Generation:
        """Generate behind `prompt_ids`. Raises `PolicyError`: `context_overflow` where no token has room,
        `policy_unavailable` where the engine is dead, `policy_timeout`, `policy_error`."""
        require_room(len(prompt_ids), self.max_model_len)
        from vllm.exceptions import GracefulHTTPError, VLLMError
        from vllm.v1.engine.exceptions import EngineDeadError

        doing = f"generate behind {len(prompt_ids)} tokens"
        try:
            params = _sampling_params(sampling)
            async with asyncio.timeout(self._timeout_sec):
                return await self._generate(prompt_ids, params, request_id)
        except EngineDeadError as error:
            fault = policy_fault(error, doing)
            raise PolicyError("policy_unavailable", "vLLM's engine is dead", fault.evidence) from error
        except GracefulHTTPError as error:  # refused by vLLM's own admission: asked to come again later
            raise policy_fault(error, doing, status=429) from error
        except VLLMError as error:
            raise policy_fault(_cause(error), doing, status=_status(error)) from error
        except (ValueError, TypeError, TimeoutError) as error:
            raise policy_fault(error, doing) from error

    async def check(self, timeout_sec: float = 120.0) -> None:
        """Raise `PolicyError` unless the engine generates a token now: a port or a process proves nothing."""
        sampling = Sampling(temperature=0.0, max_tokens=1)
        doing = f"generate one token within {timeout_sec:.0f} s"
        try:
            async with asyncio.timeout(timeout_sec):
                await self.generate([1], sampling, request_id=f"check-{uuid.uuid4().hex}")
        except TimeoutError as error:
            raise PolicyError(
                "policy_unavailable", f"vLLM's engine could not {doing}", policy_fault(error, doing).evidence
            ) from error

    async def release(self, session_id: str) -> None:
        """Nothing to let go of: the prefix cache evicts by itself."""

    async def close(self) -> None:
        """Stop the engine and its process. Closing it twice is no error."""
        llm, self._llm = self._llm, None
        try:
            if llm is not None:
                await self._stop(llm)
        finally:
            if self._sockets is not None:
                shutil.rmtree(self._sockets, ignore_errors=True)

    async def _stop(self, llm: Any) -> None:
        if llm.output_handler is not None:  # else it reports the engine's end as a failure
            llm.output_handler.cancel()
            await asyncio.wait([llm.output_handler])
        await asyncio.to_thread(llm.shutdown)
        del llm
        gc.collect()  # it is part of cycles, and finalized at the interpreter's end it prints a traceback
        if self._leash is not None:
            self._leash.drop()

    async def _generate(self, prompt_ids: Sequence[int], params: Any, request_id: str) -> Generation:
        if self._llm is None:
            raise PolicyError("policy_unavailable", "the vLLM engine is not running")
        prompt = {"prompt_token_ids": list(prompt_ids)}
        outputs = [output async for output in self._llm.generate(prompt, params, request_id=request_id)]
        last = outputs[-1]  # the only one: FINAL_ONLY
        answer = last.outputs[0]
        if answer.finish_reason not in ("stop", "length"):
            raise PolicyError("policy_error", f"vLLM ended the request as {answer.finish_reason!r}")
        ids = list(answer.token_ids)
        return Generation(
            ids=ids,
            logprobs=[at[number].logprob for number, at in zip(ids, answer.logprobs, strict=True)],
            finish_reason=answer.finish_reason,
            queue_seconds=max(0.0, last.metrics.scheduled_ts - last.metrics.queued_ts),
            generate_seconds=max(0.0, last.metrics.last_token_ts - last.metrics.scheduled_ts),
            cached_tokens=last.num_cached_tokens or 0,
            version=self.version,
        )

    def _load(self) -> Any:
        for name, value in QUIET_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._sockets = tempfile.mkdtemp(prefix="rollcage-vllm-")
        os.environ["VLLM_RPC_BASE_PATH"] = self._sockets  # it leaves its sockets there
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        settings: dict[str, Any] = {"model": self.model, "enable_log_requests": False}
        if current_platform.is_cpu():
            settings |= CPU_ARGUMENTS
            os.environ.setdefault("OMP_NUM_THREADS", str(cpu_threads()))
            for name, value in CPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
        settings |= self._engine_args
        settings["disable_log_stats"] = False  # without its statistics a request has no times
        try:
            arguments = AsyncEngineArgs(**settings)
        except TypeError as error:
            raise ValueError(f"vLLM does not take these engine arguments: {error}") from error
        try:
            return AsyncLLM.from_engine_args(arguments)
        except (RuntimeError, ValueError, OSError) as error:
            said = f"vLLM did not start with {self.model}: {error}"
            raise PolicyError("policy_unavailable", said, Evidence(said, "policy server")) from error


class VllmSession:
    """One rollout's conversation with a `TokenEngine`."""

    def __init__(self, session_id: str, engine: TokenEngine, renderer: ChatRenderer, policy: str) -> None:
        self._id = session_id
        self._policy = policy
        self._engine = engine
        self._tokens = RunningTokens(renderer)
        self._requests = 0

    @property
    def segments(self) -> list[Segment]:
        return self._tokens.segments

    async def complete(
        self, new_messages: list[Message], sampling: Sampling
    ) -> tuple[Completion, int | None]:
        """See `PolicySession`. `max_tokens` is cut to the room left in the context; an answer that fills it
        ends with `finish_reason` `length`, and the next one with `context_overflow`. A seed is moved on with
        every turn: with one and the same, a model answers what it answered before."""
        prompt = self._tokens.prompt(new_messages)
        room = require_room(len(prompt.ids), self._engine.max_model_len)
        self._requests += 1
        made = await self._engine.generate(
            prompt.ids,
            replace(
                sampling,
                max_tokens=min(sampling.max_tokens, room),
                seed=None if sampling.seed is None else sampling.seed + self._requests,
            ),
            request_id=f"{self._id}-{self._requests}-{uuid.uuid4().hex[:8]}",
            session_id=self._id,
        )
        text = self._tokens.append(prompt, made.ids, made.logprobs)
        completion = Completion(
            text=text,
            finish_reason=made.finish_reason,
            prompt_ids=prompt.ids,
            ids=made.ids,
            logprobs=made.logprobs,
            policy=self._policy,
            version=made.version,
            queue_seconds=made.queue_seconds,
            generate_seconds=made.generate_seconds,
            cached_tokens=made.cached_tokens,
        )
        return completion, len(self.segments) - 1

    async def close(self) -> None:
        await self._engine.release(self._id)


class VllmPolicy:
    """Serves sessions on `engine`, which has been started. `template_kwargs` go to its chat template."""

    def __init__(
        self, engine: TokenEngine, *, name: str = "vllm", template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self.name = name
        self._engine = engine
        self._renderer = ChatRenderer(engine.tokenizer, template_kwargs)

    def session(self, session_id: str, *, task: str, sample: int) -> VllmSession:
        """See `Policy`."""
        return VllmSession(session_id, self._engine, self._renderer, self.name)


def cpu_threads() -> int:
    """OpenMP threads of an engine without a GPU: half of the CPUs. A second thread on the same core gains
    little alone, and much is lost when one of them waits for a core that a sandbox has: with 12 runnable
    processes on 2 CPUs, 2 threads have been seen to give a third of what 1 gives."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


def require_room(prompt_tokens: int, max_model_len: int) -> int:
    """Tokens left for an answer, at least 1. Raises `PolicyError` (`context_overflow`) where there are none."""
    room = max_model_len - prompt_tokens
    if room < 1:
        raise PolicyError(
            "context_overflow",
            f"the prompt has {prompt_tokens} tokens, and the model's context of {max_model_len} no room left",
        )
    return room


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _sampling_params(sampling: Sampling) -> Any:
    """vLLM's own, for one final output with the log-probability of each sampled token. The stop string stays
    in the text, as its tokens stay in the ids. Text is made only where a stop string must be found in it."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        seed=sampling.seed,
        **{
            "logprobs": 0,
            "output_kind": RequestOutputKind.FINAL_ONLY,
            "include_stop_str_in_output": True,
            "detokenize": bool(sampling.stop),
            **sampling.extra,
        },
    )


def _status(error: BaseException) -> int:
    """The HTTP status that vLLM's server gives to this error of its engine."""
    from vllm.exceptions import VLLMClientError

    return 400 if isinstance(_cause(error), VLLMClientError | ValueError) else 500


def _cause(error: BaseException) -> BaseException:
    """What is behind vLLM's `EngineGenerateError`, which says nothing itself."""
    return error if str(error) or error.__cause__ is None else error.__cause__
