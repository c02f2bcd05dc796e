"""The running token sequence: the engine's own ids, and a new segment only where history is another."""

from __future__ import annotations

from typing import Any

import pytest

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.engine import Generation, TokenPolicy
from rollcage.rollout.tokens import ChatRenderer, RunningTokens
from rollcage.rollout.trajectory import Message


def user(text: str) -> list[Message]:
    return [Message("user", text)]


def test_the_first_prompt_is_the_templates_own(talk: Any, tokenizer: Any) -> None:
    for name in ("chatml", "llama3", "qwen3", "smollm2"):
        messages = [Message("system", "be brief"), Message("user", "list the files")]
        dicts = [{"role": message.role, "content": message.content} for message in messages]
        own = tokenizer(name).apply_chat_template(dicts, add_generation_prompt=True, return_dict=False)
        assert talk(name).prompt(*messages).ids == own


def test_the_end_of_the_turn_is_there_once_when_the_model_ended_it(talk: Any) -> None:
    engine = talk("chatml")
    engine.answer(user("one"), "two")
    assert engine.added(*user("three")) == "\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_that_was_cut_is_closed_for_the_next_turn(talk: Any) -> None:
    engine = talk("chatml")
    engine.answer(user("one"), engine.ids("two and"))
    assert engine.added(*user("three")).startswith("<|im_end|>\n")
    engine.answer(user("three"), "four")
    segment = engine.tokens.segments[0]
    ends = [mask for number, mask in zip(segment.ids, segment.loss_mask, strict=True) if number == engine.end]
    assert ends == [0, 0, 0, 1]  # of the user, of the answer that was cut, of the user, and the one sampled
    engine.check()


def test_another_end_token_than_the_templates_is_kept_and_the_turn_is_closed(talk: Any) -> None:
    engine = talk("chatml")
    engine.answer(user("one"), engine.ids("two<|endoftext|>"))
    assert engine.added(*user("three")).startswith("<|im_end|>\n")
    assert engine.text(engine.tokens.segments[0].ids).endswith("two<|endoftext|>")


def test_a_spelling_that_no_encoder_makes_is_kept(talk: Any) -> None:
    """CASES 30: decoded and encoded again it would have other ids."""
    engine = talk("chatml")
    spelled = [engine.ids(letter)[0] for letter in "hello"]
    assert engine.ids("hello") != spelled
    engine.answer(user("one"), [*spelled, engine.end])
    engine.answer(user("two"), "")
    assert len(engine.tokens.segments) == 1
    ids = engine.tokens.segments[0].ids
    assert any(ids[i : i + 5] == spelled for i in range(len(ids)))


def test_a_template_that_drops_earlier_thoughts_starts_a_new_segment(talk: Any) -> None:
    """CASES 30."""
    engine = talk("qwen3")
    engine.answer(user("one"), "<think>hard</think>two")
    mask = list(engine.tokens.segments[0].loss_mask)
    engine.answer(user("three"), "four")
    first, second = engine.tokens.segments
    assert first.loss_mask == mask
    assert "hard" in engine.text(first.ids)
    assert "hard" not in engine.text(second.ids)
    assert "<|im_start|>assistant\ntwo<|im_end|>" in engine.text(second.ids)
    assert sum(second.loss_mask) == len(engine.ids("four")) + 1
    engine.check()


def test_thoughts_of_a_turn_that_goes_on_are_kept_and_dropped_when_it_is_over(talk: Any) -> None:
    engine = talk("qwen3")
    engine.answer(user("one"), "<think>hard</think>two")  # the template would write other white space
    engine.answer([Message("tool", "output")], "<think>\nharder\n</think>\n\nthree")
    assert len(engine.tokens.segments) == 1
    engine.answer(user("four"), "five")
    assert len(engine.tokens.segments) == 2
    engine.answer(user("six"), "seven")
    assert len(engine.tokens.segments) == 2
    engine.check()


def test_a_template_whose_front_changes_with_every_turn_gives_a_segment_a_turn(talk: Any) -> None:
    engine = talk("counting")
    for text in ("one", "two", "three"):
        engine.answer(user(text), "ok")
    assert len(engine.tokens.segments) == 3
    engine.check()


def test_thoughts_that_the_prompt_opens_are_the_answers_own_in_history(talk: Any) -> None:
    engine = talk("opened")
    assert engine.answer(user("one"), "hard</think>two") == "hard</think>two"
    engine.answer(user("three"), "four")
    assert len(engine.tokens.segments) == 1
    assert "assistant\n<think>\nhard</think>two<|im_end|>\n" in engine.text(engine.tokens.segments[0].ids)
    engine.check()


def test_an_empty_thought_that_a_setting_puts_in_the_prompt_is_dropped_as_the_template_does(
    tokenizer: Any,
) -> None:
    tokens = RunningTokens(ChatRenderer(tokenizer("qwen3"), {"enable_thinking": False}))
    first = tokens.prompt(user("one"))
    assert first.text.endswith("assistant\n<think>\n\n</think>\n\n")
    tokens.append(first, [5], [-1.0])
    second = tokens.prompt(user("two"))
    assert not second.continues
    assert second.text.count("<think>") == 1


