"""The agent that runs the task's own solution. What it cannot pass, no policy can."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.commands import add_turn, run_command
from rollcage.rollout.outcome import Evidence, TaskError
from rollcage.rollout.task import ignore_patterns, resolve_env

SOLUTION = "/solution"
SCRIPT = f"{SOLUTION}/solve.sh"

SMALL_BYTES = 64 << 10
PLACE_SEC = 30.0

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class OracleAgent:
    """Uploads the step's `solution/` to `/solution` and runs its `solve.sh` in the agent's shell, with the
    task's `[solution.env]`. A script that fails is simply done: the verifier has the last word.

    Raises `TaskError` (`task_malformed`) where the step has no `solve.sh`.
    """

    name = "oracle"
    needs_policy = False

    async def run(self, context: AgentContext) -> None:
        solution = context.step.solution
        if solution is None or not (solution / "solve.sh").is_file():
            said = f"step {context.step.name} of {context.task.name} has no solution/solve.sh for the oracle"
            raise TaskError("task_malformed", said, Evidence(said, "task files"))
        if context.trajectory.turns:  # an earlier step's solution must not mix with this one's
            await context.sandbox.exec(["rm", "-rf", SOLUTION], user="root")
        await _place(context, solution)
        for name in context.task.solution_env:
            if not _NAME.fullmatch(name):
                said = f"[solution.env] of {context.task.name}: {name!r} cannot be a variable's name"
                raise TaskError("task_malformed", said, Evidence(said, "task files"))
        settings = resolve_env(context.task.solution_env, context.environ)
        env = "".join(f"{name}={shlex.quote(value)} " for name, value in sorted(settings.items()))
        result = await run_command(
            context, add_turn(context.trajectory), f"{env}{SCRIPT}", recorded_as=SCRIPT
        )
        context.emit(f"solve.sh ended with status {result.exit_code}")


async def _place(context: AgentContext, solution: Path) -> None:
    """Put the solution into the sandbox. One small script, which most are, goes by root's own shell, in a tenth of
    the time that an upload takes the engine."""
    script = solution / "solve.sh"
    ready = _repaired(script)
    if (content := _alone(script)) is not None:
        directory = SCRIPT.rpartition("/")[0]
        command = (
            f"[ -w / ] && [ ! -e {directory} ] && mkdir -m 755 {directory} && cat >{SCRIPT} && chmod 755 {SCRIPT}"
            f" && [ -s {SCRIPT} ]"
        )
        placed = await context.shell.run(
            command, stdin=content if ready is None else ready, timeout=PLACE_SEC
        )
        if placed.exit_code == 0:
            return
    await context.sandbox.upload(solution, SOLUTION, exclude=ignore_patterns(solution))
    if ready is not None:
        await context.sandbox.write({SCRIPT: ready}, mode=0o755)


def _alone(script: Path) -> bytes | None:
    """The script's bytes, where it is small and all that there is in its directory."""
    if list(script.parent.iterdir()) != [script] or script.is_symlink():
        return None
    content = script.read_bytes()
    return content if len(content) <= SMALL_BYTES else None


def _repaired(script: Path) -> bytes | None:
    """The script with Unix line ends, or None where it can be run as it was uploaded."""
    content = script.read_bytes()
    runnable = script.stat().st_mode & 0o555 == 0o555
    return None if runnable and b"\r\n" not in content else content.replace(b"\r\n", b"\n")
