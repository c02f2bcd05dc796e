"""An engine that answers at once, for replicas whose model does not matter, and what makes it fail.

It is pickled by value into its actor. The first id of a prompt says what is to happen; the directory that is its model
says it across processes: each start leaves a line in `starts`, each turn in `turns`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rollcage.cluster.engine_life import MEASURE_SEC
from rollcage.cluster.replica_protocol import ReplicaSettings, Weights
from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.engine import Generation
from rollcage.rollout.policies.scripted import ByteTokenizer

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

ANSWER, DIE, WAIT, HANG, END_ACTOR, OVERFLOW, REFUSE, GATE, DIE_ONCE, HANG_ONCE = range(1, 11)
"""Answer with the process's id; the engine dies; wait for ever; the engine hangs; the actor's process ends; the prompt
is too long; the request is refused; wait for the file `gate` of the model's directory; the
engine dies, or hangs, but answers the next time."""


@dataclass(frozen=True)
class Load:
    kv_use: float
    running: int
    waiting: int = 0


class FakeEngine:
    """See the module. Implements `Engine`."""

    def __init__(self, settings: ReplicaSettings, weights: Weights) -> None:
        self.tokenizer = ByteTokenizer()
        self.tokenizer.chat_template = settings.engine_args.get("chat_template", ByteTokenizer.chat_template)
        self.max_model_len = 4096
        self.version = weights.version
        self._model = Path(settings.model)
        self._weights = weights
        self._dead = False
        self._hung = False
        self._between = False
        self._running = 0

    async def start(self) -> None:
        self._note("starts", f"{os.getpid()} {self.version}")
        while (self._model / "loads").exists():  # noqa: ASYNC110 -- another process removes it
            await asyncio.sleep(0.02)
        if (self._model / "surprise").exists():
            raise KeyError("nobody has thought of this")
        if (self._model / "refuse").exists():
            raise PolicyError("policy_unavailable", (self._model / "refuse").read_text())
        if self._weights.path is not None and "unloadable" in self._weights.path:
            raise PolicyError("policy_unavailable", f"no engine starts with {self._weights.path}")

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        tools: Any = (),
        structure: Any = None,
    ) -> Generation:
        what = prompt_ids[0]
        self._note("turns", f"{os.getpid()} {session_id} {what}")
        self._running += 1
        version = self.version
        try:
            await self._do(what)
        except asyncio.CancelledError:
            self._note("cancelled", request_id)
            raise
        finally:
            self._running -= 1
        return Generation([os.getpid()], [0.0], "stop", 0.0, 0.0, version=version, version_end=self.version)

    async def _do(self, what: int) -> None:
        if what in (DIE_ONCE, HANG_ONCE) and not (self._model / "once").exists():
            (self._model / "once").touch()
            what = DIE if what == DIE_ONCE else HANG
        if what == DIE or self._dead:
            self._dead = True
            raise PolicyError("policy_unavailable", "the engine is dead")
        if what == HANG or self._hung:
            self._hung = True
        if what == WAIT or self._hung:
            await asyncio.Event().wait()
        if what == END_ACTOR:
            os._exit(9)
        if what == OVERFLOW:
            raise PolicyError("context_overflow", "too long")
        if what == REFUSE:
            raise PolicyError("policy_error", "refused")
        while what == GATE and not (self._model / "gate").exists():  # noqa: ASYNC110 -- another process makes it
            await asyncio.sleep(0.02)

    async def check(self, timeout_sec: float) -> None:
        if self._hung:
            await asyncio.sleep(timeout_sec)
            raise PolicyError("policy_timeout", f"no token within {timeout_sec:g} s")
        if self._dead:
            raise PolicyError("policy_unavailable", "the engine is dead")

    async def load(self) -> Load:
        if self._between:
            raise PolicyError("policy_unavailable", "there is no engine now")
        return Load(0.1, self._running)

    async def update_weights(self, path: str, version: int, *, in_flight: str) -> str:
        self._note("updates", f"{os.getpid()} {version} {self._running}")
        if "nothing" in path:
            raise ValueError(f"{path} holds no weights")
        if "unloadable" in path or "breaks" in path:
            raise PolicyError("policy_unavailable", f"{path} was half loaded")
        self.version = version
        if "restarts" in path:
            self._between = True
            await asyncio.sleep(2 * MEASURE_SEC)
            self._between = False
            return "restart"
        return "reload"

    async def release(self, session_id: str) -> None:
        self._note("released", session_id)

    async def close(self) -> None:
        self._note("closed", str(os.getpid()))

    def _note(self, name: str, line: str) -> None:
        with (self._model / name).open("a") as file:
            file.write(line + "\n")


def fake_engine(settings: ReplicaSettings, weights: Weights) -> FakeEngine:
    return FakeEngine(settings, weights)
