"""One attempt's verifier again, on the states that its sandbox was saved in: no agent, no policy.

Each step that has a state gets a sandbox of its own, that begins with it. A step's `collect` commands are not run
again: what they left is in the state, and what they asked is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rollcage.rollout.outcome import BY_NAME, Domain, Outcome, Stage
from rollcage.rollout.rollout import AttemptRun, AttemptSpec, Verifies, carry_out
from rollcage.rollout.sandbox.pool import SandboxPool
from rollcage.rollout.sandbox.pulls import BuiltImage
from rollcage.rollout.task import Step
from rollcage.rollout.trajectory import Attempt, Phase, Reward, Trajectory


@dataclass
class RegradeRun(AttemptRun):
    """`states`: what the sandbox of each step begins with, by the step's name."""

    states: Mapping[str, BuiltImage] = field(default_factory=dict)

    async def to_reward(self) -> Reward:
        """Verify the steps that have a state, in their order, as far as their rewards allow."""
        task = self.spec.task
        rewards: list[tuple[Step, Reward]] = []
        for step in task.steps:
            image = self.states.get(step.name)
            if image is None:
                break
            with self.phase(Phase.START, Stage.START):
                self.emit(f"sandbox of {image.reference}")
                sandbox = await self.pool.acquire(
                    image,
                    task.environment,
                    attempt_id=f"{self.spec.attempt_id}-{len(rewards) + 1}",
                    least_sec=2 * step.verifier.timeout_sec,
                )
                self.sandboxes.append(sandbox)
            with self.phase(Phase.VERIFY, Stage.VERIFY):
                collected = replace(step, verifier=replace(step.verifier, collect=()))
                reward = await self._verify(sandbox, collected)
            self.sandboxes.remove(sandbox)
            await self.pool.release(sandbox)
            rewards.append((step, reward))
            if not self.verifier.passed_floor(step, reward):
                break
        return self.verifier.combine(task, rewards)


async def regrade_attempt(
    old: Attempt,
    spec: AttemptSpec,
    states: Mapping[str, BuiltImage],
    pool: SandboxPool,
    verifier: Verifies,
    *,
    emit: Callable[[str], None] = lambda _line: None,
) -> Attempt:
    """`old` with the reward, outcome and error class that its states get now from the verifier of `spec.task`, and
    with what they were in `extra["regraded_from"]`. Raises nothing but what kills the process; a verifier that fails is
    an outcome."""
    graded = Attempt(
        attempt_id=spec.attempt_id,
        job=old.job,
        task=old.task,
        task_digest=spec.task.digest,
        sample=old.sample,
        draw=old.draw,
        number=old.number,
        agent=old.agent,
        policy=old.policy,
        host=pool.host,
        outcome=Outcome.INVALID,
        started_at=time.time(),
        trajectory=Trajectory(),
    )
    graded = await carry_out(RegradeRun(graded, spec, pool, verifier, None, emit, False, states=states))
    return _with_verdict(old, graded)


def _with_verdict(old: Attempt, graded: Attempt) -> Attempt:
    """What stopped the agent goes on naming an attempt that has a reward."""
    was: dict[str, Any] = {
        "attempt_id": old.attempt_id,
        "task_digest": old.task_digest,
        "outcome": old.outcome.value,
        "error_class": old.error_class,
        "reward": None if old.reward is None else old.reward.value,
    }
    agents_own = old.error_class is not None and BY_NAME[old.error_class].domain is Domain.AGENT
    named_by = old if agents_own and graded.reward_valid and graded.error_class is None else graded
    return replace(
        old,
        task_digest=graded.task_digest,
        outcome=graded.outcome,
        error_class=named_by.error_class,
        stage=named_by.stage,
        evidence=named_by.evidence,
        reward=graded.reward,
        extra={**old.extra, "regraded_from": was},
    )
