"""Answers from a file: whose they are, how they fail, and what is said when the file is wrong."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.scripted import ByteTokenizer, ScriptedPolicy
from rollcage.rollout.trajectory import Message

FILE = """\
tasks:
  org/exact: [exact]
  org/count-*:
    samples:
      1: [one, more]
    turns: [others]
  org/only-first:
    samples: {0: [first]}
  org/broken:
    - {error: policy_unavailable, message: gone}
    - {text: late, seconds: 0.05}
default: [default]
"""


def policy(tmp_path: Path, text: str) -> ScriptedPolicy:
    path = tmp_path / "answers.yaml"
    path.write_text(text, encoding="utf-8")
    return ScriptedPolicy(path)


async def ask(session: Any, sampling: Sampling | None = None) -> Any:
    completion, _ = await session.complete([Message("user", "go on")], sampling or Sampling())
    return completion


@pytest.mark.parametrize(
    ("task", "sample", "answer"),
    [
        ("org/exact", 3, "exact"),
        ("org/count-lines", 1, "one"),
        ("org/count-lines", 2, "others"),
        ("org/only-first", 0, "first"),
        ("org/only-first", 1, "default"),
        ("org/unknown", 0, "default"),
    ],
)
async def test_each_rollout_gets_its_answers(tmp_path: Path, task: str, sample: int, answer: str) -> None:
    session = policy(tmp_path, FILE).session("a", task=task, sample=sample)
    assert (await ask(session)).text == answer
    assert session.segments == []


async def test_the_last_answer_is_repeated(tmp_path: Path) -> None:
    session = policy(tmp_path, FILE).session("a", task="org/count-x", sample=1)
    assert [(await ask(session)).text for _ in range(4)] == ["one", "more", "more", "more"]


async def test_errors_and_delays_are_played(tmp_path: Path) -> None:
    session = policy(tmp_path, FILE).session("a", task="org/broken", sample=0)
    with pytest.raises(PolicyError, match="gone") as error:
        await ask(session)
    assert error.value.error_class == "policy_unavailable"
    started = time.monotonic()
    assert (await ask(session)).generate_seconds == 0.05
    assert time.monotonic() - started >= 0.05


def test_a_rollout_without_answers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no answers for org/b, sample 2, and no default"):
        policy(tmp_path, "tasks: {org/a: [x]}").session("a", task="org/b", sample=2)


CALLS = """\
tokens: %s
max_model_len: 400
default:
  - text: I look.
    reasoning: What is there?
    tool_calls:
      - {name: bash, arguments: {command: "ls é"}}
      - {name: bash, arguments: '{"comm'}
  - {text: I will not., finish_reason: refusal}
