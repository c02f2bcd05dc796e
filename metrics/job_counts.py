"""What the driver of a job counts.

Each method is one event of the driver, told after the ledger has it, so that what is counted is what is written.
`resumed` counts a run that an earlier driver has begun, from its ledger's columns.

Counting ends no job: what a server or an agent of a user's own says is taken as 0 where it is below 0 or no number.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rollcage.metrics.counts import Counts, Snapshot
from rollcage.metrics.definitions import NONE, Sender
from rollcage.rollout.outcome import BY_NAME, Domain, Outcome
from rollcage.rollout.trajectory import Attempt, Phase, Turn


@dataclass(frozen=True)
class RolloutState:
    """How many rollouts of the job wait, wait for a retry, and are in flight."""

    waiting: int
    delayed: int
    in_flight: int


class JobCounts:
    """One driver's counts. `agents`: labels of the job's agents; `policies`: names of its policies. `exemplars`: keep
    the last attempt of each ending, by its id."""

    def __init__(
        self, job: str, agents: Sequence[str], policies: Sequence[str], *, exemplars: bool = False
    ) -> None:
        self._job, self._exemplars = job, exemplars
        self._agents, self._policies = set(agents), set(policies)
        self._counts = Counts(Sender.JOB, {"agent": agents, "policy": policies, "job_id": [job]})
        now = time.time()
        for name in ("job_started_timestamp_seconds", "job_progress_timestamp_seconds"):
            self._counts.set(name, now, job)
        self._versions: dict[str, int] = {}

    # Events

    def dispatched(self) -> None:
        """An attempt was begun."""
        self._counts.add("attempts_dispatched")
        self._in_flight(1)

    def attempt(self, attempt: Attempt) -> None:
        """An attempt ended and is in the ledger."""
        counts, agent = self._counts, attempt.agent
        counts.add("attempts_ended")
        self._in_flight(-1)
        labels = (*ending(attempt.outcome, attempt.error_class), agent)
        counts.add("attempts", *labels)
        if self._exemplars:
            counts.example("attempts", *labels, job_id=self._job, attempt_id=attempt.attempt_id)
        for phase, seconds in attempt.phases.items():
            counts.observe("phase_seconds", _sane(seconds), phase)
        lost = attempt.infra_seconds if labels[1] != Domain.INFRA else attempt.phases.get(Phase.AGENT, 0.0)
        counts.add("infra_lost_seconds", amount=_sane(lost))
        turns = attempt.trajectory.turns if attempt.trajectory else []
        for turn in turns:
            policy = turn.policy or attempt.policy or ""
            if policy in self._policies:
                self._turn(turn, policy)
            for command in turn.commands:
                size = len(command.stdout.encode(errors="replace")) + len(
                    command.stderr.encode(errors="replace")
                )
                counts.add("commands", agent)
                counts.observe("command_seconds", _sane(command.seconds))
                counts.add("command_output_bytes", amount=size + _sane(command.omitted_bytes))
        if turns and (policy := turns[0].policy or attempt.policy or "") in self._policies:
            behind = self._versions.get(policy, 0) - min(turn.policy_version for turn in turns)
            counts.observe("policy_staleness_versions", _sane(behind), policy)

    def _turn(self, turn: Turn, policy: str) -> None:
        counts = self._counts
        counts.add("policy_turns", policy)
        counts.add("policy_malformed_turns", policy, amount=turn.malformed)
        counts.add("policy_tokens", "prompt", policy, amount=_sane(turn.prompt_tokens))
        counts.add("policy_tokens", "cached", policy, amount=_sane(turn.cached_tokens))
        counts.add("policy_tokens", "completion", policy, amount=_sane(turn.completion_tokens))
        counts.observe("policy_queue_seconds", _sane(turn.queue_seconds), policy)
        counts.observe("policy_generate_seconds", _sane(turn.generate_seconds), policy)
        counts.add("policy_cost_usd", policy, amount=_sane(turn.cost_usd or 0.0))
        self._versions[policy] = max(self._versions.get(policy, 0), turn.policy_version_end)

    def retried(self, error_class: str | None) -> None:
        """An attempt that ended is not what its rollout ends of."""
        self._counts.add("retries", *fault(error_class))

    def rollout(self, agent: str, outcome: Outcome, error_class: str | None, *, trajectory: bool) -> None:
        """A rollout ended and is in the ledger. `trajectory`: attempts were made at it."""
        self._counts.add("rollouts", *ending(outcome, error_class), agent)
        self._counts.add("trajectories_written", amount=trajectory)
        self._counts.set("job_progress_timestamp_seconds", time.time(), self._job)

    def group(self, agent: str, rewards: Sequence[float], size: int) -> None:
        """A group was committed: `rewards` of its valid rollouts, and how many samples were wanted."""
        complete = len(rewards) >= size
        self._counts.add("groups", "complete" if complete else "short", agent)
        self._counts.add(
            "groups_zero_variance", agent, amount=complete and size > 1 and len(set(rewards)) == 1
        )

    def committed(self, commits: int, written_bytes: int) -> None:
        """Totals of the ledger's own: commits, and bytes of shards."""
        self._counts.set("ledger_commits", commits)
        self._counts.set("trajectory_written_bytes", written_bytes)

    def quarantined(self, error_class: str | None) -> None:
        """A task was taken out of the job."""
        self._counts.add("tasks_quarantined", *fault(error_class))

    # Gauges

    def state(self, rollouts: RolloutState, total: int, ended: int) -> None:
        """Where the job is now."""
        for name in ("waiting", "delayed", "in_flight"):
            self._counts.set("rollouts_open", getattr(rollouts, name), name)
        self._counts.set("job_rollouts", total, self._job)
        self._counts.set("job_rollouts_ended", ended, self._job)

    def policy(
        self,
        name: str,
        *,
        version: int,
        running: int,
        waiting: int,
        kv_use: float,
        replicas: Mapping[str, int],
        restarts: int,
    ) -> None:
        """How a policy that vLLM serves does. `replicas`: how many are in each state."""
        self._counts.set("policy_version", version, name)
        self._counts.set("policy_requests", running, "running", name)
        self._counts.set("policy_requests", waiting, "waiting", name)
        self._counts.set("policy_kv_cache_usage_ratio", kv_use, name)
        for state in ("ready", "starting", "draining", "lost"):
            self._counts.set("policy_replicas", replicas.get(state, 0), state, name)
        self._counts.set("policy_replica_restarts", restarts, name)
        self._versions[name] = max(self._versions.get(name, 0), version)

    def feed(self, acknowledged_groups: int, lag_groups: int, readers: int) -> None:
        """How far the slowest reader is, and how far behind."""
        self._counts.set("feed_acknowledged_groups", acknowledged_groups, self._job)
        self._counts.set("feed_lag_groups", lag_groups, self._job)
        self._counts.set("feed_readers", readers, self._job)

    def snapshot(self) -> Snapshot:
        """All of it."""
        return self._counts.snapshot()

    # An earlier driver's

    def resumed(
        self,
        attempts: Iterable[tuple[str, str, str, str | None]],
        rollouts: Iterable[tuple[str, str, str, str | None, int]],
        groups: Iterable[tuple[str, Sequence[float], int]],
    ) -> None:
        """Count what a run held when it was opened, before the first snapshot. `attempts`: (id, agent, outcome, error
        class) of each. `rollouts`: the same, with the id of the attempt that decided it, and how many attempts it took.
        `groups`: (agent, valid rewards, size) of each that was committed."""
        failed: dict[str, str | None] = {}
        number = 0
        for attempt_id, agent, outcome, error_class in attempts:
            number += 1
            self._counts.add("attempts", *ending(Outcome(outcome), error_class), self._known(agent))
            if outcome == Outcome.INVALID:
                failed[attempt_id] = error_class
        self._counts.add("attempts_dispatched", amount=number)
        self._counts.add("attempts_ended", amount=number)
        for attempt_id, agent, outcome, error_class, taken in rollouts:
            self._counts.add("rollouts", *ending(Outcome(outcome), error_class), self._known(agent))
            self._counts.add("trajectories_written", amount=taken > 0)
            failed.pop(attempt_id, None)
        for error_class in failed.values():
            self.retried(error_class)
        for agent, rewards, size in groups:
            self.group(self._known(agent), rewards, size)
        self._counts.begin()

    def _known(self, agent: str) -> str:
        """An agent of the run, which the job may have no more."""
        if agent not in self._agents:
            self._agents.add(agent)
            self._counts.declare("agent", agent)
        return agent

    def _in_flight(self, change: int) -> None:
        self._counts.set("attempts_in_flight", self._counts.value("attempts_in_flight") + change)


def _sane(amount: float) -> float:
    return amount if math.isfinite(amount) and amount > 0 else 0.0


def ending(outcome: Outcome, error_class: str | None) -> tuple[str, str, str]:
    """The labels of an end: outcome, domain and error class. Where an outcome cannot have the class, one that is graded
    has none and an invalid one is `internal_error`."""
    row = BY_NAME.get(error_class or "")
    if outcome in (Outcome.PASSED, Outcome.FAILED):
        if row is None or not row.reward_valid:
            return outcome.value, NONE, NONE
    elif outcome is Outcome.CANCELLED:
        row = BY_NAME["cancelled"]
    elif row is None or row.reward_valid or row.name == "cancelled":
        row = BY_NAME["internal_error"]
    return outcome.value, row.domain.value, row.name


def fault(error_class: str | None) -> tuple[str, str]:
    """Domain and error class of a failure."""
    row = BY_NAME.get(error_class or "internal_error", BY_NAME["internal_error"])
    return row.domain.value, row.name
