"""A rollout's messages as conversations, for the formats that hold text.

A conversation that was summed up ends with the summary; what goes on behind it is another conversation, as the policy
saw it. Messages that no answer came to are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollcage.rollout.formats.base import Need, Row
from rollcage.rollout.trajectory import Attempt, Message, ToolCall

Tools = Mapping[str, Sequence[Row]]
"""The definitions of the tools that each agent offers, by its name, as OpenAI has them (`type`, `function`)."""


def conversations(rollout: Attempt) -> list[list[Message]]:
    """The rollout's conversations, each of which ends with an answer."""
    trajectory = rollout.trajectory
    if trajectory is None:
        return []
    summaries = {turn.index for turn in trajectory.turns if turn.purpose == "summary"}
    found: list[list[Message]] = [[]]
    for message in trajectory.messages:
        found[-1].append(message)
        if message.role == "assistant" and message.turn in summaries:
            found.append([])
    answered = (_up_to_last_answer(messages) for messages in found)
    return [messages for messages in answered if messages]


def arguments_of(call: ToolCall) -> Row | None:
    """The arguments that a policy wrote; None where they are no JSON object."""
    try:
        # Some parsers give no text for a call without arguments.
        arguments = json.loads(call.arguments or "{}")
    except ValueError:
        return None
    return arguments if isinstance(arguments, dict) else None


def chat_messages(messages: Iterable[Message]) -> list[Row]:
    """Messages as `transformers`' chat templates take them: OpenAI's, with arguments as objects."""
    names: dict[str, str] = {}
    rows = []
    for message in messages:
        row: Row = {"role": message.role, "content": message.content}
        if message.reasoning:
            row["reasoning_content"] = message.reasoning
        if message.tool_calls:
            names |= {call.id: call.name for call in message.tool_calls}
            row["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
                for call in message.tool_calls
                if (arguments := arguments_of(call)) is not None
            ]
        if message.role == "tool":
            row |= {"tool_call_id": message.tool_call_id, "name": names.get(message.tool_call_id or "", "")}
        rows.append(row)
    return rows


def tool_definitions(tools: Iterable[Any]) -> list[Row]:
    """`policies.base.Tool`s as OpenAI has them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters),
            },
        }
        for tool in tools
    ]


def _up_to_last_answer(messages: list[Message]) -> list[Message]:
    answers = [index for index, message in enumerate(messages) if message.role == "assistant"]
    return messages[: answers[-1] + 1] if answers else []


def _unreadable_calls(rollout: Attempt) -> str | None:
    messages = rollout.trajectory.messages if rollout.trajectory else []
    unreadable = any(arguments_of(call) is None for message in messages for call in message.tool_calls)
    return "a tool call has arguments that are no JSON object" if unreadable else None


def _no_conversation(rollout: Attempt) -> str | None:
    return None if conversations(rollout) else "its policy never answered"


CONVERSATION = Need("an answer", _no_conversation)
CALLS = Need("tool calls that can be read", _unreadable_calls)
