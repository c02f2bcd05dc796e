"""vLLM as a policy: tokens in, tokens and their log-probabilities out.

`VllmEngine` is vLLM's `AsyncLLM` in this process (its core runs in a process of its own), a `TokenEngine`.

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
from typing import Any

import psutil

from rollcage.rollout.outcome import Evidence, PolicyError
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.engine import Generation, require_room
from rollcage.rollout.policies.faults import policy_fault
from rollcage.rollout.policies.leash import Leash
from rollcage.rollout.tokens import Tokenizer

REQUEST_TIMEOUT_SEC = 600.0
"""A whole answer of 8,192 tokens at the 20 tokens/s of a busy CPU takes 410 s."""

CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Where the user sets none. 1 GiB of KV cache, not half of the machine's memory; threads unbound, because the
engine shares the cores with the sandboxes."""

CPU_ARGUMENTS = {"enforce_eager": True, "dtype": "float32"}
"""Likewise. vLLM's own choice, bfloat16, is half as fast on a CPU without instructions for it."""

QUIET_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


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
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str = "",
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
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


def cpu_threads() -> int:
    """OpenMP threads of an engine without a GPU: half of the CPUs. A second thread on the same core gains
    little alone, and much is lost when one of them waits for a core that a sandbox has: with 12 runnable
    processes on 2 CPUs, 2 threads have been seen to give a third of what 1 gives."""
    return max(1, len(os.sched_getaffinity(0)) // 2)


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
