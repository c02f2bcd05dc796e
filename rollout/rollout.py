"""One attempt at a rollout, from image to outcome, without Ray.

    image -> network lease -> sandbox -> [agent <-> policy -> verifier] for each step -> outcome -> teardown

Invariants:

- `run_attempt` returns exactly one `Attempt`, whatever happens; it raises nothing but what kills the process.
- Whatever was acquired is released on every path, also when cancelled, and in a task that a second
  cancellation does not reach.
- The first fault names the attempt. Later ones, of teardown for instance, are added to its evidence.
- An agent that met a limit is graded all the same; one that left nothing to grade has failed.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rollcage.rollout.agents.base import Agent, AgentContext, load_agent
from rollcage.rollout.clock import AgentClock
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
from rollcage.rollout.policies.base import Policy, PolicySession, Sampling
from rollcage.rollout.ready import overspent, prepare_step, wait_until_healthy
from rollcage.rollout.sandbox.base import Sandbox
from rollcage.rollout.sandbox.pool import SandboxPool
from rollcage.rollout.task import Step, Task
from rollcage.rollout.trajectory import Attempt, Phase, Reward, Trajectory

TEARDOWN_SEC = 120.0
"""A container whose removal takes longer is left to the reaper."""


class Verifies(Protocol):
    """How a rollout knows its verifier."""

    async def verify(self, sandbox: Sandbox, task: Task, step: Step) -> Reward:
        """Stop the agent's processes and grade what it left. Raises `VerifierError`."""
        ...

    async def verify_separate(
        self, sandbox: Sandbox, verifier_sandbox: Sandbox, task: Task, step: Step
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


@dataclass
class _Run:
    """What is known of an attempt while it runs."""

    attempt: Attempt
    stage: Stage = Stage.LOAD
    sandboxes: list[Sandbox] = field(default_factory=list)
    session: PolicySession | None = None

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


async def run_attempt(
    spec: AttemptSpec,
    pool: SandboxPool,
    verifier: Verifies,
    policy: Policy | None = None,
    *,
    emit: Callable[[str], None] = lambda _line: None,
    keep: bool = False,
) -> Attempt:
    """Run one attempt to its end and say how it ended. Cancelling it gives an attempt that is `cancelled`.

    `emit` is shown what happens, a line at a time. With `keep` the sandbox is left running for a look.
    """
    run = _Run(
        Attempt(
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
            trajectory=Trajectory(),
        )
    )
    try:
        await _run(run, spec, pool, verifier, policy, emit)
    except RolloutError as error:
        _end_with(run, error)
    except asyncio.CancelledError:
        _end_with(run, Cancelled())
    except Exception as error:  # noqa: BLE001 -- what has no name yet is internal_error, never a silent 0
        _end_with(run, _unknown(error))
    teardown = asyncio.ensure_future(_tear_down(run, pool, keep))
    while not teardown.done():
        try:
            await asyncio.shield(teardown)
        except asyncio.CancelledError:
            continue  # how the attempt ended is known; what it holds must be released all the same
    run.attempt.ended_at = time.time()
    return run.attempt


async def _run(
    run: _Run,
    spec: AttemptSpec,
    pool: SandboxPool,
    verifier: Verifies,
    policy: Policy | None,
    emit: Callable[[str], None],
) -> None:
    task, attempt = spec.task, run.attempt
    agent = load_agent(spec.agent, spec.agent_options)
    with run.phase(Phase.IMAGE, Stage.BUILD):
        emit(f"image of {task.name}")
        image = await pool.image(task.environment, task.name)
    with run.phase(Phase.START, Stage.START):
        emit(f"sandbox of {image.reference}")
        sandbox = await pool.acquire(
            image, task.environment, attempt_id=spec.attempt_id, least_sec=_least_seconds(spec)
        )
        run.sandboxes.append(sandbox)
        await wait_until_healthy(sandbox, task.environment.healthcheck)
    if agent.needs_policy:
        if policy is None:
            raise ValueError(f"the agent {spec.agent!r} needs a policy and the job gives it none")
        run.session = policy.session(spec.attempt_id, task=task.name, sample=spec.sample)

    rewards: list[tuple[Step, Reward]] = []
    stopped: AgentStopped | RolloutError | None = None
    for step in task.steps:
        with run.phase(Phase.START, Stage.START):
            await prepare_step(sandbox, task, step)
        with run.phase(Phase.AGENT, Stage.AGENT):
            emit(f"agent {spec.agent}" + (f", step {step.name}" if len(task.steps) > 1 else ""))
            ended = await _agent_phase(run, spec, agent, sandbox, step, pool.settings.environ, emit)
            stopped = stopped or ended
        with run.phase(Phase.VERIFY, Stage.VERIFY):
            emit("verifier")
            reward = await _verify_phase(run, spec, pool, verifier, sandbox, step)
        emit(f"reward {reward.value:g}")
        rewards.append((step, reward))
        if not verifier.passed_floor(step, reward):
            emit(f"below the min_reward of step {step.name}: the later steps are not run")
            break

    attempt.reward = verifier.combine(task, rewards)
    attempt.outcome = Outcome.PASSED if attempt.reward.value >= spec.pass_threshold else Outcome.FAILED
    if stopped is not None:
        attempt.error_class = stopped.error_class
        attempt.stage = Stage.AGENT
        attempt.evidence = stopped.evidence.capped()


async def _agent_phase(
    run: _Run,
    spec: AttemptSpec,
    agent: Agent,
    sandbox: Sandbox,
    step: Step,
    environ: Mapping[str, str],
    emit: Callable[[str], None],
) -> RolloutError | None:
    """Let the agent work on one step. Returns what stopped it, where that is the agent's own doing."""
    trajectory = run.attempt.trajectory
    assert trajectory is not None
    limit = spec.agent_timeout_sec if spec.agent_timeout_sec is not None else step.agent_timeout_sec
    if limit is not None:
        limit *= spec.agent_timeout_multiplier
    shell = await sandbox.shell(step.agent_user)
    clock = AgentClock(limit)
    context = AgentContext(
        task=spec.task,
        step=step,
        sandbox=sandbox,
        shell=shell,
        session=run.session,
        sampling=spec.sampling,
        trajectory=trajectory,
        clock=clock,
        environ=environ,
        sample=spec.sample,
        emit=emit,
    )
    try:
        await _within(clock, agent.run(context))
    except RolloutError as error:
        if BY_NAME[error.error_class].domain is not Domain.AGENT:
            raise
        return error
    finally:
        run.attempt.infra_seconds += clock.infra_seconds
        if run.session is not None:
            trajectory.segments = run.session.segments
    return await overspent(sandbox) if _was_killed(trajectory) else None


async def _within(clock: AgentClock, work: Any) -> None:
    """Await `work` for as long as the clock allows. Raises `AgentStopped` (`agent_timeout`)."""
    worker = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(clock.expired())
    try:
        await asyncio.wait({worker, watch}, return_when=asyncio.FIRST_COMPLETED)
        if worker.done():
            worker.result()
            return
    finally:
        watch.cancel()
        if not worker.done():
            worker.cancel()
            await asyncio.wait({worker})
    if not worker.cancelled() and (late := worker.exception()) is not None:
        raise late
    message = f"the agent's {clock.limit_sec:g} s ran out ({clock.infra_seconds:.1f} s more went to waiting)"
    raise AgentStopped("agent_timeout", message)


def _least_seconds(spec: AttemptSpec) -> float:
    """How long the sandbox must live: twice all time limits of the task, for waits are not in them."""
    limits = [spec.agent_timeout_sec or step.agent_timeout_sec or 0.0 for step in spec.task.steps]
    verifiers = [step.verifier.timeout_sec for step in spec.task.steps]
    return 2 * (sum(limits) * spec.agent_timeout_multiplier + sum(verifiers))


def _was_killed(trajectory: Trajectory) -> bool:
    """Whether any command did not end by itself, or by SIGKILL."""
    return any(command.exit_code in (None, 137) for turn in trajectory.turns for command in turn.commands)


async def _verify_phase(
    run: _Run, spec: AttemptSpec, pool: SandboxPool, verifier: Verifies, sandbox: Sandbox, step: Step
) -> Reward:
    own = step.verifier.environment
    if own is None:
        return await verifier.verify(sandbox, spec.task, step)
    image = await pool.image(own, f"{spec.task.name} (verifier)")
    verifier_sandbox = await pool.acquire(
        image,
        own,
        attempt_id=spec.attempt_id,
        role=f"verifier-{step.name}",
        network_mode=step.verifier.network_mode,
    )
    run.sandboxes.append(verifier_sandbox)
    return await verifier.verify_separate(sandbox, verifier_sandbox, spec.task, step)


def _end_with(run: _Run, error: RolloutError) -> None:
    """End the attempt with its first fault; a later one is evidence. One of the agent's own is graded 0."""
    attempt = run.attempt
    if attempt.error_class is not None and not attempt.reward_valid:
        _add_evidence(attempt, str(error))
        return
    attempt.error_class = error.error_class
    attempt.stage = run.stage
    attempt.evidence = error.evidence.capped()
    attempt.retry_after_sec = error.retry_after_sec
    attempt.reward = None
    if BY_NAME[error.error_class].reward_valid:
        # The agent left nothing that could be verified: a sandbox without a shell, or none at all.
        attempt.outcome = Outcome.FAILED
        attempt.reward = Reward(0.0, source=error.error_class)
    else:
        attempt.outcome = Outcome.CANCELLED if isinstance(error, Cancelled) else Outcome.INVALID


def _add_evidence(attempt: Attempt, text: str) -> None:
    evidence = attempt.evidence or Evidence()
    attempt.evidence = replace(evidence, also=(*evidence.also, text)).capped()


def _unknown(error: Exception) -> RolloutError:
    tail = "".join(traceback.format_exception(error))[-3000:]
    message = f"{type(error).__name__}: {error}"
    return RolloutError("internal_error", message, Evidence(message, "rollcage", log_tail=tail))


async def _tear_down(run: _Run, pool: SandboxPool, keep: bool) -> None:
    """Release everything, within `TEARDOWN_SEC`; what fails is evidence and left to the reaper."""
    started = time.monotonic()
    if run.session is not None:
        await run.session.close()
    for sandbox in [] if keep else run.sandboxes:
        try:
            async with asyncio.timeout(TEARDOWN_SEC):
                await pool.release(sandbox)
        except (RolloutError, TimeoutError) as error:
            _add_evidence(run.attempt, f"teardown: {error or 'took too long'}")
    run.attempt.phases[Phase.TEARDOWN] = time.monotonic() - started
