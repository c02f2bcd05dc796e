"""`rollcage resume`: a run that was killed, interrupted or finished goes on, with the same job or a larger one.

What has ended is read from the run's files, and only what has not is run:

- `passed`, `failed` and `invalid` rollouts stay as they are; with `--retry-invalid` invalid ones are run again.
- `cancelled` ones are run again: a signal, or a budget, had ended them, and not they themselves.
- Rollouts that are run again leave `rollouts/` before the job begins, so that each is there once; their attempts stay
  in `attempts/`. What attempts of an unended rollout have spent of its budgets stays spent, but for `--retry-invalid`.

The job keeps its name, and so its labels. Nothing is changed before everything is checked, and the run's lock is held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from rollcage.cluster.asked import teller
from rollcage.cluster.client_policies import asked_policies
from rollcage.cluster.config import JobConfig, changed_job
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.cluster.job import GoingOn, RunResult, carry_out, job_record
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.plan_tasks import make_plan
from rollcage.cluster.recorded_run import RecordedRun, open_run, renamed, shortened
from rollcage.cluster.stream import left_over
from rollcage.metrics.report import summarize
from rollcage.rollout.arrow import TABLES, RunError
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.policies.base import Policy
from rollcage.rollout.schema import KEY, SchemaVersionError
from rollcage.rollout.trajectory import RolloutKey as Ended

OPERATIONAL = (
    "replicas", "num_cpus", "num_gpus", "tensor_parallel_size", "pipeline_parallel_size", "placement", "threads",
    "engine_args", "on_update", "health_sec", "retry_sec", "request_timeout_sec", "api_key_env", "base_url",
    "max_connections", "cache", "prices", "budget_usd", "version",
)  # fmt: skip
"""Settings of a policy that may be others in a job that goes on: how it is served, not what it answers."""

DECIDING = (
    "seed", "pass_threshold", "reward_key", "agent_timeout_sec", "agent_timeout_multiplier",
    "verifier_timeout_multiplier", "keep_processes",
)  # fmt: skip
"""Settings of a job that decide what a rollout gives."""

SPENT = "cancelled"
"""What stands for an attempt that takes a number and nothing of a budget: the class has none."""


@dataclass(frozen=True)
class ResumeOptions:
    """What the command line says. None and empty lists leave the run's own, the cluster that it was on too (`local`:
    Ray is started here). `tasks` are further ones. `journal`: where the journal of a run that is not on this machine
    lies, where not the run's own setting or the default."""

    run: str
    samples: int | None = None
    tasks: Sequence[str] = ()
    overrides: Sequence[str] = ()
    concurrency: int | None = None
    address: str | None = None
    skip_unready: bool = False
    allow_changed: bool = False
    retry_invalid: bool = False
    journal: Path | None = None


@dataclass(frozen=True)
class Job:
    """What the run is gone on with. `changes`: in what its rollouts would differ from those that there are."""

    config: JobConfig
    plan: JobPlan
    changes: list[str]


@dataclass(frozen=True)
class Left:
    """What is to be run. `withdrawn` have ended and are run again; `earlier`: see `JobPlan`. `drawn`: how often a
    stream has drawn each task."""

    chosen: frozenset[tuple[str, str, int, int]]
    withdrawn: Collection[Ended]
    earlier: Mapping[tuple[str, str, int, int], Sequence[str]]
    drawn: Mapping[str, int]


