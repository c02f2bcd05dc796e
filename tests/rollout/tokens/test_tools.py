"""Tools, calls and outputs, as each kind of template shows them, behind answers that stay as they were sampled."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rollcage.rollout.policies.base import Sampling, Tool
from rollcage.rollout.policies.engine import Generation, Parsed, TokenPolicy
from rollcage.rollout.tokens import ChatRenderer, RunningTokens
from rollcage.rollout.trajectory import Message, ToolCall

BASH = Tool("bash", "Runs a command.", {"type": "object", "properties": {"command": {"type": "string"}}})
LOOK = Tool("look", "Shows a file.", {"type": "object", "properties": {}})


def user(text: str) -> list[Message]:
    return [Message("user", text)]


def calls(*commands: str, text: str = "", reasoning: str = "", first: int = 0) -> Message:
    """An answer that a parser has taken apart, with calls of `bash`."""
    made = tuple(
        ToolCall(f"call{number:05d}", "bash", f'{{"command": "{command}"}}')
        for number, command in enumerate(commands, first)
    )
    return Message("assistant", text, tool_calls=made, reasoning=reasoning)


def output(text: str, number: int = 0) -> Message:
    return Message("tool", text, tool_call_id=f"call{number:05d}")


HERMES_CALL = '<tool_call>\n{"name":  "bash", "arguments": {"command": "ls"}}\n</tool_call>'
"""With one blank more than a template writes."""


@pytest.mark.parametrize(
    ("name", "said", "behind"),
    [
        (
            "qwen3",
            HERMES_CALL,
            "\n<|im_start|>user\n<tool_response>\nout\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "hermes",
            HERMES_CALL,
            '\n<|im_start|>tool\n<tool_response>\n{"name": "bash", "content": "out"}\n</tool_response><|im_end|>\n'
            "<|im_start|>assistant\n",
        ),
        (
            "llama3",
            '{"name": "bash", "parameters": {"command":  "ls"}}',
            '<|start_header_id|>ipython<|end_header_id|>\n\n{"output": "out"}<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "bash", "arguments": {"command":  "ls"}, "id": "call00000"}]',
            '[TOOL_RESULTS] {"content": "out", "call_id": "call00000"}[/TOOL_RESULTS]',
        ),
    ],
)
def test_an_output_stands_behind_the_call_as_it_was_sampled(
    talk: Any, name: str, said: str, behind: str
) -> None:
    engine = talk(name, [BASH])
    engine.answer(user("list the files"), said, calls("ls"))
    sampled = engine.seen[0][1]
    assert engine.added(output("out")) == behind
    engine.answer([output("out")], said, calls("ls"))
    engine.answer([output("out")], "done")
    if name != "qwen3":  # which would drop nothing here either, but has no thoughts to keep
        engine.answer(user("thanks"), "welcome")
    assert len(engine.tokens.segments) == 1
    assert engine.tokens.segments[0].ids[len(engine.seen[0][0]) :][: len(sampled)] == sampled
    engine.check()


def test_two_calls_in_one_answer_have_two_outputs(talk: Any) -> None:
    engine = talk("qwen3", [BASH])
    engine.answer(user("go"), f"{HERMES_CALL}\n{HERMES_CALL}", calls("ls", "ls"))
    added = engine.added(output("first"), output("second", 1))
    assert "<tool_response>\nfirst\n</tool_response>\n<tool_response>\nsecond\n</tool_response>" in added


def test_two_calls_where_the_template_takes_one_are_shown_as_they_were_sampled(talk: Any) -> None:
    engine = talk("llama3", [BASH])
    engine.answer(user("go"), '{"name": "bash"}; {"name": "bash"}', calls("ls", "ls"))
    engine.answer([output("first"), output("second", 1)], "done")
    assert len(engine.tokens.segments) == 1
    engine.check()


def test_special_tokens_that_mark_a_call_stay_in_the_ids_and_are_not_read(talk: Any) -> None:
    engine = talk("llama3", [BASH])
    text = engine.answer(user("go"), '<|python_tag|>{"name": "bash"}', calls("ls"))
    assert text == '{"name": "bash"}'
    tag = engine.ids("<|python_tag|>")[0]
    assert tag in engine.tokens.segments[0].ids
    # other tools begin a segment anew, whose history has the token too
    engine.tools = [BASH, LOOK]
    prompt = engine.prompt(output("out"))
    assert not prompt.continues
    assert prompt.ids.count(tag) == 1
    assert '<|python_tag|>{"name": "bash"}<|eot_id|>' in engine.text(prompt.ids)


def test_an_answer_that_ended_for_a_call_is_closed_as_the_template_does(talk: Any) -> None:
    engine = talk("llama3", [BASH])
    engine.answer(user("go"), engine.ids('<|python_tag|>{"name": "bash"}<|eom_id|>'), calls("ls"))
    assert engine.added(output("out")).startswith("<|eot_id|><|start_header_id|>ipython")
    engine.answer([output("out")], "done")
    engine.check()


@pytest.mark.parametrize("name", ["qwen3", "hermes", "llama3", "mistral"])
def test_a_call_that_was_cut_is_closed_by_the_template(talk: Any, name: str) -> None:
    engine = talk(name, [BASH])
    engine.answer(user("go"), engine.ids('{"name": "bash", "argum'))
    added = engine.added(*user("that was cut"))
    assert added.startswith(engine.kind.special[1])
    engine.answer(user("that was cut"), "sorry")
    assert len(engine.tokens.segments) == 1
    engine.check()


def test_a_call_without_its_end_token_is_closed_where_the_template_needs_calls_apart(talk: Any) -> None:
    engine = talk("mistral", [BASH])
    engine.answer(user("go"), engine.ids("[TOOL_CALLS][...]"), calls("ls"))
    assert engine.added(output("out")).startswith("</s>[TOOL_RESULTS]")
    engine.answer([output("out")], "done")
    engine.check()


def test_thoughts_that_a_template_does_not_show_with_a_call_start_a_new_segment(talk: Any) -> None:
    engine = talk("mistral", [BASH])
    engine.answer(user("go"), "thinking hard [TOOL_CALLS][...]", calls("ls", reasoning="thinking hard"))
    engine.answer([output("out")], "done")
    first, second = engine.tokens.segments
    assert "thinking hard" in engine.text(first.ids)
    assert "thinking hard" not in engine.text(second.ids)
    engine.check()


def test_text_before_a_call_stays(talk: Any) -> None:
    for name in ("qwen3", "hermes", "mistral"):
        engine = talk(name, [BASH])
        engine.answer(user("go"), f"let me see\n{HERMES_CALL}", calls("ls", text="let me see"))
        engine.answer([output("out")], "done")
        assert len(engine.tokens.segments) == 1
        engine.check()


@pytest.mark.parametrize("name", ["qwen3", "hermes", "llama3"])
def test_other_tools_start_a_new_segment(talk: Any, name: str) -> None:
    engine = talk(name, [BASH])
    engine.answer(user("one"), "two")
    assert engine.text(engine.seen[0][0]).count("Runs a command.") == 1
    engine.tools = [BASH, LOOK]
    assert not engine.prompt(*user("three")).continues
    engine.answer(user("three"), "four")
    assert "Shows a file." in engine.text(engine.tokens.segments[1].ids)
    engine.answer(user("five"), "six")
    assert len(engine.tokens.segments) == 2
    engine.check()


def test_examples_that_an_agent_gives_are_shown_with_their_calls(talk: Any) -> None:
    for name in ("qwen3", "hermes", "llama3", "mistral"):
        engine = talk(name, [BASH])
        prompt = engine.prompt(
            *user("list"), calls("ls"), output("out"), Message("assistant", "ok"), *user("x")
        )
        text = engine.text(prompt.ids)
        assert '{"command": "ls"}' in text
        assert text.count("out") >= 1


DEEP = [pytest.param('{"a":' * levels + "1" + "}" * levels, id=f"deep{levels}") for levels in (600, 2000)]


@pytest.mark.parametrize("arguments", ['{"command": "ls', *DEEP])
def test_arguments_that_are_no_json_are_shown_as_text(talk: Any, arguments: str) -> None:
    engine = talk("mistral", [BASH])
    broken = Message("assistant", "", tool_calls=(ToolCall("call00000", "bash", arguments),))
    engine.answer(user("go"), "[TOOL_CALLS][...]", broken)
    engine.answer([output("it is no JSON")], "done")
    assert len(engine.tokens.segments) == 1
    engine.check()


def renderer_of(tokenizer: Any, messages: str, begun: str = "assistant\\n") -> ChatRenderer:
    """Of ChatML in which one message is written as `messages` says."""
    changed = copy.copy(tokenizer("chatml"))
    changed.chat_template = (
        "{%- for m in messages %}" + messages + "{% endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>" + begun + "' }}{% endif %}"
    )
    return ChatRenderer(changed)


def test_a_template_that_leaves_outputs_out_is_told_of(tokenizer: Any) -> None:
    turn = "{%- if m.role != 'tool' %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}"
    tokens = RunningTokens(renderer_of(tokenizer, turn))
    tokens.append(tokens.prompt(user("go")), [5], [-1.0], calls("ls"))
    with pytest.raises(
        ValueError, match="leaves out the outputs of tools: take an agent that needs no tools"
    ):
        tokens.prompt([output("out")])


def test_a_template_that_wants_arguments_as_text_gets_them_so(tokenizer: Any) -> None:
    turn = (
        "{{- '<|im_start|>' + m.role + '\\n' + m.content }}"
        "{%- for call in m.tool_calls or [] %}{{- call.function.name + call.function.arguments }}{% endfor %}"
        "{{- '<|im_end|>\\n' }}"
    )
    text = renderer_of(tokenizer, turn).text([*user("go"), calls("ls"), output("out")])
    assert 'assistant\nbash{"command": "ls"}<|im_end|>' in text


def test_a_template_that_wants_content_in_parts_gets_it_so(tokenizer: Any) -> None:
    turn = "{{- '<|im_start|>' + m.role + '\\n' }}{{- m.content[0].text }}{{- '<|im_end|>\\n' }}"
    tokens = RunningTokens(renderer_of(tokenizer, turn))
    tokens.append(tokens.prompt(user("one")), [5], [-1.0])
    prompt = tokens.prompt(user("two"))
    assert prompt.continues
    assert "user\none<|im_end|>" in prompt.text
    assert "user\ntwo<|im_end|>" in prompt.text


def test_a_last_answer_that_is_closed_in_its_own_way_is_closed_as_an_earlier_one(tokenizer: Any) -> None:
    # As gpt-oss: the last message of all ends with another token, and answers have channels, which content must not.
    turn = (
        "{%- if '(' in m.content %}{{- raise_exception('no channels in the content') }}{% endif %}"
        "{{- '<|im_start|>' + m.role + ('(final)' if m.role == 'assistant' else '\\n') + m.content }}"
        "{{- '<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>\\n' }}"
    )
    tokens = RunningTokens(renderer_of(tokenizer, turn, begun="assistant"))
    ids = tokenizer("chatml").encode("(final)two<|im_end|>", add_special_tokens=False)
    tokens.append(tokens.prompt(user("one")), ids, [-1.0] * len(ids), Message("assistant", "two"))
    prompt = tokens.prompt(user("three"))
    assert prompt.continues
    added = tokenizer("chatml").decode(prompt.ids[len(tokens.segments[0].ids) :])
    assert added == "\n<|im_start|>user\nthree<|im_end|>\n<|im_start|>assistant"


class Parsing:
    """An engine with a parser of calls that answers every prompt with one."""

    max_model_len = 4096

    def __init__(self, tokenizer: Any, end: str = "stop") -> None:
        self.tokenizer = tokenizer
        self.end = end
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: list[int], sampling: Sampling, **_: Any) -> Generation:
        self.prompts.append(list(prompt_ids))
        ids = self.tokenizer.encode("[TOOL_CALLS][...]</s>", add_special_tokens=False)
        call = calls("ls").tool_calls
        return Generation(ids, [-1.0] * len(ids), self.end, 0.0, 0.0, parsed=Parsed("", "", call))

    async def release(self, session_id: str) -> None: ...


async def test_a_session_goes_on_behind_the_calls_that_its_engine_has_parsed(tokenizer: Any) -> None:
    engine = Parsing(tokenizer("mistral"))
    session = TokenPolicy(engine).session("a", task="t", sample=0)
    for new in (user("go"), [output("one")], [output("two")]):
        made, segment = await session.complete(new, Sampling(), tools=[BASH])
        assert (made.finish_reason, made.text, segment) == ("tool_calls", "", 0)
        assert engine.prompts[-1] == made.prompt_ids
        assert session.segments[0].ids == [*made.prompt_ids, *made.ids]


async def test_an_answer_that_was_cut_is_called_so_though_its_engine_has_parsed_calls(tokenizer: Any) -> None:
    session = TokenPolicy(Parsing(tokenizer("mistral"), "length")).session("a", task="t", sample=0)
    made, _ = await session.complete(user("go"), Sampling(), tools=[BASH])
    assert (made.finish_reason, len(made.tool_calls)) == ("length", 1)
