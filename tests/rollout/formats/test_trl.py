"""TRL's own functions take what is written for it, with a real chat template."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rollcage.rollout.formats import Unfit, trl

TOOLS = {
    "bash": [
        {
            "type": "function",
            "function": {"name": "bash", "description": "Run a command.", "parameters": {"type": "object"}},
        }
    ]
}

TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ c.function.arguments.items() | list }}</call>{% endfor %}"
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)

CHECK = """
import json
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl.data_utils import apply_chat_template, is_conversational
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
tokenizer.chat_template = given["template"]
result = {"applied": []}
for row in given["conversations"]:
    example = {"prompt": row["prompt"], "completion": row["completion"]}
    assert is_conversational(example)
    tools = json.loads(row["tools"]) if row.get("tools") else None
    result["applied"].append(apply_chat_template(example, tokenizer, tools=tools))
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
rows = [{name: row[name] for name in ("input_ids", "labels")} for row in given["tokens"]]
batch = DataCollatorForLanguageModeling(pad_token_id=0)(rows)
result |= {"input_ids": batch["input_ids"].tolist(), "labels": batch["labels"].tolist()}
"""


def test_trl_takes_conversations_with_tool_calls_and_exact_labels(
    table: Any, shapes: Any, in_package: Any
) -> None:
    rows = trl.conversation_rows(
        table(shapes.attempt(shapes.tool_turns()), shapes.attempt(shapes.summed_up(), sample=1)), TOOLS
    )
    assert [row["conversation"] for row in rows] == [0, 0, 1]
    tokens = trl.token_rows(
        table(shapes.attempt(shapes.text_turns()), shapes.attempt(shapes.summed_up(), sample=1))
    )
    assert [row["segment"] for row in tokens] == [0, 0, 1, 2]

    theirs = in_package(
        "trl", CHECK, {"template": TEMPLATE, "conversations": rows, "tokens": tokens}, ("accelerate", "peft")
    )

    called, looked, again = theirs["applied"]
    assert called["prompt"].startswith('<tools>[{"type": "function", ')
    assert called["prompt"].endswith(
        "<system>Use the tools.</system><user>Count the lines.</user><assistant>"
    )
    assert called["completion"] == (
        "[A file; count.]I look.<call>bash [('command', 'wc -l a')]</call><call>read_file [('path', 'a')]</call>"
        "</assistant><tool>3</tool><tool>x\ny\nz</tool><assistant>There are 3.</assistant>"
    )
    assert looked["completion"] == "ls</assistant><user>Sum up.</user><assistant>I looked.</assistant>"
    assert again["prompt"].endswith("<user>Count the lines.\n\nYou looked.</user><assistant>")

    pad = len(theirs["labels"][0]) - 14
    assert theirs["input_ids"][0][:14] == [10, 11, 12, 13, 14, 15, 1010, 1011, 18, 19, 20, 1010, 1011, 1012]
    assert theirs["labels"][0] == [*[-100] * 6, 1010, 1011, *[-100] * 3, 1010, 1011, 1012, *[-100] * pad]


def test_a_rollout_function_gets_ids_with_the_mask_of_what_the_policy_said(table: Any, shapes: Any) -> None:
    output = trl.rollout_output(table(shapes.attempt(shapes.text_turns(), reward=0.5)))
    assert output["env_mask"] == [[1, 1, 0, 0, 0, 1, 1, 1]]
    assert [len(one) for name in ("completion_ids", "logprobs") for one in output[name]] == [8, 8]
    assert output["rollcage_reward"] == [0.5]


def test_a_call_that_cannot_be_read_is_not_taught(table: Any, shapes: Any) -> None:
    with pytest.raises(Unfit, match="arguments that are no JSON object"):
        trl.conversation_rows(table(shapes.attempt(shapes.tool_turns('{"command": "ls'))))


def test_datasets_reads_the_lines(table: Any, shapes: Any, tmp_path: Any) -> None:
    datasets = pytest.importorskip("datasets")
    rows = trl.conversation_rows(table(shapes.attempt(shapes.tool_turns())), TOOLS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (read,) = datasets.load_dataset(
        "json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path / "cache")
    )
    first = read["completion"][0]["tool_calls"][0]["function"]
    assert (first["name"], first["arguments"]) == ("bash", {"command": "wc -l a"})
