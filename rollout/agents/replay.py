"""The agent that runs the commands of a recorded trajectory again, in their order, without a policy. Keystrokes are
typed into the sandbox's terminal again, and waited for as they were.

`path` is one of
- a run directory: the rollout of the same task and sample (`rollouts/`, `arrow.read_rollouts`);
- a `.jsonl` or `.json` file of records `{"task": ..., "sample": ..., "commands": [...]}`, one a line, a list
  of them, or a single one. `task` and `sample` may be left out: the record then serves any. A command is a text, or
  `{"keystrokes": ..., "duration": seconds}`;
- an ATIF trajectory (`trajectory.json`): the commands of its tool calls, for any task.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.commands import add_turn, run_command
from rollcage.rollout.agents.keys_parser import Keystrokes, keystrokes
from rollcage.rollout.agents.keys_terminal import Keyboard

COMMAND_TIMEOUT_SEC = 600.0
"""A command that was stopped in the recorded attempt must not hold the replay for ever."""

Command = str | Keystrokes


@dataclass(frozen=True)
class Recording:
    """The commands of one trajectory, a tuple for each turn. `task` and `sample` None: for any. `agent`: who
    gave them, where that is known."""

    turns: tuple[tuple[Command, ...], ...]
    task: str | None = None
    sample: int | None = None
    agent: str | None = None

    def serves(self, task: str, sample: int) -> bool:
        """True where this is the recording of the given rollout, or of any."""
        return self.task in (None, task) and self.sample in (None, sample)


class ReplayAgent:
    """See the module. `task` and `sample` choose another recording than the rollout's own, `agent` one of the
    agents of a run that had several. Raises `ValueError` where the file cannot be read (at once), and where it
    does not hold one recording for the rollout."""

    name = "replay"
    needs_policy = False

    def __init__(
        self,
        *,
        path: str,
        task: str | None = None,
        sample: int | None = None,
        agent: str | None = None,
        command_timeout_sec: float = COMMAND_TIMEOUT_SEC,
    ) -> None:
        self.agent = agent
        self.task = task
        self.sample = sample
        self.command_timeout_sec = command_timeout_sec
        self.path = path
        self._recordings = recordings(path)
        self._step = 0

    async def run(self, context: AgentContext) -> None:
        """A recording holds all steps of a task; the first step runs all of it."""
        step, self._step = self._step, self._step + 1
        if step:
            return
        found = self._recording(
            context.task.name if self.task is None else self.task,
            context.sample if self.sample is None else self.sample,
        )
        keyboard = None
        for commands in found.turns:
            turn = add_turn(context.trajectory)
            for command in commands:
                if isinstance(command, str):
                    await run_command(context, turn, command, timeout=self.command_timeout_sec)
                else:
                    keyboard = keyboard or await Keyboard.open(context)
                    await keyboard.type(turn, command)

    def _recording(self, task: str, sample: int) -> Recording:
        found = [recording for recording in self._recordings if recording.serves(task, sample)]
        if self.agent is not None:
            found = [recording for recording in found if recording.agent == self.agent]
        if not found:
            by = f" by {self.agent}" if self.agent is not None else ""
            raise ValueError(f"{self.path} holds no recording of {task}, sample {sample}{by}")
        agents = {recording.agent for recording in found}
        if len(agents) > 1:
            names = ", ".join(sorted(str(agent) for agent in agents))
            raise ValueError(f"{self.path} holds {task}, sample {sample} by {names}: choose one as `agent`")
        return found[0]


@lru_cache(maxsize=8)
def recordings(path: str) -> tuple[Recording, ...]:
    """What `path` holds. Raises `ValueError` that names the place where it cannot be read."""
    place = Path(path)
    if place.is_dir():
        return tuple(_of_run(place))
    try:
        text = place.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if place.suffix == ".jsonl":
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        return tuple(
            _of_record(_parse(line, f"{path}:{number}"), f"{path}:{number}") for number, line in lines
        )
    content = _parse(text, path)
    if isinstance(content, dict) and "steps" in content:
        return (Recording(tuple(_of_atif(content["steps"], path))),)
    records = content if isinstance(content, list) else [content]
    return tuple(_of_record(record, f"{path}[{index}]") for index, record in enumerate(records))


def _of_run(run: Path) -> Iterator[Recording]:
    from rollcage.rollout.arrow import read_rollouts

    for row in read_rollouts(run, columns=("task", "draw", "sample", "agent", "turns")).to_pylist():
        if row["draw"]:
            continue  # of a task that was drawn several times, the first draw is replayed
        turns = (tuple(map(_of_row, turn["commands"])) for turn in row["turns"])
        yield Recording(tuple(turns), row["task"], row["sample"], row["agent"])


def _of_row(row: dict[str, Any]) -> Command:
    return Keystrokes(row["command"], row["seconds"]) if row["keys"] else str(row["command"])


def _of_record(record: Any, place: str) -> Recording:
    commands = record.get("commands") if isinstance(record, dict) else None
    if not isinstance(commands, list):
        raise ValueError(f"{place}: a record needs `commands`, a list of texts")
    task, sample = record.get("task"), record.get("sample")
    if not isinstance(task, str | None) or not isinstance(sample, int | None):
        raise ValueError(f"{place}: `task` is a name and `sample` a number")
    return Recording(tuple((_given(command, place),) for command in commands), task, sample)


def _given(command: Any, place: str) -> Command:
    if isinstance(command, dict):
        return _keystrokes(command, place)
    if not isinstance(command, str):
        raise ValueError(
            f"{place}: a record needs `commands`, a list of texts, or of keystrokes with a duration"
        )
    return command


def _keystrokes(given: dict[str, Any], place: str) -> Keystrokes:
    try:
        return keystrokes(given)
    except ValueError as problem:
        raise ValueError(f"{place}: {problem}") from problem


def _of_atif(steps: Any, place: str) -> Iterator[tuple[Command, ...]]:
    """The commands of each agent's step. Calls that name none cannot be replayed and are refused, not skipped, unless
    they are a mark that the task is done."""
    if not isinstance(steps, list):
        raise ValueError(f"{place}: `steps` is no list")
    for step in steps:
        calls = step.get("tool_calls") or []
        if step.get("source") == "agent" and calls:
            yield tuple(
                command for call in calls for command in _of_call(call, f"{place}, step {step['step_id']}")
            )


def _of_call(call: dict[str, Any], place: str) -> Iterator[Command]:
    arguments = call.get("arguments") or {}
    if isinstance(command := arguments.get("command", arguments.get("cmd")), str):
        yield command
    elif "keystrokes" in arguments:
        yield _keystrokes(arguments, place)
    elif call.get("function_name") not in ("mark_task_complete", "submit", "finish"):
        raise ValueError(f"{place}: the call of {call.get('function_name')!r} names no command")


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: this is no JSON: {error.msg} in line {error.lineno}") from error
