"""`rollcage run`: from a configuration to a finished run directory.

config -> plan -> ledger -> Ray -> policies -> hosts -> driver -> summary.json

Where nothing could be begun, nothing stays behind: the run directory is there again to be used.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from rollcage.cluster.asked import teller
from rollcage.cluster.checks import clean_up_after
from rollcage.cluster.client_policies import asked_policies, model_path
from rollcage.cluster.config import JobConfig, VllmPolicyConfig, read_job
from rollcage.cluster.config_source import Source
from rollcage.cluster.control_requests import job_control
from rollcage.cluster.earlier import count_earlier
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.interrupts import Interrupts
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.own_ray import ENDED, Connection
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.plan_tasks import host_spec, make_plan, named_env
from rollcage.cluster.progress import JobProgress
from rollcage.cluster.ray_thread import ray_in_a_thread
from rollcage.cluster.retries import Retries
from rollcage.metrics.report import summarize
from rollcage.rollout.arrow import TABLES, Location, RunError
from rollcage.rollout.outcome import BY_NAME, RolloutError
from rollcage.rollout.policies.base import Policy
from rollcage.rollout.task import hide_values
from rollcage.rollout.trajectory import RolloutKey

if TYPE_CHECKING:
    from rollcage.cluster.policies import ServedPolicy

STOPPING = "interrupted: no more rollouts; what runs may end (press again to cancel it)"

RUNNING_OUT = "interrupted: cancelling what runs"


@dataclass(frozen=True)
class RunOptions:
    """What the command line says. None and empty lists leave the file's, or the default."""

    job: Path | None
    tasks: list[str]
    agents: list[str]
    policy: str | None
    samples: int | None
    concurrency: int | None
    output: Path | str | None
    overrides: list[str]
    address: str | None
    skip_unready: bool
    overwrite: bool = False


@dataclass(frozen=True)
class RunResult:
    """The run directory, or its URI, and its summary, as `rollcage report --json` prints it. `interrupted`: by a
    signal."""

    run: Path | str
    summary: dict[str, Any]
    interrupted: bool


def run_job(options: RunOptions, console: Console) -> RunResult:
    """Run a job to its end.

    Raises `InputError` for what is wrong with the job, before anything is spent; `CouldNotRun` where Ray, an
    engine or a model cannot be had, or the run directory cannot be written; and `KeyboardInterrupt` where a signal
    came before the first rollout.
    """
    config, source = _config(options)
    try:
        return run_plan(config, make_plan(config), console, overwrite=options.overwrite)
    except (InputError, CouldNotRun) as error:
        if not error.setting:
            raise
        raise type(error)(f"{source.place(error.setting)}: {error}") from error


def run_plan(
    config: JobConfig,
    plan: JobPlan,
    console: Console,
    *,
    overwrite: bool = False,
    about: Mapping[str, Any] | None = None,
) -> RunResult:
    """Run what has been planned; `about` goes into `job.json`, too. Raises as `run_job`."""
    clients = asked_policies(config, teller(console))
    try:
        output = config.output or new_run_directory(Path("runs"), config.name)
        location = Location(output, journal=config.journal)
        ledger = Ledger.create(location, job_record(config, plan, about or {}), overwrite=overwrite)
    except RunError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise InputError(f"the run directory cannot be made: {error}") from error
    try:
        return carry_out(config, plan, clients, ledger, console)
    finally:
        forget_unbegun(ledger.location)
        ledger.close()


def job_record(config: JobConfig, plan: JobPlan, about: Mapping[str, Any]) -> dict[str, Any]:
    """What `job.json` holds."""
    settings = config.model_dump(mode="json")
    return {"job": plan.job, "config": settings, "tasks": _task_list(plan), **about}


@dataclass(frozen=True)
class GoingOn:
    """What a run that is gone on with needs beside its plan, once all that the job needs is there: `record` for
    `job.json`, and the ended rollouts that are run again. `summary`: what it was summed up as before; empty where it
    was killed."""

    record: Mapping[str, Any]
    withdrawn: Collection[RolloutKey]
    summary: Mapping[str, Any]


def carry_out(
    config: JobConfig,
    plan: JobPlan,
    clients: Mapping[str, Policy],
    ledger: Ledger,
    console: Console,
    *,
    going_on: GoingOn | None = None,
) -> RunResult:
    """Run a plan into an open ledger. Raises `InputError`, `CouldNotRun` and `KeyboardInterrupt` as `run_job`."""
    config.metrics.password()
    try:
        interrupted = asyncio.run(_run(config, plan, clients, ledger, console, going_on))
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    location = ledger.location
    if config.sandbox.keep_states != "none":
        from rollcage.cluster.recorded_run import kept_states

        teller(console)(kept_states(location))
    return RunResult(location.local or str(location), summarize(location), interrupted)


