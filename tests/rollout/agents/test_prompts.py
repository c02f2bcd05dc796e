"""Prompts that a user gives: placeholders are filled, braces kept, mistakes named with their line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.rollout.agents.base import load_agent
from rollcage.rollout.agents.prompts import Prompt, load_prompt

TEXT = """Do {instruction} by {"a": {"b": 1}}, ${HOME}, {}, {{x}}, { y }, {1}.
{{{instruction}}}"""


def test_braces_that_are_no_placeholder_are_text() -> None:
    prompt = load_prompt("task_prompt", TEXT, "bash_task.md", needed=["instruction"])
    filled = prompt.filled({"instruction": "{instruction} {x}"})
    assert filled == (
        'Do {instruction} {x} by {"a": {"b": 1}}, ${HOME}, {}, {x}, { y }, {1}.\n{{instruction}}'
    )


@given(st.text(alphabet="{}$ax\n 1", max_size=30))
def test_a_text_without_a_placeholder_loses_nothing_but_doubled_braces(text: str) -> None:
    try:
        prompt = load_prompt("system_prompt", text, "bash_system.md", may_be_empty=True)
    except ValueError as problem:
        assert "is no placeholder of system_prompt" in str(problem)  # noqa: PT017
        return
    kept = prompt.filled({})
    assert kept.replace("{", "").replace("}", "") == text.strip().replace("{", "").replace("}", "")


def test_a_file_is_read_from_its_path(tmp_path: Path) -> None:
    path = tmp_path / "task.md"
    path.write_text("Task:\n{instruction}\n\n")
    prompt = load_prompt("task_prompt", str(path), "bash_task.md", needed=["instruction"])
    assert prompt.filled({"instruction": "x"}) == "Task:\nx"
    assert not Prompt("")


@pytest.mark.parametrize("agent", ["bash", "tools"])
@pytest.mark.parametrize(
    ("option", "content", "said"),
    [
        ("task_prompt", b"One\nDo it.\n", r"p\.md:2: task_prompt has no \{instruction\}"),
        (
            "task_prompt",
            b"{instruction}\n{task}\n",
            r"p\.md:2: \{task\} is no placeholder of task_prompt \(known: ",
        ),
        ("task_prompt", b"\n{{instruction}}", r"p\.md:2: task_prompt has no \{instruction\}"),
        ("system_prompt", b"a\nb\nawk '{print}'", r"p\.md:3: \{print\} .* write \{\{print\}\} where"),
        ("system_prompt", b"a\n\xff", r"p\.md:2: system_prompt is no UTF-8 text"),
        ("summary_prompt", b"{what}", r"p\.md:1: \{what\} is no placeholder of summary_prompt"),
        ("task_prompt", None, r"task_prompt: .*p\.md cannot be read: No such file"),
    ],
)
def test_a_wrong_prompt_is_refused_with_file_and_line(
    tmp_path: Path, agent: str, option: str, content: bytes | None, said: str
) -> None:
    path = tmp_path / "p.md"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        load_agent(agent, {option: str(path)})


def test_a_wrong_text_is_refused_with_its_option_and_line() -> None:
    with pytest.raises(ValueError, match=r"task_prompt:2: \{x\} is no placeholder"):
        load_agent("bash", {"task_prompt": "{instruction}\n{x}"})
