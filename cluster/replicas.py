"""A policy's replicas as one `TokenEngine`, for every process that has rollouts.

A turn whose replica dies or hangs is tried again on another one with the same prompt ids, which that one prefills
anew: the rollout does not notice but in `queue_seconds`, where the agent's clock stands still. That ends

- `retry_sec` after the first time, as what the last engine ended of: `policy_unavailable`, or `policy_timeout` where it
  hung;
- as `policy_error`, with a turn that engines end of: it was the only suspect on the second engine that ended under it
  (a suspect is a turn that has been on one that ended), or on a third, where suspects run one at a time.

What an engine says of the request itself is raised as it is. A session's first turn costs one call of the router; what
ends is told with the next such call or half a second later, for all sessions together.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayTaskError

from rollcage.cluster.actors import GONE
from rollcage.cluster.replica_protocol import Draining, EngineLost, ReplicaInfo
from rollcage.cluster.router import Place
from rollcage.rollout.outcome import Evidence, PolicyError, RolloutError
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.engine import Generation

TELL_SEC = 0.5
"""How long the end of sessions may wait to be told to the router."""

BEAT_SEC = 30.0
"""How often the router hears of a process that has sessions; after 120 s of nothing it takes it for dead."""


@dataclass
class _Turn:
    """What has become of one turn so far."""

    began: float
    deadline: float
    kills: int = 0
    fault: EngineLost | None = None


class Replicas:
    """See the module. Can be pickled: each process is a client of the router of its own."""

    def __init__(self, router: Any, info: ReplicaInfo, *, retry_sec: float) -> None:
        self.tokenizer = info.tokenizer
        self.max_model_len = info.max_model_len
        self._info = info
        self._router = router
        self._retry_sec = retry_sec
        self._client = uuid.uuid4().hex
        self._places: dict[str, Place] = {}
        self._ended: set[str] = set()
        self._over: dict[int, tuple[Any, list[str]]] = {}
        """By replica: its actor, and the sessions that it has not been told the end of."""
        self._lost: set[str] = set()
        """Lives of engines that turns have ended with and that the router does not know of."""
        self._telling: asyncio.Task[None] | None = None
        self._known_router = ""
        self._unknown = False
        """The router that there is now does not know where this process's sessions are."""

    def __reduce__(self) -> Any:
        return _replicas, (self._router, self._info, self._retry_sec)

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
        """See `TokenEngine` and the module."""
        now = time.monotonic()
        turn, tries = _Turn(now, now + self._retry_sec), 0
        request = (list(prompt_ids), sampling, session_id, tuple(tools), structure)
        while True:
            place = await self._place(session_id, turn)
            lost_seconds, tries = time.monotonic() - turn.began, tries + 1
            try:
                made = await self._ask(place, f"{request_id}-{tries}", *request, kills=turn.kills)
            except Draining:
                self._leave(place)
            except EngineLost as lost:
                self._note(place, turn, lost)
            else:
                return replace(made, queue_seconds=made.queue_seconds + lost_seconds)

    async def current_version(self) -> int:
        """See `TellsVersion`: one call of the router."""
        try:
            version: int = await self._router.version.remote()
            return version
        except GONE as error:
            raise _no_router(error) from error

    async def release(self, session_id: str) -> None:
        """See `TokenEngine`. The router is told also where the session has no place now: it may know one."""
        place = self._places.pop(session_id, None)
        self._ended.add(session_id)
        if place is not None:
            self._over.setdefault(place.replica, (place.actor, []))[1].append(session_id)
        self._keep_telling()

    async def _place(self, session_id: str, turn: _Turn) -> Place:
        """Where the session's turn goes. Raises `PolicyError` where there is nothing for too long."""
        if (known := self._places.get(session_id)) is not None:
            return known
        ended, self._ended = list(self._ended), set()
        lost, self._lost = list(self._lost), set()
        within_sec = max(0.0, turn.deadline - time.monotonic())
        asked = self._router.place.remote(self._client, session_id, ended, lost, within_sec)
        try:
            found = await asked
        except GONE as error:
            raise _no_router(error) from error
        except asyncio.CancelledError:
            ray.cancel(asked)  # else the router would go on to look for a place that nobody takes
            raise
        if isinstance(found, str):
            raise self._given_up(turn, found)
        place: Place = found
        self._places[session_id] = place
        self._heard(place.router)
        self._keep_telling()
        return place

    async def _ask(
        self,
        place: Place,
        request_id: str,
        prompt_ids: list[int],
        sampling: Sampling,
        session_id: str,
        tools: tuple[Tool, ...],
        structure: Structure | None,
        *,
        kills: int,
    ) -> Generation:
        answer = place.actor.generate.remote(
            prompt_ids, sampling, request_id, session_id, tools, structure, kills
        )
        try:
            made: Generation = await answer
            return made
        except RayTaskError as error:
            fault = error.cause
            if isinstance(fault, RolloutError | Draining):
                raise fault from None
            raise error.as_instanceof_cause() from error
        except GONE as error:
            said = f"the actor of policy replica {place.replica} is gone"
            evidence = Evidence(f"{said}: {error}", "policy server")
            raise EngineLost("policy_unavailable", said, evidence, ran=True) from error
        except asyncio.CancelledError:
            ray.cancel(answer)  # else the engine would go on with an answer that nobody takes
            raise

    def _note(self, place: Place, turn: _Turn, lost: EngineLost) -> None:
        """An engine has ended with the turn. Raises `PolicyError` where it is not to be tried again."""
        now = time.monotonic()
        if turn.fault is None:
            turn.deadline = now + self._retry_sec
        turn.fault = lost
        self._leave(place)
        turn.kills += lost.ran
        if turn.kills >= 3 or (turn.kills == 2 and lost.ran and lost.alone):
            said = (
                f"{turn.kills} engines ended while they were at work on this turn, the last: {lost.message}"
            )
            raise PolicyError("policy_error", said, replace(lost.evidence, message=said)) from lost
        if now > turn.deadline:
            raise self._given_up(turn, "it was lost again") from lost

    def _leave(self, place: Place) -> None:
        """This life of a replica's engine takes no turns: every session that was there asks for another place."""
        self._lost.add(place.life)
        self._places = {session: at for session, at in self._places.items() if at.life != place.life}

    def _given_up(self, turn: _Turn, states: str) -> PolicyError:
        waited = time.monotonic() - turn.began
        said = f"no replica took the turn within {waited:.0f} s ({states})"
        fault = turn.fault
        if fault is None:
            return PolicyError("policy_unavailable", said)
        evidence = replace(fault.evidence, also=(*fault.evidence.also, said))
        return PolicyError(fault.error_class, f"{fault.message}; {said}", evidence)

    def _heard(self, router: str) -> None:
        if self._known_router not in ("", router):
            self._unknown = True
        self._known_router = router

    def _keep_telling(self) -> None:
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell())

    async def _tell(self) -> None:
        """Keep the router's count of this process's sessions right for as long as there are any."""
        told = time.monotonic()
        while self._places or self._ended or self._over:
            await asyncio.sleep(TELL_SEC)
            if not (self._ended or self._over or self._unknown) and time.monotonic() - told < BEAT_SEC:
                continue
            told = time.monotonic()
            ended, self._ended = list(self._ended), set()
            over, self._over = self._over, {}
            for actor, sessions in over.values():
                actor.release.remote(sessions)
            try:
                self._heard(await self._router.beat.remote(self._client, ended))
                if self._unknown:
                    where = {session: place.replica for session, place in self._places.items()}
                    await self._router.adopt.remote(self._client, where)
                    self._unknown = False
            except GONE:
                continue  # the next turn that needs a place finds out, and says so


def _no_router(error: Exception) -> PolicyError:
    """Ray gives it up only with the job's own process."""
    return PolicyError("policy_unavailable", f"the policy's router is gone: {error}")


def _replicas(router: Any, info: ReplicaInfo, retry_sec: float) -> Replicas:
    return Replicas(router, info, retry_sec=retry_sec)
