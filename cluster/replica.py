"""`PolicyReplica`, the actor around one engine: it proves that the engine generates, and replaces it when it does not.

The actor loads nothing by itself: `start` says which weights are current, for Ray may have started it again after they
were replaced. An engine that is lost is closed, and another one started with the weights that are current; where it
cannot be closed the actor ends itself, and Ray starts it again.

    new -> ready <-> updating, either -> starting -> ready
                                                 \\-> down (its start failed; it is tried again)
    draining: it takes no turns but those that it has
"""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any, Literal

from rollcage.cluster.engine_life import EngineLife
from rollcage.cluster.ray_names import reachable
from rollcage.cluster.replica_protocol import (
    Draining,
    Engine,
    EngineLost,
    MakeEngine,
    ReplicaInfo,
    ReplicaSettings,
    ReplicaState,
    ReplicaStatus,
    Weights,
)
from rollcage.metrics.serving import serve_process
from rollcage.metrics.targets import address_of
from rollcage.rollout.outcome import PolicyError, RolloutError
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.engine import Generation
from rollcage.rollout.policies.vllm import VllmEngine, cpu_threads

START_SEC = 900.0
"""A large model takes minutes from a network disk. Past this a replica is taken for one that never starts."""

CLOSE_SEC = 60.0
"""How long an engine may take to close; one that hangs is killed by then."""

BACKOFF_SEC = (1.0, 60.0)
"""Before an engine that did not start is started again: at first, and at most; doubled each time."""


def vllm_engine(settings: ReplicaSettings, weights: Weights) -> Engine:
    """An engine that loads these weights when it starts. Its tokenizer stays the one that the job began with, for
    prompts are made with that."""
    args, lora = dict(settings.engine_args), settings.lora
    if weights.model is not None:
        args.setdefault("tokenizer", settings.model)
    if weights.adapter is not None and lora is not None:
        lora = (lora[0], weights.adapter)
    return VllmEngine(
        weights.model or settings.model,
        args,
        request_timeout_sec=settings.request_timeout_sec,
        version=weights.version,
        lora=lora,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        template_kwargs=settings.template_kwargs,
    )


