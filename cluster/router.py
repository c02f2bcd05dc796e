"""The actor that routes a policy's sessions, one for all processes that have any.

It holds nothing that cannot be lost: Ray starts it again when it dies and gives it the calls that it had
(`max_task_retries=-1`; every one may be made twice). Who supervises the replicas tells it twice a second which there
are, and clients, which remember where their sessions are, tell it those when it is not the one that they knew.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from rollcage.cluster.routing import Report, Routing

WAITING_CALLS = 100_000
"""Sessions that may wait for a replica at once; each is one call of the actor."""


@dataclass(frozen=True)
class Member:
    """A replica as the router knows it. `said`: how it is, for people."""

    actor: Any
    report: Report
    said: str = ""


@dataclass(frozen=True)
class Place:
    """Where a session's turn goes. `router` names the one that says so: another after a restart."""

    replica: int
    life: str
    actor: Any
    router: str


class Router:
    """See the module. Runs as an asyncio actor."""

    def __init__(self) -> None:
        self._id = secrets.token_hex(6)
        self._routing = Routing()
        self._members: dict[int, Member] = {}
        self._version = 0
        self._changed = asyncio.Event()

    async def sync(self, members: Mapping[int, Member], version: int = 0) -> dict[int, int]:
        """These are the replicas, and every one that is open has weights of this version at least. Returns how many
        sessions each has."""
        self._members = dict(members)
        self._version = max(self._version, version)
        self._routing.report({number: member.report for number, member in members.items()})
        if any(member.report.serves for member in members.values()):
            self._wake()
        return {number: self._routing.sessions(number) for number in members}

    async def place(
        self, client: str, session: str, ended: Sequence[str], lost: Sequence[str], within_sec: float
    ) -> Place | str:
        """Where the session's next turn goes, waited for; or, after `within_sec`, why there is no place. `ended` are
        sessions of the client that are over, `lost` lives of engines that its turns have ended with."""
        self._routing.ended(ended)
        for life in lost:
            self._routing.doubt(life, time.monotonic())
        try:
            async with asyncio.timeout(within_sec):
                while True:
                    changed = self._changed
                    number = self._routing.place(client, session, time.monotonic())
                    if number is not None:
                        member = self._members[number]
                        return Place(number, member.report.life, member.actor, self._id)
                    await changed.wait()
        except TimeoutError:
            states = "; ".join(f"replica {n}: {m.said}" for n, m in sorted(self._members.items()))
            return states or "there are no replicas"

    async def version(self) -> int:
        """See `TellsVersion`. 0 until the first `sync`, which makes nothing stale."""
        return self._version

    async def beat(self, client: str, ended: Sequence[str]) -> str:
        """The client is there, and these of its sessions are over. Returns the router's name, and "" where it does not
        know this client's sessions."""
        self._routing.ended(ended)
        if not self._routing.knows(client):
            return ""
        self._routing.seen(client, time.monotonic())
        return self._id

    async def adopt(self, client: str, sessions: Mapping[str, int]) -> None:
        """See `Routing.adopt`."""
        self._routing.adopt(client, sessions, time.monotonic())

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def start_router() -> Any:
    """The actor. It ends with the process that made it, or when that kills it."""
    actor = ray.remote(Router)
    return actor.options(
        num_cpus=0, max_restarts=-1, max_task_retries=-1, max_concurrency=WAITING_CALLS
    ).remote()
