"""The loop of native tool calls: the policy calls tools, they are run in order, what each said goes back.

The agent is done when the policy answers without calling a tool, as in Anthropic's and OpenAI's own loops; with
`done: submit` only when it calls `submit`, and an answer without a call is malformed, as for mini-swe-agent. It is not
asked whether it is sure: a second question changes right answers, too. An answer without a call is malformed in
either case where it is empty, was cut off, holds a call that was written as text, or comes before any call has been
made: a policy whose calls nobody tells from its text must not look like one that is done.

A call that cannot be read gets an answer that says why, and the others of the same answer are run all the same; where
none of them could be read, the answer is malformed. What is run is in the turn's commands, so that `replay` repeats
it: of `edit` the command that changes the file, not the one that looks into it.

With `structured`, for policies without tool calls of their own, an answer is one JSON object `{tool, arguments}`,
which the engine is asked to hold it to; the agent is then done by `submit`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Literal

from rollcage.rollout.agents import tool_table
from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.commands import run_command
from rollcage.rollout.agents.conversation import Conversation, Limits
from rollcage.rollout.agents.observation import MAX_OUTPUT_TOKENS, OutputCap, check_caps, observation
from rollcage.rollout.agents.prompts import load_prompt
from rollcage.rollout.agents.summaries import SUMMARIZE_AT, Summaries, check_summarize_at
from rollcage.rollout.agents.tool_files import FileProblem, edit_file, read_file, write_file
from rollcage.rollout.agents.tool_table import Call, CallProblem, read_call, read_structured
from rollcage.rollout.policies.base import Completion
from rollcage.rollout.sandbox.base import CommandResult
from rollcage.rollout.trajectory import Message, ToolCall, Trajectory, Turn

FINISH = {
    "answer": "When the task is done, answer without calling a tool.",
    "submit": "When the task is done, call `submit`.",
    "structured": 'When the task is done, answer: {"tool": "submit", "arguments": {}}',
}

STEP_ENDED = "[the step had ended: nothing of this was run or can be shown]"

_CALL_IN_TEXT = re.compile(r"<tool_call>|<function[=_]|<\|tool_call|\[TOOL_CALLS\]|<\uff5ctool")
"""How models write calls that their server was to take out of the text: Qwen's and Hermes', Llama's, Mistral's,
DeepSeek's."""


