"""Every way in which an attempt can end: the one definition.

Metric labels, the Arrow dictionary, retry budgets, the documentation page and the dashboards are read
from `TABLE`; nothing else in the project lists error classes.

Four mechanisms, each in one place:

- vocabulary: `TABLE`, and the exceptions below, one for each boundary that a failure can cross;
- classification: one helper around each call into foreign code (`sandbox/faults.py`, `policies/`), which
  looks at exception types, status codes and container state, never at what a sandbox printed;
- surfacing: those helpers raise a `RolloutError` where the failure happened, with its `Evidence`;
- capture: `rollout.py` alone turns a `RolloutError` into the end of an attempt. The first fault names the
  attempt; a later one, in teardown, is added to the evidence.

    RolloutError
    ├── TaskError        the task's own files, or what the task asks of a container
    ├── BuildError       the image builder, or a registry
    ├── SandboxError     the Docker Engine, a container, a network
    ├── PolicyError      the model server
    ├── VerifierError    the verifier, or the reward that it left
    ├── AgentStopped     a limit that the agent met (its work is graded all the same)
    ├── Stale            the policy's weights have moved on too far for the rollout to go on
    └── Cancelled        somebody called the rollout off
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

EVIDENCE_BYTES = 4096
"""Evidence is for a person who reads one attempt: a screen or two, never a log archive."""


class Outcome(StrEnum):
    """What became of a rollout. `invalid` means that no attempt gave a valid reward."""

    PASSED = "passed"
    FAILED = "failed"
    INVALID = "invalid"
    CANCELLED = "cancelled"


class Domain(StrEnum):
    """Whose failure it was."""

    AGENT = "agent"
    TASK = "task"
    VERIFIER = "verifier"
    INFRA = "infra"
    SERVICE = "service"


class Stage(StrEnum):
    """What the attempt was doing."""

    QUEUE = "queue"
    LOAD = "load"
    BUILD = "build"
    START = "start"
    AGENT = "agent"
    VERIFY = "verify"
    TEARDOWN = "teardown"


class Quarantine(StrEnum):
    """When a task is taken out of the job because of an error of this class.

    `AFTER_RETRIES`: once `SUSPECTS` of its rollouts have each spent their retries, or the only one that it has. What
    one rollout alone meets may be its own agent's doing.
    """

    NEVER = "never"
    AT_ONCE = "at_once"
    AFTER_RETRIES = "after_retries"


SUSPECTS = 2
"""Rollouts of a task that must fail in its verifier before it is the task that is at fault."""


@dataclass(frozen=True)
class ErrorClass:
    """One row of the table.

    `retries`: how many further attempts one rollout may spend on this class.
    `backoff_sec`: wait before the first of them; doubled each time, see `backoff`.
    `other_host`: prefer another host for the next attempt, where there is one.
    """

    name: str
    domain: Domain
    stages: tuple[Stage, ...]
    meaning: str
    fault_of: str
    reward_valid: bool = False
    retries: int = 0
    backoff_sec: float = 0.0
    other_host: bool = False
    quarantine: Quarantine = Quarantine.NEVER


BACKOFF_CAP_SEC = 60.0


def backoff(error_class: str, retry: int) -> float:
    """Seconds to wait before retry number `retry` (from 1) after an error of this class, without jitter."""
    row = BY_NAME[error_class]
    return min(BACKOFF_CAP_SEC, row.backoff_sec * float(2 ** (retry - 1)))


_ANY = tuple(Stage)


def _agent(name: str, meaning: str) -> ErrorClass:
    return ErrorClass(name, Domain.AGENT, (Stage.AGENT,), meaning, "the policy", reward_valid=True)


def _task(name: str, stage: Stage, meaning: str) -> ErrorClass:
    return ErrorClass(
        name, Domain.TASK, (stage,), meaning, "benchmark invalidity", quarantine=Quarantine.AT_ONCE
    )


def _verifier(name: str, meaning: str, quarantine: Quarantine = Quarantine.AFTER_RETRIES) -> ErrorClass:
    return ErrorClass(
        name,
        Domain.VERIFIER,
        (Stage.VERIFY,),
        meaning,
        "reward misalignment",
        retries=1,
        quarantine=quarantine,
    )


def _infra(name: str, meaning: str, *, retries: int, backoff_sec: float, other_host: bool) -> ErrorClass:
    return ErrorClass(
        name,
        Domain.INFRA,
        _ANY,
        meaning,
        "harness brittleness",
        retries=retries,
        backoff_sec=backoff_sec,
        other_host=other_host,
    )


TABLE: tuple[ErrorClass, ...] = (
    _agent("agent_timeout", "the agent's own time ran out; what it left is graded"),
    _agent("turn_limit", "the agent used all its turns"),
    _agent("token_limit", "the agent used all its tokens"),
    _agent("context_overflow", "the conversation no longer fits the model's context"),
    _agent("malformed_actions", "too many answers in a row held no action that could be read"),
    _agent("agent_oom", "the agent's processes went past the task's memory limit"),
    _agent("agent_killed_sandbox", "the agent ended the sandbox's own processes"),
    _task("task_malformed", Stage.LOAD, "a file of the task is missing or cannot be read as the format says"),
    _task("dockerfile_parse", Stage.BUILD, "the Dockerfile is not one"),
    _task("image_build", Stage.BUILD, "a step of the Dockerfile failed by itself"),
    _task("base_image_missing", Stage.BUILD, "the registry says that the base image does not exist"),
    _task("container_config", Stage.START, "the engine refuses what the task asks of its container"),
    _task("healthcheck", Stage.START, "the task's healthcheck never passed"),
    _task("unsupported", Stage.LOAD, "the task asks for something that rollcage does not do"),
    _verifier("reward_missing", "the verifier ended and left no reward"),
    _verifier("reward_malformed", "the reward is not one finite number, or not one that can be chosen"),
    _verifier("reward_tampered", "the only reward there is was not written by the verifier", Quarantine.NEVER),
    _verifier("verifier_timeout", "the verifier's time ran out"),
    _verifier("verifier_crash", "the verifier could not run, or ended without a sign of life"),
    _infra("network_pool", "the engine has no address pool left for a network",
           retries=5, backoff_sec=2, other_host=True),
    _infra("network_setup", "the engine could not make or join a network",
           retries=3, backoff_sec=1, other_host=True),
    _infra("image_pull", "an image could not be fetched from its registry",
           retries=4, backoff_sec=5, other_host=True),
    _infra("build_infra", "a build failed for the engine's or the network's reasons",
           retries=3, backoff_sec=2, other_host=True),
    _infra("disk_full", "the host has no space left", retries=3, backoff_sec=10, other_host=True),
    _infra("container_start", "the engine could not start a container",
           retries=3, backoff_sec=1, other_host=True),
    _infra("container_lost", "a running container is gone, and not by its own processes' doing",
           retries=3, backoff_sec=1, other_host=True),
    _infra("docker_unavailable", "the engine does not answer at all",
           retries=8, backoff_sec=1, other_host=True),
    _infra("docker_timeout", "the engine did not answer in time", retries=4, backoff_sec=1, other_host=True),
    _infra("host_lost", "the host's actor or its node is gone", retries=4, backoff_sec=1, other_host=True),
    _infra("host_oom", "the host itself ran out of memory", retries=3, backoff_sec=5, other_host=True),
    _infra("policy_unavailable", "the model server is gone", retries=6, backoff_sec=2, other_host=False),
    _infra("policy_timeout", "the model server did not answer in time",
           retries=3, backoff_sec=2, other_host=False),
    _infra("policy_error", "the model server failed on its side", retries=2, backoff_sec=1, other_host=False),
    _infra("policy_refused", "the model server refuses the request, as it would again: its key, its model, its form",
           retries=0, backoff_sec=0, other_host=False),
    _infra("rate_limited", "the model server asks for fewer requests",
           retries=8, backoff_sec=5, other_host=False),
    ErrorClass("internal_error", Domain.SERVICE, _ANY, "anything that rollcage cannot name", "rollcage",
               retries=1, backoff_sec=1),
    ErrorClass("cancelled", Domain.SERVICE, _ANY, "the job or the rollout was called off", "rollcage"),
    ErrorClass("stale", Domain.SERVICE, (Stage.AGENT,),
               "the policy's weights have moved on by more than max_staleness", "rollcage", retries=8),
)  # fmt: skip

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b-\x1f\x7f]")

BY_NAME: dict[str, ErrorClass] = {row.name: row for row in TABLE}


@dataclass(frozen=True)
class Evidence:
    """What was seen when an attempt failed. Stored with the attempt, never used as a metric label.

    `said_by` names who made the statement: engine, builder, registry, container state, policy server,
    verifier, task files or rollcage. `also` holds later faults, those of teardown for instance.
    """

    message: str = ""
    said_by: str = "rollcage"
    status: int | None = None
    exit_code: int | None = None
    oom_killed: bool | None = None
    seconds: float | None = None
    log_tail: str = ""
    also: tuple[str, ...] = ()

    def mapped(self, change: Callable[[str], str]) -> Evidence:
        """The same evidence with each of its texts changed, capped again."""
        also = tuple(map(change, self.also))
        mapped = replace(self, message=change(self.message), log_tail=change(self.log_tail), also=also)
        return mapped.capped()

    def size(self) -> int:
        """Bytes of this evidence as UTF-8 JSON."""
        return len(json.dumps(asdict(self), ensure_ascii=False).encode())

    def capped(self, limit: int = EVIDENCE_BYTES) -> Evidence:
        """The same evidence in at most `limit` bytes of JSON: the log loses its head first, then the message
        its tail, then the later faults."""
        evidence = replace(
            self,
            message=_printable(self.message),
            log_tail=_printable(self.log_tail),
            also=tuple(_printable(text) for text in self.also),
        )
        while (over := evidence.size() - limit) > 0:
            if evidence.log_tail:
                evidence = replace(evidence, log_tail=evidence.log_tail[max(over // 4, 1) :])
            elif len(evidence.message) > 200:
                evidence = replace(evidence, message=evidence.message[: -max(over // 4, 1)])
            elif evidence.also:
                evidence = replace(evidence, also=evidence.also[:-1])
            else:
                evidence = replace(evidence, message=evidence.message[:50], said_by=evidence.said_by[:50])
                break
        return evidence


def _printable(text: str) -> str:
    """Text that any UTF-8 reader and any terminal may be given: lone surrogates replaced, escape sequences and
    other control characters left out."""
    return _CONTROL.sub("", text.encode("utf-8", "replace").decode("utf-8"))


@dataclass(eq=False)
class RolloutError(Exception):
    """The end of an attempt, on its way up. `error_class` is a name of `TABLE`."""

    error_class: str
    message: str
    evidence: Evidence = field(default_factory=Evidence)
    retry_after_sec: float | None = None
    """What the other side asked us to wait, where it said so."""

    domains = frozenset(Domain)

    def __post_init__(self) -> None:
        row = BY_NAME.get(self.error_class)
        if row is None or row.domain not in self.domains:
            raise ValueError(f"{type(self).__name__} cannot carry the error class {self.error_class!r}")
        super().__init__(self.message)
        if not self.evidence.message:
            self.evidence = replace(self.evidence, message=self.message)

    def __str__(self) -> str:
        return f"{self.error_class}: {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.error_class, self.message, self.evidence, self.retry_after_sec)


class TaskError(RolloutError):
    """The task's own files, or what it asks of a container, are at fault."""

    domains = frozenset({Domain.TASK})


