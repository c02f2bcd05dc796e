"""What a replica's actor, its engine and its clients say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, Protocol

from rollcage.rollout.outcome import Evidence, PolicyError
from rollcage.rollout.policies.base import Sampling, Structure, Tool
from rollcage.rollout.policies.engine import Generation
from rollcage.rollout.policies.vllm import REQUEST_TIMEOUT_SEC
from rollcage.rollout.policies.vllm_weights import is_adapter
from rollcage.rollout.tokens import Tokenizer

CHECK_SEC = 60.0
"""How long an engine may take to prove that it generates: a step over many long prompts takes seconds on a GPU, and
may take half a minute on a CPU."""


@dataclass(frozen=True)
class Weights:
    """What an engine answers with: `model` and `adapter` (directories) in the place of those that the job began with,
    where they are not None. `version` is theirs together, and `path` what was last replaced."""

    version: int
    model: str | None = None
    adapter: str | None = None
    path: str | None = None

    def updated(self, path: str, version: int) -> Weights:
        """With what is at `path`, an adapter or a model."""
        if is_adapter(Path(path)):
            return replace(self, version=version, adapter=path, path=path)
        return replace(self, version=version, model=path, path=path)


@dataclass(frozen=True)
class ReplicaSettings:
    """What every replica of a policy is made with. `environment`: variables of its process, set before vllm is
    imported. `lora`: name and directory. `check_sec`: how long an engine may take to prove itself."""

    model: str
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    request_timeout_sec: float = REQUEST_TIMEOUT_SEC
    lora: tuple[str, str] | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None
    """OpenMP threads of an engine without a GPU; 0: `cpu_threads`; None: as Ray sets them."""
    environment: Mapping[str, str] = field(default_factory=dict)
    health_sec: float = 30.0
    check_sec: float = CHECK_SEC
    metrics: Mapping[str, Any] | None = None
    """Of `metrics.serving.serve`: how the engine's own metrics are scraped; None: they are not."""


@dataclass(frozen=True)
class ReplicaInfo:
    """What a client needs of a replica to make prompts for it."""

    tokenizer: Tokenizer
    max_model_len: int


class ReplicaState(StrEnum):
    """See `replica.py`."""

    NEW = "new"
    STARTING = "starting"
    READY = "ready"
    UPDATING = "updating"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True)
class ReplicaStatus:
    """`running` are turns in the engine's batch, `waiting` those that it or the replica holds back; `restarts` the
    engines that this actor has had beyond its first; `said`: why the last one ended or did not start."""

    state: ReplicaState
    life: str = ""
    version: int = 0
    kv_use: float = 0.0
    running: int = 0
    waiting: int = 0
    restarts: int = 0
    said: str = ""
    metrics: str = ""
    """Where the engine's own metrics are, as `host:port`."""


class Draining(Exception):
    """This replica takes no more turns: the session moves to another one."""


class EngineLoad(Protocol):
    """What an engine says of its load. `kv_use` is 0 to 1."""

    @property
    def kv_use(self) -> float: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...


class Engine(Protocol):
    """What a replica needs of its engine; `VllmEngine` is one."""

    tokenizer: Tokenizer
    max_model_len: int

    async def start(self) -> None: ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str,
        tools: Sequence[Tool] = (),
        structure: Structure | None = None,
    ) -> Generation: ...

    async def check(self, timeout_sec: float) -> None:
        """Raises `PolicyError`: `policy_timeout` where it hangs."""
        ...

    async def load(self) -> EngineLoad: ...

    async def update_weights(
        self, path: str, version: int, *, in_flight: Literal["finish", "continue"]
    ) -> str: ...

    async def release(self, session_id: str) -> None: ...

    async def close(self) -> None: ...


class EngineLost(PolicyError):
    """The engine that had the turn is gone, or none was there: no fault of the turn, which may be tried elsewhere.

    `ran`: the engine was at work on the turn, which may have ended it. `alone`: of the turns that it was at work on, no
    other had been on an engine that ended.
    """

    def __init__(
        self,
        error_class: str,
        message: str,
        evidence: Evidence | None = None,
        *,
        ran: bool = False,
        alone: bool = False,
    ) -> None:
        super().__init__(error_class, message, evidence or Evidence(message, "policy server"))
        self.ran = ran
        self.alone = alone

    def __reduce__(self) -> tuple[Any, ...]:
        return _engine_lost, (self.error_class, self.message, self.evidence, self.ran, self.alone)


def _engine_lost(error_class: str, message: str, evidence: Evidence, ran: bool, alone: bool) -> EngineLost:
    return EngineLost(error_class, message, evidence, ran=ran, alone=alone)


MakeEngine = Callable[[ReplicaSettings, Weights], Engine]
