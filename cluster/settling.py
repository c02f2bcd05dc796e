"""Writes what came of a job into its ledger: attempts as they end, rollouts once nothing more is tried, and then the
groups that are whole.

What is written is told to Prometheus afterwards (`counts`), so that what is counted is what is written. A record with
content that cannot be written is written without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from rollcage.cluster.decisions import RolloutEnd, RolloutKey, TaskKey
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.ledger_rows import Group
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.progress import JobProgress
from rollcage.cluster.records import UNWRITABLE, own_record, without_content
from rollcage.cluster.scheduler import Scheduler
from rollcage.metrics.job_counts import JobCounts
from rollcage.rollout.outcome import Evidence, Outcome
from rollcage.rollout.trajectory import Attempt


class Settling:
    """Of one run. Its methods raise what the ledger raises."""

    def __init__(
        self,
        plan: JobPlan,
        ledger: Ledger,
        scheduler: Scheduler,
        progress: JobProgress,
        counts: JobCounts,
    ) -> None:
        self.groups_committed = 0
        self.evidence: dict[TaskKey, Evidence] = {
            broken.key: broken.evidence.mapped(progress.redact) for broken in plan.broken
        }
        """Why tasks were quarantined: that of their rollouts that no attempt was made at."""
        self.run_out: Evidence | None = None
        """Why the job was called off: that of rollouts that had not begun."""
        self._plan = plan
        self._ledger = ledger
        self._scheduler = scheduler
        self._progress = progress
        self._counts = counts
        self._group_size = {agent.label: agent.samples for agent in plan.agents}
        self._rewards: dict[Group, list[float]] = {}
        """Of the valid rollouts of groups that are not committed yet."""
        self._last: dict[RolloutKey, Attempt] = {}

    def goes_on(self, rewards: Mapping[Group, list[float]]) -> None:
        """See `Driver.goes_on`."""
        self._rewards.update(rewards)

    async def attempt(self, attempt: Attempt) -> Attempt:
        """Write an attempt that ended, and return what was written."""
        try:
            await self._ledger.record_attempt(attempt)
        except UNWRITABLE as error:
            attempt = self._without_content(attempt, error)
            await self._ledger.record_attempt(attempt)
        self._counts.attempt(attempt)
        return attempt

    def last(self, key: RolloutKey, attempt: Attempt) -> None:
        """The rollout is not tried again: it is to be settled with this attempt."""
        self._last[key] = attempt

    async def settle(self) -> None:
        """Write the rollouts that ended, then commit the groups that are whole. Not called twice at once, so that a
        group is committed after all of its rollouts."""
        while ends := self._scheduler.finished():
            groups = [(group.agent, group.task, group.draw) for group in self._scheduler.groups_done()]
            await asyncio.gather(*(self._rollout(end) for end in ends))
            await asyncio.gather(*(self._ledger.commit_group(*group) for group in groups))
            for group in groups:
                self._counts.group(group[0], self._rewards.pop(group, ()), self._group_size[group[0]])
            self.groups_committed += len(groups)

    async def _rollout(self, end: RolloutEnd) -> None:
        attempt = self._last.pop(end.key, None)
        if attempt is None or attempt.attempt_id != end.attempt_id:
            # No attempt decided it: its task was quarantined, or the job cancelled.
            if attempt is not None and attempt.outcome is Outcome.INVALID:
                self._counts.retried(attempt.error_class)
            invalid = end.outcome is Outcome.INVALID
            evidence = self.evidence.get(end.key.task_key) if invalid else self.run_out
            error_class = end.error_class or "cancelled"
            policy = self._plan.agent(end.key.agent).policy
            attempt = own_record(
                end.key, end.outcome, error_class, evidence, number=end.attempts, policy=policy
            )
        self._progress.ended(end.outcome, self._scheduler.counts().in_flight)
        group_size = self._group_size[end.key.agent]
        try:
            await self._ledger.record_rollout(attempt, end.attempts, group_size)
        except UNWRITABLE as error:
            attempt = self._without_content(attempt, error)
            await self._ledger.record_rollout(attempt, end.attempts, group_size)
        self._counts.rollout(end.key.agent, attempt.outcome, attempt.error_class, trajectory=end.attempts > 0)
        if attempt.reward_valid:
            rewards = self._rewards.setdefault((end.key.agent, end.key.task, end.key.draw), [])
            rewards.append(attempt.reward.value if attempt.reward is not None else 0.0)

    def _without_content(self, attempt: Attempt, error: Exception) -> Attempt:
        bare = without_content(attempt, error)
        return replace(bare, evidence=bare.evidence and bare.evidence.mapped(self._progress.redact))
