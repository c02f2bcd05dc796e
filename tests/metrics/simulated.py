"""Small runs for tests of reports."""

from __future__ import annotations

import math
import random
from pathlib import Path

from rollcage.rollout.location import Location
from rollcage.rollout.outcome import BY_NAME, Evidence, Outcome
from rollcage.rollout.rows import attempts_batch, rollouts_batch
from rollcage.rollout.trajectory import (
    Attempt,
    CommandRecord,
    Message,
    Phase,
    Reward,
    Segment,
    Trajectory,
    Turn,
)

START = 1.7e9
HOSTILE = (
    "</script><img src=x onerror=\"document.title='taken'\">\x1b[31mred\x1b[0m\x00\ud800\u202e<!--<script>"
)
"""What a policy, a sandbox or a task might say to whoever reads the report."""


def noise(length: int) -> str:
    """Text that compresses no better than its alphabet."""
    return random.Random(length).randbytes((length + 1) // 2).hex()[:length]


def a_trajectory(said: str, output: int) -> Trajectory:
    """Two turns of three sampled tokens."""
    turns, messages = [], [Message("user", f"the task: {said}")]
    segment = Segment()
    for index in range(2):
        segment.ids += [7] * (5 if index == 0 else 4)
        segment.loss_mask += [0] * (5 if index == 0 else 4)
        segment.logprobs += [math.nan] * (5 if index == 0 else 4)
        before = len(segment.ids)
        segment.ids += [1, 2, 3]
        segment.loss_mask += [1, 1, 1]
        segment.logprobs += [-0.25, -0.5, -0.75]
        text = f"turn {index}: {said}"
        command = CommandRecord(f"echo {index}", index, said + noise(output), said if index else "", 0.5)
        turns.append(Turn(index, text, "stop", 0, before, 3, "small", 1, 1, prompt_tokens=before,
                          completion_tokens=3, commands=[command]))  # fmt: skip
        messages += [
            Message("assistant", text, index, reasoning=f"thought {index}"),
            Message("user", said, index),
        ]
    return Trajectory(messages, turns, [segment])


def an_attempt(
    task: str,
    sample: int,
    outcome: Outcome,
    error: str | None = None,
    *,
    number: int = 0,
    said: str = "hello",
    message: str = "",
    agent: str = "bash",
    output: int = 10,
) -> Attempt:
    valid = outcome in (Outcome.PASSED, Outcome.FAILED)
    passed = float(outcome is Outcome.PASSED)
    return Attempt(
        f"{task}-{sample}-{number}", "demo", task, f"digest of {task}", sample, number, agent, "small", "host", outcome,
        error_class=error, stage=BY_NAME[error].stages[0] if error else None,
        evidence=Evidence(message or "no pool left", "engine") if error else None,
        reward=Reward(passed, {"reward": passed}, output_tail=f"verifier says {said}", test_ids=("test_a",))
        if valid else None,
        started_at=START + sample, ended_at=START + 10 + 3 * sample,
        phases={Phase.AGENT.value: 2.0, Phase.VERIFY.value: 0.5}, trajectory=a_trajectory(said, output),
    )  # fmt: skip


def write(run: Path, attempts: list[Attempt], rollouts: list[tuple[Attempt, int, int]]) -> Path:
    """A finished run."""
    place = Location(run)
    place.write_json("job.json", {"job": "demo"})
    place.write_shard("attempts", [attempts_batch(attempts)])
    place.write_shard("rollouts", [rollouts_batch(rollouts)])
    place.write_json("summary.json", {"wall_seconds": 60.0})
    return run


def a_run(run: Path, *, tasks: int = 5, samples: int = 4, output: int = 10) -> Path:
    """Tasks of which the first always passes and the last never does; one rollout is retried, one is invalid."""
    attempts, rollouts = [], []
    for number in range(tasks):
        for sample in range(samples):
            passed = sample >= number * samples / (tasks - 1)
            end = (Outcome.PASSED, None) if passed else (Outcome.FAILED, "turn_limit")
            attempt = an_attempt(f"task-{number}", sample, *end, message="8 turns", output=output)
            tries = 1
            if (number, sample) == (1, 0):
                attempts.append(an_attempt("task-1", 0, Outcome.INVALID, "network_pool"))
                attempt.number, tries = 1, 2
            if (number, sample) == (2, 0):
                attempt = an_attempt("task-2", 0, Outcome.INVALID, "network_pool", output=output)
            attempts.append(attempt)
            rollouts.append((attempt, tries, samples))
    return write(run, attempts, rollouts)


def hostile_run(run: Path) -> Path:
    """A run in which everything that anybody may say is hostile, and one output has a megabyte."""
    bad = HOSTILE
    attempts = [
        an_attempt(f"{bad}/task", 0, Outcome.PASSED, said=bad, agent=bad),
        an_attempt(
            "big", 0, Outcome.FAILED, "turn_limit", said=bad, message=bad, output=1_000_000, agent=bad
        ),
        an_attempt("lost", 0, Outcome.INVALID, "container_lost", said=bad, message=bad, agent=bad),
    ]
    for attempt in attempts:
        attempt.host = attempt.policy = bad
        attempt.extra = {bad: bad}
    return write(run, attempts, [(attempt, 1, 1) for attempt in attempts])
