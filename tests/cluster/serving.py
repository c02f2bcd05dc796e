"""Serving a policy of fake engines (`fake_engine.py`) in a Ray that is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fake_engine import ANSWER, fake_engine

from rollcage.cluster.config_policies import VllmPolicyConfig
from rollcage.cluster.policies import ServedPolicy
from rollcage.cluster.replicas import Replicas
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.engine import Generation


async def until(true: Callable[[], bool], within_sec: float = 60.0) -> None:
    """Return once it is true. What other processes do has no event here."""
    async with asyncio.timeout(within_sec):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


class Serving:
    """A policy that is served, and what can be seen of it from outside."""

    def __init__(self, served: ServedPolicy, model: Path, said: list[str]) -> None:
        self.served = served
        self.model = model
        self.said = said
        self._sessions: set[str] = set()
        self._restarts: dict[int, int] = {}
        self.engine: Replicas = served.policy._engine  # type: ignore[assignment]

    async def fresh(self) -> Serving:
        """The same policy for another test: what the last one left is gone, and every replica is well."""
        for session in self._sessions:
            await self.engine.release(session)
        self._sessions.clear()
        for file in self.model.iterdir():
            file.unlink()
        await self.until_ready(len(self.served.status()))
        self._restarts = {replica["replica"]: replica["restarts"] for replica in self.served.status()}
        self.said.clear()
        return self

    @property
    def restarts(self) -> list[int]:
        """Of each replica, since the test began."""
        return [
            replica["restarts"] - self._restarts.get(replica["replica"], 0)
            for replica in self.served.status()
        ]

    async def turn(self, session: str, what: int = ANSWER, engine: Replicas | None = None) -> Generation:
        self._sessions.add(session)
        return await (engine or self.engine).generate(
            [what], Sampling(), request_id=f"{session}-{what}", session_id=session
        )

    async def who(self, session: str, engine: Replicas | None = None) -> int:
        """The process that answers this session."""
        return (await self.turn(session, engine=engine)).ids[0]

    async def who_is(self, number: int) -> int:
        """The process of a replica."""
        made = await self.served._replicas[number].actor.generate.remote(
            [ANSWER], Sampling(), f"who-{number}", ""
        )
        pid: int = made.ids[0]
        return pid

    def noted(self, name: str) -> list[str]:
        """Lines that engines have left."""
        file = self.model / name
        return file.read_text().splitlines() if file.exists() else []

    async def until_ready(self, replicas: int = 2) -> None:
        """Return when so many are well, asked now, and the router knows."""
        async with asyncio.timeout(60):
            while True:
                await asyncio.gather(*(replica._ask() for replica in self.served._replicas.values()))
                if [replica["state"] for replica in self.served.status()] == ["ready"] * replicas:
                    break
                await asyncio.sleep(0.05)
        await self.served._sync()


@asynccontextmanager
async def serving(
    model: Path, *, replicas: int = 2, check_sec: float = 1.0, **settings: Any
) -> AsyncIterator[Serving]:
    """A policy of fake engines whose directory is `model`."""
    said: list[str] = []
    config = VllmPolicyConfig(
        kind="vllm", model=str(model), replicas=replicas, **{"health_sec": 0.5, **settings}
    )
    served = ServedPolicy(
        "p", config, str(model), say=said.append, make_engine=fake_engine, check_sec=check_sec
    )
    await served.start()
    try:
        yield Serving(served, model, said)
    finally:
        await served.close()
