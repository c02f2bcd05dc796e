"""vLLM in Ray: a `PolicyReplica` actor around each engine, and one policy over all of them.

A session stays with the replica that it began with, for its prefix cache; a new one goes to the replica with
the fewest sessions of this process. What a replica's death does:

- The engine's process dies: the turns it had end `policy_unavailable`, and the actor starts another engine.
- The actor's process dies: the same, and Ray starts it again (`max_restarts=-1`).
- Until it is back, new sessions go to the other replicas. Where there is no other they wait for it, with the
  agent's clock held.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from rollcage.rollout.outcome import Evidence, PolicyError, RolloutError
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.engine import Generation, TokenPolicy
from rollcage.rollout.policies.vllm import REQUEST_TIMEOUT_SEC, VllmEngine, cpu_threads
from rollcage.rollout.tokens import Tokenizer

START_SEC = 900.0
"""A large model takes minutes from a network disk. Past this a replica is taken for one that never starts."""

CONCURRENT_REQUESTS = 4096
"""Requests that one actor holds at once; the engine queues what it cannot batch yet."""


@dataclass(frozen=True)
class ReplicaInfo:
    """What a client needs of a replica to make prompts for it."""

    tokenizer: Tokenizer
    max_model_len: int


class PolicyReplica:
    """One vLLM engine, started at the first call and again when it has died."""

    def __init__(
        self,
        model: str,
        engine_args: Mapping[str, Any],
        *,
        request_timeout_sec: float,
        version: int,
        threads: int | None,
    ) -> None:
        self._model = model
        self._engine_args = dict(engine_args)
        self._request_timeout_sec = request_timeout_sec
        self._version = version
        self._starting: asyncio.Task[VllmEngine] | None = None
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(threads or cpu_threads())

    async def info(self) -> ReplicaInfo:
        """Waits until the engine generates. Raises what `VllmEngine.start` raises."""
        engine = await self._engine()
        return ReplicaInfo(engine.tokenizer, engine.max_model_len)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, request_id: str, session_id: str
    ) -> Generation:
        """See `VllmEngine.generate`."""
        engine = await self._engine()
        starting = self._starting
        try:
            return await engine.generate(prompt_ids, sampling, request_id=request_id, session_id=session_id)
        except PolicyError as error:
            if error.error_class == "policy_unavailable":
                await self._discard(starting)
            raise

    async def check(self) -> None:
        """Raise `PolicyError` unless the engine generates a token now; a dead one is replaced."""
        engine = await self._engine()
        starting = self._starting
        try:
            await engine.check()
        except PolicyError:
            await self._discard(starting)
            raise

    async def close(self) -> None:
        """Stop the engine."""
        await self._discard(self._starting)

    async def _engine(self) -> VllmEngine:
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._start())
        starting = self._starting
        try:
            return await asyncio.shield(starting)
        except (RolloutError, ValueError):
            if self._starting is starting:
                self._starting = None
            raise

    async def _start(self) -> VllmEngine:
        engine = VllmEngine(
            self._model,
            self._engine_args,
            request_timeout_sec=self._request_timeout_sec,
            version=self._version,
        )
        try:
            await engine.start()
        except BaseException:
            await engine.close()
            raise
        return engine

    async def _discard(self, starting: asyncio.Task[VllmEngine] | None) -> None:
        """Close this engine, once, however many of its requests find it dead."""
        if starting is None or self._starting is not starting:
            return
        self._starting = None
        starting.cancel()
        with suppress(asyncio.CancelledError, RolloutError, ValueError):
            engine = await starting
            await engine.close()


class Replicas:
    """Actors of `PolicyReplica` as one `TokenEngine`. It can be pickled: each process routes on its own."""

    def __init__(self, actors: Sequence[Any], info: ReplicaInfo, *, request_timeout_sec: float) -> None:
        self.tokenizer = info.tokenizer
        self.max_model_len = info.max_model_len
        self._info = info
        self._actors = list(actors)
        self._timeout_sec = request_timeout_sec + START_SEC
        self._request_timeout_sec = request_timeout_sec
        self._replica_of: dict[str, int] = {}
        self._recovering: dict[int, asyncio.Task[None]] = {}

    def __reduce__(self) -> Any:
        return _replicas, (self._actors, self._info, self._request_timeout_sec)

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
        """See `TokenEngine`."""
        index = self._route(session_id)
        answer = self._actors[index].generate.remote(list(prompt_ids), sampling, request_id, session_id)
        try:
            async with asyncio.timeout(self._timeout_sec):
                made: Generation = await answer
                return made
        except RayTaskError as error:
            fault = error.cause
            if isinstance(fault, PolicyError) and fault.error_class == "policy_unavailable":
                self._recover(index)
            raise (fault if isinstance(fault, RolloutError) else error.as_instanceof_cause()) from error
        except RayActorError as error:
            self._recover(index)
            said = f"the actor of policy replica {index} is gone"
            evidence = Evidence(f"{said}: {error}", "policy server")
            raise PolicyError("policy_unavailable", said, evidence) from error
        except TimeoutError as error:
            self._recover(index)
            said = f"policy replica {index} did not answer within {self._timeout_sec:.0f} s"
            raise PolicyError("policy_timeout", said) from error
        except asyncio.CancelledError:
            ray.cancel(answer)  # else the engine would go on with an answer that nobody takes
            raise

    async def release(self, session_id: str) -> None:
        """See `TokenEngine`."""
        self._replica_of.pop(session_id, None)

    def _route(self, session_id: str) -> int:
        """The session's replica: at its start the one with the fewest sessions, of those that are well."""
        index = self._replica_of.get(session_id)
        if index is None:
            sessions = Counter(self._replica_of.values())
            well = [i for i in range(len(self._actors)) if i not in self._recovering]
            index = min(well or range(len(self._actors)), key=lambda i: (sessions[i], i))
            self._replica_of[session_id] = index
        return index

    def _recover(self, index: int) -> None:
        """Leave this replica out until it generates again."""
        if index not in self._recovering:
            self._recovering[index] = asyncio.ensure_future(self._until_well(index))

    async def _until_well(self, index: int) -> None:
        try:
            async with asyncio.timeout(START_SEC):
                while True:
                    try:
                        await self._actors[index].info.remote()
                        return
                    except (RayActorError, RayTaskError):
                        await asyncio.sleep(1.0)
        except TimeoutError:
            return  # its next session finds out, and names what is wrong
        finally:
            del self._recovering[index]


