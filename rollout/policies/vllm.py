"""vLLM as a policy: tokens in, tokens and their log-probabilities out.

`VllmEngine` is vLLM's `AsyncLLM` in this process (its core, and several workers, run in processes of their own), a
`TokenEngine`. Its parts: `vllm_launch.py` brings an engine up and down, `vllm_parsers.py` takes answers apart,
`vllm_weights.py` reads what is to be loaded, `vllm_load.py` keeps the engine's word on its load.

Weights are replaced while no request is let in: requests that come wait, and are not charged for it. Those under way
finish on the weights that they began with, or are frozen and go on with the new ones, their KV cache computed anew.
Then the checkpoint is loaded in place (its tensors are the old one's by name and shape, its configuration and
tokenizer are the same), an adapter takes the place of another, or another engine is started in place of this one.

vllm is imported only in `vllm*.py`, and only when an engine starts.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rollcage.rollout.outcome import Evidence, PolicyError
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.engine import Generation, require_room
from rollcage.rollout.policies.faults import policy_fault
from rollcage.rollout.policies.vllm_launch import (
    CPU_ARGUMENTS,
    CPU_ENVIRONMENT,
    QUIET_ENVIRONMENT,
    Launched,
    cpu_threads,
    launch,
    plain_tokenizer,
)
from rollcage.rollout.policies.vllm_load import EngineLoad
from rollcage.rollout.policies.vllm_parsers import AnswerParser, require_parsers
from rollcage.rollout.policies.vllm_requests import require_structure, sampling_params, translated
from rollcage.rollout.policies.vllm_update import (
    LORA_ID,
    AdapterRefused,
    how_to_update,
    replace_in_place,
    try_adapter,
)
from rollcage.rollout.policies.vllm_weights import How, is_adapter
from rollcage.rollout.tokens import Tokenizer

__all__ = [
    "CPU_ARGUMENTS",
    "CPU_ENVIRONMENT",
    "QUIET_ENVIRONMENT",
    "REQUEST_TIMEOUT_SEC",
    "EngineLoad",
    "VllmEngine",
    "cpu_threads",
]

REQUEST_TIMEOUT_SEC = 600.0
"""A whole answer of 8,192 tokens at the 20 tokens/s of a busy CPU takes 410 s."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


