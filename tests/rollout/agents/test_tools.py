"""The loop of tool calls: what is run, what the policy is told of it, and how it ends."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from rollcage.rollout.agents.base import load_agent
from rollcage.rollout.agents.replay import ReplayAgent
from rollcage.rollout.agents.tool_table import SUBMIT, TOOLS, CallProblem, call_structure, read_call
from rollcage.rollout.agents.tools import ToolsAgent
from rollcage.rollout.outcome import AgentStopped
from rollcage.rollout.task import Step
from rollcage.rollout.trajectory import Message


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def calls(*made: dict[str, Any], text: str = "") -> dict[str, Any]:
    return {"text": text, "tool_calls": list(made)}


def sh(command: str, **arguments: Any) -> dict[str, Any]:
    return calls(call("bash", command=command, **arguments))


def told(context: Any) -> list[str]:
    return [message.content for message in context.trajectory.messages if message.role in ("tool", "user")][
        1:
    ]


async def test_calls_are_run_in_one_shell_until_an_answer_without_one(
    make_context: Any, tmp_path: Path
) -> None:
    context = make_context([sh("mkdir d && cd d; x=5"), sh("echo $x > f; pwd"), "It is done."])
    await ToolsAgent().run(context)
    assert (tmp_path / "workdir" / "d" / "f").read_text() == "5\n"
    roles = [message.role for message in context.trajectory.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [turn.finish_reason for turn in context.trajectory.turns] == ["tool_calls", "tool_calls", "stop"]
    assert "answer without calling a tool" in context.trajectory.messages[0].content


async def test_several_calls_of_one_answer_are_run_in_order_and_each_is_answered(make_context: Any) -> None:
    bad = {"name": "bash", "arguments": '{"command": "ls'}
    context = make_context(
        [calls(call("bash", command="echo one"), bad, call("bash", command="echo two")), "done"]
    )
    await ToolsAgent(max_malformed=1).run(context)
    answer = context.trajectory.messages[2]
    answers = [message for message in context.trajectory.messages if message.role == "tool"]
    assert [message.tool_call_id for message in answers] == [made.id for made in answer.tool_calls]
    assert [command.command for command in context.trajectory.turns[0].commands] == ["echo one", "echo two"]
    assert "one" in answers[0].content
    assert answers[1].content.startswith("[not run: the arguments of bash are no JSON: ")
    assert "two" in answers[2].content
    assert not context.trajectory.turns[0].malformed


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("bash", "{", "the arguments of bash are no JSON"),
        ("bash", "[1]", "the arguments of bash are no JSON object"),
        ("bash", "", "the call of bash has no 'command', which it needs"),
        ("bash", '{"command": null}', "has no 'command'"),
        ("bash", '{"cmd": "ls", "command": "ls"}', "bash has no argument 'cmd'; it has command, timeout"),
        ("bash", '{"command": 5}', "'command' of bash must be a JSON string"),
        ("bash", '{"command": "ls", "timeout": true}', "'timeout' of bash must be a JSON number"),
        ("bash", '{"command": "ls", "timeout": 0}', "'timeout' of bash must be above 0"),
        ("bash", '{"command": "ls", "timeout": NaN}', "'timeout' of bash must be above 0"),
        ("bash", '{"command": "a\\u0000b"}', "'command' of bash holds a NUL"),
        ("bash", '{"command": "\\ud83d"}', "half a surrogate pair"),
        ("read_file", '{"path": "f", "start_line": 0}', "'start_line' of read_file must be at least 1"),
        ("read_file", '{"path": "f", "end_line": 1.5}', "'end_line' of read_file must be a JSON integer"),
        ("bash", "[" * 5000, "the arguments of bash are no JSON: it is nested too deeply"),
        ("bash", '{"command": "ls", "timeout": 1e999}', "'timeout' of bash must be above 0 and finite"),
        ("python", "{}", "there is no tool 'python'; there are bash, read_file, write_file, edit"),
    ],
)
def test_a_call_that_cannot_be_run_is_told_why(name: str, arguments: str, said: str) -> None:
    with pytest.raises(CallProblem) as problem:
        read_call(name, arguments, TOOLS)
    assert said in str(problem.value)


def test_what_fits_the_schema_loosely_is_taken() -> None:
    read = read_call("read_file", '{"path": "f", "start_line": 3.0, "end_line": null}', TOOLS)
    assert read.arguments == {"path": "f", "start_line": 3}


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (calls(call("bash")), "has no 'command'"),
        ({"text": ""}, "it was empty"),
        ({"text": "<tool_call>\n{"}, "written as text"),
        ({"text": "I shall now", "finish_reason": "length"}, "cut off at the token limit"),
        ({"reasoning": "I am done."}, "it was empty"),
    ],
)
async def test_answers_in_a_row_without_a_call_that_can_be_read_stop_the_agent(
    make_context: Any, answer: Any, said: str
) -> None:
    context = make_context([answer, sh("true"), answer, answer, sh("true")])
    with pytest.raises(AgentStopped) as stopped:
        await ToolsAgent(max_malformed=2).run(context)
    assert stopped.value.error_class == "malformed_actions"
    assert said in str(stopped.value)
    assert [turn.malformed for turn in context.trajectory.turns] == [True, False, True, True]
    assert said in told(context)[0]


async def test_an_answer_without_a_call_is_no_end_before_there_was_one(make_context: Any) -> None:
    context = make_context(["Shall I begin?", sh("true"), "Done."])
    await ToolsAgent().run(context)
    assert [turn.malformed for turn in context.trajectory.turns] == [True, False, False]
    assert (
        "it called no tool. Answer with a call of a tool. When the task is done, answer" in told(context)[0]
    )


async def test_a_refusal_ends_the_agent_at_once(make_context: Any) -> None:
    context = make_context([{"text": "I will not.", "finish_reason": "refusal"}, "done"])
    with pytest.raises(AgentStopped, match="the policy refused to answer: I will not") as stopped:
        await ToolsAgent().run(context)
    assert stopped.value.error_class == "malformed_actions"
    assert [turn.finish_reason for turn in context.trajectory.turns] == ["refusal"]


@pytest.mark.parametrize("arguments", ['{"command": "rm -r "', '{"command": "rm -r ."}'])
async def test_a_call_that_was_cut_off_is_not_run_and_told_so(make_context: Any, arguments: str) -> None:
    last = {"name": "bash", "arguments": arguments}  # some servers' parsers end what was cut
    context = make_context(
        [calls(call("bash", command="echo one"), last) | {"finish_reason": "length"}, sh("true"), "done"]
    )
    await ToolsAgent().run(context)
    first, second = told(context)[:2]
    assert "one" in first
    assert second == "[not run: the answer was cut off at the token limit, and this call with it]"
    assert [command.command for command in context.trajectory.turns[0].commands] == ["echo one"]
    assert not context.trajectory.turns[0].malformed


async def test_with_submit_only_the_call_ends_it(make_context: Any, tmp_path: Path) -> None:
    turns = [
        "I am done.",
        calls(call("write_file", path="f", content="x"), call("submit"), call("bash", command="rm f")),
    ]
    context = make_context(turns)
    await ToolsAgent(done="submit").run(context)
    assert (
        "it called no tool. Answer with a call of a tool. When the task is done, call `submit`."
        in told(context)[0]
    )
    assert (tmp_path / "workdir" / "f").read_text() == "x"
    assert [turn.malformed for turn in context.trajectory.turns] == [True, False]


async def test_a_command_may_ask_for_its_own_time_up_to_a_limit(make_context: Any) -> None:
    context = make_context([sh("sleep 60", timeout=0.2), sh("sleep 60", timeout=1000), "done"])
    await ToolsAgent(max_command_timeout_sec=0.3, command_timeout_sec=0.1).run(context)
    first, second = (turn.commands[0] for turn in context.trajectory.turns[:2])
    assert first.timed_out
    assert first.seconds < 0.3 <= second.seconds < 30


async def test_a_commands_output_is_cut_to_tokens(make_context: Any) -> None:
    context = make_context([sh("seq 1000; seq 5 >&2"), "done"], tokens=True)
    await ToolsAgent(max_output_tokens=200).run(context)
    said = told(context)[0]
    assert len(said) < 350
    assert "<stdout>\n1\n2\n3\n" in said
    assert "\n999\n1000\n</stdout>" in said
    head, left_out, tail = re.split(r"\n\[\.\.\. (\d+) tokens left out \.\.\.\]\n", said)
    shown = len(head.partition("<stdout>\n")[2]) + len(tail.partition("\n</stdout>")[0])
    assert shown + int(left_out) == len("".join(f"{number}\n" for number in range(1, 1001))) - 2
    assert "<stderr>\n1\n2\n3\n4\n5\n</stderr>" in said
    assert context.trajectory.turns[0].commands[0].stdout.endswith("1000\n")


async def test_what_was_run_can_be_replayed(make_context: Any, tmp_path: Path) -> None:
    turns = [
        sh("mkdir d && cd d"),
        calls(call("write_file", path="e/f", content="it's\nold\n"), call("read_file", path="e/f")),
        calls(call("edit", path="e/f", old_string="old", new_string="new")),
        "done",
    ]
    context = make_context(turns)
    await ToolsAgent().run(context)
    commands = [command.command for turn in context.trajectory.turns for command in turn.commands]
    (tmp_path / "again.json").write_text(json.dumps({"commands": commands}))
    await make_context().shell.run("cd .. && rm -r d")
    assert not (tmp_path / "workdir" / "d").exists()
    await ReplayAgent(path=str(tmp_path / "again.json")).run(make_context())
    assert (tmp_path / "workdir" / "d" / "e" / "f").read_text() == "it's\nnew\n"


async def test_the_next_step_answers_the_last_calls_first(make_context: Any) -> None:
    agent = ToolsAgent(done="submit", max_turns=1)
    context = make_context(
        [calls(call("bash", command="true"), call("submit")), sh("true"), calls(call("submit"))]
    )
    await agent.run(context)
    context.step = Step("second", "Now this.", tests=Path(), solution=None)
    with pytest.raises(AgentStopped, match="turn_limit"):
        await agent.run(context)
    context.step = Step("third", "And this.", tests=Path(), solution=None)
    await agent.run(context)
    said = [(message.role, message.content) for message in context.trajectory.messages]
    assert [role for role, _ in said] == [
        *("system", "user", "assistant", "tool", "tool", "user"),
        *("assistant", "tool", "user", "assistant"),
    ]
    assert [content for _, content in said[4:6]] == ["[submitted]", "Now this."]
    assert said[7][1].startswith("[the step had ended")
    assert said[8][1] == "And this."


async def test_a_structured_answer_is_one_call(make_context: Any, tmp_path: Path) -> None:
    def answer(tool: str, **arguments: Any) -> str:
        return json.dumps({"tool": tool, "arguments": arguments})

    turns = [
        answer("bash", command="echo hi > f"),
        f"```json\n{answer('read_file', path='f')}\n```",
        "no object",
        {"text": '{"tool": "bash", "argum', "finish_reason": "length"},
        answer("submit"),
    ]
    context = make_context(turns)
    asked = []
    complete = context.session.complete

    async def noted(new: list[Message], sampling: Any, **settings: Any) -> Any:
        asked.append(settings)
        return await complete(new, sampling, **settings)

    context.session.complete = noted
    agent = ToolsAgent(structured=True)
    await agent.run(context)
    assert (tmp_path / "workdir" / "f").read_text() == "hi\n"
    assert told(context)[1] == "     1\thi"
    assert "it is no JSON" in told(context)[2]
    assert "cut off" in told(context)[3]
    assert [turn.malformed for turn in context.trajectory.turns] == [False, False, True, True, False]
    assert all(settings == {"tools": (), "structure": agent.structure} for settings in asked)
    assert '{"tool": "edit", "description": ' in context.trajectory.messages[0].content


def test_the_form_of_structured_calls_is_one_that_engines_take() -> None:
    structure = call_structure((*TOOLS, SUBMIT))
    grammar = xgrammar.Grammar.from_json_schema(json.dumps(structure.json_schema))
    assert "read_file" in str(grammar)


def test_it_is_found_by_name_and_says_what_is_wrong_with_its_options() -> None:
    assert load_agent("tools", {"structured": True, "max_turns": 5}).needs_policy
    with pytest.raises(ValueError, match="does not take these options"):
        load_agent("tools", {"examples": []})
    with pytest.raises(ValueError, match="done must be 'answer' or 'submit', not 'now'"):
        load_agent("tools", {"done": "now"})
    with pytest.raises(ValueError, match=r"system_prompt has no \{tools\}"):
        load_agent("tools", {"structured": True, "system_prompt": "Call tools."})
