"""The plain loop: the policy answers with one bash block, it is run, its output goes back.

An answer holds exactly one fenced block labelled `bash`, `sh` or `shell`, or else exactly one without a label;
text around it is free. The agent is done when the last line of a block is `submit` (or mini-swe-agent's
`echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`); the lines before it are run first. Only what the policy wrote can
end the run, never what the sandbox printed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.commands import run_command
from rollcage.rollout.agents.conversation import Conversation, Limits
from rollcage.rollout.agents.observation import MAX_OUTPUT_TOKENS, OutputCap, check_caps, observation
from rollcage.rollout.agents.prompts import load_prompt
from rollcage.rollout.agents.summaries import SUMMARIZE_AT, Summaries, check_summarize_at
from rollcage.rollout.trajectory import Message, Turn

DONE = ("submit", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
LABELS = ("bash", "sh", "shell")

_FENCE = re.compile(r"[ \t]*(`{3,})([^`]*)")


@dataclass(frozen=True)
class Action:
    """What an answer asks for: a command to run (empty: none), and whether the agent is done behind it."""

    command: str
    done: bool


def parse_action(answer: str) -> Action:
    """The one action of an answer. Raises `ValueError` that tells the policy what is wrong."""
    blocks = _blocks(answer)
    labelled = [body for label, body in blocks if label in LABELS]
    chosen = labelled or [body for label, body in blocks if not label]
    if len(chosen) != 1:
        raise ValueError(f"it held {len(chosen) or 'no'} bash block{'s' if len(chosen) > 1 else ''}")
    lines = chosen[0].strip().split("\n")
    done = lines[-1].strip().replace("'", "").replace('"', "") in DONE
    command = "\n".join(lines[:-1] if done else lines).strip()
    if not command and not done:
        raise ValueError("its bash block was empty")
    return Action(command, done)


class BashAgent:
    """See the module. `system_prompt` and `task_prompt` replace the files beside this one (see `prompts.py`);
    `{instruction}` in the latter is the step's instruction. An empty `system_prompt` leaves the system message out.
    `examples`, `{instruction, answer}` each, are put before the task as turns that went well: a small model learns
    the form from them, where it cannot from words.

    Limits, each ending the agent with the error class in brackets: `max_turns` answers a step (`turn_limit`),
    `max_tokens` sampled tokens an attempt (`token_limit`; None: no limit), `max_malformed` answers in a row
    without one action (`malformed_actions`). `command_timeout_sec` stops a command and goes on.
    A command's stdout and stderr show `max_output_tokens` together (None: no limit), and `output_bytes` each.

    With `summarize`, a conversation past `summarize_at` of the model's context is summed up by the policy, as
    `summary_prompt` asks it to, and goes on in a new segment; without, it ends by `context_overflow`.
    """

    name = "bash"
    needs_policy = True

    def __init__(
        self,
        *,
        max_turns: int = 30,
        max_tokens: int | None = None,
        max_malformed: int = 3,
        command_timeout_sec: float = 60.0,
        output_bytes: int = 10_000,
        max_output_tokens: int | None = MAX_OUTPUT_TOKENS,
        system_prompt: str | None = None,
        task_prompt: str | None = None,
        examples: Sequence[Mapping[str, str]] = (),
        summarize: bool = False,
        summarize_at: float = SUMMARIZE_AT,
        summary_prompt: str | None = None,
    ) -> None:
        check_caps(command_timeout_sec, output_bytes, max_output_tokens)
        check_summarize_at(summarize_at)
        self.limits = Limits(max_turns, max_tokens, max_malformed)
        self.command_timeout_sec = command_timeout_sec
        self.output_bytes = output_bytes
        self.max_output_tokens = max_output_tokens
        self.system_prompt = load_prompt("system_prompt", system_prompt, "bash_system.md", may_be_empty=True)
        self.task_prompt = load_prompt("task_prompt", task_prompt, "bash_task.md", needed=["instruction"])
        self.examples = [_example(example) for example in examples]
        self.summarize = summarize
        self.summarize_at = summarize_at
        self.summary_prompt = load_prompt(
            "summary_prompt", summary_prompt, "summary.md", known=["instruction"]
        )

    async def run(self, context: AgentContext) -> None:
        opening = self._opening(context.step.instruction)
        talk = Conversation(context, self.limits, self._summaries(context, opening))
        cap = OutputCap(self.max_output_tokens, talk.count_tokens)
        new = opening[-1:] if talk.begun else opening
        while True:
            turn, made = await talk.ask(new)
            try:
                action = parse_action(made.text)
            except ValueError as problem:
                talk.malformed(turn, str(problem))
                new = [Message("user", _malformed(problem, turn), turn.index)]
                continue
            talk.well_formed()
            if action.command:
                result = await run_command(
                    context,
                    turn,
                    action.command,
                    timeout=self.command_timeout_sec,
                    output_bytes=self.output_bytes,
                )
                new = [Message("user", observation(result, cap), turn.index)]
                context.emit(new[0].content)
            if action.done:
                return

    def _opening(self, instruction: str) -> list[Message]:
        """The messages before the first answer; a later step of the task adds only the last, its own."""
        opening = [Message("system", self.system_prompt.filled({}))] if self.system_prompt else []
        for example, answer in self.examples:
            opening += [Message("user", self._ask(example)), Message("assistant", answer)]
        return [*opening, Message("user", self._ask(instruction))]

    def _ask(self, instruction: str) -> str:
        return self.task_prompt.filled({"instruction": instruction.strip()})

    def _summaries(self, context: AgentContext, opening: Sequence[Message]) -> Summaries | None:
        if not self.summarize:
            return None
        request = self.summary_prompt.filled({"instruction": context.step.instruction.strip()})
        return Summaries(opening, request, self.summarize_at)


def _malformed(problem: ValueError, turn: Turn) -> str:
    cut = " It was cut off at the token limit." if turn.finish_reason == "length" else ""
    return (
        f"Your answer could not be read: {problem}.{cut} Answer with exactly one block:\n"
        "```bash\nyour command\n```\nWhen the task is done, the command is: submit"
    )


def _blocks(answer: str) -> Sequence[tuple[str, str]]:
    """Label and body of each closed fence. As in CommonMark, a fence is closed by a bare one at least as long;
    one that stays open to the end is no block. Unlike there, a stray bare fence does not swallow a labelled block
    behind it: small models leave such fences, and their prose must not be run."""
    blocks: list[tuple[str, str]] = []
    opening: tuple[str, str] | None = None
    body: list[str] = []
    # `splitlines` would make newlines of form feeds and others that a command may hold.
    for line in answer.replace("\r\n", "\n").split("\n"):
        fence = _FENCE.fullmatch(line)
        label = fence[2].strip().lower() if fence else ""
        if fence and (opening is None or (not opening[1] and label in LABELS)):
            opening, body = (fence[1], label), []
        elif opening is None:
            continue
        elif fence and not label and len(fence[1]) >= len(opening[0]):
            blocks.append((opening[1], "\n".join(body)))
            opening = None
        else:
            body.append(line)
    return blocks


def _example(example: Mapping[str, str]) -> tuple[str, str]:
    if set(example) != {"instruction", "answer"}:
        raise ValueError(f"an example has an `instruction` and an `answer`, not {', '.join(sorted(example))}")
    try:
        parse_action(example["answer"])
    except ValueError as problem:
        raise ValueError(f"the example {example['instruction']!r} teaches nothing: {problem}") from problem
    return example["instruction"], example["answer"].strip()
