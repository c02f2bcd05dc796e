"""Making a sandbox ready for the agent: the task's healthcheck, a step's own files and set-up, the shell."""

from __future__ import annotations

import asyncio
import time

from rollcage.rollout.outcome import BY_NAME, AgentStopped, Domain, Evidence, SandboxError, TaskError
from rollcage.rollout.sandbox.base import CommandResult, Sandbox, Shell
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


async def prepare_step(sandbox: Sandbox, task: Task, step: Step) -> Shell:
    """Put the step's own files into the workdir, run its `setup.sh` as the agent's user, as Harbor does, wait for
    its healthcheck, and start the agent's shell.

    Where the first step does not get ready, that is the task's (`TaskError`, `SandboxError`). A later one has to in
    what the agent left of the sandbox: that is the agent's (`AgentStopped`, `agent_killed_sandbox`).
    """
    try:
        await _set_up(sandbox, task, step)
        await wait_until_healthy(sandbox, step.healthcheck)
        return await sandbox.shell(step.agent_user)
    except (TaskError, SandboxError) as error:
        if step is task.steps[0] or BY_NAME[error.error_class].domain is not Domain.TASK:
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


def _evidence(said: str, result: CommandResult) -> Evidence:
    return Evidence(said, "task files", exit_code=result.exit_code, log_tail=result.text[-2000:])
