"""The running token sequence of one conversation: exactly what the engine saw and returned.

The first prompt is the chat template's. A later prompt is what the engine saw, then what it returned, then
the tokens of only the text that the template puts behind the answer: the end of the turn where the model did
not emit it, the new messages, the opening of the next answer. So nothing that was sampled is tokenized again.

Where the template no longer renders the earlier text as the engine saw it (Qwen3 drops earlier `<think>`
blocks), or other tools are offered, the prefix is broken, and a new segment starts with the whole conversation as
its prompt. That a template changes white space in or around an answer breaks nothing: the sequence keeps the
answer as it was sampled. Nothing is ever cut: a prompt that is too long for the model is for its session to refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import nan

from rollcage.rollout.chat_template import MARK, Answer, ChatRenderer
from rollcage.rollout.control_tokens import SPLIT
from rollcage.rollout.policies.base import Tool
from rollcage.rollout.tokenizer import Tokenizer, load_tokenizer
from rollcage.rollout.trajectory import Message, Segment

__all__ = ["ChatRenderer", "Prompt", "RunningTokens", "Tokenizer", "load_tokenizer"]


@dataclass(frozen=True)
class Prompt:
    """What the engine is to see next. `continues`: it begins with the last segment, whole."""

    ids: list[int]
    continues: bool
    messages: tuple[Message, ...]
    text: str
    """The template's text for `messages`; kept to see whether the next one still begins with it."""
    tools: tuple[Tool, ...] = ()


class RunningTokens:
    """One conversation's tokens. `segments` and `messages` grow when an answer is appended, never before: a
    prompt that the engine did not answer leaves no trace, and may be made again."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.segments: list[Segment] = []
        self.messages: tuple[Message, ...] = ()
        self._renderer = renderer
        self._text = ""
        self._tools: tuple[Tool, ...] = ()

    def restart(self) -> None:
        """Forget the conversation and keep the segments: the next prompt begins another one."""
        self.messages = ()
        self._text = ""

    def prompt(self, new_messages: Iterable[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The prompt for the next answer, `new_messages` behind all that was said.

        Of the two ways to show earlier answers (see `chat_template.py`), the first that continues the segment is
        taken; the first that the template accepts, where none does. Raises `ValueError` where it accepts neither.
        """
        messages, tools = (*self.messages, *map(self._renderer.shown, new_messages)), tuple(tools)
        parsed = any(isinstance(message, Answer) and message.parsed for message in messages)
        first = self._renderer.structured_first
        whole: str | None = None
        refused: ValueError | None = None
        for structured in (first, not first) if parsed else (False,):
            try:
                text = self._renderer.text(messages, tools, structured=structured)
                whole = text if whole is None else whole
                added = self._behind_last_answer(messages, tools, text, structured)
            except ValueError as error:
                refused = refused or error
                continue
            if added is not None:
                return Prompt([*self.segments[-1].ids, *added], True, messages, text, tools)
        if whole is None:
            assert refused is not None, "a text that was not refused was rendered"
            raise refused
        return Prompt(self._renderer.encode(whole), False, messages, whole, tools)

    def append(
        self,
        prompt: Prompt,
        ids: Sequence[int],
        logprobs: Sequence[float],
        parsed: Message | None = None,
    ) -> str:
        """Record that the engine saw `prompt` and returned `ids`; returns the answer's raw text. `parsed` has its
        text, reasoning and tool calls apart, where the engine has parsers.

        Raises `ValueError` where the log-probabilities are not one for each id, or the prompt is not one of
        this state of the conversation.
        """
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled tokens came with {len(logprobs)} log-probabilities")
        if prompt.messages[: len(self.messages)] != self.messages:
            raise ValueError("the prompt was made before the last answer was appended")
        if prompt.continues and not self.messages:
            raise ValueError("the prompt was made before the conversation was restarted")
        if not prompt.continues:
            self.segments.append(Segment())
        segment = self.segments[-1]
        added = prompt.ids[len(segment.ids) :]
        segment.ids += [*added, *ids]
        segment.loss_mask += [0] * len(added) + [1] * len(ids)
        segment.logprobs += [nan] * len(added) + list(logprobs)
        answer = self._renderer.answer(ids, prompt.text, parsed)
        self.messages = (*prompt.messages, answer)
        self._text = prompt.text
        self._tools = prompt.tools
        return answer.content

    def _behind_last_answer(
        self, messages: Sequence[Message], tools: tuple[Tool, ...], text: str, structured: bool
    ) -> list[int] | None:
        """Ids to put behind the last segment, or None where its prefix no longer holds."""
        if not self.messages or tools != self._tools or not text.startswith(self._text):
            return None
        last = len(self.messages) - 1
        answer = messages[last]
        assert isinstance(answer, Answer), "what was appended last is an answer"
        parsed = answer.parsed if structured else None
        if parsed is not None and parsed.tool_calls:
            parts = self._behind_calls(messages[: last + 1], tools, text)
        else:
            marked = self._renderer.text(messages, tools, structured=structured, marked=last)
            parts = _behind_mark(marked, text, self._text)
        if parts is None:
            return None
        shown, behind = parts
        if parsed is None and _letters(shown) != _letters(answer.said):
            return None
        if parsed is not None and any(_letters(part) not in _letters(shown) for part in _parts(parsed)):
            return None
        return self._continued(behind)

    def _behind_calls(
        self, messages: Sequence[Message], tools: tuple[Tool, ...], text: str
    ) -> tuple[str, str] | None:
        """What the template shows of the last of `messages`, which has calls, behind the last prompt, and what it
        writes from the end of that turn on; None where it shows something else before it."""
        said = self._renderer.text(messages, tools, structured=True, opened=False)
        if not said.startswith(self._text) or not text.startswith(said):
            return None
        shown = said[len(self._text) :]
        end = self._renderer.last_special(shown)
        return None if end is None else (shown[:end], shown[end:] + text[len(said) :])

    def _continued(self, behind: str) -> list[int]:
        """Ids of `behind`, without the end of the turn where the model emitted it itself."""
        added = self._renderer.encode(behind)
        segment, control = self.segments[-1], self._renderer.control_ids
        end = next((index for index, number in enumerate(added) if number in control), None)
        ended = segment.loss_mask[-1] == 1 and end is not None and added[end] == segment.ids[-1]
        if ended and end is not None and not self._renderer.decode(added[:end]).strip():
            return added[end + 1 :]
        return added


def _behind_mark(marked: str, text: str, prompt: str) -> tuple[str, str] | None:
    """What stands in `text` between the last prompt and what is behind the mark, and that; None where it does not
    stand there."""
    _, found, behind = marked.partition(MARK)
    if not found or MARK in behind or not text.endswith(behind) or len(prompt) + len(behind) > len(text):
        return None
    return text[len(prompt) : len(text) - len(behind)], behind


def _parts(parsed: Message) -> tuple[str, ...]:
    """What must be seen of an answer that is shown by its parts."""
    return (parsed.content, parsed.reasoning, *(call.name for call in parsed.tool_calls))


def _letters(text: str) -> str:
    """A text without its white space, and without the splits of its control tokens."""
    return "".join(text.split()).replace(SPLIT, "")
