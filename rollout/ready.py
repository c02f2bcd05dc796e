"""Making a sandbox ready for the agent: the task's healthcheck, and a step's own files and set-up."""

from __future__ import annotations

import asyncio
import time

from rollcage.rollout.outcome import AgentStopped, Evidence, RolloutError, TaskError
from rollcage.rollout.sandbox.base import CommandResult, Sandbox
from rollcage.rollout.task import Healthcheck, Step, Task

_SETUP = "command -v bash >/dev/null && exec bash setup.sh; exec sh setup.sh"


async def wait_until_healthy(sandbox: Sandbox, check: Healthcheck | None) -> None:
    """Wait until the healthcheck passes, in Docker's own terms: failures inside the start period do not
    count, then `retries` in a row are one too many. Raises `TaskError` (`healthcheck`).
    https://docs.docker.com/reference/dockerfile/#healthcheck"""
    if check is None:
        return
    started = time.monotonic()
    failures = 0
    while True:
        result = await sandbox.exec(["/bin/sh", "-c", check.command], timeout=check.timeout_sec)
        if result.exit_code == 0:
            return
        starting = time.monotonic() - started < check.start_period_sec
        failures += 0 if starting else 1
        if failures >= check.retries:
            said = f"the healthcheck failed {failures} times in a row: {check.command}"
            raise TaskError("healthcheck", said, _evidence(said, result))
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)


async def prepare_step(sandbox: Sandbox, task: Task, step: Step) -> None:
    """Put the step's own files into the workdir, run its `setup.sh` as the agent's user, as Harbor does, and wait
    for its healthcheck.

    Raises `TaskError` where the first step does not get ready. A later one does so in what the agent left of
    the sandbox: that is the agent's (`AgentStopped`, `agent_killed_sandbox`).
    """
    try:
        await _set_up(sandbox, task, step)
        await wait_until_healthy(sandbox, step.healthcheck)
    except TaskError as error:
        if step is task.steps[0]:
            raise
        said = f"step {step.name} does not get ready in what the agent left: {error.message}"
        raise AgentStopped("agent_killed_sandbox", said, error.evidence) from error


async def _set_up(sandbox: Sandbox, task: Task, step: Step) -> None:
    if step.workdir is None:
        return
    workdir = sandbox.spec.workdir or "/"
    await sandbox.upload(step.workdir, workdir)
    if not (step.workdir / "setup.sh").is_file():
        return
    result = await sandbox.exec(
        ["/bin/sh", "-c", _SETUP],
        user=step.agent_user,
        workdir=workdir,
        timeout=task.environment.build_timeout_sec,
    )
    if result.exit_code != 0:
        ended = "did not end in time" if result.timed_out else f"ended with status {result.exit_code}"
        said = f"setup.sh of step {step.name} {ended}"
        raise TaskError("container_config", said, _evidence(said, result))


async def overspent(sandbox: Sandbox) -> RolloutError | None:
    """The agent's own end of its processes, where the engine or the sandbox says so: past the memory limit
    (`agent_oom`), or past the storage budget (`agent_killed_sandbox`)."""
    state = await sandbox.state()
    if state.oom_killed:
        said = f"processes of the agent went past the memory limit of {sandbox.spec.memory_mb} MiB"
        evidence = Evidence(said, "container state", exit_code=state.exit_code, oom_killed=True)
        return AgentStopped("agent_oom", said, evidence)
    if state.storage_exceeded:
        said = f"the agent wrote more than its {sandbox.spec.storage_mb} MiB, and its processes were stopped"
        return AgentStopped("agent_killed_sandbox", said, Evidence(said, "container state"))
    return None


def _evidence(said: str, result: CommandResult) -> Evidence:
    return Evidence(said, "task files", exit_code=result.exit_code, log_tail=result.text[-2000:])
