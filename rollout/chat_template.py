"""A tokenizer's chat template: text of messages, ids of such text, and text of sampled ids.

Control tokens come from the template and from the engine only: in messages, tools and calls their texts are split
(`control_tokens.py`) before the template is rendered.

An answer can be shown in two ways. As it was sampled: its raw text is the message's content, tool calls, thoughts
and all. Structured: the text, the thoughts and the calls that a parser found in it, each in its own field, for
templates which refuse a tool's message behind anything else, or put something else between the two. Which one a
template wants is found by rendering a small conversation both ways.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError, UndefinedError

from rollcage.rollout.control_tokens import SPLIT, ControlTexts
from rollcage.rollout.model_json import read_json
from rollcage.rollout.policies.base import Tool
from rollcage.rollout.tokenizer import Tokenizer
from rollcage.rollout.trajectory import Message, ToolCall

MARK = "\udffe"
"""Put at the end of an answer, to see what a template writes behind it."""

_PROBE_CALL = ToolCall("call00001", "probe", "{}")
"""Mistral's templates want an id of nine letters and digits."""
_PROBE_TOOL = Tool("probe", "none", {"type": "object", "properties": {}})
_PROBE_USER = Message("user", "text")
_PROBE_OUTPUT = Message("tool", "(an output)", tool_call_id=_PROBE_CALL.id)


@dataclass
class Shown(Message):
    """A message whose harmless text, `said`, is made once for all the prompts that show it."""

    said: str = ""


@dataclass
class Answer(Shown):
    """An answer that was sampled. `content` is what an agent reads.

    `said` is harmless but for the control tokens that were sampled; `opening` is what the prompt had already begun
    it with (`<think>`). `parsed` has text, thoughts and calls apart; None where there is nothing to tell apart.
    """

    opening: str = ""
    parsed: Message | None = None


_PROBE_ANSWER = Answer("assistant", "", parsed=Message("assistant", "", tool_calls=(_PROBE_CALL,)))