class ToolsAgent:
    """See the module. `system_prompt`, `task_prompt`, `summary_prompt`: as for `BashAgent`; the system prompt's
    `{finish}` says how to end, and `{tools}`, which a `structured` one must have, shows the tools' schemas.

    Limits and `summarize`: as for `BashAgent`. `command_timeout_sec` stops a command that asks for no time of its own,
    `max_command_timeout_sec` any. A command shows `max_output_tokens` and `output_bytes` of each stream; a file at
    most as much at a time.
    """

    name = "tools"
    needs_policy = True

    def __init__(
        self,
        *,
        max_turns: int = 50,
        max_tokens: int | None = None,
        max_malformed: int = 3,
        command_timeout_sec: float = 60.0,
        max_command_timeout_sec: float = 600.0,
        output_bytes: int = 10_000,
        max_output_tokens: int | None = MAX_OUTPUT_TOKENS,
        done: Literal["answer", "submit"] = "answer",
        structured: bool = False,
        system_prompt: str | None = None,
        task_prompt: str | None = None,
        summarize: bool = False,
        summarize_at: float = SUMMARIZE_AT,
        summary_prompt: str | None = None,
    ) -> None:
        check_caps(min(command_timeout_sec, max_command_timeout_sec), output_bytes, max_output_tokens)
        check_summarize_at(summarize_at)
        if done not in ("answer", "submit"):
            raise ValueError(f"`done` is answer or submit, not {done!r}")
        self.limits = Limits(max_turns, max_tokens, max_malformed)
        self.command_timeout_sec = command_timeout_sec
        self.max_command_timeout_sec = max_command_timeout_sec
        self.output_bytes = output_bytes
        self.max_output_tokens = max_output_tokens
        self.by_answer = done == "answer" and not structured
        self.tools = tool_table.TOOLS if self.by_answer else (*tool_table.TOOLS, tool_table.SUBMIT)
        self.structure = tool_table.call_structure(self.tools) if structured else None
        self.finish = FINISH["structured" if structured else done]
        self.system_prompt = load_prompt(
            "system_prompt",
            system_prompt,
            "tools_structured_system.md" if structured else "tools_system.md",
            known=["finish"],
            needed=["tools"] if structured else [],
            may_be_empty=not structured,
        )
        self.task_prompt = load_prompt("task_prompt", task_prompt, "tools_task.md", needed=["instruction"])
        self.summarize = summarize
        self.summarize_at = summarize_at
        self.summary_prompt = load_prompt(
            "summary_prompt", summary_prompt, "summary.md", known=["instruction"]
        )
        self.calls_tools = not structured
        """Whether the policy must be able to tell calls from text."""
        self._has_called = False
        self._told: list[Message] = []
        """Answers to the calls of the step's last turn, which the policy reads with the next step."""

    async def run(self, context: AgentContext) -> None:
        opening = self._opening(context)
        talk = Conversation(context, self.limits, self._summaries(context, opening))
        cap = OutputCap(self.max_output_tokens, talk.count_tokens)
        new = [*self._unanswered(context.trajectory), opening[-1]] if talk.begun else opening
        while True:
            self._told = []
            offered = () if self.structure else self.tools
            turn, made = await talk.ask(new, tools=offered, structure=self.structure)
            calls = self._calls(made)
            if not calls:
                problem = self._why_no_call(made)
                if problem is None:
                    return
                talk.malformed(turn, problem)
                new = [Message("user", self._no_call(problem), turn.index)]
                continue
            self._told, done = await self._run_all(context, talk, turn, calls, cap)
            if done:
                return
            new = self._told

    async def _run_all(
        self, context: AgentContext, talk: Conversation, turn: Turn, calls: Sequence[ToolCall], cap: OutputCap
    ) -> tuple[list[Message], bool]:
        """Run an answer's calls in order. Returns what the policy is told of each, and whether it is done."""
        told: list[Message] = []
        problems: list[str] = []
        done = False
        for call in calls:
            if done:
                content = "[not run: the task was submitted before]"
            else:
                try:
                    read = self._read(call, cut=turn.finish_reason == "length" and call is calls[-1])
                except CallProblem as problem:
                    problems.append(str(problem))
                    content = f"[not run: {problem}]"
                else:
                    done = read.tool == tool_table.SUBMIT.name
                    content = "[submitted]" if done else await self._run(context, turn, read, cap)
            told.append(self._answer(call, content, turn))
            context.emit(content)
        if len(problems) == len(calls):
            talk.malformed(turn, problems[-1])
        else:
            talk.well_formed()
            self._has_called = True
        return told, done

    async def _run(self, context: AgentContext, turn: Turn, call: Call, cap: OutputCap) -> str:
        """Run one call; what the policy is told of it."""
        given = call.arguments
        if call.tool == tool_table.BASH.name:
            seconds = min(given.get("timeout", self.command_timeout_sec), self.max_command_timeout_sec)
            return observation(
                await run_command(
                    context, turn, given["command"], timeout=seconds, output_bytes=self.output_bytes
                ),
                cap,
            )
        run = partial(self._record, context, turn)
        path = given["path"]
        try:
            if call.tool == tool_table.READ_FILE.name:
                first, last = given.get("start_line", 1), given.get("end_line")
                return await read_file(run, path, first, last, max_bytes=self.output_bytes, cap=cap)
            if call.tool == tool_table.WRITE_FILE.name:
                return await write_file(run, path, given["content"], cap)
            old, new, everywhere = given["old_string"], given["new_string"], given.get("replace_all", False)
            look = partial(self._look, context)
            return await edit_file(look, run, path, old, new, everywhere=everywhere, cap=cap)
        except FileProblem as problem:
            return f"[{call.tool} failed] {problem}"

    async def _record(
        self, context: AgentContext, turn: Turn, command: str, output_bytes: int
    ) -> CommandResult:
        return await run_command(
            context, turn, command, timeout=self.command_timeout_sec, output_bytes=output_bytes
        )

    async def _look(self, context: AgentContext, command: str, output_bytes: int) -> CommandResult:
        return await context.shell.run(command, timeout=self.command_timeout_sec, output_bytes=output_bytes)

    def _calls(self, made: Completion) -> Sequence[ToolCall]:
        """The calls of an answer. A structured one that was not cut off is one call, whatever it holds."""
        if self.structure is None:
            return made.tool_calls
        return () if made.finish_reason == "length" else (ToolCall("", "", made.text),)

    def _read(self, call: ToolCall, *, cut: bool) -> Call:
        if cut:  # some parsers read half a command as a whole one
            raise CallProblem("the answer was cut off at the token limit, and this call with it")
        if self.structure is not None:
            return read_structured(call.arguments, self.tools)
        return read_call(call.name, call.arguments, self.tools)

    def _answer(self, call: ToolCall, content: str, turn: Turn) -> Message:
        if self.structure is not None:
            return Message("user", content, turn.index)
        return Message("tool", content, turn.index, tool_call_id=call.id)

    def _why_no_call(self, made: Completion) -> str | None:
        """What is wrong with an answer without a call; None where it says that the task is done."""
        if made.finish_reason == "length":
            return "it was cut off at the token limit before it held a call"
        if _CALL_IN_TEXT.search(made.text):
            return "it held a call that was written as text and could not be read"
        if not made.text.strip():
            return "it was empty"
        return None if self.by_answer and self._has_called else "it called no tool"

    def _no_call(self, problem: str) -> str:
        form = 'with {"tool": ..., "arguments": {...}} alone' if self.structure else "with a call of a tool"
        return f"Your answer could not be used: {problem}. Answer {form}. {self.finish}"

    def _unanswered(self, trajectory: Trajectory) -> list[Message]:
        """An answer to each call of the last turn, which no policy may be left without when the next step begins."""
        last = next(message for message in reversed(trajectory.messages) if message.role == "assistant")
        told = {message.tool_call_id: message for message in self._told}
        stub = partial(Message, "tool", STEP_ENDED, last.turn)
        return [told.get(call.id) or stub(tool_call_id=call.id) for call in last.tool_calls]

    def _opening(self, context: AgentContext) -> list[Message]:
        """The messages before the first answer; a later step of the task adds only the last, its own."""
        values = {"finish": self.finish, "tools": tool_table.described(self.tools)}
        system = [Message("system", self.system_prompt.filled(values))] if self.system_prompt else []
        instruction = context.step.instruction.strip()
        return [*system, Message("user", self.task_prompt.filled({"instruction": instruction}))]

    def _summaries(self, context: AgentContext, opening: Sequence[Message]) -> Summaries | None:
        if not self.summarize:
            return None
        request = self.summary_prompt.filled({"instruction": context.step.instruction.strip()})
        return Summaries(opening, request, self.summarize_at)
