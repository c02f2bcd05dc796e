"""Answers in terminus-2's XML protocol: what is read in them, what is warned of, and what cannot be read."""

from __future__ import annotations

import pytest

from rollcage.rollout.agents.keys_parser import Answer, Keystrokes, MalformedAnswer
from rollcage.rollout.agents.keys_xml import parse_xml

LS = '<keystrokes duration="0.1">ls\n</keystrokes>'
READ = (Keystrokes("ls\n", 0.1),)


def said(commands: str = LS, *, before: str = "<analysis>a</analysis><plan>p</plan>", after: str = "") -> str:
    return f"<response>\n{before}\n<commands>\n{commands}\n</commands>\n{after}\n</response>"


DONE = "<task_complete>true</task_complete>"

RIGHT = {
    "one command": (said(), Answer(READ)),
    "two commands": (said(LS + LS), Answer(READ * 2)),
    "complete": (said(after=DONE), Answer(READ, True)),
    "complete, and nothing else to do": (said("", after="<task_complete> TRUE </task_complete>"), Answer((), True)),
    "not complete": (said(after="<task_complete>false</task_complete>"), Answer(READ)),
    "not complete by an empty tag": (said(after="<task_complete/>"), Answer(READ)),
    "raw text": (
        said('<keystrokes duration="1">cat <<E >f && echo "<b>"\n</keystrokes>'),
        Answer((Keystrokes('cat <<E >f && echo "<b>"\n'),)),
    ),
    "a key before a command": (said('<keystrokes duration="1">C-c</keystrokes>' + LS),
                               Answer((Keystrokes("C-c"), *READ))),
    "space around": (f"\n {said()}\n", Answer(READ)),
}  # fmt: skip


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_answer_is_read_without_a_warning(case: str) -> None:
    text, answer = RIGHT[case]
    assert parse_xml(text) == answer


WARNED = {
    "text before": (f"So:{said()}", READ, ["Extra text detected before <response> tag"]),
    "text after": (f"{said()}.", READ, ["Extra text detected after <response> tag"[:26]]),
    "two answers": (said() * 2, READ, ["Extra text detected after", "IMPORTANT: Only issue one <response> block"]),
    "no end": (said().removesuffix("</response>"), READ, ["AUTO-CORRECTED: Missing </response> tag"]),
    "no plan": (said(before="<analysis>a</analysis>"), READ, ["Missing <plan> section"]),
    "another tag": (said(after="<thought>x</thought>"), READ, ["Unknown tag found: <thought>, expected analysis/plan"]),
    "another order": (said(before="<plan>p</plan><analysis>a</analysis>"), READ,
                      ["Sections appear in wrong order. Found: plan → analysis → commands, expected: analysis"]),
    "a section twice": (said(after="<plan>q</plan>"), READ, ["Multiple <plan> sections found"]),
    "commands twice": (said(after="<commands></commands>"), READ, ["IMPORTANT: Only issue one <commands> block"]),
    "no commands": (said(""), (), ["Commands section is empty"]),
    "no time": (said("<keystrokes>ls\n</keystrokes>"), (Keystrokes("ls\n"),),
                ["Command 1: Missing duration attribute"]),
    "a time in words": (said('<keystrokes duration="long">ls\n</keystrokes>'), (Keystrokes("ls\n"),),
                        ["Command 1: Invalid duration value 'long', using default 1.0"]),
    "no number as a time": (said('<keystrokes duration="nan">ls\n</keystrokes>'), (Keystrokes("ls\n"),),
                            ["Command 1: Invalid duration value 'nan'"]),
    "a time below nothing": (said('<keystrokes duration="-1">ls</keystrokes>'), (Keystrokes("ls", 0.0),), []),
    "single quotes": (said("<keystrokes duration='0.1'>ls\n</keystrokes>"), READ,
                      ["Command 1: Use double quotes for attribute 'duration': duration=\"0.1\""]),
    "no quotes": (said("<keystrokes duration=0.1>ls\n</keystrokes>"), (Keystrokes("ls\n"),),
                  ["Command 1: Attribute 'duration' value should be quoted: duration=\"0.1\"",
                   "Command 1: Missing duration attribute"]),
    "another attribute": (said('<keystrokes duration="0.1" wait="1">ls\n</keystrokes>'), READ,
                          ["Command 1: Unknown attribute 'wait' - known attributes are: duration"]),
    "no line's end": (said(LS.replace("\n", "") + LS), (Keystrokes("ls", 0.1), *READ),
                      ["Command 1 should end with newline"]),
    "an entity": (said('<keystrokes duration="0.1">a &amp; b\n</keystrokes>'), (Keystrokes("a &amp; b\n", 0.1),),
                  ["Warning: &amp; is typed as it stands"]),
    "line ends in words": (said('<keystrokes duration="0.1">a\\r\\n</keystrokes>'), (Keystrokes("a\\r\\n", 0.1),),
                           ["Warning: \\r\\n is typed as it stands"]),
    "keystrokes that stay open": (said(f"{LS}<keystrokes>rm"), READ, []),
}  # fmt: skip


@pytest.mark.parametrize("case", WARNED)
def test_what_is_borne_is_warned_of(case: str) -> None:
    text, commands, warnings = WARNED[case]
    answer = parse_xml(text)
    assert answer.commands == commands
    assert len(answer.warnings) == len(warnings), answer.warnings
    assert all(map(str.startswith, answer.warnings, warnings)), answer.warnings


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "No <response> tag found"),
        ('{"analysis": "a"}', "No <response> tag found"),
        ("<response></response>", "The <response> is empty"),
        ("<response><analysis>a</analysis><plan>p</plan></response>", "Missing <commands> section"),
        (f"<response><commands>{LS}</response>", "Missing <commands> section"),
        ("<response>" + "<plan>" * 200_000, "Missing <commands> section"),
        ("<response>" + "<keystrokes>" * 100_000, "Missing <commands> section"),
    ],
)
def test_what_cannot_be_read_is_said(text: str, problem: str) -> None:
    with pytest.raises(MalformedAnswer) as raised:
        parse_xml(text)
    assert str(raised.value) == problem


def test_half_an_answer_is_not_completed() -> None:
    with pytest.raises(MalformedAnswer, match="is not closed"):
        parse_xml(said().removesuffix("</response>"), cut=True)
    assert parse_xml(f"{said()} and", cut=True).commands == READ


def test_a_task_is_complete_without_commands() -> None:
    answer = parse_xml(f"<response><analysis>a</analysis><plan>p</plan>{DONE}</response>")
    assert answer == Answer((), True, ("Missing <commands> section",))