"""


async def test_answers_may_think_call_tools_and_refuse(tmp_path: Path) -> None:
    session = policy(tmp_path, CALLS % "true").session("a", task="t", sample=0)
    first = await ask(session)
    assert (first.text, first.reasoning, first.finish_reason) == ("I look.", "What is there?", "tool_calls")
    calls = [(call.name, call.arguments) for call in first.tool_calls]
    assert calls == [("bash", '{"command": "ls \\u00e9"}'), ("bash", '{"comm')]
    assert len({call.id for call in first.tool_calls}) == 2
    second = await ask(session)
    assert (second.text, second.finish_reason, second.tool_calls) == ("I will not.", "refusal", ())
    (segment,) = session.segments
    assert segment.ids == second.prompt_ids + second.ids
    assert b"<tool_call>" in bytes(first.ids[:-1])


async def test_a_prompt_without_room_overflows_and_takes_no_answer(tmp_path: Path) -> None:
    session = policy(tmp_path, CALLS % "true").session("a", task="t", sample=0)
    with pytest.raises(PolicyError) as overflow:
        await session.complete([Message("user", "x" * 400)], Sampling())
    assert overflow.value.error_class == "context_overflow"
    assert (await ask(session)).text == "I look."
    assert (session.max_model_len, session.count_tokens("é")) == (400, 2)


async def test_an_answer_that_is_cut_tells_no_calls_apart(tmp_path: Path) -> None:
    session = policy(tmp_path, CALLS % "true").session("a", task="t", sample=0)
    cut = await ask(session, Sampling(max_tokens=80))
    assert (cut.finish_reason, cut.tool_calls, cut.reasoning) == ("length", (), "")
    assert cut.text.startswith("<think>\nWhat is there?\n</think>\nI look.\n<tool_call>")


async def test_with_tokens_the_sequence_is_kept_and_cut_at_max_tokens(tmp_path: Path) -> None:
    scripted = pickle.loads(pickle.dumps(policy(tmp_path, "tokens: true\ndefault: [abc]")))
    session = scripted.session("a", task="t", sample=0)
    whole = await ask(session)
    cut = await ask(session, Sampling(max_tokens=2))
    assert (whole.text, whole.finish_reason, whole.ids) == ("abc", "stop", [*b"abc", ByteTokenizer.END])
    assert (cut.text, cut.finish_reason, cut.ids) == ("ab", "length", [*b"ab"])
    (segment,) = session.segments
    assert segment.ids == cut.prompt_ids + cut.ids
    assert sum(segment.loss_mask) == len(whole.ids) + len(cut.ids)


@given(st.lists(st.one_of(st.text(), st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_"])), max_size=6))
def test_byte_tokens_decode_to_what_was_encoded(parts: list[str]) -> None:
    text = "".join(parts)
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids.count(tokenizer.END) == text.count("<|im_end|>")
    assert ids.count(tokenizer.START) == text.count("<|im_start|>")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"answers\.yaml: the file is empty"),
        ("tasks: [\n", r"answers\.yaml:2: this is no YAML"),
        ("tokens: true", r"answers\.yaml:1: there are neither `tasks` nor a `default`"),
        (
            "default: [x]\ntaks: {}",
            r"answers\.yaml:2: the file has no key 'taks'; known: default, max_model_len, tasks",
        ),
        ("default: []", r":1: turns are a list with at least one answer"),
        ("default:\n  - x\n  - 3", r":3: an answer must be a text"),
        ("default:\n  - {error: no_such}", r":2: 'no_such' is no error class of a policy"),
        ("default:\n  - {error: image_build}", r":2: 'image_build' is no error class of a policy"),
        (
            "default:\n  - {text: x, error: policy_error}",
            r":2: an answer has either a `text`, `reasoning` or `tool_calls`, or an `error`",
        ),
        ("default:\n  - {text: x, seconds: -1}", r":2: `seconds` is a length of time"),
        ("default:\n  - {text: x, seconds: true}", r":2: `seconds` must be"),
        ("tasks:\n  a:\n    samples:\n      one: [x]", r":4: a sample must be a whole number"),
        ("default: [x]\ndefault: [y]", r":2: 'default' is there twice"),
        ("default: [x]\ntokens: maybe", r":2: `tokens` must be true or false"),
        (CALLS % "false", r":2: `max_model_len` is above 0 and goes with `tokens: true`"),
        ("default:\n  - {tool_calls: bash}", r":2: `tool_calls` is a list of calls"),
        ("default:\n  - tool_calls:\n      - {name: bash}", r":3: a call has a `name` and `arguments`"),
        ("default:\n  - tool_calls:\n      - {name: b, arguments: 5}", r":3: `arguments` must be a text"),
        ("default:\n  - tool_calls:\n    - {name: b, arguments: {a: 2020-01-01}}", r":3: .* cannot be JSON"),
        ("default:\n  - {text: x, finish_reason: done}", r":2: no answer ends by 'done'; known: stop, "),
        ("default:\n  - {seconds: 1}", r":2: an answer has either a `text`, "),
        ("tokens: true\ndefault: ['a\0b']", r":2: the character '\\x00' is none of YAML's"),
        ("default:\n  - !new x", r":2: an answer cannot be read: .* constructor for the tag '!new'"),
        ("default:\n  - 2001-99-99", r":2: an answer cannot be read: month must be in 1..12"),
        ('default:\n  - "\\ud83d"', r":2: an answer holds half of a surrogate pair"),
        ("default:\n  - {text: x, seconds: 1" + "0" * 400 + "}", r":2: `seconds` is a length of time"),
        ("[" * 2000, r"answers\.yaml: this is nested too deeply"),
        ("tasks:\n  a: [x]\n  a: [y]", r":3: 'a' is there twice"),
        ("tasks:\n  a:\n    samples:\n      0: [x]\n      0: [y]", r":5: 0 is there twice"),
        ("tasks:\n  a:\n    samples: {-1: [x]}", r":3: samples are counted from 0, and -1 is none"),
        ("tasks:\n  a: {}", r":2: a task has `turns`, `samples` or both"),
        ("default:\n  - {text: x, message: m}", r":2: `message` goes with an `error` alone"),
        (
            "default:\n  - {error: policy_error, finish_reason: stop}",
            r":2: `finish_reason` goes with an answer",
        ),
        ("default:\n  - tool_calls: [{name: b, arguments: {a: .nan}}]", r":2: .* cannot be JSON"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        policy(tmp_path, text)


def test_a_file_that_is_no_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "answers.yaml").write_bytes(b"default:\n  - caf\xe9\n")
    with pytest.raises(ValueError, match=r"answers\.yaml:2: the file of answers is no UTF-8 text"):
        ScriptedPolicy(tmp_path / "answers.yaml")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"/no/such\.yaml: .* cannot be read: No such file"):
        ScriptedPolicy("/no/such.yaml")
