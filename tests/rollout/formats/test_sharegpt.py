"""LLaMA-Factory's own converter takes the conversations, whole."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollcage.rollout.formats import Unfit, sharegpt

CONVERT = """
from types import SimpleNamespace
from llamafactory.data.converter import SharegptDatasetConverter
from llamafactory.data.formatter import FunctionFormatter
attribute = SimpleNamespace(
    messages="conversations", role_tag="from", content_tag="value", user_tag="human", assistant_tag="gpt",
    observation_tag="observation", function_tag="function_call", system_tag="", system="system", tools="tools",
    ranking=False, kto_tag=None, images=None, videos=None, audios=None)
convert = SharegptDatasetConverter(attribute, SimpleNamespace(media_dir="."))
result = [convert(one) for one in given]
calls = FunctionFormatter(slots=["{{content}}"], tool_format="qwen")
marks = {"thought_words": ("<think>\\n", "\\n</think>\\n\\n"), "tool_call_words": ("<tool_call>", "</tool_call>")}
for row in result:
    for message in row["_prompt"] + row["_response"]:
        if message["role"] == "function":
            row["function"] = calls.apply(content=message["content"], **marks)
"""
STAND_INS = (
    "llamafactory.data.collator", "llamafactory.data.loader", "llamafactory.data.template",
    "llamafactory.data.mm_plugin", "llamafactory.hparams", "datasets", "transformers", "torch", "peft", "accelerate",
    "trl",
)  # fmt: skip


def test_llama_factory_skips_none_of_them(table: Any, shapes: Any, in_package: Any) -> None:
    rollouts = table(
        shapes.attempt(shapes.text_turns()),
        shapes.attempt(shapes.tool_turns(), sample=1),
        shapes.attempt(shapes.summed_up(), sample=2),
    )
    tools = {"bash": [{"type": "function", "function": {"name": "bash", "parameters": {}}}]}
    rows = sharegpt.rows(rollouts, tools)
    text, called, *summed = in_package("llamafactory", CONVERT, rows, STAND_INS)

    assert [one["role"] for one in text["_prompt"]] == ["user", "assistant", "user"]
    assert text["_response"] == [{"role": "assistant", "content": "done"}]
    assert (text["_system"], json.loads(text["_tools"])) == (
        "You have a shell.",
        [tools["bash"][0]["function"]],
    )
    _, observation = called["_prompt"][1:]
    assert called["function"] == [
        "<think>\nA file; count.\n</think>\n\nI look.\n<tool_call>\n"
        '{"name": "bash", "arguments": {"command": "wc -l a"}}'
        '\n</tool_call>\n<tool_call>\n{"name": "read_file", "arguments": {"path": "a"}}\n</tool_call>'
    ]
    assert observation == {"role": "observation", "content": "3\n\nx\ny\nz"}
    assert [len(one["_prompt"]) for one in summed] == [3, 3]
    assert all(one["_response"] for one in summed)


def test_a_conversation_that_does_not_alternate_is_refused(table: Any, shapes: Any) -> None:
    trajectory = shapes.text_turns()
    del trajectory.messages[3]
    with pytest.raises(Unfit, match="do not alternate"):
        sharegpt.rows(table(shapes.attempt(trajectory)))