def resume(options: ResumeOptions, console: Console) -> RunResult:
    """Go on with a run to its end; one that has nothing left to run ends at once.

    Raises `InputError` where there is no run, another process writes it, or the job is smaller or another one than the
    run's; and as `run_job`.
    """
    run = open_run(options.run, options.journal)
    job = planned(run, options)
    if job.changes and not options.allow_changed:
        raise InputError(
            f"{run.location} was made with another job, and its rollouts would not be comparable; --allow-changed goes "
            "on all the same:\n  " + shortened(job.changes)
        )
    clients = asked_policies(job.config, teller(console))
    try:
        ledger = Ledger.open(run.location)
    except (RunError, SchemaVersionError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise CouldNotRun(f"{run.location} cannot be gone on with: {error}") from error
    try:
        return _go_on(run, job, clients, ledger, options, console)
    finally:
        ledger.close()


def _go_on(
    run: RecordedRun,
    job: Job,
    clients: Mapping[str, Policy],
    ledger: Ledger,
    options: ResumeOptions,
    console: Console,
) -> RunResult:
    before = run.location.read_json("summary.json") or {}
    for name in (name for table in TABLES for name in run.location.missing(table)):
        teller(console)(
            f"{name} is missing (was it moved away?): what it holds is run again, unless it is put back first"
        )
    plan = job.plan
    left = read_left(run, plan, retry_invalid=options.retry_invalid)
    if plan.stream is not None:
        plan = replace(plan, stream=replace(plan.stream, drawn=left.drawn))
    plan = replace(plan, chosen=left.chosen)
    earlier = {key: left.earlier[key.place] for key in plan.rollouts() if key.place in left.earlier}
    plan = replace(plan, earlier=earlier)
    more = "" if plan.total() is None else f", {plan.total()} are to be run"
    said = f"going on with {plan.job}: {len(ledger.known) - len(left.withdrawn)} rollouts have ended{more}"
    teller(console)(said)
    if plan.total() == 0:
        if not before:
            asyncio.run(ledger.finish({"job": plan.job}))
        return RunResult(options.run, summarize(run.location), interrupted=False)
    about = {name: value for name, value in run.job.items() if name not in ("job", "config", "tasks")}
    note = {"at": time.time(), "rollouts": plan.total(), "changed": list(job.changes)}
    record = job_record(job.config, plan, about | {"resumed": [*run.job.get("resumed", []), note]})
    names = {task["task"] for task in record["tasks"]}
    # What the job has no longer keeps its place: rollouts of it are in the run.
    record["tasks"] += [
        {"task": task.name, "digest": task.digest, "path": task.path}
        for task in run.tasks.values()
        if task.name not in names
    ]
    going_on = GoingOn(record, left.withdrawn, before)
    return carry_out(job.config, plan, clients, ledger, console, going_on=going_on)


def _config(run: RecordedRun, options: ResumeOptions) -> JobConfig:
    joined = {} if options.address is None else {"address": options.address}
    given: dict[str, Any] = {
        "samples": options.samples,
        "concurrency": options.concurrency,
        "tasks": [*dict.fromkeys([*run.config.tasks, *options.tasks])] if options.tasks else None,
        "skip_unready": options.skip_unready or None,
        "journal": None if options.journal is None else str(options.journal.absolute()),
        "ray": run.config.ray.model_dump(mode="json") | joined,
        "output": str(run.location.name) if "://" in run.location.name else run.location.path,
    }
    return changed_job(run.config, options.overrides, given, f"{run.location}/job.json")


def planned(run: RecordedRun, options: ResumeOptions) -> Job:
    """The whole job, its tasks called as the run calls them. Raises `InputError` for one that cannot be, or that has
    less to do than the run has."""
    config = _config(run, options)
    plan = replace(renamed(run, make_plan(config)), job=str(run.job["job"]))
    now = {key.name: key.digest for key in plan.task_keys()}
    gone = [task.name for task in run.tasks.values() if task.name not in now]
    changed = [
        f"task {task.name}: its files have changed" for task in run.tasks.values()
        if now.get(task.name, task.digest) != task.digest
    ]  # fmt: skip
    changed += [f"task {name}: the job does not have it any more" for name in gone]
    agents = {agent.called: agent for agent in config.agents}
    for old in run.config.agents:
        agent = agents.get(old.called)
        if agent is None:
            changed.append(f"agent {old.called}: the job does not have it any more")
            continue
        was, is_now = (found.samples or job.samples for found, job in ((old, run.config), (agent, config)))
        if is_now < was:
            raise InputError(
                f"{run.location} has {was} samples of each task by {old.called}, and {is_now} are asked for: a run "
                f"that goes on cannot have fewer (--samples {was}, or more)"
            )
        for name in ("name", "options", "policy"):
            changed += _difference(f"agent {old.called}: {name}", getattr(old, name), getattr(agent, name))
    for name, policy in run.config.used_policies().items():
        new = config.policies.get(name)
        if new is not None:
            then, today = policy.model_dump(mode="json"), new.model_dump(mode="json")
            for setting in sorted((then.keys() | today.keys()) - set(OPERATIONAL)):
                changed += _difference(f"policies.{name}.{setting}", then.get(setting), today.get(setting))
    for name in DECIDING:
        changed += _difference(name, getattr(run.config, name), getattr(config, name))
    if run.config.mode != config.mode:
        raise InputError(
            f"{run.location} is a run of mode {run.config.mode}, which cannot become {config.mode}"
        )
    return Job(config, plan, changed)


def _difference(what: str, was: Any, now: Any) -> list[str]:
    return [] if was == now else [f"{what}: was {was!r}, is {now!r}"]


def read_left(run: RecordedRun, plan: JobPlan, *, retry_invalid: bool) -> Left:
    """Read what has ended. Raises `InputError` where the run's files cannot be read."""
    ended: dict[tuple[str, str, int, int], bool] = {}
    withdrawn: list[Ended] = []
    of_job = {(agent.label, key.name): agent.samples for agent in plan.agents for key in plan.task_keys()}
    for batch in run.batches((*KEY, "outcome")):
        for row in batch.to_pylist():
            place = (row["agent"], row["task"], row["draw"], row["sample"])
            again = row["outcome"] == Outcome.CANCELLED or (
                retry_invalid and row["outcome"] == Outcome.INVALID
            )
            # What the job has no longer is not run again, so it stays.
            again = again and row["sample"] < of_job.get((row["agent"], row["task"]), 0)
            ended[place] = not again
            if again:
                withdrawn.append(Ended(**{name: row[name] for name in KEY}))
    stay = {place for place, stays in ended.items() if stays}
    drawn: Mapping[str, int] = {}
    if plan.stream is None:
        chosen = frozenset(place for key in plan.rollouts() if (place := key.place) not in stay)
    else:
        samples = {agent.label: agent.samples for agent in plan.agents}
        # A draw is known by any of its rollouts, those that are run again included.
        drawn, _ = left_over(ended, samples)
        chosen = left_over(stay, samples)[1] | {place for place, stays in ended.items() if not stays}
    fresh = {place for place, stays in ended.items() if not stays} if retry_invalid else set()
    earlier: dict[tuple[str, str, int, int], list[str]] = {}
    for batch in run.batches(("agent", "task", "draw", "sample", "error_class"), "attempts"):
        for agent, task, draw, sample, error_class in zip(
            *(batch[name].to_pylist() for name in ("agent", "task", "draw", "sample", "error_class")),
            strict=True,
        ):
            place = (agent, task, draw, sample)
            if place in chosen:
                # An attempt without a class had a reward, and was not written as a rollout before the kill.
                spent = SPENT if place in fresh else error_class or SPENT
                earlier.setdefault(place, []).append(spent)
    return Left(chosen, withdrawn, earlier, drawn)
