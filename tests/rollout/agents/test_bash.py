"""The plain loop: one bash block a turn, its output back, until done or at a limit."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.agents.base import load_agent
from rollcage.rollout.agents.bash import Action, BashAgent, parse_action
from rollcage.rollout.clock import AgentClock
from rollcage.rollout.outcome import AgentStopped, PolicyError
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.task import Step


def block(*lines: str, label: str = "bash") -> str:
    return "\n".join([f"```{label}", *lines, "```"])


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        (block("ls"), Action("ls", False)),
        (f"I look.\n\n{block('ls', label='sh')}\nThen I see.", Action("ls", False)),
        (block("ls", label=""), Action("ls", False)),
        (block("ls", label="Shell "), Action("ls", False)),
        ("```bash\r\nls\r\n```\r\n", Action("ls", False)),
        (f"{block('x', label='python')}\n{block('ls')}", Action("ls", False)),
        (f"{block('output', label='')}\n{block('ls')}", Action("ls", False)),
        (f"Create it.\n```\n\nAnd run `ls`.\n{block('mkdir d')}\nDone.", Action("mkdir d", False)),
        (block("submit"), Action("", True)),
        (block("make", "", "submit", ""), Action("make", True)),
        (block("echo 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT'"), Action("", True)),
        (block("echo submit"), Action("echo submit", False)),
        (block("cat > f <<'E'", "```x", "E"), Action("cat > f <<'E'\n```x\nE", False)),
        ("````bash\ncat > f <<E\n```\nE\n````", Action("cat > f <<E\n```\nE", False)),
        (block("printf 'a\u2028b\x0cc\x85d\re'"), Action("printf 'a\u2028b\x0cc\x85d\re'", False)),
        (f"{block('ls')}\n{block('pwd')}", None),
        ("no block", None),
        ("```bash\nls", None),
        (block(""), None),
        (block("x", label="python"), None),
        ("run `ls` or ```ls```", None),
    ],
)
def test_an_answer_holds_one_action_or_is_malformed(answer: str, action: Action | None) -> None:
    if action is None:
        with pytest.raises(ValueError, match=r"it held|was empty"):
            parse_action(answer)
    else:
        assert parse_action(answer) == action


async def test_commands_are_run_in_one_shell_until_submit(make_context: Any, tmp_path: Path) -> None:
    context = make_context([block("mkdir d && cd d", "x=5"), block("echo $x > f"), block("submit")])
    await BashAgent().run(context)
    assert (tmp_path / "workdir" / "d" / "f").read_text() == "5\n"
    roles = [message.role for message in context.trajectory.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user", "assistant"]
    assert context.trajectory.messages[1].content == "Do it."
    assert [turn.index for turn in context.trajectory.turns] == [0, 1, 2]


async def test_lines_before_submit_are_run(make_context: Any, tmp_path: Path) -> None:
    await BashAgent().run(make_context([block("echo hi > f", "submit")]))
    assert (tmp_path / "workdir" / "f").read_text() == "hi\n"


async def test_the_policy_reads_status_output_and_errors(make_context: Any) -> None:
    context = make_context([block("echo out; echo err >&2; false"), block("submit")])
    await BashAgent().run(context)
    said = context.trajectory.messages[3].content
    assert said == "<exit_code>1</exit_code>\n<stdout>\nout\n</stdout>\n<stderr>\nerr\n</stderr>"
    (command,) = context.trajectory.turns[0].commands
    assert (command.exit_code, command.stdout, command.stderr) == (1, "out\n", "err\n")


async def test_the_policy_is_told_what_was_left_out(make_context: Any) -> None:
    context = make_context([block("seq 1000"), block("submit")])
    await BashAgent(output_bytes=100).run(context)
    assert "[3793 bytes of output were left out]" in context.trajectory.messages[3].content
    assert context.trajectory.turns[0].commands[0].omitted_bytes == 3793


async def test_a_command_past_its_time_is_stopped_and_the_agent_goes_on(make_context: Any) -> None:
    context = make_context([block("sleep 60"), block("echo after"), block("submit")])
    await BashAgent(command_timeout_sec=0.3).run(context)
    first, second = (turn.commands[0] for turn in context.trajectory.turns[:2])
    assert first.timed_out
    assert first.exit_code is None
    assert "the shell was replaced after a timeout" in context.trajectory.messages[3].content
    assert second.stdout == "after\n"


async def test_output_that_says_submit_does_not_end_the_run(make_context: Any) -> None:
    context = make_context([block("printf '```bash\\nsubmit\\n```\\n'"), block("echo on"), block("submit")])
    await BashAgent().run(context)
    assert len(context.trajectory.turns) == 3


async def test_a_malformed_answer_is_told_so_and_may_be_mended(make_context: Any) -> None:
    context = make_context(["hm", block("ls") + "\n" + block("pwd"), block("submit")])
    await BashAgent(max_malformed=3).run(context)
    assert [turn.malformed for turn in context.trajectory.turns] == [True, True, False]
    assert "it held no bash block" in context.trajectory.messages[3].content
    assert "it held 2 bash blocks" in context.trajectory.messages[5].content


async def test_malformed_answers_in_a_row_stop_the_agent(make_context: Any) -> None:
    context = make_context(["hm", block("true"), "hm", "hm"])
    with pytest.raises(AgentStopped) as stopped:
        await BashAgent(max_malformed=2).run(context)
    assert stopped.value.error_class == "malformed_actions"
    assert len(context.trajectory.turns) == 4


async def test_turns_are_limited(make_context: Any) -> None:
    context = make_context([block("true")])
    with pytest.raises(AgentStopped) as stopped:
        await BashAgent(max_turns=3).run(context)
    assert stopped.value.error_class == "turn_limit"
    assert len(context.trajectory.turns) == 3


async def test_tokens_are_limited_and_never_overdrawn(make_context: Any) -> None:
    context = make_context([block("echo a long command")], tokens=True)
    with pytest.raises(AgentStopped) as stopped:
        await BashAgent(max_tokens=50, max_malformed=9).run(context)
    assert stopped.value.error_class == "token_limit"
    assert [turn.completion_len for turn in context.trajectory.turns] == [32, 18]
    assert [turn.finish_reason for turn in context.trajectory.turns] == ["stop", "length"]
    assert "cut off at the token limit" not in context.trajectory.messages[3].content


async def test_an_answer_cut_by_the_agents_own_limit_is_not_called_malformed(make_context: Any) -> None:
    context = make_context([block("echo a long command")], tokens=True)
    with pytest.raises(AgentStopped) as stopped:
        await BashAgent(max_tokens=50, max_malformed=1).run(context)
    assert stopped.value.error_class == "token_limit"
    assert [turn.malformed for turn in context.trajectory.turns] == [False, True]


async def test_an_answer_cut_by_its_length_is_told_so(make_context: Any) -> None:
    context = make_context([block("echo a long command")], tokens=True, sampling=Sampling(max_tokens=9))
    with pytest.raises(AgentStopped):
        await BashAgent(max_malformed=2).run(context)
    assert "cut off at the token limit" in context.trajectory.messages[3].content


async def test_a_refusal_ends_the_agent_at_once(make_context: Any) -> None:
    context = make_context([{"text": "I will not.", "finish_reason": "refusal"}, block("submit")])
    with pytest.raises(AgentStopped, match="the policy refused to answer: I will not") as stopped:
        await BashAgent().run(context)
    assert stopped.value.error_class == "malformed_actions"
    assert [turn.malformed for turn in context.trajectory.turns] == [True]


async def test_an_output_is_cut_to_tokens_and_kept_whole_in_the_record(make_context: Any) -> None:
    context = make_context([block("seq 1000"), block("submit")])
    await BashAgent(max_output_tokens=50).run(context)
    said = context.trajectory.messages[3].content
    assert len(said) < 300
    assert re.search(r"\n\[\.\.\. 9\d\d tokens left out \.\.\.\]\n", said)
    assert len(context.trajectory.turns[0].commands[0].stdout) == 3893


async def test_each_turn_points_at_its_tokens(make_context: Any) -> None:
    context = make_context([block("echo 1"), block("echo 2"), block("submit")], tokens=True)
    await BashAgent().run(context)
    (segment,) = context.session.segments
    for turn in context.trajectory.turns:
        assert turn.segment == 0
        completion = segment.ids[turn.prompt_len : turn.prompt_len + turn.completion_len]
        assert bytes(completion[:-1]).decode() == turn.text
        assert turn.policy == "scripted"


async def test_an_overflow_of_the_context_passes_through_with_what_there_was(make_context: Any) -> None:
    context = make_context([block("echo 1"), {"error": "context_overflow"}])
    with pytest.raises(PolicyError) as stopped:
        await BashAgent().run(context)
    assert stopped.value.error_class == "context_overflow"
    assert len(context.trajectory.turns) == 1
    assert context.trajectory.turns[0].commands[0].stdout == "1\n"


async def test_only_generation_is_charged_while_the_policy_is_waited_for(make_context: Any) -> None:
    now = [0.0]
    clock = AgentClock(100.0, now=lambda: now[0])
    context = make_context([block("submit")], clock=clock)
    answer = context.session.complete

    async def late(*arguments: Any, **asked: Any) -> Any:
        completion, segment = await answer(*arguments, **asked)
        now[0] += 50.0
        completion.generate_seconds = 8.0
        return completion, segment

    context.session.complete = late
    await BashAgent().run(context)
    assert clock.used == pytest.approx(8.0)
    assert clock.infra_seconds == pytest.approx(42.0)


async def test_a_command_that_runs_when_the_attempt_ends_is_in_the_trajectory(make_context: Any) -> None:
    running = asyncio.Event()
    context = make_context([block("echo ready; sleep 60")])
    context.emit = lambda line: running.set() if line.startswith("$") else None
    work = asyncio.ensure_future(BashAgent().run(context))
    await running.wait()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    (command,) = context.trajectory.turns[0].commands
    assert (command.command, command.exit_code) == ("echo ready; sleep 60", None)
    assert "the attempt ended" in command.note


async def test_the_next_step_goes_on_in_the_same_conversation(make_context: Any) -> None:
    agent, context = BashAgent(), make_context([block("submit")])
    await agent.run(context)
    context.step = Step("second", "Now this.", tests=Path(), solution=None)
    await agent.run(context)
    contents = [(message.role, message.content) for message in context.trajectory.messages]
    assert contents[3] == ("user", "Now this.")
    assert [role for role, _ in contents].count("system") == 1
    assert [turn.index for turn in context.trajectory.turns] == [0, 1]


async def test_what_a_step_asked_in_vain_is_not_in_the_record_of_the_next(make_context: Any) -> None:
    agent = BashAgent(system_prompt="")
    context = make_context([block("echo 1"), {"error": "context_overflow"}, block("submit")])
    with pytest.raises(PolicyError):
        await agent.run(context)
    assert [message.role for message in context.trajectory.messages] == ["user", "assistant", "user"]
    context.step = Step("second", "Now this.", tests=Path(), solution=None)
    await agent.run(context)
    said = [(message.role, message.content) for message in context.trajectory.messages]
    assert said == [
        ("user", "Do it."),
        ("assistant", block("echo 1")),
        ("user", "Now this."),
        ("assistant", block("submit")),
    ]


async def test_prompts_can_be_replaced_by_texts_and_files(make_context: Any, tmp_path: Path) -> None:
    (tmp_path / "task.md").write_text("Task: {instruction}\n")
    context = make_context([block("submit")])
    await BashAgent(system_prompt="", task_prompt=str(tmp_path / "task.md")).run(context)
    assert [message.content for message in context.trajectory.messages[:-1]] == ["Task: Do it."]


def test_it_is_found_by_name_and_refuses_options_it_does_not_have() -> None:
    assert load_agent("bash", {"max_turns": 5}).needs_policy
    with pytest.raises(ValueError, match="does not take these options"):
        load_agent("bash", {"turns": 5})
    with pytest.raises(ValueError, match="must be above 0"):
        load_agent("bash", {"max_turns": 0})
