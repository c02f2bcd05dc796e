"""What an agent is made with: every option is of the kind that it says, or named with what it is instead."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from inspect import signature
from pathlib import Path
from typing import Any, Literal

import pytest

from rollcage.rollout.agents.base import GROUP, known_agents, load_agent
from rollcage.rollout.agents.options import BadOption, check_options


@pytest.mark.parametrize(
    ("agent", "options", "said"),
    [
        ("bash", {"max_turns": "ten"}, "max_turns must be a whole number, not 'ten'"),
        ("bash", {"max_turns": 2.5}, "max_turns must be a whole number, not 2.5"),
        ("bash", {"max_turns": True}, "max_turns must be a whole number, not True"),
        ("bash", {"max_tokens": "5"}, "max_tokens must be a whole number or null, not '5'"),
        ("bash", {"summarize": "no"}, "summarize must be true or false, not 'no'"),
        ("bash", {"command_timeout_sec": None}, "command_timeout_sec must be a number, not None"),
        ("bash", {"command_timeout_sec": float("nan")}, "command_timeout_sec must be above 0"),
        ("bash", {"system_prompt": ["a"]}, "system_prompt must be a text or null, not ['a']"),
        ("bash", {"examples": "abc"}, "examples must be a list, not 'abc'"),
        ("bash", {"examples": ["abc"]}, "examples[0] must be a mapping, not 'abc'"),
        ("bash", {"examples": [{"instruction": 1}]}, "examples[0].instruction must be a text, not 1"),
        ("tools", {"structured": "yes"}, "structured must be true or false, not 'yes'"),
        ("bash", {"max_turn": 3}, "there is no 'max_turn' (did you mean 'max_turns'?); there is max_turns, "),
        ("nop", {"x": 1}, "there is no 'x'; there is none at all"),
        ("replay", {}, "'path' is missing"),
        ("keys", {"columns": "80"}, "columns must be a whole number, not '80'"),
    ],
)
def test_an_option_of_another_kind_is_named(agent: str, options: Mapping[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=r"does not take (these options|this value): ") as refused:
        load_agent(agent, options)
    assert said in str(refused.value)
    assert ("these options" in str(refused.value)) == (" must be " not in said)


def test_numbers_without_a_point_are_numbers() -> None:
    assert load_agent("bash", {"command_timeout_sec": 5, "max_tokens": None}).needs_policy


class Own:
    """An agent of a user's, with annotations of every kind."""

    def __init__(
        self,
        *,
        way: Literal["a", "b"] | None = None,
        either: int | str = 1,
        path: Path = Path(),
        ids: Sequence[int] = (),
        anything: Any = None,
        nothing="x",  # type: ignore[no-untyped-def]
    ) -> None:
        """Takes them."""


def test_the_options_of_a_users_agent_are_checked_where_its_annotations_say_what_they_are() -> None:
    check_options(Own, {"path": "x", "anything": [1], "nothing": 3, "ids": [1], "either": "a"})
    check_options(print, {"sep": 3})
    with pytest.raises(ValueError, match="way must be 'a' or 'b' or null, not 'c'"):
        check_options(Own, {"way": "c"})
    with pytest.raises(ValueError, match="either must be a whole number or a text"):
        check_options(Own, {"either": 1.5})
    with pytest.raises(ValueError, match=r"ids\[1\] must be a whole number, not 'x'"):
        check_options(Own, {"ids": [1, "x"]})


@pytest.mark.parametrize("name", known_agents())
def test_the_page_of_agents_has_every_option(name: str) -> None:
    page = (Path(__file__).parents[3] / "docs/agents.md").read_text()
    [point] = [point for point in entry_points(group=GROUP) if point.name == name]
    shown = re.findall(r"`(\w+)`|^ +#? *(\w+):", page, re.MULTILINE)
    assert set(signature(point.load()).parameters) - {name for names in shown for name in names} == set()