class BuildError(RolloutError):
    """An image could not be built or fetched: the task's fault or the infrastructure's, as the class says."""

    domains = frozenset({Domain.TASK, Domain.INFRA})


class SandboxError(RolloutError):
    """The engine, a container or a network failed; also a container that its own processes ended."""

    domains = frozenset({Domain.INFRA, Domain.AGENT, Domain.TASK})


class PolicyError(RolloutError):
    """The model server failed or refused; `context_overflow` and `token_limit` are the agent's."""

    domains = frozenset({Domain.INFRA, Domain.AGENT})


class VerifierError(RolloutError):
    """The verifier gave no reward that can be trusted."""

    domains = frozenset({Domain.VERIFIER})


class AgentStopped(RolloutError):
    """The agent met a limit. Its work is verified all the same and the reward counts."""

    domains = frozenset({Domain.AGENT})


class Stale(RolloutError):
    """The policy's weights have moved on by more than `max_staleness` since the rollout's first turn."""

    domains = frozenset({Domain.SERVICE})


class Cancelled(RolloutError):
    """The rollout was called off."""

    domains = frozenset({Domain.SERVICE})

    def __init__(self, message: str = "cancelled", *_: Any) -> None:
        RolloutError.__init__(self, "cancelled", message)

    def __reduce__(self) -> tuple[Any, ...]:
        return Cancelled, (self.message,)
