"""One attempt at a rollout, from image to outcome, without Ray.

    image -> network lease -> sandbox -> [agent <-> policy -> verifier] for each step -> outcome -> teardown

Invariants:

- `run_attempt` returns exactly one `Attempt`, whatever happens; it raises nothing but what kills the process.
- Whatever was acquired is released on every path. A cancellation reaches the work once and the teardown never,
  so that a call which has made something is not left before that is known.
- The first fault names the attempt. Others, of teardown for instance, are added to its evidence.
- An agent that met a limit is graded all the same; one that left nothing to grade has failed.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rollcage.rollout.agents.base import Agent, AgentContext, load_agent
from rollcage.rollout.agents.run import run_agent
from rollcage.rollout.clock import AgentClock
from rollcage.rollout.kept_states import KeptStates
from rollcage.rollout.outcome import (
    BY_NAME,
    AgentStopped,
    Cancelled,
    Domain,
    Evidence,
    Outcome,
    RolloutError,
    Stage,
)
from rollcage.rollout.policies.base import Policy, PolicySession, Sampling, notes_of
from rollcage.rollout.ready import prepare_step, wait_until_healthy
from rollcage.rollout.sandbox.base import Sandbox, Shell
from rollcage.rollout.sandbox.pool import SandboxPool
from rollcage.rollout.task import Step, Task, redactor
from rollcage.rollout.trajectory import Attempt, Phase, Reward, Trajectory

TEARDOWN_SEC = 120.0
"""A container whose removal takes longer is left to the reaper."""


Left = Callable[[str], Awaitable[None]]
"""Awaited by a verifier once the agent's sandbox is as it was left: its processes are stopped, and nothing of the
verifier's has entered. It is told what goes on all the same and no copy of the files would have, or nothing."""


class Verifies(Protocol):
    """How a rollout knows its verifier."""

    async def verify(self, sandbox: Sandbox, task: Task, step: Step, left: Left | None = None) -> Reward:
        """Stop the agent's processes and grade what it left. Raises `VerifierError`."""
        ...

    async def verify_separate(
        self,
        sandbox: Sandbox,
        verifier_sandbox: Sandbox,
        task: Task,
        step: Step,
        left: Left | None = None,
    ) -> Reward:
        """The same, with the tests in a sandbox of their own that receives what the agent left."""
        ...

    def passed_floor(self, step: Step, reward: Reward) -> bool:
        """False where the reward is below the step's `min_reward`, so that later steps are not run."""
        ...

    def combine(self, task: Task, rewards: list[tuple[Step, Reward]]) -> Reward:
        """One reward of the rewards of the steps that ran, by the task's own strategy."""
        ...


@dataclass(frozen=True)
class AttemptSpec:
    """Everything that one attempt needs to know, and nothing that it shares with others.

    `agent_timeout_sec` replaces every step's own limit. `pass_threshold`: a primary reward of at least so
    much has passed. `agent` is what `load_agent` takes; `agent_label` tells the job's agents apart.
    """

    attempt_id: str
    job: str
    task: Task
    sample: int
    number: int
    agent: str
    agent_label: str = ""
    agent_options: dict[str, Any] = field(default_factory=dict)
    sampling: Sampling = field(default_factory=Sampling)
    agent_timeout_sec: float | None = None
    agent_timeout_multiplier: float = 1.0
    pass_threshold: float = 1.0
    draw: int = 0


