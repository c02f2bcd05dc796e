"""The running token sequence: joined ids are what the engine saw, whatever is said and however it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isnan
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from rollcage.rollout.tokens import ChatRenderer, RunningTokens, Tokenizer
from rollcage.rollout.trajectory import Message

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m['content']", "m['content'] | trim")

# As Qwen3's: thoughts of answers before the last user's message are left out.
THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- if m['role'] == 'assistant' and loop.index0 < ns.last and '</think>' in m['content'] %}
{{- '<|im_start|>assistant\n' + m['content'].split('</think>')[-1].lstrip('\n') + '<|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

TEMPLATES = {"chatml": CHATML, "trimming": TRIMMING, "thinking": THINKING}


def tokenizer(template: str) -> Any:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    corpus = [
        "the file is in the folder, echo hello > file.txt and then ls -la; im_end think user assistant"
    ] * 4
    backend.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        ),
    )
    backend.add_special_tokens(
        [AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")]
    )
    backend.add_tokens([AddedToken(text) for text in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, clean_up_tokenization_spaces=False
    )


TOKENIZERS = {name: tokenizer(template) for name, template in TEMPLATES.items()}
END = TOKENIZERS["chatml"].convert_tokens_to_ids("<|im_end|>")
START = TOKENIZERS["chatml"].convert_tokens_to_ids("<|im_start|>")
THINK_END = TOKENIZERS["chatml"].convert_tokens_to_ids("</think>")
VOCABULARY = len(TOKENIZERS["chatml"])


@dataclass
class Engine:
    """Keeps what it saw and returned."""

    tokens: RunningTokens
    seen: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def answer(self, new: list[Message], ids: list[int]) -> str:
        prompt = self.tokens.prompt(new)
        self.seen.append((list(prompt.ids), list(ids)))
        return self.tokens.append(prompt, ids, [-0.5 * (1 + i) for i in range(len(ids))])


def conversation(name: str) -> Engine:
    return Engine(RunningTokens(ChatRenderer(TOKENIZERS[name])))


def user(text: str) -> list[Message]:
    return [Message("user", text)]


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZERS["chatml"].encode(text, add_special_tokens=False)
    return ids


def check_invariants(engine: Engine) -> None:
    """Replays the record against what the engine saw, turn by turn."""
    segments, at, length = engine.tokens.segments, -1, 0
    for prompt, ids in engine.seen:
        if at < 0 or prompt[:length] != segments[at].ids[:length] or len(segments[at].ids) == length:
            at += 1
        segment = segments[at]
        length = len(prompt) + len(ids)
        assert segment.ids[:length] == prompt + ids
        assert segment.loss_mask[len(prompt) : length] == [1] * len(ids)
        assert segment.logprobs[len(prompt) : length] == [-0.5 * (1 + i) for i in range(len(ids))]
    assert at == len(segments) - 1
    assert sum(sum(s.loss_mask) for s in segments) == sum(len(ids) for _, ids in engine.seen)
    for segment in segments:
        assert len(segment.ids) == len(segment.loss_mask) == len(segment.logprobs)
        assert all(
            isnan(value) == (mask == 0)
            for mask, value in zip(segment.loss_mask, segment.logprobs, strict=True)
        )


FRAGMENTS = st.sampled_from(
    [
        "hello ",
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<think>",
        "</think>",
        "\n",
        "<|im_",
        "end|>",
        "é",
        "🦊",
        "\x00",
    ]
)
TEXT = st.one_of(st.text(max_size=20), st.lists(FRAGMENTS, max_size=5).map("".join))
# Any ids whatever, so with cut characters, control tokens in the middle, and spellings that no encoder makes.
SAMPLED = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12)
TURNS = st.lists(st.tuples(st.lists(TEXT, max_size=2), SAMPLED, st.booleans()), min_size=1, max_size=5)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@given(system=st.one_of(st.none(), TEXT), turns=TURNS)
@settings(max_examples=150, deadline=None)
def test_joined_ids_are_what_the_engine_saw(name: str, system: str | None, turns: Any) -> None:
    engine = conversation(name)
    opening = [] if system is None else [Message("system", system)]
    for texts, ids, ended in turns:
        new = [Message("user", text) for text in texts] or user("go on")
        engine.answer([*opening, *new], [*ids, END] if ended else ids)
        opening = []
    check_invariants(engine)


@given(messages=st.lists(TEXT, min_size=1, max_size=4))
@settings(max_examples=200, deadline=None)
def test_no_message_can_hold_a_control_token(messages: list[str]) -> None:
    renderer = ChatRenderer(TOKENIZERS["chatml"])
    ids = renderer.encode(renderer.text([Message("user", text) for text in messages]))
    assert ids.count(START) == len(messages) + 1
    assert ids.count(END) == len(messages)
    reads = TOKENIZERS["chatml"].decode(ids, skip_special_tokens=False)
    expected = (
        "".join(f"<|im_start|>user\n{text}<|im_end|>\n" for text in messages) + "<|im_start|>assistant\n"
    )
    assert reads == expected


def test_the_first_prompt_is_the_templates_own() -> None:
    engine = conversation("chatml")
    messages = [Message("system", "be brief"), Message("user", "list the files")]
    prompt = engine.tokens.prompt(messages)
    dicts = [{"role": message.role, "content": message.content} for message in messages]
    own = TOKENIZERS["chatml"].apply_chat_template(dicts, add_generation_prompt=True, return_dict=False)
    assert prompt.ids == own


def test_the_end_of_the_turn_is_there_once_when_the_model_ended_it() -> None:
    engine = conversation("chatml")
    engine.answer(user("one"), [*encode("two"), END])
    prompt = engine.tokens.prompt(user("three"))
    assert prompt.continues
    assert prompt.ids[len(engine.tokens.segments[0].ids) :] == encode(
        "\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_that_was_cut_is_closed_for_the_next_turn() -> None:
    engine = conversation("chatml")
    engine.answer(user("one"), encode("two and"))
    prompt = engine.tokens.prompt(user("three"))
    assert prompt.continues
    assert prompt.ids[len(engine.tokens.segments[0].ids)] == END
    assert engine.tokens.segments[0].loss_mask[-1] == 1


def test_another_end_token_than_the_templates_is_kept_and_the_turn_is_closed() -> None:
    engine = conversation("chatml")
    other = TOKENIZERS["chatml"].convert_tokens_to_ids("<|endoftext|>")
    engine.answer(user("one"), [*encode("two"), other])
    prompt = engine.tokens.prompt(user("three"))
    assert prompt.ids[: len(engine.tokens.segments[0].ids) + 1][-2:] == [other, END]


def test_a_spelling_that_no_encoder_makes_is_kept() -> None:
    engine = conversation("chatml")
    spelled = [encode(letter)[0] for letter in "hello"]
    assert encode("hello") != spelled
    engine.answer(user("one"), [*spelled, END])
    engine.answer(user("two"), [END])
    assert len(engine.tokens.segments) == 1
    ids = engine.tokens.segments[0].ids
    assert any(ids[i : i + 5] == spelled for i in range(len(ids)))


def test_a_template_that_drops_earlier_thoughts_starts_a_new_segment() -> None:
    engine = conversation("thinking")
    engine.answer(user("one"), [*encode("<think>hard</think>two"), END])
    engine.answer(user("three"), [*encode("four"), END])
    assert len(engine.tokens.segments) == 2
    second = TOKENIZERS["thinking"].decode(engine.tokens.segments[1].ids, skip_special_tokens=False)
    assert "hard" not in second
    assert sum(engine.tokens.segments[1].loss_mask) == len(encode("four")) + 1
    check_invariants(engine)


def test_a_thought_dropped_further_back_starts_a_new_segment_too() -> None:
    engine = conversation("thinking")
    engine.answer(user("one"), [*encode("<think>hard</think>two"), END])
    engine.answer([Message("tool", "output")], [*encode("three"), END])
    assert len(engine.tokens.segments) == 1
    engine.answer(user("four"), [*encode("five"), END])
    assert len(engine.tokens.segments) == 2
    check_invariants(engine)


def test_a_template_that_keeps_an_answer_continues_the_segment() -> None:
    engine = conversation("thinking")
    engine.answer(user("one"), [*encode("plain"), END])
    engine.answer(user("two"), [*encode("<think>now</think>three"), END])
    engine.answer([Message("tool", "output")], [*encode("four"), END])  # no user's message: thoughts stay
    assert len(engine.tokens.segments) == 1
    check_invariants(engine)


def test_white_space_that_a_template_trims_breaks_nothing() -> None:
    engine = conversation("trimming")
    engine.answer(user("one"), [*encode("  two \n\n"), END])
    engine.answer(user("three"), [*encode("four"), END])
    assert len(engine.tokens.segments) == 1
    check_invariants(engine)


def test_a_think_token_stays_one_in_an_answer_and_is_text_in_an_output() -> None:
    renderer = ChatRenderer(TOKENIZERS["thinking"])
    said = renderer.encode(renderer.text([Message("assistant", "<think>a</think>b")]))
    shown = renderer.encode(renderer.text([Message("user", "<think>a</think>b")]))
    assert THINK_END in said
    assert THINK_END not in shown


def test_control_tokens_that_overlap_in_a_message_are_all_text() -> None:
    overlapping = tokenizer(CHATML)
    overlapping.add_tokens([AddedToken(text, special=True) for text in ("<|x|>", "|><|y")])
    control = {overlapping.convert_tokens_to_ids(text) for text in ("<|x|>", "|><|y")}
    renderer = ChatRenderer(overlapping)
    ids = renderer.encode(renderer.text(user("<|x|><|y <|x|>")))
    assert not control & set(ids)
    assert "<|x|><|y <|x|>" in overlapping.decode(ids)


def test_a_prompt_without_an_answer_leaves_no_trace() -> None:
    engine = conversation("chatml")
    engine.answer(user("one"), [END])
    before = list(engine.tokens.segments[0].ids)
    first = engine.tokens.prompt(user("two"))
    assert engine.tokens.prompt(user("two")) == first
    assert engine.tokens.segments[0].ids == before


def test_a_stale_prompt_and_missing_log_probabilities_are_refused() -> None:
    engine = conversation("chatml")
    stale = engine.tokens.prompt(user("one"))
    with pytest.raises(ValueError, match="2 sampled tokens came with 1"):
        engine.tokens.append(stale, [1, 2], [-1.0])
    engine.answer(user("two"), [END])
    with pytest.raises(ValueError, match="before the last answer"):
        engine.tokens.append(stale, [1], [-1.0])


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    bare: Tokenizer = tokenizer("")
    with pytest.raises(ValueError, match="no chat template"):
        ChatRenderer(bare)
