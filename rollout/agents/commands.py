"""Running a command for an agent so that the trajectory holds it, whatever happens next."""

from __future__ import annotations

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.sandbox.base import OUTPUT_BYTES, CommandResult
from rollcage.rollout.trajectory import CommandRecord, Trajectory, Turn


def add_turn(trajectory: Trajectory, text: str = "") -> Turn:
    """A turn without a policy behind it, appended to the trajectory."""
    turn = Turn(index=len(trajectory.turns), text=text, finish_reason="stop")
    trajectory.turns.append(turn)
    return turn


async def run_command(
    context: AgentContext,
    turn: Turn,
    command: str,
    *,
    timeout: float | None = None,
    output_bytes: int = OUTPUT_BYTES,
    recorded_as: str | None = None,
) -> CommandResult:
    """Run `command` in the agent's shell as one of `turn`. It is in the trajectory before it runs, so that one
    that was under way when the attempt ended is seen too: its exit code is None. `recorded_as` is what the
    trajectory holds in the place of a command that has secrets in it."""
    shown = command if recorded_as is None else recorded_as
    record = CommandRecord(shown, None, "", "", 0.0, note="[the attempt ended while this command ran]")
    turn.commands.append(record)
    context.emit(f"$ {shown}")
    result = await context.shell.run(command, timeout=timeout, output_bytes=output_bytes)
    record.exit_code = result.exit_code
    record.stdout = result.stdout.decode("utf-8", "replace")
    record.stderr = result.stderr.decode("utf-8", "replace")
    record.seconds = result.seconds
    record.timed_out = result.timed_out
    record.omitted_bytes = result.omitted_bytes
    record.note = result.note
    return result
