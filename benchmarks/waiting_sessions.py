"""What sessions cost that wait for their policy, in the process that has them: `policy_throughput.py --waiting N`.

All of them wait at a replica in Ray whose engine answers nobody before the last of them has come.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from rollcage.cluster.actors import connected
from rollcage.cluster.config_policies import VllmPolicyConfig
from rollcage.cluster.policies import ServedPolicy
from rollcage.cluster.replica_protocol import ReplicaSettings, Weights
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.engine import Generation
from rollcage.rollout.policies.scripted import ByteTokenizer
from rollcage.rollout.trajectory import Message

PROMPT = "word " * 1000
"""5,000 tokens of `ByteTokenizer`."""


@dataclass(frozen=True)
class Load:
    """The engine's cache is never in use: it is not what sessions wait for."""

    running: int
    kv_use: float = 0.0
    waiting: int = 0


class PatientEngine:
    """Answers everybody once the file `answer` is in the directory that is its model. Implements `Engine`."""

    def __init__(self, settings: ReplicaSettings, weights: Weights) -> None:
        self.tokenizer = ByteTokenizer()
        self.max_model_len = 16384
        self._file = Path(settings.model) / "answer"
        self._running = 0

    async def start(self) -> None: ...

    async def check(self, timeout_sec: float) -> None: ...

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None: ...

    async def update_weights(self, path: str, version: int, *, in_flight: str) -> str:
        return "reload"

    async def load(self) -> Load:
        return Load(self._running)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: Any) -> Generation:
        self._running += 1
        while not self._file.exists():  # noqa: ASYNC110 -- another process makes it
            await asyncio.sleep(0.2)
        self._running -= 1
        return Generation([ord("."), ByteTokenizer.END], [0.0, 0.0], "stop", 0.0, 0.0)


def patient_engine(settings: ReplicaSettings, weights: Weights) -> PatientEngine:
    return PatientEngine(settings, weights)


def waiting(sessions: int) -> None:
    """Print what `sessions` cost that wait."""
    with tempfile.TemporaryDirectory() as model, connected():
        asyncio.run(_waiting(sessions, Path(model)))


async def _waiting(sessions: int, model: Path) -> None:
    config = VllmPolicyConfig(kind="vllm", model=str(model))
    served = ServedPolicy("p", config, str(model), make_engine=patient_engine)
    await served.start()
    try:
        me = psutil.Process()
        before = me.memory_info().rss, me.num_threads()
        began = time.monotonic()
        turns = [asyncio.create_task(_turn(served, number)) for number in range(sessions)]
        while served.status()[0]["running"] + served.status()[0]["waiting"] < sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.2)  # the replica tells it twice a second
        there = time.monotonic() - began
        during = me.memory_info().rss, me.num_threads()
        (model / "answer").touch()
        texts = await asyncio.gather(*turns)
    finally:
        await served.close()
    if texts != ["."] * sessions:
        raise SystemExit("not every session had its answer")
    print(f"{sessions} sessions wait in process {os.getpid()}, all there after {there:.1f} s:")
    for when, (rss, threads) in (("before", before), ("while they wait", during)):
        print(f"  {when:15s}  {rss / (1 << 20):7.0f} MiB  {threads:4d} threads")
    print(f"  a session {(during[0] - before[0]) / sessions / 1024:.0f} KiB", flush=True)


async def _turn(served: ServedPolicy, number: int) -> str:
    session = served.policy.session(f"waiting-{number}", task="t", sample=number)
    made, _ = await session.complete([Message("user", PROMPT)], Sampling())
    await session.close()
    return made.text
