"""terminus-2's agent: the policy types into a terminal and reads its screen, in a JSON or an XML protocol.

An answer holds keystrokes, each with the seconds to wait behind them (`keys_parser`); they are typed into the
sandbox's terminal, and what came is shown (`keys_terminal`). An answer that cannot be read is told why. One that says
that the task is complete is asked whether it is sure; a second in a row ends the run. Prompts, screens and feedback
are of terminus-2's form, so that models that were trained for it run as they are; nothing is installed in the image.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.conversation import Conversation, Limits
from rollcage.rollout.agents.keys_parser import SCHEMA, Answer, MalformedAnswer, parse_json
from rollcage.rollout.agents.keys_terminal import MAX_WAIT_SEC, OUTPUT_BYTES, Keyboard, limited
from rollcage.rollout.agents.keys_xml import parse_xml
from rollcage.rollout.agents.observation import OutputCap
from rollcage.rollout.agents.prompts import Prompt, load_prompt
from rollcage.rollout.agents.summaries import SUMMARIZE_AT, Summaries, check_summarize_at
from rollcage.rollout.policies.base import Structure
from rollcage.rollout.sandbox.base import TERMINAL_COLUMNS, TERMINAL_ROWS
from rollcage.rollout.trajectory import Message, Turn

FEEDBACK_BYTES = 2000
"""Of warnings and errors: an answer of a thousand commands may have a thousand of them."""
SHOWN_BELOW = "(shown below)"

_PARSERS: dict[str, tuple[Callable[..., Answer], str, str]] = {
    "json": (parse_json, "JSON response", '"task_complete": true in your JSON response'),
    "xml": (parse_xml, "response", "<task_complete>true</task_complete>"),
}
"""By name: what reads an answer, what a right one is called, and how one says that the task is complete."""
_PLACEHOLDERS = ("instruction", "terminal_state")
_DOUBLED = re.compile(r'\{\{\s*"')


class KeysAgent:
    """See the module. `parser` is `json` or `xml`. With `structured` the engine is asked to hold answers to the JSON
    protocol's schema. `columns` and `rows` are the terminal's size, `max_wait_sec` is the most that one command is
    waited for. A turn's output shows `output_bytes`, and `max_output_tokens` (None: no limit of its own).

    `task_prompt` and `step_prompt` (for the later steps of a task, which go on in one conversation) replace the files
    beside this one, see `prompts.py`; `{instruction}` and `{terminal_state}` are filled in. A template of Harbor's,
    with all its braces doubled, does as well.

    Limits, each ending the agent with the error class in brackets: `max_turns` answers a step (`turn_limit`),
    `max_tokens` sampled tokens an attempt (`token_limit`; None: no limit), `max_malformed` answers in a row that
    cannot be read (`malformed_actions`). With `summarize`, a conversation past `summarize_at` of the model's context
    is summed up by the policy, as `summary_prompt` asks it to, and goes on with the current screen in a new segment.
    """

    name = "keys"
    needs_policy = True

    def __init__(
        self,
        *,
        parser: Literal["json", "xml"] = "json",
        structured: bool = False,
        max_turns: int = 100,
        max_tokens: int | None = None,
        max_malformed: int = 5,
        max_wait_sec: float = MAX_WAIT_SEC,
        output_bytes: int = OUTPUT_BYTES,
        max_output_tokens: int | None = None,
        columns: int = TERMINAL_COLUMNS,
        rows: int = TERMINAL_ROWS,
        task_prompt: str | None = None,
        step_prompt: str | None = None,
        summarize: bool = False,
        summarize_at: float = SUMMARIZE_AT,
        summary_prompt: str | None = None,
    ) -> None:
        if parser not in _PARSERS:
            raise ValueError(f"parser is {' or '.join(_PARSERS)}, not {parser!r}")
        if structured and parser != "json":
            raise ValueError("structured answers are JSON: leave out `structured`, or set `parser: json`")
        if output_bytes < 1 or max_wait_sec <= 0 or (max_output_tokens is not None and max_output_tokens < 1):
            raise ValueError("output_bytes, max_output_tokens and max_wait_sec must be above 0")
        check_summarize_at(summarize_at)
        self.limits = Limits(max_turns, max_tokens, max_malformed)
        self.max_wait_sec = max_wait_sec
        self.output_bytes = output_bytes
        self.max_output_tokens = max_output_tokens
        self.columns, self.rows = columns, rows
        self.structure = Structure(json_schema=SCHEMA) if structured else None
        self.parse, self._called, self._complete = _PARSERS[parser]
        self.task_prompt = _template("task_prompt", task_prompt, f"keys_{parser}.md")
        self.step_prompt = _template("step_prompt", step_prompt, "keys_step.md")
        self.summarize = summarize
        self.summarize_at = summarize_at
        self.summary_prompt = load_prompt(
            "summary_prompt", summary_prompt, "summary.md", known=["instruction"]
        )

    async def run(self, context: AgentContext) -> None:
        keyboard = await Keyboard.open(
            context, columns=self.columns, rows=self.rows, max_wait_sec=self.max_wait_sec
        )
        talk = Conversation(context, self.limits, self._summaries(context, keyboard))
        cap = OutputCap(self.max_output_tokens, talk.count_tokens)
        prompt = self.step_prompt if context.trajectory.messages else self.task_prompt
        new = [Message("user", _filled(prompt, context, cap.cut(await keyboard.look(self.output_bytes))))]
        confirming = False
        while True:
            turn, made = await talk.ask(new, structure=self.structure)
            try:
                answer: Answer = self.parse(made.text, cut=turn.finish_reason == "length")
            except MalformedAnswer as problem:
                talk.malformed(turn, str(problem))
                new = [Message("user", self._mend(problem, turn), turn.index)]
                continue
            talk.well_formed()
            await keyboard.type_all(turn, answer.commands)
            if answer.done and confirming:
                return
            confirming = answer.done
            seen = cap.cut(await keyboard.look(self.output_bytes))
            new = [Message("user", self._observation(answer, seen), turn.index)]
            context.emit(seen)

    def _observation(self, answer: Answer, seen: str) -> str:
        if answer.done:
            return (
                f"Current terminal state:\n{seen}\n\nAre you sure you want to mark the task as complete? "
                "Your solution is graded then, and you cannot correct anything any more. "
                f"If so, include {self._complete} again."
            )
        if answer.warnings:
            feedback = limited(f"WARNINGS: {_listed(answer.warnings)}", FEEDBACK_BYTES)
            return f"Previous response had warnings:\n{feedback}\n\n{seen}"
        return seen

    def _mend(self, problem: MalformedAnswer, turn: Turn) -> str:
        warnings = f"\nWARNINGS: {_listed(problem.warnings)}" if problem.warnings else ""
        feedback = limited(f"ERROR: {problem}{warnings}", FEEDBACK_BYTES)
        if turn.finish_reason == "length":
            return (
                "ERROR: none of the actions that you just requested were performed, because your response was cut "
                f"off after {turn.completion_tokens} tokens, the most that it may have. Request them again, in "
                f"several responses that are each shorter than that.\n\nOf the response as it was cut off:\n{feedback}"
            )
        return (
            f"Previous response had parsing errors:\n{feedback}\n\n"
            f"Please fix these issues and provide a proper {self._called}."
        )

    def _summaries(self, context: AgentContext, keyboard: Keyboard) -> Summaries | None:
        if not self.summarize:
            return None

        async def screen() -> str:
            return f"Current terminal state:\n{await keyboard.screen(self.output_bytes)}"

        opening = [Message("user", _filled(self.task_prompt, context, SHOWN_BELOW))]
        request = self.summary_prompt.filled({"instruction": context.step.instruction.strip()})
        return Summaries(opening, request, self.summarize_at, also=screen)


def _template(option: str, given: str | None, default: str) -> Prompt:
    prompt = load_prompt(option, given, default, needed=_PLACEHOLDERS)
    if _DOUBLED.search(prompt.text):
        return Prompt(prompt.text.replace("{{", "{").replace("}}", "}"))
    return prompt


def _filled(prompt: Prompt, context: AgentContext, terminal_state: str) -> str:
    values = (context.step.instruction.strip(), terminal_state)
    return prompt.filled(dict(zip(_PLACEHOLDERS, values, strict=True)))


def _listed(warnings: Sequence[str]) -> str:
    return "\n".join(f"- {warning}" for warning in warnings)
