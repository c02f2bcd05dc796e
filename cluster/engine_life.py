"""One life of an engine: the turns that are on it, whether it still generates, and how it ends.

A life ends once, by `lose`: every turn on it then ends at once with `EngineLost`, whatever the engine itself would
still have said, for a hung one says nothing. Turns wait for `KvAdmission` before they are given to the engine.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

from rollcage.cluster.kv_admission import KvAdmission
from rollcage.cluster.replica_protocol import Engine, EngineLoad, EngineLost
from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.engine import Generation

T = TypeVar("T")

MEASURE_SEC = 0.2
"""How often the engine's load is read; an answer takes seconds."""

GIVE_UP_SEC = 10.0
"""How much longer than it was given an engine's own check may take before it is taken to hang with it."""


class EngineLife:
    """`engine` has been started with the weights `version`. `close` is due."""

    def __init__(self, engine: Engine, version: int, *, check_sec: float, update_sec: float) -> None:
        self.id = secrets.token_hex(6)
        self.engine = engine
        self.version = version
        self.load: EngineLoad | None = None
        self.updating = False
        self._check_sec = check_sec
        self._update_sec = update_sec
        self._admission = KvAdmission()
        self._turns: dict[str, asyncio.Future[None]] = {}
        self._kills: dict[str, int] = {}
        """Of each turn that the engine is at work on: how many engines have ended under it before."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._loading_weights = False
        self._proving: asyncio.Future[None] | None = None
        self._lost: asyncio.Future[EngineLost] = asyncio.get_running_loop().create_future()
        self._left: set[asyncio.Future[Any]] = set()
        self._measuring = asyncio.create_task(self._measure())

    @property
    def running(self) -> int:
        """Turns that the engine has."""
        return len(self._kills)

    @property
    def waiting(self) -> int:
        """Turns that have not been given to the engine yet."""
        return self._admission.waiting

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        tools: Sequence[Tool],
        structure: Structure | None,
        kills: int,
    ) -> Generation:
        """A turn, once it is admitted; its wait is in `queue_seconds`. Raises `EngineLost`, and what the engine says of
        the request itself. One past its time is the request's own only where the engine still generates."""
        arrived = time.monotonic()
        try:
            await self._admitted(request_id, alone=kills >= 2)
            waited = time.monotonic() - arrived
            self._kills[request_id] = kills
            self._idle.clear()
            made = await self._on_engine(
                request_id,
                self.engine.generate(
                    prompt_ids,
                    sampling,
                    request_id=request_id,
                    session_id=session_id,
                    tools=tools,
                    structure=structure,
                ),
            )
        finally:
            self._admission.ended(request_id)
            self._turns.pop(request_id, None)
            if not self._lost.done():  # else it is kept, for those that are told after this one
                self._kills.pop(request_id, None)
                if not self._kills:
                    self._idle.set()
            self._admit()
        return replace(made, queue_seconds=made.queue_seconds + waited)

    async def over(self) -> EngineLost:
        """Why the life is over, once it is."""
        return await asyncio.shield(self._lost)

    def lose(self, error: PolicyError) -> None:
        """The life is over. A second reason is not heard."""
        if not self._lost.done():
            error_class = "policy_timeout" if error.error_class == "policy_timeout" else "policy_unavailable"
            self._lost.set_result(EngineLost(error_class, error.message, error.evidence))

    async def prove(self) -> None:
        """Have the engine generate a token; where it does not, the life is over. Those who ask at the same time share
        one proof. While the engine loads weights it is not asked: that has a time limit of its own."""
        if self._proving is None:
            self._proving = asyncio.ensure_future(self._prove())
        await asyncio.shield(self._proving)

    async def _prove(self) -> None:
        try:
            if not self._loading_weights:
                async with asyncio.timeout(self._check_sec + GIVE_UP_SEC):
                    await self._raced(self.engine.check(self._check_sec))
        except (PolicyError, TimeoutError) as error:
            if self._loading_weights:
                return
            # Not told by the time that it took: an event loop's timers are no clock, and may go off a little early.
            if isinstance(error, PolicyError) and error.error_class != "policy_timeout":
                self.lose(error)
            else:
                said = f"the engine hangs: it generated no token within {self._check_sec:g} s"
                self.lose(PolicyError("policy_timeout", said))
        finally:
            self._proving = None

    async def update(self, path: str, version: int, in_flight: Literal["finish", "continue"]) -> str:
        """Give the engine other weights. With `finish` turns wait here until those on the engine have ended.

        Raises `ValueError` where the path holds no weights for it, and nothing has changed; in whatever other way
        this fails the life is over, and `EngineLost` is raised.
        """
        self.updating = True
        if in_flight == "finish":
            self._admission.pause()
        try:
            if in_flight == "finish":
                await self._raced(self._idle.wait())
            return await self._update(path, version, in_flight)
        finally:
            self.updating = False
            self._admission.resume()
            self._admit()

    async def _update(self, path: str, version: int, in_flight: Literal["finish", "continue"]) -> str:
        as_it_was = False
        self._loading_weights = True
        try:
            async with asyncio.timeout(self._update_sec):
                how = await self._raced(self.engine.update_weights(path, version, in_flight=in_flight))
            self.version = version
            as_it_was = True
            return how
        except ValueError:
            as_it_was = True
            raise
        except TimeoutError as error:
            said = f"the engine did not take the weights of {path} within {self._update_sec:g} s"
            self.lose(PolicyError("policy_timeout", said))
            raise self._lost.result() from error
        except EngineLost:
            raise
        except PolicyError as error:
            self.lose(error)
            raise self._lost.result() from error
        finally:
            self._loading_weights = False
            if not as_it_was:
                self.lose(PolicyError("policy_unavailable", f"the update to {path} did not end"))

    async def close(self) -> None:
        """End the life and close the engine."""
        self.lose(PolicyError("policy_unavailable", "the replica is closed"))
        self._measuring.cancel()
        await asyncio.wait([self._measuring])
        await self.engine.close()

    async def _admitted(self, request_id: str, *, alone: bool) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._admission.request(request_id, alone=alone)
        self._turns[request_id] = turn
        self._admit()
        await self._either(turn)
        if self._lost.done():
            raise self._as_told(request_id)

    def _admit(self) -> None:
        for request_id in self._admission.admit():
            turn = self._turns.pop(request_id)
            if not turn.done():
                turn.set_result(None)

    async def _on_engine(self, request_id: str, answer: Awaitable[Generation]) -> Generation:
        try:
            return await self._raced(answer)
        except EngineLost as error:
            raise self._as_told(request_id) from error
        except PolicyError as error:
            if error.error_class == "policy_unavailable":
                self.lose(error)
                raise self._as_told(request_id) from error
            if error.error_class == "policy_timeout":
                await self.prove()
                if self._lost.done():
                    raise self._as_told(request_id) from error
            raise

    def _as_told(self, request_id: str) -> EngineLost:
        """The life's end, as this turn is told of it."""
        over = self._lost.result()
        ran = request_id in self._kills
        alone = not any(kills for other, kills in self._kills.items() if other != request_id)
        return EngineLost(over.error_class, over.message, over.evidence, ran=ran, alone=ran and alone)

    async def _raced(self, work: Awaitable[T]) -> T:
        """What `work` gives, or `EngineLost` as soon as the life is over."""
        task = asyncio.ensure_future(work)
        try:
            await self._either(task)
            if task.done():
                return task.result()
            raise self._lost.result()
        finally:
            if not task.done():  # a hung engine does not let go of its calls either: nobody waits for them
                task.cancel()
                self._left.add(task)
                task.add_done_callback(self._forget)

    async def _either(self, one: asyncio.Future[Any]) -> None:
        """Return once `one` is done or the life over."""
        both: set[asyncio.Future[Any]] = {one, self._lost}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._left.discard(task)
        if not task.cancelled():
            task.exception()

    async def _measure(self) -> None:
        while True:
            if not self._loading_weights:  # it may be between two engines then
                try:
                    self.load = await self.engine.load()
                except PolicyError as error:
                    self.lose(error)
                    return
                self._admission.measured(self.load.kv_use, self.load.waiting)
                self._admit()
            await asyncio.sleep(MEASURE_SEC)
