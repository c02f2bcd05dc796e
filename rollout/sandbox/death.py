"""Whose doing the end of a container was: its own processes', the memory limit's, or somebody else's.

Nobody inside can send PID 1 a SIGKILL, so that status 137 is the kernel's, for memory, or came from outside. The
engine's `OOMKilled` does not tell them apart: it stays true from the first process that was ever killed for memory
in the container. Its events do: it notes each time that the limit was met (`oom`) and each signal that was sent over
its API (`kill`), with the time. So PID 1 died of the limit where the limit was met just before it died, and nobody
had sent it a signal that ends it. An engine that was started anew has forgotten its events, and one that is very
busy keeps only the last 256: without them a death is nobody's that can be named, and so the harness's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rollcage.rollout.outcome import Evidence, SandboxError
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.link import CLEAR, INTERRUPT, REPORT

KILLED = 128 + 9

OOM_NEAR_SEC = 2.0
"""From the kernel's kill for memory to the end that the engine notes: shim and engine pass the two on apart."""

AFTER_SEC = 0.5
"""The engine may note the kill for memory after the end that came of it."""

_OURS = frozenset(str(number) for number in (CLEAR, INTERRUPT, REPORT))


@dataclass(frozen=True)
class Notes:
    """What an engine has noted about a container's end. Times are Unix seconds of the engine's clock."""

    died_at: float | None = None
    signals: tuple[str, ...] = ()
    """Numbers of the signals that its API sent, but for those that PID 1 has traps for."""
    limit_met_at: tuple[float, ...] = ()

    @property
    def limit_killed(self) -> bool:
        """PID 1 was killed for the memory limit."""
        if self.died_at is None or self.signals:
            return False
        return any(abs(self.died_at - met_at) <= OOM_NEAR_SEC for met_at in self.limit_met_at)


async def notes(engine: Engine, container_id: str, state: Mapping[str, Any]) -> Notes:
    """What the engine has noted about the end of this container, whose state says that it was killed; nothing of any
    other end, and nothing where the engine keeps no events. Raises `SandboxError` where it does not answer."""
    ended_at = _unix(state.get("FinishedAt") or "")
    if state["ExitCode"] != KILLED or ended_at is None:
        return Notes()
    wanted = {"container": container_id, "event": ["oom", "kill", "die"]}
    # As text, because docker-py takes no fractions of a second otherwise.
    span = {"since": f"{ended_at - OOM_NEAR_SEC:.9f}", "until": f"{ended_at + AFTER_SEC:.9f}"}

    def ask(api: Any) -> list[dict[str, Any]]:
        # With `until` the stream has an end, which is awaited where it lies ahead.
        return list(api.events(**span, filters=wanted, decode=True))

    try:
        return read_notes(await engine.call("ask for a container's events", ask))
    except SandboxError as error:
        if error.evidence.status is None:
            raise
        return Notes()


def read_notes(events: Iterable[Mapping[str, Any]]) -> Notes:
    """The notes in events as the engine gives them:
    https://docs.docker.com/reference/api/engine/version/v1.41/#tag/System/operation/SystemEvents"""
    died_at = None
    signals, limit_met_at = [], []
    for event in events:
        at = event.get("timeNano", 0) / 1e9 or float(event.get("time", 0))
        what = str(event.get("Action") or event.get("status"))
        if what in ("die", "died"):
            died_at = at
        elif what == "oom":
            limit_met_at.append(at)
        elif what == "kill":
            signal = str(((event.get("Actor") or {}).get("Attributes") or {}).get("signal", ""))
            if signal not in _OURS:
                signals.append(signal)
    return Notes(died_at, tuple(signals), tuple(limit_met_at))


def death(
    state: Mapping[str, Any] | None, noted: Notes, *, ready: bool, memory_mb: int | None
) -> SandboxError:
    """The fault for a container that has ended, or that the engine does not know any more (`state` None).

    `ready`: PID 1 had said that its shell is there. `memory_mb`: the container's limit. Status 124 is PID 1's own
    word at its deadline.
    """
    if state is None:
        return SandboxError("container_lost", "the engine does not know the container any more")
    code = state["ExitCode"]
    evidence = Evidence(
        f"the container ended with status {code}: {state.get('Error') or 'no error of the engine'}"
        + (f"; signals sent over the engine's API: {', '.join(noted.signals)}" if noted.signals else ""),
        said_by="container state",
        exit_code=code,
        oom_killed=bool(state["OOMKilled"]),
    )
    if not ready and code == KILLED and noted.limit_killed and memory_mb is not None:
        said = f"a memory limit of {memory_mb} MiB has no room for a shell"
        return SandboxError("container_config", said, evidence)
    if not ready:
        return SandboxError("container_start", "the container ended before its shell was there", evidence)
    if code == KILLED and noted.limit_killed:
        if memory_mb is None:
            return SandboxError("host_oom", "PID 1 was killed for memory, and it has no limit", evidence)
        return SandboxError("agent_oom", "PID 1 was killed for the memory limit", evidence)
    if code in (KILLED, 143, 255) or state.get("Error"):
        return SandboxError("container_lost", "the container was killed from outside", evidence)
    if code == 124:
        return SandboxError(
            "container_lost", "the sandbox reached its deadline (sandbox.deadline_sec)", evidence
        )
    return SandboxError("agent_killed_sandbox", f"PID 1 was made to end with status {code}", evidence)


def _unix(text: str) -> float | None:
    """Seconds of a time as the engine writes it; None where it is none, or Go's zero time."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.timestamp() if moment.year > 1 else None
