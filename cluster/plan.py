"""What a job is to do: which tasks by which agents, how often. Made before anything is spent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from rollcage.cluster.decisions import Assignment, RolloutKey, TaskKey
from rollcage.cluster.stream import StreamPlan
from rollcage.rollout.outcome import Evidence
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.rollout import AttemptSpec
from rollcage.rollout.task import Task


@dataclass(frozen=True)
class AgentPlan:
    """One agent of the job. `label` tells it from the job's others; `agent` is what `load_agent` takes."""

    label: str
    agent: str
    samples: int
    options: dict[str, Any] = field(default_factory=dict)
    policy: str | None = None
    sampling: Sampling = field(default_factory=Sampling)


@dataclass(frozen=True)
class BrokenTask:
    """A task that cannot be loaded. Its rollouts end `invalid` with its class, and no attempt is spent."""

    key: TaskKey
    error_class: str
    evidence: Evidence


@dataclass(frozen=True)
class JobPlan:
    """All of a job's rollouts. `job` is unique among the jobs of one engine.

    `agent_timeout_sec` replaces the tasks' own. `retries` are budgets other than the outcome table's. The job
    stops when more than `max_quarantined_tasks` are quarantined. `warm`: sandboxes that each host starts ahead.
    `chosen`: (agent, task, draw, sample) of the rollouts that are run; None: all of them, each task drawn once. With a
    `stream` these are only what an interrupted one left over, and the driver draws further tasks. `earlier`: error
    classes of the attempts that an interrupted job has spent on a rollout.
    """

    job: str
    agents: tuple[AgentPlan, ...]
    tasks: Mapping[TaskKey, Task]
    broken: tuple[BrokenTask, ...] = ()
    concurrency: int = 8
    build_slots: int = 2
    warm: int = 0
    seed: int = 0
    retries: Mapping[str, int] = field(default_factory=dict)
    max_quarantined_tasks: int | None = None
    agent_timeout_sec: float | None = None
    agent_timeout_multiplier: float = 1.0
    pass_threshold: float = 1.0
    chosen: frozenset[tuple[str, str, int, int]] | None = None
    earlier: Mapping[RolloutKey, Sequence[str]] = field(default_factory=dict)
    stream: StreamPlan | None = None

    def rollouts(self) -> Iterator[RolloutKey]:
        """Every rollout, a group's samples together, a task's groups together; of a stream those that are known."""
        if self.stream is not None and self.chosen is None:
            return
        draws: dict[tuple[str, str], set[int]] = {}
        for label, name, draw, _ in self.chosen or ():
            draws.setdefault((label, name), set()).add(draw)
        for task in self.task_keys():
            for agent in self.agents:
                for draw in sorted(draws.get((agent.label, task.name), (0,))):
                    for sample in range(agent.samples):
                        if self.chosen is None or (agent.label, task.name, draw, sample) in self.chosen:
                            yield RolloutKey(self.job, agent.label, task.name, task.digest, sample, draw)

    def total(self) -> int | None:
        """How many rollouts there will be; None for a stream without an end of its own."""
        known = sum(1 for _ in self.rollouts())
        if self.stream is None:
            return known
        if self.stream.draws is None:
            return None
        draws = max(0, self.stream.draws - sum(self.stream.drawn.values()))
        return known + draws * sum(agent.samples for agent in self.agents)

    def drawn(self, task: TaskKey, draw: int) -> list[RolloutKey]:
        """The rollouts of one draw of a task: a group of each agent."""
        return [
            RolloutKey(self.job, agent.label, task.name, task.digest, sample, draw)
            for agent in self.agents
            for sample in range(agent.samples)
        ]

    def task_keys(self) -> list[TaskKey]:
        """Keys of all tasks, broken ones too."""
        return [*self.tasks, *(broken.key for broken in self.broken)]

    def agent(self, label: str) -> AgentPlan:
        """The agent with this label."""
        return next(agent for agent in self.agents if agent.label == label)

    def attempt(self, assignment: Assignment) -> AttemptSpec:
        """What the host must know to run this attempt."""
        key = assignment.key
        agent = self.agent(key.agent)
        return AttemptSpec(
            attempt_id=assignment.attempt_id,
            job=self.job,
            task=self.tasks[key.task_key],
            sample=key.sample,
            draw=key.draw,
            number=assignment.number,
            agent=agent.agent,
            agent_label=agent.label,
            agent_options=agent.options,
            sampling=self._sampling(agent, key),
            agent_timeout_sec=self.agent_timeout_sec,
            agent_timeout_multiplier=self.agent_timeout_multiplier,
            pass_threshold=self.pass_threshold,
        )

    def _sampling(self, agent: AgentPlan, key: RolloutKey) -> Sampling:
        """Each rollout draws with a seed of its own, the same in every attempt and in every run of the policy's
        `sampling.seed`, or of the job's seed where that is None."""
        base = self.seed if agent.sampling.seed is None else agent.sampling.seed
        name = f"{base}/{agent.label}/{key.task}/{key.task_digest}/{key.sample}"
        if key.draw:
            name += f"/{key.draw}"
        seed = int.from_bytes(blake2b(name.encode(), digest_size=4).digest()) >> 1
        return replace(agent.sampling, seed=seed)
