"""A recorded trajectory's commands are run again, found by task and sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.agents.base import load_agent
from rollcage.rollout.agents.replay import ReplayAgent, recordings
from rollcage.rollout.arrow import Location
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.rows import rollouts_batch
from rollcage.rollout.trajectory import Attempt, CommandRecord, Trajectory, Turn

ATIF = {
    "schema_version": "ATIF-v1.4",
    "agent": {"name": "terminus", "version": "1"},
    "steps": [
        {"step_id": 1, "source": "user", "message": "Do it."},
        {
            "step_id": 2,
            "source": "agent",
            "message": "",
            "tool_calls": [
                {"tool_call_id": "a", "function_name": "bash", "arguments": {"command": "echo one > f"}},
                {"tool_call_id": "b", "function_name": "bash", "arguments": {"command": "echo two >> f"}},
            ],
        },
        {
            "step_id": 3,
            "source": "agent",
            "message": "done",
            "tool_calls": [{"tool_call_id": "c", "function_name": "mark_task_complete", "arguments": {}}],
        },
    ],
}


def write(path: Path, *contents: Any) -> str:
    path.write_text("\n".join(json.dumps(content) for content in contents), encoding="utf-8")
    return str(path)


async def test_the_recording_of_the_same_task_and_sample_is_run(make_context: Any, tmp_path: Path) -> None:
    records = [
        {"task": "org/other", "sample": 1, "commands": ["echo other > f"]},
        {"task": "org/task", "sample": 0, "commands": ["echo first > f"]},
        {"task": "org/task", "sample": 1, "commands": ["x=second", "echo $x > f"]},
    ]
    context = make_context(sample=1)
    await ReplayAgent(path=write(tmp_path / "r.jsonl", *records)).run(context)
    assert (tmp_path / "workdir" / "f").read_text() == "second\n"
    assert [[c.command for c in turn.commands] for turn in context.trajectory.turns] == [
        ["x=second"],
        ["echo $x > f"],
    ]


async def test_another_recording_can_be_chosen(make_context: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", [{"task": "org/other", "sample": 7, "commands": ["echo other > f"]}])
    await ReplayAgent(path=path, task="org/other", sample=7).run(make_context())
    assert (tmp_path / "workdir" / "f").read_text() == "other\n"


def a_run(path: Path, commands: dict[str, str]) -> str:
    """A run directory in which each of these agents ran one command on sample 3 of org/task."""
    attempts = []
    for number, (agent, command) in enumerate(commands.items()):
        turn = Turn(0, "", "stop", commands=[CommandRecord(command, 0, "", "", 0.1)])
        made = Attempt(
            f"a{number}", "job", "org/task", "0" * 64, 3, 1, agent, "", "host", Outcome.PASSED,
            trajectory=Trajectory(turns=[turn]),
        )  # fmt: skip
        attempts.append((made, 1, 4))
    Location.of(path).write_shard("rollouts", [rollouts_batch(attempts)])
    return str(path)


async def test_a_run_is_replayed_by_task_and_sample(make_context: Any, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", {"bash": "echo bash > f"})
    await ReplayAgent(path=run).run(make_context(sample=3))
    assert (tmp_path / "workdir" / "f").read_text() == "bash\n"
    with pytest.raises(ValueError, match="no recording of org/task, sample 4"):
        await ReplayAgent(path=run).run(make_context(sample=4))


async def test_of_several_agents_in_a_run_one_is_chosen(make_context: Any, tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", {"oracle": "echo oracle > f", "bash": "echo bash > f"})
    with pytest.raises(ValueError, match="sample 3 by bash, oracle: choose one as `agent`"):
        await ReplayAgent(path=run).run(make_context(sample=3))
    await ReplayAgent(path=run, agent="oracle").run(make_context(sample=3))
    assert (tmp_path / "workdir" / "f").read_text() == "oracle\n"


async def test_an_atif_trajectory_is_replayed_turn_by_turn(make_context: Any, tmp_path: Path) -> None:
    context = make_context()
    await ReplayAgent(path=write(tmp_path / "trajectory.json", ATIF)).run(context)
    assert (tmp_path / "workdir" / "f").read_text() == "one\ntwo\n"
    assert [len(turn.commands) for turn in context.trajectory.turns] == [2, 0]


async def test_a_rollout_without_a_recording_is_refused(make_context: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", {"task": "org/other", "commands": []})
    with pytest.raises(ValueError, match=r"no recording of org/task, sample 0"):
        await ReplayAgent(path=path).run(make_context())


async def test_a_failing_command_does_not_stop_the_replay(make_context: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "r.json", {"commands": ["false", "sleep 60", "echo on > f"]})
    context = make_context()
    await ReplayAgent(path=path, command_timeout_sec=0.3).run(context)
    assert (tmp_path / "workdir" / "f").read_text() == "on\n"
    assert [turn.commands[0].exit_code for turn in context.trajectory.turns] == [1, None, 0]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", r"r\.json: this is no JSON: .* in line 1"),
        ('[{"commands": "ls"}]', r"r\.json\[0\]: a record needs `commands`"),
        ('{"commands": [], "sample": "1"}', "`sample` a number"),
        (
            '{"steps": [{"step_id": 4, "source": "agent", "tool_calls": [{"arguments": {"keystrokes": ["ls"]}}]}]}',
            "step 4: `keystrokes` are a text",
        ),
        ('{"commands": [{"keystrokes": "ls", "duration": "long"}]}', r"r\.json\[0\]: .* a number of seconds"),
        ('{"commands": [3]}', "a list of texts, or of keystrokes with a duration"),
        (
            '{"steps": [{"step_id": 4, "source": "agent", "tool_calls": [{"function_name": "edit"}]}]}',
            "step 4: the call of 'edit' names no command",
        ),
    ],
)
def test_what_cannot_be_replayed_is_refused_at_once(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(content)
    recordings.cache_clear()
    with pytest.raises(ValueError, match=said):
        ReplayAgent(path=str(path))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"/no/such\.json cannot be read: No such file"):
        load_agent("replay", {"path": "/no/such.json"})