async def run_attempt(
    spec: AttemptSpec,
    pool: SandboxPool,
    verifier: Verifies,
    policy: Policy | None = None,
    *,
    emit: Callable[[str], None] = lambda _line: None,
    keep: bool = False,
    trajectory: Trajectory | None = None,
) -> Attempt:
    """Run one attempt to its end and say how it ended. Cancelling it gives an attempt that is `cancelled`.

    `emit` is shown what happens, a line at a time. With `keep` the sandbox is left running for a look. `trajectory`, an
    empty one, is filled as the agent works, for who wants to see how far it is.
    """
    attempt = Attempt(
        attempt_id=spec.attempt_id,
        job=spec.job,
        task=spec.task.name,
        task_digest=spec.task.digest,
        sample=spec.sample,
        number=spec.number,
        agent=spec.agent_label or spec.agent,
        policy=policy.name if policy is not None else "",
        host=pool.host,
        outcome=Outcome.INVALID,
        started_at=time.time(),
        trajectory=Trajectory() if trajectory is None else trajectory,
        draw=spec.draw,
    )
    return await carry_out(AttemptRun(attempt, spec, pool, verifier, policy, emit, keep))


async def carry_out(run: AttemptRun) -> Attempt:
    """Run it to its end, whatever that is, and say how it ended."""
    attempt = run.attempt
    work = asyncio.ensure_future(run.to_reward())
    await _ended(work, cancel=True)
    try:
        run.end(work.result())
    except RolloutError as error:
        run.end_with(error)
    except asyncio.CancelledError:
        run.end_with(Cancelled())
    except Exception as error:  # noqa: BLE001 -- what has no name yet is internal_error, never a silent 0
        run.end_with(_unknown(error))
    await _ended(asyncio.ensure_future(run.tear_down()), cancel=False)
    _redact(attempt, redactor(run.spec.task, run.pool.settings.environ))
    attempt.ended_at = time.time()
    return attempt


def _redact(attempt: Attempt, redact: Callable[[str], str]) -> None:
    """Take the values of the host's variables out of what is kept beside the trajectory."""
    if attempt.evidence is not None:
        attempt.evidence = attempt.evidence.mapped(redact)
    if attempt.reward is not None:
        attempt.reward = replace(attempt.reward, output_tail=redact(attempt.reward.output_tail))


async def _ended(work: asyncio.Future[Any], *, cancel: bool) -> None:
    """Wait until `work` is done, whoever cancels the wait. With `cancel` it is told so, once."""
    while not work.done():
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            if cancel:
                work.cancel()
            cancel = False


