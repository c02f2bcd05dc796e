"""The running token sequence of one conversation: exactly what the engine saw and returned.

The first prompt is the chat template's. A later prompt is what the engine saw, then what it returned, then
the tokens of only the text that the template puts behind the answer: the end of the turn where the model did
not emit it, the new messages, the opening of the next answer. So nothing that was sampled is tokenized again.

Where the template no longer renders the earlier text as the engine saw it (Qwen3 drops earlier `<think>`
blocks), the prefix is broken, and a new segment starts with the whole conversation as its prompt. That a
template trims white space around an answer breaks nothing: the sequence keeps the answer as it was sampled.

Control tokens come from the template and from the engine only. Inside a message, the text of a control token
is split in two by a lone surrogate, which no valid text holds, before the template is rendered; what lies
between surrogates is then tokenized on its own. It reads the same and controls nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, Protocol

from rollcage.rollout.policies.base import Tool
from rollcage.rollout.trajectory import Message, Segment

SPLIT = "\udfff"
"""Inside a text to be encoded: tokenize what is before and what is behind on their own."""

ANSWER = f"{SPLIT}answer{SPLIT}"
"""Stands for an answer, to see what the template puts before and behind it."""

_SURROGATES = re.compile("[\ud800-\udfff]")


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    added_tokens_decoder: Mapping[int, Any]
    """Added tokens by id; each has `content` and `special`."""
    chat_template: Any

    def apply_chat_template(
        self,
        conversation: list[dict[str, str]],
        *,
        tokenize: bool,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a model directory or name. Takes seconds: transformers is imported here."""
    from transformers import AutoTokenizer

    tokenizer: Tokenizer = AutoTokenizer.from_pretrained(str(path))
    return tokenizer


class ChatRenderer:
    """Makes text of messages with a tokenizer's chat template, ids of such text, and text of sampled ids.

    `template_kwargs` go to the template (`enable_thinking`, ...). Raises `ValueError` where the tokenizer has
    no chat template, or a control token of one character, which could not be kept out of messages.
    """

    def __init__(self, tokenizer: Tokenizer, template_kwargs: Mapping[str, Any] | None = None) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs or {})
        added = tokenizer.added_tokens_decoder.items()
        special = {token.content for _, token in added if token.special}
        if short := [content for content in special if len(content) < 2]:
            raise ValueError(f"a control token of one character cannot be kept out of messages: {short[0]!r}")
        template = str(tokenizer.chat_template)
        written = {token.content for _, token in added if len(token.content) > 1 and token.content.strip()}
        control = special | {content for content in written if content in template}
        self.control_ids = frozenset(number for number, token in added if token.content in control)
        self._special = _any_of(special)
        self._control = _any_of(control)

    def text(self, messages: Sequence[Message], *, stand_in: int | None = None) -> str:
        """The template's text up to where the next answer begins, with `ANSWER` for message `stand_in`."""
        conversation = [
            {"role": message.role, "content": ANSWER if index == stand_in else self.harmless(message)}
            for index, message in enumerate(messages)
        ]
        rendered: str = self._tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **self._kwargs
        )
        return rendered

    def harmless(self, message: Message) -> str:
        """The message's text with its control tokens split. Those that a template writes but the tokenizer
        does not call special (`<think>`) stay whole in an answer, where the model wrote them."""
        pattern = self._special if message.role == "assistant" else self._control
        text = _SURROGATES.sub("\ufffd", message.content)
        while pattern.search(text):  # splitting one may leave another that overlapped it
            text = pattern.sub(lambda found: f"{found[0][0]}{SPLIT}{found[0][1:]}", text)
        return text

    def encode(self, text: str) -> list[int]:
        """Ids of a text that `text` rendered, or of a part of one."""
        parts = (part for part in text.split(SPLIT) if part)
        return [number for part in parts for number in self._tokenizer.encode(part, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Sampled ids as an agent reads them: without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


@dataclass(frozen=True)
class Prompt:
    """What the engine is to see next. `continues`: it begins with the last segment, whole."""

    ids: list[int]
    continues: bool
    messages: tuple[Message, ...]
    text: str
    """The template's text for `messages`; kept to see whether the next one still begins with it."""


class RunningTokens:
    """One conversation's tokens. `segments` and `messages` grow when an answer is appended, never before: a
    prompt that the engine did not answer leaves no trace, and may be made again."""

    def __init__(self, renderer: ChatRenderer) -> None:
        self.segments: list[Segment] = []
        self.messages: tuple[Message, ...] = ()
        self._renderer = renderer
        self._text = ""

    def restart(self) -> None:
        """Forget the conversation and keep the segments: the next prompt begins another one."""
        self.messages = ()
        self._text = ""

    def prompt(self, new_messages: Iterable[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """The prompt for the next answer, `new_messages` behind all that was said."""
        messages = (*self.messages, *new_messages)
        text = self._renderer.text(messages)
        added = self._behind_last_answer(messages, text)
        if added is None:
            return Prompt(self._renderer.encode(text), False, messages, text)
        return Prompt([*self.segments[-1].ids, *added], True, messages, text)

    def append(self, prompt: Prompt, ids: Sequence[int], logprobs: Sequence[float]) -> str:
        """Record that the engine saw `prompt` and returned `ids`; returns the answer's text.

        Raises `ValueError` where the log-probabilities are not one for each id, or the prompt is not one of
        this state of the conversation.
        """
        if len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} sampled tokens came with {len(logprobs)} log-probabilities")
        if prompt.messages[: len(self.messages)] != self.messages:
            raise ValueError("the prompt was made before the last answer was appended")
        if not prompt.continues:
            self.segments.append(Segment())
        segment = self.segments[-1]
        added = prompt.ids[len(segment.ids) :]
        segment.ids += [*added, *ids]
        segment.loss_mask += [0] * len(added) + [1] * len(ids)
        segment.logprobs += [nan] * len(added) + list(logprobs)
        answer = self._renderer.decode(ids)
        self.messages = (*prompt.messages, Message("assistant", answer))
        self._text = prompt.text
        return answer

    def _behind_last_answer(self, messages: Sequence[Message], text: str) -> list[int] | None:
        """Ids to put behind the last segment, or None where its prefix no longer holds."""
        if not self.messages:
            return None
        last = len(self.messages) - 1
        before, found, behind = self._renderer.text(messages, stand_in=last).partition(ANSWER)
        if not found or before != self._text or not text.startswith(before) or not text.endswith(behind):
            return None
        shown = text[len(before) : len(text) - len(behind)]
        if shown.strip() != self._renderer.harmless(messages[last]).strip():
            return None
        added = self._renderer.encode(behind)
        segment = self.segments[-1]
        ended = segment.loss_mask[-1] == 1 and segment.ids[-1] in self._renderer.control_ids
        if ended and added[:1] == segment.ids[-1:]:
            return added[1:]  # the model ended its turn itself
        return added


def _any_of(texts: set[str]) -> re.Pattern[str]:
    """Matches any of `texts`, the longest first; nothing where there are none."""
    return re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or r"(?!)")