class VllmEngine:
    """One vLLM engine. `engine_args` are vLLM's `AsyncEngineArgs` by name.

    `lora` (name, directory) is an adapter that every answer is made with. `tool_parser` and `reasoning_parser` are
    vLLM's names; with either, `Generation.parsed` is set. `template_kwargs` are the chat template's, for the parsers.

    `start` raises `ValueError` for an engine argument, a parser or an adapter that vLLM does not take, and
    `PolicyError` (`policy_unavailable`) where the engine does not come up.

    `model`, `lora` and `version` are those of the weights that it has now.
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
        lora: tuple[str, str] | None = None,
        tool_parser: str | None = None,
        reasoning_parser: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.version = version
        self.lora = lora
        self._engine_args = dict(engine_args or {})
        self._tokenizer_from = model  # trainers often save weights without it: it stays then
        self._tool_parser = tool_parser
        self._reasoning_parser = reasoning_parser
        self._template_kwargs = dict(template_kwargs or {})
        self._timeout_sec = request_timeout_sec
        self._launched: Launched | None = None
        self._parser: AnswerParser | None = None
        self._update = asyncio.Lock()
        self._under_way = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self) -> None:
        """Load the model and prove with one token that it generates. `close` is due also when this fails."""
        await self._start()
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
        """Generate behind `prompt_ids`, at most to the end of the context. The request ends with its caller: one that
        is cancelled or late is aborted in the engine.

        Raises `PolicyError`: `context_overflow` where no token has room, `policy_unavailable` where the engine is
        dead or is closed meanwhile, `policy_timeout`, `policy_error`. Raises `ValueError` for a `structure` that vLLM
        cannot hold an answer to: that is no fault of a server, and another try is as bad.
        """
        arrived = time.monotonic()
        async with self._let_in():
            waited = time.monotonic() - arrived
            running = self._running()
            room = require_room(len(prompt_ids), self.max_model_len)
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
            reasoning: dict[str, Any] = {}
            if structure is not None:
                require_structure(structure, running.llm)
                reasoning = self._parser.reasoning(prompt_ids) if self._parser is not None else {}
            with translated(f"generate behind {len(prompt_ids)} tokens"):
                params = sampling_params(sampling, structure)
                async with asyncio.timeout(self._timeout_sec):
                    output = await self._generate(running, prompt_ids, params, request_id, **reasoning)
        answer = output.outputs[0]
        ids = list(answer.token_ids)
        versions = [int(span.version) for span in answer.weight_versions or ()] or [self.version]
        parsed = None
        if self._parser is not None:
            ended = answer.finish_reason == "stop" and not isinstance(answer.stop_reason, str)
            parsed = self._parser.parse(prompt_ids, ids, ended=ended, tools=tools, session_id=session_id)
        return Generation(
            ids=ids,
            logprobs=[at[number].logprob for number, at in zip(ids, answer.logprobs, strict=True)],
            finish_reason=answer.finish_reason,
            queue_seconds=waited + max(0.0, output.metrics.scheduled_ts - output.metrics.queued_ts),
            generate_seconds=max(0.0, output.metrics.last_token_ts - output.metrics.scheduled_ts),
            cached_tokens=output.num_cached_tokens or 0,
            version=versions[0],
            version_end=versions[-1],
            parsed=parsed,
            structured=structure is not None,
        )

    async def check(self, timeout_sec: float = 120.0) -> None:
        """Raise `PolicyError` unless the engine generates a token now: a port or a process proves nothing. It hangs
        where that is `policy_timeout`.

        A token of any request counts, which tells an engine that is busy from one that hangs: one of our own would
        have to wait behind all others. It is asked for all the same, for an engine that has nothing else to do. While
        weights are replaced nothing is generated: that has its own time, `UPDATE_SEC`, and passes here.
        """
        if self._update.locked():
            return
        running = self._running()
        own = asyncio.ensure_future(self._one_token(running))
        others = asyncio.ensure_future(running.recorder.progress())
        try:
            done, _ = await asyncio.wait(
                (own, others), timeout=timeout_sec, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            own.cancel()
            others.cancel()
            await asyncio.wait((own, others))
        if self._update.locked():
            return
        if own in done:
            own.result()
        elif others not in done:
            said = f"vLLM's engine could not generate one token within {timeout_sec:g} s"
            raise PolicyError("policy_timeout", said, policy_fault(TimeoutError(said), "check").evidence)

    async def load(self) -> EngineLoad:
        """As of the engine's last step; asks nobody. Raises `PolicyError` (`policy_unavailable`) without an engine."""
        running = self._running()
        if running.llm.errored:
            raise PolicyError("policy_unavailable", "vLLM's engine is dead")
        unfinished = running.llm.get_num_unfinished_requests()
        return running.recorder.load(unfinished=unfinished, version=self.version)

    async def update_weights(
        self, path: str, version: int, *, in_flight: Literal["finish", "continue"]
    ) -> str:
        """Answers come from the weights at `path`, as `version`, from now on. Returns how they were taken: a `How`, and
        behind `restart` and a colon why.

        `path` is a model's directory, or a LoRA adapter's where the engine serves one. Requests under way `finish`
        first, or `continue` with the new weights. A restart cannot continue them: they finish. The prefix cache is
        emptied. Updates follow each other.

        Raises `ValueError` for a path that cannot be loaded, with everything as it was, and `PolicyError`
        (`policy_unavailable`) where the change failed on the way: the engine is then closed, never half loaded.
        """
        async with self._update:
            llm, given = self._running().llm, self._engine_args.get("max_lora_rank")
            how, why = await asyncio.to_thread(how_to_update, llm, self.model, self.lora, Path(path), given)
            self._open.clear()
            try:
                if how == "restart" or in_flight == "finish":
                    await self._idle.wait()
                if how == "restart":
                    await self._restart(path, version)
                else:
                    await self._replace(how, path, version)
            finally:
                self._open.set()
            return f"{how}: {why}" if why else how

    async def release(self, session_id: str) -> None:
        """The prefix cache evicts by itself; the ids of tool calls are forgotten."""
        if self._parser is not None:
            self._parser.forget(session_id)

    async def close(self) -> None:
        """Stop the engine and its processes, within 20 s also where they hang; requests under way end
        `policy_unavailable`. Closing it twice is no error."""
        launched, self._launched = self._launched, None
        if launched is not None:
            await launched.close()

    async def _start(self) -> None:
        require = (self._tool_parser, self._reasoning_parser)
        if any(require):
            await asyncio.to_thread(require_parsers, *require)
        lora = None if self.lora is None else Path(self.lora[1])
        arguments = {"tokenizer": self._tokenizer_from, **self._engine_args}
        loading = asyncio.ensure_future(
            asyncio.to_thread(
                launch, self.model, arguments, lora=lora, reasoning_parser=self._reasoning_parser
            )
        )
        try:
            self._launched = await asyncio.shield(loading)
        except asyncio.CancelledError:  # a thread cannot be called off: wait for what it makes, to close it
            await asyncio.wait([loading])
            if not loading.cancelled() and loading.exception() is None:
                self._launched = loading.result()
            raise
        llm = self._launched.llm
        self.max_model_len = llm.model_config.max_model_len
        self.tokenizer = plain_tokenizer(llm)
        if any(require):
            self._parser = AnswerParser(
                llm.get_tokenizer(),
                llm.model_config,
                tool_parser=self._tool_parser,
                reasoning_parser=self._reasoning_parser,
                template_kwargs=self._template_kwargs,
            )
        if self.lora is not None:
            await try_adapter(llm, self.lora[0], LORA_ID, self.lora[1])
        await llm.update_weight_version(str(self.version))

    async def _restart(self, path: str, version: int) -> None:
        self._running()
        await self.close()
        self._now_at(path, version)
        try:
            await self._start()
        except BaseException as error:
            await self.close()
            if isinstance(error, ValueError):
                said = f"vLLM's engine did not come back with {path}: {error}"
                raise PolicyError("policy_unavailable", said) from error
            raise

    async def _replace(self, how: How, path: str, version: int) -> None:
        """In the engine that runs. Once begun, the change comes to its end or the engine does."""
        running = self._running()
        try:
            await replace_in_place(running.llm, how, path, version, self.lora)
        except AdapterRefused:
            raise
        except Exception as error:  # vLLM hands on what was raised in its processes as a bare one
            await self.close()
            said = f"the vLLM engine was closed half loaded: {error}"
            raise PolicyError("policy_unavailable", said, Evidence(said, "policy server")) from error
        except BaseException:
            await self.close()
            raise
        self._now_at(path, version)

    def _now_at(self, path: str, version: int) -> None:
        if self.lora is not None and is_adapter(Path(path)):
            self.lora = (self.lora[0], path)
        else:
            self.model = path
            if any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
                self._tokenizer_from = path
        self.version = version

    async def _generate(
        self, running: Launched, prompt_ids: Sequence[int], params: Any, request_id: str, **reasoning: Any
    ) -> Any:
        """vLLM's output, which has one answer and is the only one (FINAL_ONLY)."""
        from vllm.lora.request import LoRARequest

        prompt = {"prompt_token_ids": list(prompt_ids)}
        lora = None if self.lora is None else LoRARequest(self.lora[0], LORA_ID, self.lora[1])
        made = running.llm.generate(prompt, params, request_id=request_id, lora_request=lora, **reasoning)
        outputs = [output async for output in made]
        if (reason := outputs[-1].outputs[0].finish_reason) not in ("stop", "length"):
            raise PolicyError("policy_error", f"vLLM ended the request as {reason!r}")
        return outputs[-1]

    async def _one_token(self, running: Launched) -> None:
        with translated("generate one token"):
            params = sampling_params(Sampling(temperature=0.0, max_tokens=1))
            await self._generate(running, [1], params, f"check-{uuid.uuid4().hex}")

    @asynccontextmanager
    async def _let_in(self) -> AsyncIterator[None]:
        while not self._open.is_set():
            await self._open.wait()
        self._under_way += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    def _running(self) -> Launched:
        if self._launched is None:
            raise PolicyError("policy_unavailable", "the vLLM engine is not running")
        return self._launched