class PolicyReplica:
    """One engine after another. See the module."""

    def __init__(self, settings: ReplicaSettings, make_engine: MakeEngine = vllm_engine) -> None:
        self._settings = settings
        self._make_engine = make_engine
        self._weights: Weights | None = None
        self._life: EngineLife | None = None
        self._first: asyncio.Task[ReplicaInfo] | None = None
        self._tending: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._one_update = asyncio.Lock()
        self._draining = False
        self._down = False
        self._restarts = 0
        self._said = ""
        if settings.threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(settings.threads or cpu_threads())
        os.environ.update(settings.environment)
        self._metrics = ""
        if settings.metrics is not None:
            try:
                port = serve_process(**settings.metrics).port
                self._metrics = address_of(reachable(settings.metrics["host"]), port)
            except OSError as error:  # the certificate is not on this node: no reason not to answer turns
                self._said = f"its metrics are not served: {error}"

    async def start(self, weights: Weights) -> ReplicaInfo:
        """Start the engine, once, and wait until it generates. Raises what the engine's start raises: `ValueError` for
        an engine argument that there is none of, `PolicyError` where it does not come up."""
        if self._first is None:
            self._weights = weights
            self._first = asyncio.ensure_future(self._start())
        first = self._first
        try:
            return await asyncio.shield(first)
        except BaseException as error:
            if first.done():
                self._first, self._said = None, str(error)
            raise

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        request_id: str,
        session_id: str,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
        kills: int = 0,
    ) -> Generation:
        """See `EngineLife.generate`. Raises `Draining` too, and `EngineLost` where there is no engine now. `kills`: the
        engines that have ended with this turn on them."""
        if self._draining:
            raise Draining
        if self._life is None:
            raise EngineLost("policy_unavailable", f"the replica has no engine now: {self._said}")
        return await self._life.generate(
            prompt_ids,
            sampling,
            request_id=request_id,
            session_id=session_id,
            tools=tools,
            structure=structure,
            kills=kills,
        )

    async def release(self, sessions: Sequence[str]) -> None:
        """These sessions are over."""
        if self._life is not None:
            for session_id in sessions:
                await self._life.engine.release(session_id)

    async def update(self, weights: Weights, in_flight: Literal["finish", "continue"]) -> str:
        """Take these weights, and say how: as the engine says, `restart` where it did not survive that, `same` where it
        has them, `later` where it is about to start with them. Raises `ValueError` where nothing has changed, and
        `PolicyError` where the engine ended and does not start with them either."""
        async with self._one_update:
            life, before = self._life, self._weights
            if life is None:
                self._weights = weights
                return "later"
            if life.version >= weights.version:
                return "same"
            if weights.path is None:
                raise ValueError("an update needs the path of the weights")
            self._weights = weights
            try:
                return await life.update(weights.path, weights.version, in_flight)
            except ValueError:
                self._weights = before
                raise
            except EngineLost as error:
                await self._next_life(life, error)
                return "restart"

    async def status(self) -> ReplicaStatus:
        """How it is now."""
        life = self._life
        if life is None:
            state = ReplicaState.NEW if self._first is None else ReplicaState.STARTING
            return ReplicaStatus(
                ReplicaState.DOWN if self._down else state,
                restarts=self._restarts,
                said=self._said,
                metrics=self._metrics,
            )
        state = ReplicaState.UPDATING if life.updating else ReplicaState.READY
        load = life.load
        queued = min(load.waiting, life.running) if load is not None else 0
        return ReplicaStatus(
            ReplicaState.DRAINING if self._draining else state,
            life=life.id,
            version=life.version,
            kv_use=load.kv_use if load is not None else 0.0,
            running=life.running - queued,
            waiting=life.waiting + queued,
            restarts=self._restarts,
            said=self._said,
            metrics=self._metrics,
        )

    async def drain(self) -> None:
        """Take no more turns but those that are here."""
        self._draining = True

    async def close(self) -> None:
        """Stop the engine, also one that is about to start."""
        tasks = [task for task in (self._first, self._tending) if task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        life, self._life = self._life, None
        if life is not None:
            await life.close()

    async def _start(self) -> ReplicaInfo:
        life = self._life = await self._begin()
        self._tending = asyncio.create_task(self._tend(life))
        self._tending.add_done_callback(_end_with)
        return ReplicaInfo(life.engine.tokenizer, life.engine.max_model_len)

    async def _begin(self) -> EngineLife:
        """Another engine, with the weights that are current."""
        assert self._weights is not None
        weights = self._weights
        engine = self._make_engine(self._settings, weights)
        try:
            async with asyncio.timeout(START_SEC):
                await engine.start()
        except TimeoutError as error:
            await self._closed(engine.close())
            said = f"the engine did not start within {START_SEC:.0f} s"
            raise PolicyError("policy_unavailable", said) from error
        except BaseException:
            await self._closed(engine.close())
            raise
        return EngineLife(engine, weights.version, check_sec=self._settings.check_sec, update_sec=START_SEC)

    async def _tend(self, life: EngineLife) -> None:
        """Replace the engine whenever it is lost."""
        while True:
            lost = await self._watch(life)
            self._life, self._said = None, lost.message
            self._restarts += 1
            await self._closed(life.close())
            life = self._life = await self._begin_again()
            self._tell()

    async def _watch(self, life: EngineLife) -> EngineLost:
        while True:
            try:
                async with asyncio.timeout(self._settings.health_sec):
                    return await life.over()
            except TimeoutError:
                await life.prove()

    async def _begin_again(self) -> EngineLife:
        wait, most = BACKOFF_SEC
        while True:
            try:
                return await self._begin()
            except (RolloutError, ValueError) as error:
                self._down, self._said = True, str(error)
                self._tell()
                await asyncio.sleep(wait)
                wait = min(2 * wait, most)
            finally:
                self._down = False

    async def _next_life(self, life: EngineLife, lost: EngineLost) -> None:
        """Return once there is another engine. Raises `PolicyError` where its start fails."""
        while self._life is None or self._life is life:
            await self._changed.wait()
            if self._down:
                said = f"{lost.message}; and no other engine came up: {self._said}"
                raise PolicyError("policy_unavailable", said) from lost

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _closed(self, closing: Any) -> None:
        """Close an engine, or this process with it."""
        task = asyncio.ensure_future(closing)
        await asyncio.wait({task}, timeout=CLOSE_SEC)
        if not task.done():
            print("the engine cannot be closed: its actor ends", file=sys.stderr, flush=True)
            os._exit(1)
        task.result()


def _end_with(tending: asyncio.Task[None]) -> None:
    """End this process with an error that has no name: a replica that nobody tends must not live on."""
    if not tending.cancelled() and (error := tending.exception()) is not None:
        traceback.print_exception(error)
        sys.stderr.flush()
        os._exit(1)