def start_replicas(
    model: str,
    engine_args: Mapping[str, Any] | None = None,
    *,
    replicas: int = 1,
    num_cpus: float = 0.0,
    num_gpus: float = 0.0,
    threads: int | None = None,
    request_timeout_sec: float = REQUEST_TIMEOUT_SEC,
    version: int = 0,
) -> list[Any]:
    """Make the actors; they load their engines when first called (`replica_policy`).

    `num_cpus` and `num_gpus` are what Ray sets aside for each. `threads`: OpenMP threads of an engine without
    a GPU, None for `cpu_threads` (Ray itself sets as many as it sets CPUs aside, at least 1).
    """
    actor = ray.remote(PolicyReplica).options(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=CONCURRENT_REQUESTS,
    )
    given = None if num_gpus else (threads or 0)
    return [
        actor.remote(
            model,
            dict(engine_args or {}),
            request_timeout_sec=request_timeout_sec,
            version=version,
            threads=given,
        )
        for _ in range(replicas)
    ]


async def replica_policy(
    actors: Sequence[Any],
    *,
    name: str = "vllm",
    template_kwargs: Mapping[str, Any] | None = None,
    request_timeout_sec: float = REQUEST_TIMEOUT_SEC,
) -> TokenPolicy:
    """A policy over these replicas, all of them started in parallel. Raises `PolicyError` where one does not
    come up, and `ValueError` where vLLM does not take an engine argument."""
    try:
        async with asyncio.timeout(START_SEC):
            infos = await asyncio.gather(*(actor.info.remote() for actor in actors))
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from error
    except RayActorError as error:
        raise PolicyError(
            "policy_unavailable", f"a policy replica ended while it started: {error}"
        ) from error
    except TimeoutError as error:
        raise PolicyError("policy_unavailable", f"no policy replica within {START_SEC:.0f} s") from error
    replicas = Replicas(actors, infos[0], request_timeout_sec=request_timeout_sec)
    return TokenPolicy(replicas, name=name, template_kwargs=template_kwargs)


async def stop_replicas(actors: Sequence[Any], *, within_sec: float = 60.0) -> None:
    """Close the engines and end the actors, whatever state they are in."""
    try:
        async with asyncio.timeout(within_sec):
            await asyncio.gather(*(actor.close.remote() for actor in actors), return_exceptions=True)
    except TimeoutError:
        pass  # killed below; Ray ends the engine with its actor
    finally:
        for actor in actors:
            ray.kill(actor, no_restart=True)


def _replicas(actors: Sequence[Any], info: ReplicaInfo, request_timeout_sec: float) -> Replicas:
    return Replicas(actors, info, request_timeout_sec=request_timeout_sec)
