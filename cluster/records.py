"""Records that no host made: of attempts whose host gave no answer, and of rollouts that no attempt decided."""

from __future__ import annotations

import time
import traceback
from dataclasses import replace

import pyarrow as pa

from rollcage.cluster.decisions import RolloutKey
from rollcage.rollout.outcome import BY_NAME, Evidence, Outcome, Stage
from rollcage.rollout.trajectory import Attempt

UNWRITABLE = (ValueError, TypeError, KeyError, OverflowError, pa.ArrowException)
"""What the ledger raises for a record that the schema cannot hold: that record's fault, not the disk's."""


def own_record(
    key: RolloutKey,
    outcome: Outcome,
    error_class: str,
    evidence: Evidence | None,
    *,
    number: int,
    policy: str | None,
    attempt_id: str = "",
    host: str = "",
    started_at: float | None = None,
) -> Attempt:
    """A record without trajectory or reward. `attempt_id` is empty where there was no attempt; `started_at` is
    now where it is None."""
    now = time.time()
    stages = BY_NAME[error_class].stages
    return Attempt(
        attempt_id=attempt_id,
        job=key.job,
        task=key.task,
        task_digest=key.task_digest,
        sample=key.sample,
        draw=key.draw,
        number=number,
        agent=key.agent,
        policy=policy or "",
        host=host,
        outcome=outcome,
        error_class=error_class,
        stage=stages[0] if len(stages) == 1 else Stage.QUEUE,
        evidence=evidence,
        started_at=now if started_at is None else started_at,
        ended_at=now,
    )


def without_content(attempt: Attempt, error: Exception) -> Attempt:
    """What can be written of an attempt that the schema cannot hold: a bad rollout is data, not a crash."""
    return replace(
        attempt,
        outcome=Outcome.INVALID,
        error_class="internal_error",
        evidence=unknown(error),
        reward=None,
        phases={},
        trajectory=None,
        extra={},
    )


def unknown(error: BaseException) -> Evidence:
    """Evidence of what has no name yet: the exception and the end of its traceback."""
    tail = "".join(traceback.format_exception(error))[-3000:]
    return Evidence(f"{type(error).__name__}: {error}", "rollcage", log_tail=tail).capped()
