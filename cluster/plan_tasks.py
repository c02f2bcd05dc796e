"""From a job's configuration to its plan: tasks are read, bad ones set apart, variables checked."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollcage.cluster.checks import locate_tasks
from rollcage.cluster.config import JobConfig
from rollcage.cluster.decisions import TaskKey
from rollcage.cluster.errors import InputError
from rollcage.cluster.host import HostSpec
from rollcage.cluster.plan import AgentPlan, BrokenTask, JobPlan
from rollcage.cluster.stream import StreamPlan
from rollcage.rollout.curriculum import check_weights
from rollcage.rollout.outcome import Evidence
from rollcage.rollout.policies.base import Policy, Sampling
from rollcage.rollout.sandbox.pool import SandboxSettings
from rollcage.rollout.sandbox.trust import Proxies
from rollcage.rollout.task import (
    Problem,
    Task,
    check_task,
    missing_env,
    name_apart,
    referenced_env,
    task_digest,
)


def make_plan(
    config: JobConfig,
    environ: Mapping[str, str] | None = None,
    *,
    leave_out: str = "with --skip-unready (skip_unready: true)",
) -> JobPlan:
    """Read every task of the job. `leave_out`: how a user leaves tasks out, for a message.

    Raises `InputError` where there is no task, or where tasks need variables that `environ` (this process's, by
    default) does not have and the job does not `skip_unready`: one message with all of them.
    """
    environ = os.environ if environ is None else environ
    checked = [(path, *check_task(path)) for path in locate_tasks(config.tasks)]
    loaded = name_apart([task for _, task, _ in checked if task is not None], Path.cwd())
    names = {task.name for task in loaded}
    broken = [_broken(path, problems, names) for path, task, problems in checked if task is None]
    tasks = {TaskKey(task.name, task.digest): task for task in _ready(config, loaded, environ, leave_out)}
    if not tasks and not broken:
        raise InputError("no task is left to run: every one of them needs variables that are not set")
    return JobPlan(
        job=f"{config.name}-{uuid.uuid4().hex[:8]}",
        agents=tuple(
            AgentPlan(
                label=agent.called,
                agent=agent.name,
                samples=agent.samples or config.samples,
                options=agent.options,
                policy=policy,
                sampling=config.policies[policy].sampling.sampling() if policy else Sampling(),
            )
            for agent in config.agents
            for policy in [config.policy_of(agent)]
        ),
        tasks=tasks,
        broken=tuple(broken),
        concurrency=config.concurrency,
        build_slots=config.sandbox.build_slots,
        warm=warm_sandboxes(config),
        seed=config.seed,
        retries=config.retries,
        max_quarantined_tasks=config.max_quarantined_tasks,
        agent_timeout_sec=config.agent_timeout_sec,
        agent_timeout_multiplier=config.agent_timeout_multiplier,
        pass_threshold=config.pass_threshold,
        stream=_stream(config, [key.name for key in tasks] + [task.key.name for task in broken]),
    )


def _stream(config: JobConfig, names: Sequence[str]) -> StreamPlan | None:
    """What a stream is to draw. Raises `InputError` for weights that cannot be."""
    if config.mode != "stream":
        return None
    stream = config.stream
    try:
        check_weights(dict.fromkeys(names, 1.0), stream.curriculum)
    except ValueError as error:
        raise InputError(f"stream.curriculum: {error}") from error
    return StreamPlan(stream.max_lag_groups, stream.draws, stream.curriculum)


def warm_sandboxes(config: JobConfig) -> int:
    """How many sandboxes each host starts ahead."""
    warm = config.sandbox.warm
    return max(2, config.concurrency // 8) if warm is None else warm


def host_spec(
    config: JobConfig, plan: JobPlan, policies: Mapping[str, Policy], environ: Mapping[str, str] | None = None
) -> HostSpec:
    """What the job's hosts are made with. Of `environ` (this process's, by default) they get the variables that
    tasks name, and no other."""
    sandbox = config.sandbox
    settings = SandboxSettings(
        docker_host=sandbox.docker_host,
        build_slots=sandbox.build_slots,
        pids=sandbox.pids,
        cpus=sandbox.cpus,
        memory_mb=sandbox.memory_mb,
        storage_mb=sandbox.storage_mb,
        deadline_sec=sandbox.deadline_sec,
        runtime=sandbox.runtime,
        network_cidr=sandbox.network.cidr,
        leases_per_bridge=sandbox.network.leases_per_bridge,
        insecure_network=sandbox.network.insecure_network,
        allow_private=tuple(sandbox.network.allow_private),
        network_modes=frozenset().union(*(task.network_modes for task in plan.tasks.values())),
        memory_reserve_mb=sandbox.memory_reserve_mb,
        admit_memory_mb=sandbox.admit_memory_mb,
        admit_cpus=sandbox.admit_cpus,
        least_disk_mb=sandbox.least_disk_mb,
        warm=warm_sandboxes(config),
        image_disk_gb=sandbox.image_disk_gb,
        ca_bundle=sandbox.ca_bundle,
        keep_states=sandbox.keep_states,
        states_disk_gb=sandbox.states_disk_gb,
        proxies=Proxies(sandbox.proxies.http, sandbox.proxies.https, tuple(sandbox.proxies.no)),
        environ=named_env(plan, environ),
    )
    return HostSpec(
        plan.job,
        settings,
        policies,
        reward_key=config.reward_key,
        verifier_timeout_multiplier=config.verifier_timeout_multiplier,
        keep_processes=tuple(config.keep_processes),
    )


def named_env(plan: JobPlan, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The variables of `environ` (this process's, by default) that the plan's tasks name."""
    environ = os.environ if environ is None else environ
    named = {name for task in plan.tasks.values() for name in referenced_env(task)}
    return {name: environ[name] for name in sorted(named) if name in environ}


def _broken(path: Path, problems: Sequence[Problem], names: set[str]) -> BrokenTask:
    """A task that is called by its directory; by its path where `names`, to which its name is added, has that."""
    path = Path(str(path).encode("utf-8", "backslashreplace").decode())
    name = path.resolve().name
    if name in names:
        here = Path.cwd()
        name = path.relative_to(here).as_posix() if path.is_relative_to(here) else path.as_posix()
    names.add(name)
    try:
        digest = task_digest(path)
    except OSError:
        digest = ""  # a file cannot be read, as the problems say
    malformed = [problem for problem in problems if problem.error_class == "task_malformed"]
    error_class = (malformed or problems)[0].error_class
    evidence = Evidence("\n".join(map(str, problems)), "task files").capped()
    return BrokenTask(TaskKey(name, digest), error_class, evidence)


def _ready(
    config: JobConfig, tasks: Sequence[Task], environ: Mapping[str, str], leave_out: str
) -> list[Task]:
    """The tasks whose variables are set."""
    oracle = any(agent.name == "oracle" for agent in config.agents)
    missing = {task.name: missing_env(task, environ, solution=oracle) for task in tasks}
    if any(missing.values()) and not config.skip_unready:
        lines = [  # a line of a compose file may name a variable twice
            f"{task}: {variable} ({where})"
            for task, found in missing.items()
            for variable, where in dict.fromkeys(found)
        ]
        count = sum(bool(found) for found in missing.values())
        raise InputError(
            f"{count} of {len(tasks)} tasks need variables that are not set; set them, or leave these tasks out "
            f"{leave_out}:\n  " + "\n  ".join(lines)
        )
    return [task for task in tasks if not missing[task.name]]
