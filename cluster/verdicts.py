"""How a rollout ended, for those who compare two runs of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollcage.rollout.trajectory import Attempt


def verdict(row: Mapping[str, Any]) -> dict[str, Any]:
    """Outcome, error class and reward of a row of `rollouts/`, as JSON values."""
    return {name: row[name] for name in ("outcome", "error_class", "reward")}


def verdict_of(attempt: Attempt) -> dict[str, Any]:
    """The same of an attempt."""
    reward = None if attempt.reward is None else attempt.reward.value
    return {"outcome": attempt.outcome.value, "error_class": attempt.error_class, "reward": reward}


def shown(verdict: Mapping[str, Any] | None) -> str:
    """A verdict for people; None: the rollout is not there."""
    if verdict is None:
        return "not there"
    reward = "" if verdict["reward"] is None else f" with {verdict['reward']:g}"
    error_class = f" ({verdict['error_class']})" if verdict["error_class"] else ""
    return f"{verdict['outcome']}{reward}{error_class}"