def new_run_directory(parent: Path, name: str) -> Path:
    """Make a directory for a run that was given none: its name and the time, with a number where another job of that
    name has taken this second. Raises `OSError`."""
    parent.mkdir(parents=True, exist_ok=True)
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in count(1):
        directory = parent / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            directory.mkdir()
            return directory
    raise AssertionError("numbers do not end")


def _config(options: RunOptions) -> tuple[JobConfig, Source]:
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
    return read_job(options.job, options.overrides, settings)


def forget_unbegun(location: Location) -> None:
    """Delete the files of a run that has no row."""
    if any(location.shards(table) or location.journals(table) for table in TABLES):
        return
    location.erase()
    if location.local and not any(location.local.iterdir()):
        location.local.rmdir()


async def _run(
    config: JobConfig,
    plan: JobPlan,
    scripted: Mapping[str, Policy],
    ledger: Ledger,
    console: Console,
    going_on: GoingOn | None,
) -> bool:
    """Returns True where a signal ended the job before its time."""
    from rollcage.cluster.driver import Driver, job_counts
    from rollcage.cluster.host import INSECURE, HostLost

    started = time.monotonic()
    redact = hide_values(named_env(plan))
    with JobProgress(plan.total(), console, redact) as progress, Interrupts(progress.say) as interrupts:
        for broken in plan.broken:
            progress.say(f"quarantined {broken.key.name}: {broken.error_class}: {broken.evidence.message}")
        async with AsyncExitStack() as stack:
            progress.say("joining the Ray cluster" if config.ray.address else "starting Ray on this machine")
            if config.sandbox.network.insecure_network:
                progress.say(INSECURE)
            starting = {
                name: policy.version
                for name, policy in config.used_policies().items()
                if isinstance(policy, VllmPolicyConfig)
            }
            control = await stack.enter_async_context(
                job_control(ledger.location.here, progress.say, starting)
            )
            ray = await stack.enter_async_context(ray_in_a_thread(config.ray, interrupts))
            stack.callback(asyncio.create_task(_say_where_ray_ends(ray, interrupts, progress.say)).cancel)
            from rollcage.cluster.actors import RayHosts
            from rollcage.cluster.budget import shared_budgets, spending, stopping_when_spent
            from rollcage.cluster.job_metrics import JobMetrics

            own_ray = config.ray.address is None
            metrics = JobMetrics(config.metrics, plan.job, progress.say, ray_ends=own_ray, ended=ray.ended)
            stack.push_async_callback(metrics.close)
            clients, budgets = await stack.enter_async_context(shared_budgets(scripted))
            async with ray.needed():
                served = await stack.enter_async_context(_served_policies(config, progress, metrics.vllm))
            await stack.enter_async_context(control.serving(served))
            engines = {name: policy.policy for name, policy in served.items()}
            spec = host_spec(config, plan, {**clients, **engines})
            hosts = RayHosts(spec, say=progress.say, exporter=metrics.exporter, connection=ray)
            counts = job_counts(plan, exemplars=config.metrics.exemplars)
            driver = Driver(plan, ledger, hosts, progress, counts)
            control.steers(driver)
            interrupts.then(driver.stop, STOPPING)
            failure = None

            def run_out(why: str) -> None:
                progress.say(
                    f"{why}: no more rollouts; those that run end as cancelled and ungraded, once they have the answer "
                    "that they wait for"
                )
                interrupts.then(driver.stop, RUNNING_OUT)
                driver.run_out(why)

            try:
                if going_on is not None:
                    to_run = {place[:3] for place in plan.chosen or ()}
                    await ledger.reopen(going_on.record, going_on.withdrawn, to_run)
                    counting = asyncio.to_thread(count_earlier, ledger.location, driver.counts, to_run)
                    driver.goes_on(await counting)
                async with stopping_when_spent(budgets, run_out), metrics.told(driver, ledger, served):
                    await driver.run()
            except (RolloutError, HostLost) as error:
                failure = _ended(driver.begun) if ray.ended() else error
            except (OSError, RunError) as error:
                raise CouldNotRun(f"{ledger.location} cannot be written: {error}") from error
            finally:
                interrupts.then(lambda: None, "interrupted: the job has ended, cleaning up")
                if driver.unclean:
                    await _clean_up(driver.unclean, config, plan, progress)
            spent = await spending(budgets)
        if driver.begun:
            summary = {"job": plan.job, "wall_seconds": time.monotonic() - started, "budgets": spent}
            await ledger.finish(_added_up(going_on.summary, summary) if going_on else summary)
            if ledger.not_merged is not None:
                progress.say(f"small shards were left as they are: {ledger.not_merged}")
    if failure is not None:
        raise CouldNotRun.because(failure) from failure
    return interrupts.count > 0