class ChatRenderer:
    """Makes text of messages with a tokenizer's chat template, ids of such text, and text of sampled ids.

    `template_kwargs` go to the template (`enable_thinking`, ...). Raises `ValueError` where the tokenizer has
    no chat template, or a control token of one character, which could not be kept out of messages.

    `control_ids`: special tokens, and added ones that the template writes. `special_ids`: the special ones alone,
    which an agent does not read. `opening`: what the template begins an answer with before it is generated, and
    which belongs to the answer's content once it is history. `structured_first`: the template wants the calls of an
    answer in their own field.
    """

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        self._added = {number: str(token.content) for number, token in tokenizer.added_tokens_decoder.items()}
        special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        if short := [content for content in special if len(content) < 2]:
            raise ValueError(f"a control token of one character cannot be kept out of messages: {short[0]!r}")
        self._special = self._control = ControlTexts(special)
        self._parts = self._objects = self._drops_outputs = False
        self._parts = not self._shows_text()
        self._objects = True
        self._objects = self._probe(True) is not None
        # A template may put a control token together (`'<|' + role + '|>'`), so its output is looked at too.
        written = [str(tokenizer.chat_template), *filter(None, map(self._probe, (False, True)))]
        whole = {content for content in self._added.values() if len(content) > 1 and content.strip()}
        control = special | {content for content in whole if any(content in text for text in written)}
        self._control = ControlTexts(control)
        self.control_ids = frozenset(number for number, content in self._added.items() if content in control)
        self.special_ids = frozenset(number for number, content in self._added.items() if content in special)
        # A tokenizer that writes a space before every text is given the parts of one text behind another.
        once = tokenizer.encode("a", add_special_tokens=False)
        self._begun = "" if self.decode([*once, *once]) == "aa" else "\n"
        self._begun_ids = tokenizer.encode(self._begun, add_special_tokens=False) if self._begun else []
        self.structured_first = self._wants_structure()
        shown = self._probe(self.structured_first)
        self._drops_outputs = shown is not None and _PROBE_OUTPUT.content not in shown
        self.opening = self._opening()

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        structured: bool = False,
        marked: int | None = None,
        opened: bool = True,
    ) -> str:
        """The template's text, up to where the next answer begins if it is `opened`.

        Answers are shown `structured` or as they were sampled, with `MARK` at the end of message `marked`. Raises
        `ValueError`, with the template's own words, where it refuses the conversation.
        """
        if self._drops_outputs and any(message.role == "tool" for message in messages):
            raise ValueError(
                "the model's chat template leaves out the outputs of tools: take an agent that needs no tools"
            )
        called = {call.id: call.name for message in messages for call in _calls(message)}
        entries = [
            self._entry(message, called, structured, MARK if index == marked else "")
            for index, message in enumerate(messages)
        ]
        return self._render(entries, tools, opened=opened)

    def shown(self, message: Message) -> Shown:
        """The message, ready to be rendered many times."""
        return Shown(
            message.role,
            message.content,
            tool_calls=message.tool_calls,
            tool_call_id=message.tool_call_id,
            reasoning=message.reasoning,
            said=self.harmless(message),
        )

    def harmless(self, message: Message) -> str:
        """The message's text with its control tokens split. Those that a template writes but the tokenizer
        does not call special (`<think>`) stay whole in an answer's text, where the model wrote them."""
        texts = self._special if message.role == "assistant" else self._control
        return texts.split(message.content)

    def encode(self, text: str) -> list[int]:
        """Ids of a text that `text` rendered, or of a part of one."""
        first, *others = text.split(SPLIT)
        ids = self._tokenizer.encode(first, add_special_tokens=False) if first else []
        for part in filter(None, others):
            begun = self._tokenizer.encode(self._begun + part, add_special_tokens=False)
            if begun[: len(self._begun_ids)] == self._begun_ids:
                ids += begun[len(self._begun_ids) :]
            else:
                ids += self._tokenizer.encode(part, add_special_tokens=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Sampled ids as an agent reads them: without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def answer(self, ids: Sequence[int], prompt: str, parsed: Message | None = None) -> Answer:
        """The answer that `ids` are, sampled behind the text `prompt`. In what the template is to show, special
        tokens stay what they are, but for the last one where it ended the answer: the template writes that."""
        pieces: list[str] = []
        run: list[int] = []
        for number in ids[:-1] if ids and ids[-1] in self.special_ids else ids:
            if number in self.special_ids:
                pieces += [self._special.split(self.decode(run)), self._added[number]]
                run = []
            else:
                run.append(number)
        pieces.append(self._special.split(self.decode(run)))
        text = self.decode(ids)
        return Answer(
            "assistant",
            text,
            said="".join(pieces),
            opening=self.opening if prompt.endswith(self.opening) else "",
            parsed=None if parsed is None or parsed == Message("assistant", text) else self.shown(parsed),
        )

    def last_special(self, text: str) -> int | None:
        """Where the last special token of a rendered text begins."""
        return self._special.last(text)

    def _entry(
        self, message: Message, called: Mapping[str, str], structured: bool, mark: str
    ) -> dict[str, Any]:
        """A message as templates take it. Keys without a value are left out: templates ask what is defined."""
        opening = message.opening if isinstance(message, Answer) else ""
        if isinstance(message, Answer) and message.parsed is not None and structured:
            message, opening = message.parsed, ""
        said = message.said if isinstance(message, Shown) else self.harmless(message)
        content = f"{opening}{said}{mark}"
        parts = [{"type": "text", "text": content}]
        entry: dict[str, Any] = {"role": message.role, "content": parts if self._parts else content}
        if message.reasoning:
            entry |= dict.fromkeys(("reasoning_content", "thinking"), self._control.split(message.reasoning))
        if message.tool_calls:
            entry["tool_calls"] = [
                {
                    "id": self._control.split(call.id),
                    "type": "function",
                    "function": self._control.split_all(
                        {
                            "name": call.name,
                            "arguments": _arguments(call) if self._objects else call.arguments,
                        }
                    ),
                }
                for call in message.tool_calls
            ]
        if message.tool_call_id is not None:
            entry["tool_call_id"] = self._control.split(message.tool_call_id)
            if message.tool_call_id in called:
                entry["name"] = self._control.split(called[message.tool_call_id])
        return entry

    def _render(self, entries: list[dict[str, Any]], tools: Sequence[Tool], *, opened: bool) -> str:
        given = [
            {
                "type": "function",
                "function": self._control.split_all(
                    {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
                ),
            }
            for tool in tools
        ]
        kwargs = {**self._kwargs, **({"tools": given} if given else {})}
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                entries, tokenize=False, add_generation_prompt=opened, **kwargs
            )
        except (TemplateError, TypeError) as error:
            roles = ", ".join(entry["role"] for entry in entries[-8:])
            raise ValueError(
                f"the model's chat template refuses the conversation (roles, the last ones: {roles}): {error}"
            ) from error
        return rendered

    def _shows_text(self) -> bool:
        """Whether a message's content may be a text. Templates of models that also see images may want parts."""
        try:
            return MARK in self.text([_PROBE_USER], marked=0)
        except ValueError as error:
            return isinstance(error.__cause__, TemplateError) and not isinstance(
                error.__cause__, UndefinedError
            )

    def _probe(self, structured: bool) -> str | None:
        """Two calls of a tool and their outputs, shown in one of the two ways; None where the template refuses."""
        turns = (_PROBE_ANSWER, _PROBE_OUTPUT) * 2
        try:
            return self.text(
                [_PROBE_USER, *turns], [_PROBE_TOOL], structured=structured, marked=None if structured else 3
            )
        except ValueError:
            return None

    def _wants_structure(self) -> bool:
        sampled, structured = self._probe(False), self._probe(True)
        if sampled is None or structured is None:
            return structured is not None
        if not structured.endswith(sampled.rpartition(MARK)[2]):
            return True
        return self._behind_a_call(True) != self._behind_a_call(False)

    def _behind_a_call(self, structured: bool) -> str:
        """What an output adds to a call; nothing where it changes what stands before."""
        called = [_PROBE_USER, _PROBE_ANSWER]
        before = self.text(called, [_PROBE_TOOL], structured=structured, opened=False)
        whole = self.text([*called, _PROBE_OUTPUT], [_PROBE_TOOL], structured=structured)
        return whole[len(before) :] if whole.startswith(before) else ""

    def _opening(self) -> str:
        try:
            asked = self.text([_PROBE_USER])
            unasked = self.text([_PROBE_USER], opened=False)
            history = self.text([_PROBE_USER, Answer("assistant", ""), _PROBE_USER], marked=1)
        except ValueError:
            return ""
        before, found, _ = history.partition(MARK)
        if found and asked.startswith(before):
            return asked[len(before) :]
        # History shows an answer that has no thoughts with an empty one.
        thought = asked.rfind("<think>", len(unasked))
        return asked[thought:] if thought >= 0 and asked.startswith(unasked) else ""


def _calls(message: Message) -> tuple[ToolCall, ...]:
    parsed = message.parsed if isinstance(message, Answer) else None
    return message.tool_calls if parsed is None else parsed.tool_calls


def _arguments(call: ToolCall) -> Any:
    """The arguments as an object, as templates expect them; the text as it is where it is none."""
    try:
        arguments = read_json(call.arguments)
    except ValueError:
        return call.arguments
    return arguments if isinstance(arguments, dict) else call.arguments
