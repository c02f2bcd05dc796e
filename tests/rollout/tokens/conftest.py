"""Chat templates of every kind with small tokenizers made for them, and an engine that keeps what it saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import isnan
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from rollcage.rollout.chat_template import ChatRenderer
from rollcage.rollout.policies import smollm2
from rollcage.rollout.policies.base import Tool
from rollcage.rollout.tokens import Prompt, RunningTokens
from rollcage.rollout.trajectory import Message

CORPUS = [
    "the file is in the folder, echo hello > file.txt and then ls -la; think user assistant system tool\n",
    '{"name": "bash", "arguments": {"command": "ls"}} and the output of im_start im_end tool_call <| |> </ >\n',
]


@dataclass(frozen=True)
class Kind:
    """What a template is: its control tokens and how its conversations go. `special`: BOS (or "") and the end of the
    turn first. `strict`: user and assistant take turns, and outputs of tools follow calls."""

    special: tuple[str, ...] = ("", "<|im_end|>", "<|im_start|>", "<|endoftext|>")
    added: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    system: bool = True
    strict: bool = False


LLAMA3 = "<|begin_of_text|> <|eot_id|> <|start_header_id|> <|end_header_id|> <|eom_id|> <|python_tag|>"
MISTRAL = "<s> </s> [INST] [/INST] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]"
KINDS = {
    "chatml": Kind(),
    "trimming": Kind(),
    "qwen3": Kind(
        added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
    ),
    "llama3": Kind(tuple(LLAMA3.split()), ()),
    "hermes": Kind(),
    "mistral": Kind(tuple(MISTRAL.split()), (), system=False, strict=True),
    "counting": Kind(),
    "merging": Kind(),
    "opened": Kind(),
    "composed": Kind(("", "<|end|>"), ("<|user|>", "<|assistant|>", "<|tool|>"), system=False),
    "smollm2": Kind(),
}


@cache
def tokenizer(name: str, *, bos: bool = False) -> Any:
    """A tokenizer with the template `name`. With `bos` it puts BOS before every text that may have special tokens."""
    if name == "smollm2":
        return PreTrainedTokenizerFast.from_pretrained(str(smollm2.prepare()))
    kind = KINDS[name]
    backend = _byte_fallback() if name == "mistral" else _byte_level()
    backend.add_special_tokens([AddedToken(text, special=True) for text in kind.special if text])
    backend.add_tokens([AddedToken(text) for text in kind.added])
    begin, end = kind.special[:2]
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, backend.token_to_id(begin))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=(Path(__file__).parent / "templates" / f"{name}.jinja").read_text(),
        bos_token=begin or None,
        eos_token=end,
        clean_up_tokenization_spaces=False,
    )


def _byte_level() -> Backend:
    """As GPT-2's, Qwen's and Llama-3's."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS * 4, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return backend


def _byte_fallback() -> Backend:
    """As Llama-2's and Mistral's: a space is written before every text, and letters it lacks are bytes."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("e", "c"), ("ec", "h"), ("ech", "o"), ("l", "s")]
    pieces += ["".join(merge) for merge in merges]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


@cache
def renderer(name: str) -> ChatRenderer:
    return ChatRenderer(tokenizer(name))


class Counting:
    """A tokenizer that counts the letters that it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.letters = 0

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        self.letters += len(text)
        ids: list[int] = self._tokenizer.encode(text, **kwargs)
        return ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


@dataclass
class Engine:
    """One conversation, and what an engine saw of it and returned, kept by itself."""

    name: str
    tokens: RunningTokens
    tools: Sequence[Tool] = ()
    seen: list[tuple[list[int], list[int], int]] = field(default_factory=list)
    """Of each answer: the prompt, what was sampled, and the segment."""

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    @property
    def end(self) -> int:
        """The id that ends a turn."""
        number: int = tokenizer(self.name).convert_tokens_to_ids(KINDS[self.name].special[1])
        return number

    def ids(self, text: str) -> list[int]:
        """A text as its tokenizer's own ids, control tokens and all."""
        ids: list[int] = tokenizer(self.name).encode(text, add_special_tokens=False)
        return ids

    def text(self, ids: Sequence[int]) -> str:
        text: str = tokenizer(self.name).decode(list(ids), skip_special_tokens=False)
        return text

    def prompt(self, *new: Message) -> Prompt:
        return self.tokens.prompt(new, self.tools)

    def added(self, *new: Message) -> str:
        """The text that the next prompt puts behind the last segment."""
        prompt = self.prompt(*new)
        assert prompt.continues
        return self.text(prompt.ids[len(self.tokens.segments[-1].ids) :])

    def answer(self, new: Sequence[Message], sampled: list[int] | str, parsed: Message | None = None) -> str:
        """Ask, and answer with ids, or with a text and the end of the turn."""
        ids = [*self.ids(sampled), self.end] if isinstance(sampled, str) else sampled
        prompt = self.prompt(*new)
        said = self.tokens.append(prompt, ids, [-0.5 * (1 + i) for i in range(len(ids))], parsed)
        self.seen.append((list(prompt.ids), list(ids), len(self.tokens.segments) - 1))
        return said

    def check(self) -> None:
        """The record is what the engine saw, turn by turn, and nothing else."""
        segments = self.tokens.segments
        lengths = [0] * len(segments)
        for prompt, ids, at in self.seen:
            segment, length = segments[at], len(prompt) + len(ids)
            assert prompt[: lengths[at]] == segment.ids[: lengths[at]]
            assert segment.ids[:length] == prompt + ids
            assert segment.loss_mask[lengths[at] : length] == [0] * (len(prompt) - lengths[at]) + [1] * len(
                ids
            )
            assert segment.logprobs[len(prompt) : length] == [-0.5 * (1 + i) for i in range(len(ids))]
            lengths[at] = length
        assert lengths == [len(segment.ids) for segment in segments]
        for segment in segments:
            assert len(segment.ids) == len(segment.loss_mask) == len(segment.logprobs)
            unknown = [int(isnan(value)) for value in segment.logprobs]
            assert unknown == [1 - mask for mask in segment.loss_mask]


@pytest.fixture(scope="session", name="tokenizer")
def _tokenizer() -> Callable[..., Any]:
    """By the template's name."""
    return tokenizer


@pytest.fixture(scope="session")
def counting() -> Callable[[str], Counting]:
    """A tokenizer that counts, by the template's name."""
    return lambda name: Counting(tokenizer(name))


@pytest.fixture(scope="session", name="renderer")
def _renderer() -> Callable[[str], ChatRenderer]:
    """By the template's name."""
    return renderer


@pytest.fixture(scope="session")
def talk() -> Callable[..., Engine]:
    """A new conversation, by the template's name and the tools on offer."""
    return lambda name, tools=(): Engine(name, RunningTokens(renderer(name)), tools)
