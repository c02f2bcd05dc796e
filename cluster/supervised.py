"""One replica under supervision: its place in the cluster, its actor, and what has been seen of it.

`follow` asks the actor how it is, twice a second. One that does not answer is killed, and Ray starts it again, on
another node where its own is gone; one that Ray does not bring back is placed anew. An actor that is new is told the
weights that are current; one that is behind them takes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Literal

import ray
from ray.exceptions import RayTaskError

from rollcage.cluster.actors import GONE
from rollcage.cluster.errors import CouldNotRun
from rollcage.cluster.replica import PolicyReplica
from rollcage.cluster.replica_placement import Placement, actor_options, give_back, reserve
from rollcage.cluster.replica_protocol import (
    MakeEngine,
    ReplicaInfo,
    ReplicaSettings,
    ReplicaState,
    ReplicaStatus,
    Weights,
)
from rollcage.cluster.routing import Report
from rollcage.rollout.outcome import Evidence, PolicyError, RolloutError

POLL_SEC = 0.5

BOOT_SEC = 300.0
"""How long the process of an actor may take to answer at all: on a full machine, and over a slow network disk."""

ANSWER_SEC = 30.0
"""How long an actor that has answered may be silent. Its event loop does I/O only; its engine loads in a thread."""

LOST_SEC = 120.0
"""How long Ray may take to bring a dead actor back. It knows after some 10 s that a node is gone."""

RETRY_SEC = 10.0
"""Between tries of what has failed: a start, an update, a new place."""

CONCURRENT_CALLS = 20_000
"""Turns that one actor holds at once, and some calls of ours; the replica queues what it does not admit."""


class Supervised:
    """Replica `number` of a policy. `say` is shown what happens to it."""

    def __init__(
        self,
        number: int,
        settings: ReplicaSettings,
        placement: Placement,
        make_engine: MakeEngine,
        say: Callable[[str], None],
    ) -> None:
        self.number = number
        self.status = ReplicaStatus(ReplicaState.NEW)
        self.restarts = 0
        self.actor: Any = None
        self._settings = settings
        self._placement = placement
        self._make_engine = make_engine
        self._say = say
        self._group: Any = None
        self._life = ""
        self._answered: float | None = None
        self._silent_since: float | None = None
        self._work: asyncio.Task[None] | None = None
        self._draining = False

    async def start(self, weights: Weights) -> ReplicaInfo:
        """Place the actor and start its engine. Raises `CouldNotRun` where it finds no place, `ValueError` for an
        engine argument that there is none of, and `PolicyError` where the engine does not come up."""
        await self._place()
        info: ReplicaInfo = await called(self.actor.start.remote(weights))
        await self._ask()
        return info

    async def update(self, weights: Weights, in_flight: Literal["finish", "continue"]) -> str:
        """See `PolicyReplica.update`; `lost` where the actor is gone, and will start with these weights."""
        try:
            how: str = await called(self.actor.update.remote(weights, in_flight))
        except PolicyError as error:
            if error.error_class == "policy_unavailable" and isinstance(error.__cause__, GONE):
                return "lost"
            raise
        await self._ask()
        return how

    async def follow(
        self,
        current: Callable[[], Weights],
        in_flight: Literal["finish", "continue"],
        *,
        settled: Callable[[], bool],
    ) -> None:
        """Keep it well, for ever. `current` are the weights that it should have, `settled` is False while somebody else
        gives them to the replicas."""
        while True:
            await self._ask()
            if self._work is None or self._work.done():
                weights, state = current(), self.status.state
                if self._silent_since is not None and time.monotonic() - self._silent_since > LOST_SEC:
                    self._work = asyncio.create_task(self._trying(self._anew()))
                elif state is ReplicaState.NEW:
                    self._work = asyncio.create_task(self._trying(called(self.actor.start.remote(weights))))
                elif self.status.version < weights.version and state is ReplicaState.READY and settled():
                    self._work = asyncio.create_task(self._trying(self.update(weights, in_flight)))
            await asyncio.sleep(POLL_SEC)

    async def drain(self) -> None:
        """Return when it has no turn left; until then it takes none."""
        self._draining = True
        while True:
            try:
                await self.actor.drain.remote()
                status: ReplicaStatus = await self.actor.status.remote()
            except GONE:
                return
            if not (status.running or status.waiting):
                return
            await asyncio.sleep(POLL_SEC)

    async def stop(self, within_sec: float) -> None:
        """Close the engine, end the actor and give its place back, whatever state it is in."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        try:
            if self.actor is not None:
                async with asyncio.timeout(within_sec):
                    await self.actor.close.remote()
        except (TimeoutError, RayTaskError, *GONE):
            pass  # killed below; the engine's processes end with their actor's
        finally:
            if self.actor is not None:
                ray.kill(self.actor, no_restart=True)
            give_back(self._group)

    @property
    def report(self) -> Report:
        """For the router."""
        status = self.status
        serves = status.state in (ReplicaState.READY, ReplicaState.UPDATING) and not self._draining
        return Report(
            life=status.life,
            serves=serves,
            open=serves and status.state is ReplicaState.READY,
            kv_use=status.kv_use,
            requests=status.running + status.waiting,
        )

    @property
    def said(self) -> str:
        """How it is, for people."""
        return f"{self.status.state}" + (f" ({self.status.said})" if self.status.said else "")

    async def _place(self) -> None:
        self._group = await reserve(self._placement)
        actor = ray.remote(PolicyReplica).options(
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=CONCURRENT_CALLS,
            **actor_options(self._placement, self._group),
        )
        self.actor = actor.remote(self._settings, self._make_engine)
        self._answered = self._silent_since = None

    async def _anew(self) -> None:
        """Another actor, where there is room for one."""
        self._say(f"replica {self.number} is placed anew")
        ray.kill(self.actor, no_restart=True)
        give_back(self._group)
        self._group = None
        await self._place()

    async def _trying(self, work: Coroutine[Any, Any, Any]) -> None:
        try:
            await work
        except (CouldNotRun, RolloutError, ValueError) as error:
            self._say(f"replica {self.number}: {error}")
            await asyncio.sleep(RETRY_SEC)

    async def _ask(self) -> None:
        """Bring `status` up to date."""
        within_sec = BOOT_SEC if self._answered is None else ANSWER_SEC
        try:
            async with asyncio.timeout(within_sec):
                status: ReplicaStatus = await self.actor.status.remote()
        except TimeoutError:
            self._is_silent(f"it did not answer within {within_sec:g} s")
            ray.kill(self.actor, no_restart=False)
            return
        except GONE as error:
            self._is_silent(f"its actor is gone: {type(error).__name__}")
            return
        self._answered, self._silent_since = time.monotonic(), None
        if status.life and status.life != self._life:
            if self._life:
                self.restarts += 1
                self._say(f"replica {self.number} is well again ({status.said or 'its actor is new'})")
            self._life = status.life
        elif self.status.life and not status.life:
            self._say(f"replica {self.number} is lost, and its turns go on elsewhere: {status.said}")
        self.status = status

    def _is_silent(self, said: str) -> None:
        if self.status.life:
            self._say(f"replica {self.number} is lost, and its turns go on elsewhere: {said}")
        self.status = replace(ReplicaStatus(ReplicaState.DOWN), version=self.status.version, said=said)
        if self._silent_since is None:
            self._silent_since = time.monotonic()
        self._answered = None  # its next process has to boot


async def called(answer: Any) -> Any:
    """What an actor answers, or raises, if that is a `RolloutError` or a `ValueError`; `PolicyError` of whatever else
    it raises (`policy_error`), and where it is gone (`policy_unavailable`)."""
    try:
        return await answer
    except RayTaskError as error:
        if isinstance(error.cause, RolloutError | ValueError):
            raise error.cause from error
        said = f"a policy replica failed: {error.cause!r}"
        raise PolicyError("policy_error", said, Evidence(str(error), "policy server")) from error
    except GONE as error:
        said = f"a policy replica's actor ended: {error}"
        raise PolicyError("policy_unavailable", said) from error