def test_white_space_that_a_template_trims_breaks_nothing(talk: Any) -> None:
    for name in ("trimming", "llama3"):
        engine = talk(name)
        engine.answer(user("one"), "  two \n\n")
        engine.answer(user("three"), "four")
        assert len(engine.tokens.segments) == 1
        assert "  two \n\n" in engine.text(engine.tokens.segments[0].ids)
        engine.check()


def test_messages_that_a_template_merges_continue_the_segment(talk: Any) -> None:
    engine = talk("merging")
    engine.answer([*user("one "), *user("two")], "three")
    engine.answer([*user("four "), *user("five")], "six")
    assert engine.text(engine.tokens.segments[0].ids).count("<|im_start|>user\nfour five<|im_end|>") == 1
    engine.check()


def test_bos_is_there_once(talk: Any, tokenizer: Any) -> None:
    adding = tokenizer("llama3", bos=True)
    assert adding.encode("x")[0] == adding.bos_token_id
    for tokens in (talk("llama3").tokens, RunningTokens(ChatRenderer(adding))):
        prompt = tokens.prompt(user("one"))
        tokens.append(prompt, [5, adding.eos_token_id], [-1.0, -1.0])
        ids = tokens.prompt(user("two")).ids
        assert ids[0] == adding.bos_token_id
        assert ids.count(adding.bos_token_id) == 1


def test_the_template_says_itself_why_it_refuses_a_conversation(talk: Any) -> None:
    refused = talk("composed")
    with pytest.raises(ValueError, match=r"template refuses .*system, user\): System role not supported"):
        refused.prompt(Message("system", "be brief"), *user("one"))
    strict = talk("mistral")
    with pytest.raises(ValueError, match="roles must take turns"):
        strict.prompt(*user("one"), *user("two"))
    strict.answer(user("one"), "two")
    with pytest.raises(ValueError, match="not the same number of calls and outputs"):
        strict.prompt(Message("tool", "output"))
    strict.answer(user("three"), "four")
    strict.check()


def test_restarting_begins_another_segment_and_keeps_the_first(talk: Any) -> None:
    engine = talk("chatml")
    engine.answer(user("one"), "two")
    before = engine.text(engine.tokens.segments[0].ids)
    stale = engine.prompt(*user("three"))
    engine.tokens.restart()
    with pytest.raises(ValueError, match="before the conversation was restarted"):
        engine.tokens.append(stale, [1], [-1.0])
    engine.answer(user("a summary"), "go on")
    assert engine.text(engine.tokens.segments[0].ids) == before
    assert "one" not in engine.text(engine.tokens.segments[1].ids)
    engine.check()


def test_a_prompt_without_an_answer_leaves_no_trace(talk: Any) -> None:
    engine = talk("chatml")
    engine.answer(user("one"), "")
    before = list(engine.tokens.segments[0].ids)
    first = engine.prompt(*user("two"))
    assert engine.prompt(*user("two")) == first
    assert engine.tokens.segments[0].ids == before


def test_a_stale_prompt_and_missing_log_probabilities_are_refused(talk: Any) -> None:
    engine = talk("chatml")
    stale = engine.prompt(*user("one"))
    with pytest.raises(ValueError, match="2 sampled tokens came with 1"):
        engine.tokens.append(stale, [1, 2], [-1.0])
    engine.answer(user("two"), "")
    with pytest.raises(ValueError, match="before the last answer"):
        engine.tokens.append(stale, [1], [-1.0])


def test_a_tokenizer_without_a_chat_template_is_refused(tokenizer: Any) -> None:
    bare = type(tokenizer("chatml"))(tokenizer_object=tokenizer("chatml").backend_tokenizer)
    with pytest.raises(ValueError, match="no chat template"):
        ChatRenderer(bare)


class Cutting:
    """An engine of 120 tokens of context that answers `hello` again and again until it is cut."""

    max_model_len = 120

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, **_: Any) -> Generation:
        self.prompts.append(list(prompt_ids))
        ids = (self.tokenizer.encode(" hello", add_special_tokens=False) * 120)[: sampling.max_tokens]
        return Generation(ids, [-1.0] * len(ids), "length", 0.0, 0.0)

    async def release(self, session_id: str) -> None: ...


async def test_what_is_too_long_for_the_model_is_refused_and_nothing_is_cut(tokenizer: Any) -> None:
    engine = Cutting(tokenizer("chatml"))
    session = TokenPolicy(engine).session("a", task="t", sample=0)
    made, _ = await session.complete(user("one"), Sampling(max_tokens=20))
    assert (made.finish_reason, len(made.ids)) == ("length", 20)
    with pytest.raises(PolicyError, match="no room left") as raised:
        await session.complete(user("hello " * 200), Sampling())
    assert raised.value.error_class == "context_overflow"
    assert len(engine.prompts) == 1
    whole = [*made.prompt_ids, *made.ids]
    assert session.segments[0].ids == whole

    made, _ = await session.complete(user("two"), Sampling(max_tokens=1000))  # fills the context
    assert engine.prompts[1][: len(whole)] == whole
    assert len(made.prompt_ids) + len(made.ids) == engine.max_model_len
    assert session.segments[0].ids == [*made.prompt_ids, *made.ids]
    with pytest.raises(PolicyError) as raised:
        await session.complete(user("three"), Sampling())
    assert raised.value.error_class == "context_overflow"
    assert len(session.segments[0].ids) == engine.max_model_len
