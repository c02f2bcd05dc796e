"""ShareGPT, for supervised fine-tuning: a line a conversation, as LLaMA-Factory reads it.

`conversations` alternates: `human` and `observation` in odd places, `gpt` and `function_call` in even ones; `system`
is apart, and `tools` a JSON text where they are known. What several tools said in one turn is one observation. An
answer with calls is `function_call`: a JSON list of them, behind `<think>` where the policy's reasoning is apart, and
between `<tool_call>` marks behind what it said beside.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from rollcage.rollout.formats.base import Format, Need, Row, about, fit_rollouts
from rollcage.rollout.formats.conversations import CALLS, CONVERSATION, Tools, arguments_of, conversations
from rollcage.rollout.trajectory import Attempt, Message

_BETWEEN = "\n\n"


def rows(table: pa.Table, tools: Tools | None = None) -> list[Row]:
    """The conversations of a table of `schema.ROLLOUTS`. Raises `Unfit`."""
    return list(_rows(fit_rollouts(table, NEEDS), tools or {}))


def _rows(rollouts: Iterable[Attempt], tools: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    for rollout in rollouts:
        facts = about(rollout)
        offered = json.dumps([tool["function"] for tool in tools.get(rollout.agent, ())])
        for number, messages in enumerate(conversations(rollout)):
            yield {
                "conversations": _alternating(messages),
                "system": _BETWEEN.join(one.content for one in messages if one.role == "system"),
                "tools": "" if offered == "[]" else offered,
                **facts,
                "conversation": number,
            }


def _alternating(messages: Iterable[Message]) -> list[Row]:
    """The conversation without its system prompt; what stands next to its like is joined to it."""
    told: list[Row] = []
    for message in messages:
        if message.role == "system":
            continue
        if message.role == "assistant":
            told.append({"from": "function_call" if message.tool_calls else "gpt", "value": _answer(message)})
            continue
        speaker = "observation" if message.role == "tool" else "human"
        if told and told[-1]["from"] in ("human", "observation"):
            told[-1]["value"] += _BETWEEN + message.content
        else:
            told.append({"from": speaker, "value": message.content})
    return told


def _answer(message: Message) -> str:
    thought = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    if not message.tool_calls:
        return thought + message.content
    calls = json.dumps([{"name": call.name, "arguments": arguments_of(call)} for call in message.tool_calls])
    said = message.content.strip()
    return f"{thought}{said}\n<tool_call>{calls}</tool_call>" if said else thought + calls


def _not_alternating(rollout: Attempt) -> str | None:
    for messages in conversations(rollout):
        told = _alternating(messages)
        if any(
            (one["from"] in ("gpt", "function_call")) != bool(index % 2) for index, one in enumerate(told)
        ):
            return "its messages and answers do not alternate"
    return None


NEEDS = (CONVERSATION, CALLS, Need("messages and answers in turn", _not_alternating))

SHAREGPT = Format(
    "sharegpt",
    "ShareGPT, for fine-tuning: a line a conversation",
    "jsonl",
    NEEDS,
    "llamafactory 0.9.5",
    _rows,
    tools=True,
)
