"""The names of the temporary directories that belong to one process (`rollout/scratch.py`)."""

from __future__ import annotations

from rollcage.rollout import scratch
from rollcage.rollout.scratch import VLLM, make_scratch, remove_scratch

__all__ = ["RAY", "TASKS", "make_scratch", "remove_abandoned", "remove_scratch"]

TASKS, RAY = "rollcage-tasks-", "rollcage-ray-"


def remove_abandoned() -> None:
    """Remove the directories of processes on this machine that are gone."""
    scratch.remove_abandoned((TASKS, RAY, VLLM))
