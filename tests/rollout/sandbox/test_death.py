"""Whose doing the end of a container was, by its state and what the engine has noted. Real ends are in tests/faults."""

from __future__ import annotations

from typing import Any

import pytest

from rollcage.rollout.sandbox.death import Notes, death, read_notes

LIMIT_MET = Notes(died_at=100.0, limit_met_at=(99.9,))
KILLED_LATER = Notes(died_at=100.0, limit_met_at=(90.0,))
KILLED_BY_API = Notes(died_at=100.0, limit_met_at=(99.9,), signals=("9",))


def state(code: int, oom_killed: bool = False, error: str = "") -> dict[str, Any]:
    return {"ExitCode": code, "OOMKilled": oom_killed, "Error": error}


@pytest.mark.parametrize(
    ("ended", "noted", "memory_mb", "error_class"),
    [
        (state(137, True), LIMIT_MET, 64, "agent_oom"),
        (state(137, False), LIMIT_MET, 64, "agent_oom"),  # the engine can note the end before the kill
        (state(137, True), KILLED_LATER, 64, "container_lost"),
        (state(137, True), KILLED_BY_API, 64, "container_lost"),
        (state(137, True), Notes(), 64, "container_lost"),
        (state(137, True), LIMIT_MET, None, "host_oom"),
        (state(137), Notes(died_at=100.0), 64, "container_lost"),
        (state(143, True), LIMIT_MET, 64, "container_lost"),
        (state(255), Notes(), None, "container_lost"),
        (state(0, error="the shim is gone"), Notes(), None, "container_lost"),
        (state(0), Notes(), None, "agent_killed_sandbox"),
        (state(139), Notes(), 64, "agent_killed_sandbox"),
        (state(124, True), LIMIT_MET, 64, "container_lost"),
        (None, Notes(), 64, "container_lost"),
    ],
)
def test_whose_doing_the_end_of_a_container_was(
    ended: dict[str, Any] | None, noted: Notes, memory_mb: int | None, error_class: str
) -> None:
    assert death(ended, noted, ready=True, memory_mb=memory_mb).error_class == error_class


@pytest.mark.parametrize(
    ("noted", "error_class"), [(LIMIT_MET, "container_config"), (KILLED_BY_API, "container_start")]
)
def test_an_end_before_there_was_a_shell(noted: Notes, error_class: str) -> None:
    assert death(state(137, True), noted, ready=False, memory_mb=6).error_class == error_class


def event(what: str, at: float, **attributes: str) -> dict[str, Any]:
    return {"Action": what, "timeNano": int(at * 1e9), "Actor": {"Attributes": attributes}}


def test_signals_that_pid_1_has_traps_for_are_ours() -> None:
    events = [event("kill", 1, signal="43"), event("kill", 2, signal="44"), event("kill", 3, signal="45")]
    assert read_notes(events) == Notes()
    events += [event("oom", 4.5), event("kill", 5, signal="9"), event("die", 5.25, exitCode="137")]
    assert read_notes(events) == Notes(5.25, ("9",), (4.5,))
