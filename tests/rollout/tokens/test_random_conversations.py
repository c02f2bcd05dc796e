"""Whatever is said, by whom, and however answers end: joined ids are what the engine saw."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollcage.rollout.policies.base import Tool
from rollcage.rollout.tokens import ChatRenderer, RunningTokens
from rollcage.rollout.trajectory import Message, ToolCall

TEMPLATES = [*sorted(path.stem for path in Path(__file__).parent.glob("templates/*.jinja")), "smollm2"]
TOOLS = tuple(Tool(name, f"Does {name}.", {"type": "object", "properties": {}}) for name in ("bash", "look"))

FRAGMENTS = st.sampled_from(
    [
        *(
            "<|im_end|>",
            "<|im_start|>assistant\n",
            "<|im_",
            "end|>",
            "<|eot_id|>",
            "<|user|>",
            "</s>",
            "[INST]",
        ),
        *("<think>", "</think>", "<tool_call>", "hello ", "\n", "é", "🦊", "\x00"),
    ]
)
TEXT = st.one_of(st.text(max_size=20), st.lists(FRAGMENTS, max_size=5).map("".join))
# Fractions of the vocabulary: any ids whatever, so with cut characters, control tokens in the middle, and
# spellings that no encoder makes; the upper end is where control tokens are.
SAMPLED = st.lists(
    st.one_of(st.floats(0, 1, exclude_max=True), st.floats(0.97, 1, exclude_max=True)), max_size=12
)


@dataclass(frozen=True)
class Step:
    """One answer. Before it, perhaps, the conversation is restarted, other tools are offered, or a prompt gets no
    answer. `said` is what the messages say: a user's, or a tool's where there was a call. `calls`: how many calls a
    parser finds in the answer; None: no parser."""

    said: list[str]
    sampled: list[float]
    ended: bool
    calls: int | None
    thought: str
    restarted: bool
    other_tools: bool
    unanswered: bool


SELDOM = st.integers(0, 7).map(lambda drawn: drawn == 0)
STEPS = st.lists(
    st.builds(
        Step,
        said=st.lists(TEXT, max_size=2),
        sampled=SAMPLED,
        ended=st.booleans(),
        calls=st.sampled_from([None, None, 0, 1, 2]),
        thought=st.sampled_from(["", "", "hm", "</think>"]),
        restarted=SELDOM,
        other_tools=SELDOM,
        unanswered=SELDOM,
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("name", TEMPLATES)
@given(system=st.one_of(st.none(), TEXT), steps=STEPS)
@settings(max_examples=60, deadline=None)
def test_joined_ids_are_what_the_engine_saw(
    talk: Any, tokenizer: Any, name: str, system: str | None, steps: list[Step]
) -> None:
    engine = talk(name, TOOLS[:1])
    kind, vocabulary = engine.kind, len(tokenizer(name))
    opening = [Message("system", system)] if system is not None and kind.system else []
    open_calls: tuple[ToolCall, ...] = ()
    begun = False
    for number, step in enumerate(steps):
        fresh = not begun
        if step.restarted:
            engine.tokens.restart()
            fresh, open_calls = True, ()
        if step.other_tools:
            engine.tools = TOOLS if len(engine.tools) == 1 else TOOLS[:1]
            fresh = True
        said = [*step.said, "go on"]
        if open_calls:
            new = [Message("tool", said[0], tool_call_id=call.id) for call in open_calls]
        else:
            new = [Message("user", text) for text in (said[:1] if kind.strict else step.said or said)]
        new = [*opening, *new]
        if step.unanswered:
            before = copy.deepcopy((engine.tokens.segments, engine.tokens.messages))
            engine.prompt(*new)
            assert repr((engine.tokens.segments, engine.tokens.messages)) == repr(before)
        assert not (fresh and engine.prompt(*new).continues)
        ids = [int(at * vocabulary) for at in step.sampled] or [engine.end]
        parsed = None
        open_calls = ()
        if step.calls is not None:
            open_calls = tuple(
                ToolCall(f"c{number:03d}{call:05d}", "bash", '{"command": "ls"}')
                for call in range(step.calls)
            )
            parsed = Message("assistant", "", tool_calls=open_calls, reasoning=step.thought)
        engine.answer(new, [*ids, engine.end] if step.ended else ids, parsed)
        opening, begun = [], True
    engine.check()
    assert sum(sum(segment.loss_mask) for segment in engine.tokens.segments) == sum(
        len(ids) for _, ids, _ in engine.seen
    )


PLAIN = st.text("abc the\né🦊<>", max_size=20)


@pytest.mark.parametrize("name", ["chatml", "hermes", "llama3", "merging", "opened", "smollm2"])
@given(
    system=PLAIN,
    turns=st.lists(st.tuples(PLAIN, PLAIN.map(str.strip), st.booleans()), min_size=1, max_size=5),
)
@settings(max_examples=60, deadline=None)
def test_all_but_what_was_sampled_is_as_the_template_has_it_tokenized(
    talk: Any, tokenizer: Any, name: str, system: str, turns: list[tuple[str, str, bool]]
) -> None:
    engine = talk(name)

    def spelled(text: str) -> list[int]:
        return [number for letter in text for number in engine.ids(letter)]

    own = [{"role": "system", "content": system}]
    new = [Message("system", system)]
    for said, answer, ended in turns:
        end = [engine.end] if ended else []
        engine.answer([*new, Message("user", said)], [*spelled(answer), *end])
        thought = "<think>\n" if name == "opened" else ""
        own += [{"role": "user", "content": said}, {"role": "assistant", "content": thought + answer}]
        new = []
    last = engine.prompt(Message("user", "end")).ids
    assert len(engine.tokens.segments) == 1
    rebuilt: list[int] = []
    at = 0
    for (prompt, sampled, _), (_, answer, ended) in zip(engine.seen, turns, strict=True):
        rebuilt += [*last[at : len(prompt)], *engine.ids(answer), *([engine.end] if ended else [])]
        at = len(prompt) + len(sampled)
    own.append({"role": "user", "content": "end"})
    oracle = tokenizer(name).apply_chat_template(own, add_generation_prompt=True, return_dict=False)
    assert [*rebuilt, *last[at:]] == oracle


@pytest.mark.parametrize("name", ["chatml", "smollm2"])
def test_two_hundred_turns_are_tokenized_once(counting: Any, name: str) -> None:
    tokenizer = counting(name)
    tokens = RunningTokens(ChatRenderer(tokenizer))
    tokenizer.letters = 0
    line = "cc1: warning: <stdin>:3: something that a compiler says of a file of more than one line\n"
    for _ in range(200):
        prompt = tokens.prompt([Message("user", line * 8)])
        tokens.append(prompt, [5, tokenizer.eos_token_id], [-1.0, -1.0])
    assert len(tokens.segments) == 1
    said = 200 * 8 * len(line)
    assert said < tokenizer.letters < 1.1 * said