def _added_up(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a job that several drivers have worked on: their time, and what they spent. Of one that was killed
    nobody knows."""
    budgets = {
        name: {**budget, "spent_usd": budget["spent_usd"] and spent + budget["spent_usd"]}
        for name, budget in now["budgets"].items()
        for spent in [(before.get("budgets", {}).get(name) or {}).get("spent_usd") or 0.0]
    }
    return {
        **now,
        "wall_seconds": before.get("wall_seconds", 0.0) + now["wall_seconds"],
        "budgets": before.get("budgets", {}) | budgets,
    }


async def _say_where_ray_ends(ray: Connection, interrupts: Interrupts, say: Callable[[str], None]) -> None:
    await ray.until_ended()
    if not interrupts.count:
        say(f"{ENDED}: what has an answer still goes on, and nothing that is lost can be replaced")


def _ended(begun: bool) -> Exception:
    from rollcage.cluster.host import HostLost

    return HostLost(
        f"{ENDED}; " + ("`rollcage resume` goes on with what is written" if begun else "run it again")
    )


async def _clean_up(hosts: set[str], config: JobConfig, plan: JobPlan, progress: JobProgress) -> None:
    """Do what lost hosts can no longer do, where their engine is the one that this process reaches."""
    remedy = f"`rollcage gc --job {plan.job}` on their machines removes what they left"
    if config.ray.address is not None:
        progress.say(f"not cleaned up after {', '.join(sorted(hosts))}: {remedy}")
        return
    try:
        await clean_up_after(hosts, config.sandbox.docker_host)
        progress.say(f"cleaned up after {', '.join(sorted(hosts))}")
    except CouldNotRun as error:
        progress.say(f"not cleaned up after {', '.join(sorted(hosts))}: {error}; {remedy}")


@asynccontextmanager
async def _served_policies(
    config: JobConfig, progress: JobProgress, metrics: Mapping[str, Any] | None = None
) -> AsyncIterator[dict[str, ServedPolicy]]:
    """The policies that vLLM serves, started side by side, ready to answer; stopped when the block ends. Raises
    `InputError` and `CouldNotRun`, where one of them fails; then the others are stopped."""
    from rollcage.cluster.policies import ServedPolicy

    settings = {
        name: policy
        for name, policy in config.used_policies().items()
        if isinstance(policy, VllmPolicyConfig)
    }
    async with AsyncExitStack() as stack:

        async def start(name: str, policy: VllmPolicyConfig) -> ServedPolicy:
            started = time.monotonic()
            progress.say(f"starting policy {name}: {policy.model} in {policy.replicas} replica(s) of vLLM")
            model = await asyncio.to_thread(model_path, policy.model)
            served = ServedPolicy(name, policy, model, say=progress.say, metrics=metrics)
            await served.start()
            stack.push_async_callback(served.close)
            progress.say(f"policy {name} is ready after {time.monotonic() - started:.0f} s")
            return served

        for name, policy in settings.items():
            if policy.max_staleness == 0 and policy.stale == "drop":
                progress.say(
                    f"policies.{name}.max_staleness is 0: a rollout under which the weights change begins again, "
                    f"{Retries(config.retries).budget(BY_NAME['stale'])} times at most; where updates come faster than "
                    "rollouts end, none does"
                )
        starting = [asyncio.create_task(start(name, policy)) for name, policy in settings.items()]
        try:
            served = await asyncio.gather(*starting)
        finally:  # the first failure is the one that is told
            for task in starting:
                task.cancel()
            if starting:
                await asyncio.wait(starting)
        yield dict(zip(settings, served, strict=True))


def _task_list(plan: JobPlan) -> list[dict[str, str]]:
    paths = {key: str(task.path) for key, task in plan.tasks.items()}
    return [{"task": key.name, "digest": key.digest, "path": paths.get(key, "")} for key in plan.task_keys()]
