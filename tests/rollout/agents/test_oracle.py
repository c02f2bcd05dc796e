"""The oracle runs the task's own solution; the nop agent nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.agents import oracle
from rollcage.rollout.agents.nop import NopAgent
from rollcage.rollout.agents.oracle import OracleAgent
from rollcage.rollout.outcome import TaskError
from rollcage.rollout.task import Environment, Step, Task


@pytest.fixture
def solution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A step's `solution/`; the sandbox's `/solution` is a directory of the test."""
    monkeypatch.setattr(oracle, "SCRIPT", f"{tmp_path}/solution/solve.sh")
    directory = tmp_path / "task" / "solution"
    directory.mkdir(parents=True)
    return directory


def script(solution: Path, text: str, mode: int = 0o755) -> None:
    (solution / "solve.sh").write_bytes(text.encode())
    (solution / "solve.sh").chmod(mode)


def step(solution: Path | None, name: str = "main") -> Step:
    return Step(name, "Do it.", tests=Path("tests"), solution=solution)


async def test_the_solution_runs_in_the_workdir_with_its_environment(
    make_context: Any, solution: Path, tmp_path: Path
) -> None:
    script(solution, '#!/bin/sh\necho "$GREETING" > answer.txt\n')
    task = Task(
        "t", tmp_path, "", Environment(None, "image"), (), solution_env={"GREETING": "it's $HOME; ok"}
    )
    context = make_context(task=task, step=step(solution))
    await OracleAgent().run(context)
    assert (tmp_path / "workdir" / "answer.txt").read_text() == "it's $HOME; ok\n"
    (command,) = context.trajectory.turns[0].commands
    assert command.exit_code == 0


async def test_variables_of_the_environment_table_are_resolved(
    make_context: Any, solution: Path, tmp_path: Path
) -> None:
    script(solution, '#!/bin/sh\necho "$KEY $MODE" > answer.txt\n')
    env = {"KEY": "${SECRET}", "MODE": "${MODE:-fast}"}
    task = Task("t", tmp_path, "", Environment(None, "image"), (), solution_env=env)
    await OracleAgent().run(make_context(task=task, step=step(solution), environ={"SECRET": "a b"}))
    assert (tmp_path / "workdir" / "answer.txt").read_text() == "a b fast\n"


async def test_a_solution_that_fails_is_simply_done(make_context: Any, solution: Path) -> None:
    script(solution, "#!/bin/sh\necho no >&2\nexit 7\n")
    context = make_context(step=step(solution))
    await OracleAgent().run(context)
    (command,) = context.trajectory.turns[0].commands
    assert (command.exit_code, command.stderr) == (7, "no\n")


@pytest.mark.parametrize(
    ("text", "mode"),
    [("#!/bin/bash\r\necho yes > answer.txt\r\n", 0o755), ("#!/bin/sh\necho yes > answer.txt\n", 0o600)],
    ids=["crlf", "not executable"],
)
async def test_a_script_with_windows_line_ends_or_no_mode_runs(
    make_context: Any, solution: Path, tmp_path: Path, text: str, mode: int
) -> None:
    script(solution, text, mode)
    await OracleAgent().run(make_context(step=step(solution)))
    assert (tmp_path / "workdir" / "answer.txt").read_text() == "yes\n"


async def test_ignored_files_are_left_out(make_context: Any, solution: Path, tmp_path: Path) -> None:
    script(solution, f"#!/bin/sh\nls -A {tmp_path}/solution > answer.txt\n")
    (solution / "notes.md").touch()
    (solution / "data.bin").touch()
    (solution / ".harborignore").write_text("*.md\n")
    await OracleAgent().run(make_context(step=step(solution)))
    names = (tmp_path / "workdir" / "answer.txt").read_text().split()
    assert "data.bin" in names
    assert "notes.md" not in names


async def test_a_later_step_does_not_see_the_earlier_ones_solution(
    make_context: Any, solution: Path, tmp_path: Path
) -> None:
    script(solution, "#!/bin/sh\ntrue\n")
    (solution / "left").touch()
    second = tmp_path / "task" / "second"
    second.mkdir()
    script(second, "#!/bin/sh\ntrue\n")
    context = make_context(step=step(solution))
    agent = OracleAgent()
    await agent.run(context)
    context.step = step(second, "second")
    await agent.run(context)
    assert [path.name for path in (tmp_path / "solution").iterdir()] == ["solve.sh"]


@pytest.mark.parametrize("there", [True, False], ids=["no script", "no directory"])
async def test_a_task_without_a_solution_is_named(make_context: Any, solution: Path, there: bool) -> None:
    with pytest.raises(TaskError) as error:
        await OracleAgent().run(make_context(step=step(solution if there else None)))
    assert error.value.error_class == "task_malformed"
    assert "org/task has no solution/solve.sh" in str(error.value)


async def test_the_nop_agent_runs_nothing(make_context: Any) -> None:
    context = make_context()
    await NopAgent().run(context)
    assert context.trajectory.turns == []
    assert context.trajectory.messages == []


async def test_what_the_host_resolved_is_not_in_the_record(
    make_context: Any, solution: Path, tmp_path: Path
) -> None:
    script(solution, "#!/bin/sh\ntrue\n")
    task = Task("t", tmp_path, "", Environment(None, "image"), (), solution_env={"KEY": "${SECRET}"})
    context = make_context(task=task, step=step(solution), environ={"SECRET": "hunter2"})
    await OracleAgent().run(context)
    assert context.trajectory.turns[0].commands[0].command == oracle.SCRIPT


async def test_a_name_that_no_variable_has_never_reaches_a_shell(
    make_context: Any, solution: Path, tmp_path: Path
) -> None:
    script(solution, "#!/bin/sh\ntrue\n")
    task = Task("t", tmp_path, "", Environment(None, "image"), (), solution_env={"X;touch pwned;Y": "x"})
    context = make_context(task=task, step=step(solution))
    with pytest.raises(TaskError, match="cannot be a variable's name") as caught:
        await OracleAgent().run(context)
    assert caught.value.error_class == "task_malformed"
    assert not context.trajectory.turns
