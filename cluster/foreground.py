"""`rollcage try`: one rollout in this process, without Ray, showing what happens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.markup import escape

from rollcage.cluster.client_policies import client_policies, model_path
from rollcage.cluster.config import JobConfig, VllmPolicyConfig, load_job
from rollcage.cluster.decisions import Assignment, RolloutKey
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.host import SandboxHost
from rollcage.cluster.interrupts import Interrupts
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.plan_tasks import host_spec, make_plan
from rollcage.cluster.records import own_record
from rollcage.cluster.task_copies import pack_task
from rollcage.rollout.outcome import BY_NAME, Outcome, RolloutError
from rollcage.rollout.policies.base import Policy
from rollcage.rollout.trajectory import Attempt

LEAST_LOST_SEC = 0.05
"""Time lost to infra that is worth a word."""


def try_task(
    task: Path,
    agent: str,
    policy: str | None,
    options: Sequence[str],
    *,
    sample: int,
    keep: bool,
    keep_states: str = "none",
    docker_host: str | None,
    console: Console,
    show: Callable[[Attempt], None],
) -> Attempt:
    """Run one attempt at a task, `show` its record and return it. With `keep` the sandbox is there until a signal
    comes: it ends by itself when nobody holds its shell.

    Raises `InputError` for a bad task, agent or option, `CouldNotRun` where engine or model cannot be had, and
    `KeyboardInterrupt` where a signal came before the agent.
    """
    settings = {
        "tasks": [str(task)],
        "agents": [{"name": agent, "options": dict(map(_option, options))}],
        "policy": policy,
        "samples": sample + 1,
        "sandbox": {"keep_states": keep_states},
    }
    config = load_job(None, [f"sandbox.docker_host={docker_host}"] if docker_host else [], settings)
    plan = make_plan(config)
    if len(plan.task_keys()) != 1:
        raise InputError(f"{task} holds {len(plan.task_keys())} tasks: name one of them")
    if plan.broken:
        raise InputError(f"{plan.broken[0].error_class}:\n{plan.broken[0].evidence.message}")
    return run_one(config, plan, sample, keep=keep, console=console, show=show)


def run_one(
    config: JobConfig,
    plan: JobPlan,
    sample: int,
    *,
    keep: bool,
    console: Console,
    show: Callable[[Attempt], None],
) -> Attempt:
    """One attempt of a plan that has one task and one agent. Raises as `try_task`."""
    try:
        return asyncio.run(_try(config, plan, sample, keep, console, show))
    except RolloutError as error:
        raise CouldNotRun.because(error) from error
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def as_dict(attempt: Attempt) -> dict[str, Any]:
    """The record as JSON values."""
    record: dict[str, Any] = json.loads(json.dumps(asdict(attempt), default=str))
    return record


def render(attempt: Attempt, console: Console) -> None:
    """Print how the attempt ended: outcome, reward, time by phase, and the evidence where there is any."""
    colour = {"passed": "green", "failed": "yellow"}.get(attempt.outcome.value, "red")
    console.print(f"[bold {colour}]{attempt.outcome.value}[/]" + (_why(attempt)), highlight=False)
    if attempt.reward is not None:
        values = ", ".join(f"{name} {value:g}" for name, value in attempt.reward.values.items())
        console.print(
            f"reward {attempt.reward.value:g} from {attempt.reward.source}  {values}", highlight=False
        )
        if attempt.outcome is not Outcome.PASSED and attempt.reward.output_tail:
            console.print("--- the verifier's output ends ---", style="dim")
            console.print(escape(attempt.reward.output_tail), highlight=False, markup=True)
    if attempt.evidence is not None:
        console.print(f"--- said by {attempt.evidence.said_by} ---", style="dim")
        console.print(escape(attempt.evidence.message), highlight=False, soft_wrap=True)
        if attempt.evidence.log_tail:
            console.print(escape(attempt.evidence.log_tail), style="dim", highlight=False, soft_wrap=True)
        for also in attempt.evidence.also:
            console.print(escape(also), style="dim", highlight=False, soft_wrap=True)
    phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in attempt.phases.items())
    lost = attempt.infra_seconds
    of_it = f"; of the agent's, {lost:.2f} s waited for the policy (its queue, retries, the way to it)"
    console.print(f"[dim]{phases}{of_it if lost >= LEAST_LOST_SEC else ''}[/]", highlight=False)


def _why(attempt: Attempt) -> str:
    if attempt.error_class is None:
        return ""
    row = BY_NAME[attempt.error_class]
    return f"  {row.name} ({row.meaning}; fault of {row.fault_of})"


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--option {text!r}: give it as name=value")
    return name, yaml.safe_load(value)


async def _try(
    config: JobConfig,
    plan: JobPlan,
    sample: int,
    keep: bool,
    console: Console,
    show: Callable[[Attempt], None],
) -> Attempt:
    def emit(line: str) -> None:
        console.print(escape(line), highlight=False, soft_wrap=True)

    key = next(key for key in plan.rollouts() if key.sample == sample)
    with Interrupts(emit) as interrupts:
        async with _policies(config, emit) as policies:
            host = SandboxHost(host_spec(config, plan, policies), emit=emit)
            await host.open()
            try:
                attempt = await _attempt(plan, host, key, keep, emit)
                show(attempt)
                if keep and attempt.attempt_id and attempt.outcome is not Outcome.CANCELLED:
                    seen = asyncio.Event()
                    interrupts.then(seen.set, "removing it")
                    emit(f"kept: docker exec -it rollcage-{attempt.attempt_id}-main sh (Ctrl-C removes it)")
                    await seen.wait()
                return attempt
            finally:
                await host.close()


async def _attempt(
    plan: JobPlan, host: SandboxHost, key: RolloutKey, keep: bool, emit: Callable[[str], None]
) -> Attempt:
    """One attempt, or the record of why there is none."""
    [task] = plan.tasks.values()
    policy = plan.agents[0].policy
    emit(f"preparing {task.name}")
    prepared = await host.prepare(task)
    if prepared.wants_files:
        prepared = await host.prepare(task, await asyncio.to_thread(pack_task, task))
    if prepared.error_class is None:
        assignment = Assignment(key, 1, host.name, f"try-{plan.job}")
        return await host.run(plan.attempt(assignment), policy, keep=keep)
    return own_record(
        key, Outcome.INVALID, prepared.error_class, prepared.evidence, number=1, policy=policy, host=host.name
    )


@asynccontextmanager
async def _policies(config: JobConfig, emit: Any) -> AsyncIterator[dict[str, Policy]]:
    """The one policy that the agent works with, in this process."""
    served = [
        (name, policy)
        for name, policy in config.used_policies().items()
        if isinstance(policy, VllmPolicyConfig)
    ]
    if not served:
        yield client_policies(config)
        return
    from rollcage.rollout.policies.engine import TokenPolicy
    from rollcage.rollout.policies.vllm import VllmEngine

    [(name, policy)] = served
    emit(f"starting {policy.model}")
    engine = VllmEngine(await asyncio.to_thread(model_path, policy.model), policy.engine_args)
    try:
        try:
            await engine.start()
        except ValueError as error:
            raise InputError(f"policies.{name}: {error}") from error
        yield {name: TokenPolicy(engine, name=name, template_kwargs=policy.template_kwargs)}
    finally:
        await engine.close()
