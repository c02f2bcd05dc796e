"""Answers in terminus-2's JSON protocol: what is read in them, what is warned of, and what cannot be read."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import pytest

from rollcage.rollout.agents.keys_parser import (
    SCHEMA,
    Answer,
    Keystrokes,
    MalformedAnswer,
    keystrokes,
    parse_json,
)

LS = {"keystrokes": "ls\n", "duration": 0.1}
BEFORE, AFTER = "Extra text detected before JSON object", "Extra text detected after JSON object"
BRACE, HIDDEN = "AUTO-CORRECTED: Fixed incomplete JSON", "AUTO-CORRECTED: Extracted JSON from mixed content"


def said(*commands: Any, **fields: Any) -> str:
    """An answer of these commands."""
    return json.dumps(
        {"analysis": "a", "plan": "p", "commands": list(commands), **fields}, ensure_ascii=False
    )


def typed(*keys: str, seconds: float = 0.1) -> str:
    return said(*({"keystrokes": text, "duration": seconds} for text in keys))


def raw(commands: str) -> str:
    return f'{{"analysis": "a", "plan": "p", "commands": {commands}}}'


WELL_FORMED = {
    "one command": (said(LS), [("ls\n", 0.1)], False),
    "no command": (said(), [], False),
    "several commands": (typed("cd x\n", "make\n"), [("cd x\n", 0.1), ("make\n", 0.1)], False),
    "a wait": (said({"keystrokes": "", "duration": 10.0}), [("", 10.0)], False),
    "a wait between commands": (typed("make\n", "", "ls\n"), [("make\n", 0.1), ("", 0.1), ("ls\n", 0.1)], False),
    "a whole number of seconds": (typed("x", seconds=5), [("x", 5.0)], False),
    "complete": (said(LS, task_complete=True), [("ls\n", 0.1)], True),
    "not complete": (said(task_complete=False), [], False),
    "complete is null": (said(task_complete=None), [], False),
    "complete in words": (said(task_complete="Yes"), [], True),
    "complete as a text": (said(task_complete="TRUE"), [], True),
    "complete as a number in a text": (said(task_complete="1"), [], True),
    "not complete in words": (said(task_complete="false"), [], False),
    "a field more": (said(LS, thought="hm"), [("ls\n", 0.1)], False),
    "space around": (f"\n\n  {said(LS)} \n", [("ls\n", 0.1)], False),
    "many lines": (json.dumps(json.loads(said(LS)), indent=4), [("ls\n", 0.1)], False),
    "braces in a text": (typed("awk '{print $1}' f\n"), [("awk '{print $1}' f\n", 0.1)], False),
    "an open brace in a text": (typed("echo '{'\n"), [("echo '{'\n", 0.1)], False),
    "JSON in a text": (typed(said(LS)), [(said(LS), 0.1)], False),
    "quotes in a text": (typed('echo "a\\"b"\n'), [('echo "a\\"b"\n', 0.1)], False),
    "a backslash at a text's end": (typed("echo \\"), [("echo \\", 0.1)], False),
    "a control character by its number": (raw(r'[{"keystrokes": "\u0003", "duration": 1}]'), [("\x03", 1.0)], False),
    "a pair of surrogates": (raw(r'[{"keystrokes": "\ud83d\ude00", "duration": 1}]'), [("😀", 1.0)], False),
    "half a pair": (raw(r'[{"keystrokes": "\ud83d", "duration": 1}]'), [("\ud83d", 1.0)], False),
    "other scripts": (typed("echo ä 漢字\n"), [("echo ä 漢字\n", 0.1)], False),
    "a time below nothing": (typed("x", seconds=-3), [("x", 0.0)], False),
    "a time without an end": (raw('[{"keystrokes": "x", "duration": Infinity}]'), [("x", inf)], False),
    "a very long time": (raw('[{"keystrokes": "x", "duration": 1e400}]'), [("x", inf)], False),
    "a time of 400 digits": (raw('[{"keystrokes": "x", "duration": %s}]' % ("9" * 400)), [("x", inf)], False),
    "a megabyte of text": (typed("x" * (1 << 20)), [("x" * (1 << 20), 0.1)], False),
}  # fmt: skip


@pytest.mark.parametrize("case", WELL_FORMED)
def test_a_right_answer_is_read_without_a_warning(case: str) -> None:
    text, commands, done = WELL_FORMED[case]
    assert parse_json(text) == Answer(tuple(Keystrokes(*command) for command in commands), done)


LINE = "Command 1 should end with newline when followed by another command"
MISSING = "Command 1: Missing duration field, using default 1.0"
INVALID = "Command 1: Invalid duration value, using default 1.0"
READ = [("ls\n", 0.1)]
WARNED: dict[str, tuple[str, list[tuple[str, float]], list[str]]] = {
    "text before": (f"I look.\n{said(LS)}", READ, [BEFORE]),
    "text after": (f"{said(LS)}\nI wait.", READ, [AFTER]),
    "text on both sides": (f"So: {said(LS)} there.", READ, [BEFORE, AFTER]),
    "a code fence": (f"```json\n{said(LS)}\n```", READ, [BEFORE, AFTER]),
    "thoughts before": (f"<think>what now?</think>{said(LS)}", READ, [BEFORE]),
    "two answers": (f"{said(LS)}\n{typed('rm x')}", READ, [AFTER]),
    "a brace too many": (said(LS) + "}", READ, [AFTER]),
    "a brace too many before": ("} " + said(LS), READ, [BEFORE]),
    "no time": (said({"keystrokes": "ls\n"}), [("ls\n", 1.0)], [MISSING]),
    "a time in words": (said({"keystrokes": "ls\n", "duration": "1"}), [("ls\n", 1.0)], [INVALID]),
    "no number as a time": (raw('[{"keystrokes": "x", "duration": NaN}]'), [("x", 1.0)], [INVALID]),
    "true as a time": (said({"keystrokes": "x", "duration": True}), [("x", 1.0)], [INVALID]),
    "null as a time": (said({"keystrokes": "x", "duration": None}), [("x", 1.0)], [INVALID]),
    "a list as a time": (said({"keystrokes": "x", "duration": [1]}), [("x", 1.0)], [INVALID]),
    "a command's field more": (said({**LS, "timeout": 3}), READ, ["Command 1: Unknown fields: timeout"]),
    "no line's end": (typed("ls", "pwd\n"), [("ls", 0.1), ("pwd\n", 0.1)], [LINE]),
    "another order": (
        json.dumps({"plan": "p", "analysis": "a", "commands": [LS]}), READ,
        ["Fields appear in wrong order. Found: plan → analysis → commands, expected: analysis → plan → commands"],
    ),
    "no text": (json.dumps({"analysis": 1, "plan": ["p"], "commands": [LS]}), READ,
                ["Field 'analysis' should be a string", "Field 'plan' should be a string"]),
    "complete as a number": (said(LS, task_complete=0), READ,
                             ["Field 'task_complete' should be a boolean or string"]),
    "a field twice": (said(LS)[:-1] + ', "plan": "q"}', READ,
                      ["Field 'plan' is there more than once, the last one counts"]),
    "commands twice": (raw('[{"keystrokes": "rm x"}]')[:-1] + f', "commands": [{json.dumps(LS)}]}}', READ,
                       ["Field 'commands' is there more than once"]),
    "a missing brace": (said(LS)[:-1], READ, [BRACE]),
    "a missing brace in a fence": (f"```json\n{said(LS)[:-1]}\n```", READ, [BRACE, BEFORE]),
    "a missing brace, and one in a text": (typed("echo ${x\n")[:-1], [("echo ${x\n", 0.1)], [BRACE]),
    "braces in the text before": ("I run {x}: " + said(LS), READ, [HIDDEN]),
    "an object before": ('{"note": 1} ' + said(LS), READ, [HIDDEN]),
    "an odd quote before": ('a 5" disk: ' + said(LS), READ, [HIDDEN]),
    "an object around": (f'{{"response": {said(LS)}}}', READ, [HIDDEN]),
    "a brace before that is never closed": ("{ " + said(LS), READ, [HIDDEN]),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNED)
def test_what_is_borne_is_warned_of(case: str) -> None:
    text, commands, warnings = WARNED[case]
    answer = parse_json(text)
    assert answer.commands == tuple(Keystrokes(*command) for command in commands)
    assert len(answer.warnings) == len(warnings), answer.warnings
    assert all(map(str.startswith, answer.warnings, warnings)), answer.warnings


NOTHING = "No valid JSON found in response: "
MALFORMED = {
    "nothing": ("", NOTHING + "it holds no JSON object"),
    "words": ("I am done.", NOTHING + "it holds no JSON object"),
    "a fence of another kind": ("```bash\nls\n```", NOTHING + "it holds no JSON object"),
    "a list": (f"[{json.dumps(LS)}]", "Missing required fields: analysis, plan, commands"),
    "a text that stays open": ('{"analysis": "a', NOTHING + "a string of the object is not closed"),
    "a command that stays open": (said(LS)[:-2], NOTHING + "1 of the object's braces are not closed"),
    "a command in the middle of it": (said(LS)[:-4], NOTHING + "2 of the object's braces are not closed"),
    "a comma too many": (said(LS)[:-1] + ",}", "Invalid JSON: Illegal trailing comma"),
    "single quotes": ("{'analysis': 'a'}", "Invalid JSON: Expecting property name enclosed in double quotes"),
    "a real newline in a text": (said(LS).replace("\\n", "\n"), "Invalid JSON: Invalid control character"),
    "an escape that is none": (raw(r'[{"keystrokes": "\d"}]'), r"Invalid JSON: Invalid \escape"),
    "no comma": ('{"analysis": "a" "plan": "p"}', "Invalid JSON: Expecting ',' delimiter: line 1 column 18"),
    "no plan": ('{"analysis": "a", "commands": []}', "Missing required fields: plan"),
    "an empty object": ("{}", "Missing required fields: analysis, plan, commands"),
    "commands as a text": (said().replace("[]", '"ls"'), "Field 'commands' must be an array"),
    "commands as null": (said().replace("[]", "null"), "Field 'commands' must be an array"),
    "a text as a command": (said("ls\n"), "Command 1 must be an object"),
    "a list as a command": (said(LS, [LS]), "Command 2 must be an object"),
    "no keystrokes": (said(LS, {"duration": 1}), "Command 2 missing required 'keystrokes' field"),
    "a number as keystrokes": (said({"keystrokes": 3}), "Command 1 'keystrokes' must be a string"),
    "null as keystrokes": (said({"keystrokes": None}), "Command 1 'keystrokes' must be a string"),
    "lists a thousand deep": (raw("[" * 100_000 + "]" * 100_000), "Invalid JSON: it is nested too deeply"),
    "objects a thousand deep": (raw('{"a":' * 100_000 + "1" + "}" * 100_000), "Invalid JSON: it is nested too"),
    "a number of 5,000 digits": (raw("[%s]" % ("9" * 5000)), "Invalid JSON: a number is too long"),
    "a megabyte of braces": ("{" * (1 << 20), NOTHING + "1048576 of the object's braces are not closed"),
    "a megabyte of objects": ('{"a' * (1 << 18), NOTHING),
    "a megabyte of nested objects": ('{"a":' * (1 << 18), NOTHING),
    "a megabyte of empty objects": ("{}" * (1 << 19), "Missing required fields"),
    "a megabyte of quotes": ('"' * ((1 << 20) + 1), NOTHING + "it holds no JSON object"),
    "a megabyte of backslashes": ("{" + "\\" * (1 << 20), NOTHING),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_what_cannot_be_read_is_said_so_that_it_can_be_mended(case: str) -> None:
    text, problem = MALFORMED[case]
    with pytest.raises(MalformedAnswer) as raised:
        parse_json(text)
    # Python 3.13 has words of its own for a trailing comma.
    other = "Invalid JSON: Expecting property name" if "trailing comma" in problem else problem
    assert str(raised.value).startswith((problem, other)), str(raised.value)
    assert len(str(raised.value)) < 300


def test_an_error_comes_with_the_warnings_before_it() -> None:
    with pytest.raises(MalformedAnswer) as raised:
        parse_json(f"So: {said({'keystrokes': 'ls'}, 3)} there.")
    assert str(raised.value) == "Command 2 must be an object"
    assert [*raised.value.warnings[:2], *raised.value.warnings[2:3]] == [BEFORE, AFTER, MISSING]


def test_commands_that_cannot_be_read_do_not_keep_a_task_open() -> None:
    answer = parse_json(said(3, task_complete=True))
    assert answer == Answer((), True, ("Command 1 must be an object",))


def test_half_an_answer_is_not_completed() -> None:
    assert parse_json(said(LS)[:-1]).commands
    with pytest.raises(MalformedAnswer, match="braces are not closed"):
        parse_json(said(LS)[:-1], cut=True)
    assert parse_json(said(LS) + " and so", cut=True).commands


def test_the_schema_is_the_protocol_and_one_that_xgrammar_takes() -> None:
    xgrammar = pytest.importorskip("xgrammar")
    alphabet = xgrammar.TokenizerInfo([bytes([code]) for code in range(256)])
    compiled = xgrammar.GrammarCompiler(alphabet).compile_json_schema(json.dumps(SCHEMA))

    def takes(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return matcher.accept_string(text) and matcher.is_terminated()

    loose = {"a field more", "space around", "a time without an end"}
    for case, (text, _, _) in WELL_FORMED.items():
        assert takes(text) == (
            case not in loose and '"task_complete": "' not in text and "null" not in text
        ), case
    assert [case for case, (text, _, _) in WARNED.items() if takes(text)] == ["no line's end"]
    assert not any(takes(text) for text, _ in MALFORMED.values())


@pytest.mark.parametrize("given", [{"keystrokes": 1}, {"duration": 1}, {"keystrokes": "x", "duration": "1"}])
def test_recorded_keystrokes_are_a_text_and_a_time(given: dict[str, Any]) -> None:
    assert keystrokes({"keystrokes": "x"}) == Keystrokes("x", 1.0)
    with pytest.raises(ValueError, match="`keystrokes` are a text"):
        keystrokes(given)