@dataclass
class AttemptRun:
    """One attempt under way: what it was given, and what it holds."""

    attempt: Attempt
    spec: AttemptSpec
    pool: SandboxPool
    verifier: Verifies
    policy: Policy | None
    emit: Callable[[str], None]
    keep: bool
    stage: Stage = Stage.LOAD
    sandboxes: list[Sandbox] = field(default_factory=list)
    verifiers: int = 0
    session: PolicySession | None = None
    kept: KeptStates | None = None
    stops: list[RolloutError] = field(default_factory=list)
    """What has stopped the agent by its own doing, in the order in which it happened."""

    @contextmanager
    def phase(self, phase: Phase, stage: Stage) -> Iterator[None]:
        """Time a phase, and name its stage where a fault happens in it."""
        self.stage = stage
        started = time.monotonic()
        try:
            yield
        finally:
            spent = self.attempt.phases.get(phase, 0.0)
            self.attempt.phases[phase] = spent + time.monotonic() - started

    def queued(self, seconds: float) -> None:
        """That much of the start was a wait for room on the host."""
        for phase, more in ((Phase.QUEUE, seconds), (Phase.START, -seconds)):
            self.attempt.phases[phase] = self.attempt.phases.get(phase, 0.0) + more

    async def to_reward(self) -> Reward:
        """Everything from the image to the reward. What happens on the way is in the attempt at once."""
        task, spec = self.spec.task, self.spec
        agent = load_agent(spec.agent, spec.agent_options)
        if agent.needs_policy and self.policy is None:
            raise ValueError(f"the agent {spec.agent!r} needs a policy and the job gives it none")
        with self.phase(Phase.IMAGE, Stage.BUILD):
            self.emit(f"image of {task.name}")
            image = await self.pool.image(task.environment, task.name)
        with self.phase(Phase.START, Stage.START):
            self.emit(f"sandbox of {image.reference}")
            sandbox = await self.pool.acquire(
                image,
                task.environment,
                attempt_id=spec.attempt_id,
                least_sec=least_seconds(spec),
                waited=self.queued,
            )
            self.sandboxes.append(sandbox)
            await wait_until_healthy(sandbox, task.environment.healthcheck)
        if agent.needs_policy and self.policy is not None:
            self.session = self.policy.session(spec.attempt_id, task=task.name, sample=spec.sample)
        rewards: list[tuple[Step, Reward]] = []
        for step in task.steps:
            with self.phase(Phase.START, Stage.START):
                shell = await prepare_step(sandbox, task, step)
            with self.phase(Phase.AGENT, Stage.AGENT):
                self.emit(f"agent {spec.agent}" + (f", step {step.name}" if len(task.steps) > 1 else ""))
                await self._agent(agent, sandbox, shell, step)
            with self.phase(Phase.VERIFY, Stage.VERIFY):
                self.emit("verifier")
                reward = await self._verify(sandbox, step)
            self.emit(f"reward {reward.value:g}")
            rewards.append((step, reward))
            if not self.verifier.passed_floor(step, reward):
                self.emit(f"below the min_reward of step {step.name}: the later steps are not run")
                break
        return self.verifier.combine(task, rewards)

    async def _agent(self, agent: Agent, sandbox: Sandbox, shell: Shell, step: Step) -> None:
        """Let the agent work on one step, and note what has stopped it, where that is its own doing."""
        trajectory, spec = self.attempt.trajectory, self.spec
        assert trajectory is not None
        limit = spec.agent_timeout_sec if spec.agent_timeout_sec is not None else step.agent_timeout_sec
        clock = AgentClock(None if limit is None else limit * spec.agent_timeout_multiplier)
        context = AgentContext(
            task=spec.task,
            step=step,
            sandbox=sandbox,
            shell=shell,
            session=self.session,
            sampling=spec.sampling,
            trajectory=trajectory,
            clock=clock,
            environ=self.pool.settings.environ,
            sample=spec.sample,
            emit=self.emit,
        )
        kills, was_full, noted = sandbox.oom_kills, sandbox.storage_exceeded, len(self.stops)
        try:
            await self._noted(run_agent(agent, context))
        finally:
            self.attempt.infra_seconds += clock.infra_seconds
            if self.session is not None:
                trajectory.segments = self.session.segments
                self.attempt.extra.update(notes_of(self.session))
        # A limit of the sandbox was met before the agent ended, and so before any of its own.
        if sandbox.storage_exceeded and not was_full:
            said = (
                f"the agent wrote more than its {sandbox.spec.storage_mb} MiB, and its processes were stopped"
            )
            evidence = Evidence(said, "container state")
            self.stops.insert(noted, AgentStopped("agent_killed_sandbox", said, evidence))
        if sandbox.spec.memory_mb is not None:
            await self._noted(sandbox.count_oom_kills())  # now: the verifier's own come after it
            if sandbox.oom_kills > kills:
                said = f"processes of the agent went past the memory limit of {sandbox.spec.memory_mb} MiB"
                evidence = Evidence(said, "container state", oom_killed=True)
                self.stops.insert(noted, AgentStopped("agent_oom", said, evidence))

    async def _noted(self, work: Awaitable[None]) -> None:
        """Await `work`. What ends it is noted where that is the agent's own doing, and raised otherwise."""
        try:
            await work
        except RolloutError as error:
            if BY_NAME[error.error_class].domain is not Domain.AGENT:
                raise
            self.stops.append(error)

    async def _verify(self, sandbox: Sandbox, step: Step) -> Reward:
        own, task = step.verifier.environment, self.spec.task
        if own is None:
            return await self.verifier.verify(sandbox, task, step, self._keeper(sandbox, step))
        image = await self.pool.image(own, f"{task.name} (verifier)")
        self.verifiers += 1
        verifier_sandbox = await self.pool.acquire(
            image,
            own,
            attempt_id=self.spec.attempt_id,
            role=f"verifier{self.verifiers}",
            network_mode=step.verifier.network_mode,
            least_sec=2 * step.verifier.timeout_sec,
        )
        self.sandboxes.append(verifier_sandbox)
        await wait_until_healthy(verifier_sandbox, own.healthcheck)
        reward = await self.verifier.verify_separate(
            sandbox, verifier_sandbox, task, step, self._keeper(sandbox, step)
        )
        if not self.keep:
            # A task of many steps would hold as many sandboxes.
            self.sandboxes.remove(verifier_sandbox)
            await self.pool.release(verifier_sandbox)
        return reward

    def _keeper(self, sandbox: Sandbox, step: Step) -> Left | None:
        """Saves the sandbox's state, where the job wants that."""
        if self.pool.settings.keep_states == "none":
            return None
        if self.kept is None:
            self.kept = KeptStates(self.pool, self.attempt, self.emit)
        return self.kept.keeper(sandbox, self.spec.task, step)

    def end(self, reward: Reward) -> None:
        """End the attempt with a reward that counts; what stopped the agent first is its error class."""
        self.attempt.reward = reward
        passed = reward.value >= self.spec.pass_threshold
        self.attempt.outcome = Outcome.PASSED if passed else Outcome.FAILED
        if self.stops:
            self._name(self.stops[0], Stage.AGENT)

    def end_with(self, error: RolloutError) -> None:
        """End the attempt without the verifier's reward. An error of the agent's own is a valid 0: it left nothing
        that could be verified."""
        attempt = self.attempt
        self._name(error, self.stage)
        attempt.retry_after_sec = error.retry_after_sec
        if BY_NAME[error.error_class].reward_valid:
            attempt.outcome = Outcome.FAILED
            attempt.reward = Reward(0.0, source=error.error_class)
        elif isinstance(error, Cancelled):
            attempt.outcome = Outcome.CANCELLED

    def _name(self, error: RolloutError, stage: Stage) -> None:
        """`error` names the attempt; whatever else stopped the agent is evidence."""
        row = BY_NAME[error.error_class]
        self.attempt.error_class = row.name
        self.attempt.stage = stage if stage in row.stages else row.stages[0]
        self.attempt.evidence = error.evidence.capped()
        for other in self.stops:
            if str(other) != str(error):
                self._add_evidence(str(other))

    def _add_evidence(self, text: str) -> None:
        evidence = self.attempt.evidence or Evidence()
        self.attempt.evidence = replace(evidence, also=(*evidence.also, text)).capped()

    async def tear_down(self) -> None:
        """Release everything, each within `TEARDOWN_SEC`; what fails is evidence and left to the reaper."""
        started = time.monotonic()
        work: list[Awaitable[None]] = [] if self.session is None else [self.session.close()]
        work += [] if self.kept is None else [self.kept.settle()]
        work += [] if self.keep else [self.pool.release(sandbox) for sandbox in self.sandboxes]
        limited = (asyncio.wait_for(one, TEARDOWN_SEC) for one in work)
        for error in await asyncio.gather(*limited, return_exceptions=True):
            if error is not None:
                self._add_evidence(f"teardown: {str(error) or repr(error)}")
        self.attempt.phases[Phase.TEARDOWN] = time.monotonic() - started


def least_seconds(spec: AttemptSpec) -> float:
    """How long the sandbox must live: twice all time limits of the task, for waits are not in them."""
    limits = [spec.agent_timeout_sec or step.agent_timeout_sec or 0.0 for step in spec.task.steps]
    verifiers = [step.verifier.timeout_sec for step in spec.task.steps]
    return 2 * (sum(limits) * spec.agent_timeout_multiplier + sum(verifiers))


def _unknown(error: Exception) -> RolloutError:
    tail = "".join(traceback.format_exception(error))[-3000:]
    message = f"{type(error).__name__}: {error}"
    return RolloutError("internal_error", message, Evidence(message, "rollcage", log_tail=tail))
