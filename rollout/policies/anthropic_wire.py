"""Anthropic's Messages API as plain JSON: a conversation on its way out, an answer on its way in.

`History` holds a conversation as the API takes it. What the model answered goes back as it came, block by block: the
server checks the signatures of what the model thought against the conversation that it thought it in. Left out are
only blocks that the API does not take back: texts without a visible character, and what was never finished.

`Answer` puts an answer together from the events of its stream. One that ends without `message_stop` was cut off, and is
none. Events and deltas of kinds that are not known are passed over, as the API asks of its clients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollcage.rollout.model_json import read_json
from rollcage.rollout.policies.api_text import whole
from rollcage.rollout.policies.base import Tool
from rollcage.rollout.policies.prices import Usage
from rollcage.rollout.trajectory import Message, ToolCall

EMPTY = "(empty)"
"""Stands for a text without a visible character, which the API refuses."""

NO_RESULT = "This call was not carried out."
"""The API refuses a conversation in which a call of a tool has no result."""

MARK = {"type": "ephemeral"}
"""What is before it may be cached, for five minutes."""

FINISH = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "refusal",
}
"""Our `finish_reason` by the API's `stop_reason`. An answer that fills the context is cut, like one that fills
`max_tokens`; it is the next request that has no room any more."""

PAUSED = "pause_turn"
"""The `stop_reason` of an answer that goes on when it is sent back."""

Block = dict[str, Any]

HELD: Mapping[str, Mapping[str, type]] = {
    "text": {"text": str},
    "thinking": {"thinking": str},
    "tool_use": {"id": str, "name": str, "input": dict},
}
"""What is read of a block, by its type. It is there when the block begins, if only empty."""


class StreamError(Exception):
    """What the server says went wrong in the middle of its answer. `kind` is its name for it."""

    def __init__(self, event: Mapping[str, Any]) -> None:
        said = event.get("error")
        found = said if isinstance(said, Mapping) else {}
        self.kind = str(found.get("type", ""))
        super().__init__(f"{self.kind}: {found.get('message', event)}")


@dataclass(frozen=True)
class History:
    """A conversation. `messages` begins with a user's and alternates. Never changed in place."""

    system: str = ""
    messages: tuple[Mapping[str, Any], ...] = ()

    def extended(self, new: Sequence[Message]) -> History:
        """With `new` behind it. Calls of the last answer that `new` has no result for get one that says so."""
        system = "\n\n".join(
            filter(None, [self.system, *(m.content for m in new if m.role == "system" and m.content.strip())])
        )
        messages = list(self.messages)
        for message in new:
            if message.role == "assistant":
                _append(messages, "assistant", _answer_blocks(message))
            elif message.role == "tool":
                result = {
                    "type": "tool_result",
                    "tool_use_id": message.tool_call_id,
                    "content": _visible(message.content),
                }
                _append(messages, "user", [result])
            elif message.role == "user":
                _append(messages, "user", [{"type": "text", "text": _visible(message.content)}])
        return History(system, tuple(_with_results(messages)))

    def answered(self, blocks: Sequence[Block]) -> History:
        """With an answer of these blocks behind it."""
        messages = list(self.messages)
        _append(messages, "assistant", [block for block in blocks if _goes_back(block)])
        return History(self.system, tuple(messages))


def request(history: History, tools: Sequence[Tool], *, cache: bool) -> dict[str, Any]:
    """The fields of a request that hold the conversation. With `cache`, what comes before these is marked for caching:
    the end of the system prompt (else of the tools), and the last two messages of the user, so that each request finds
    the prefix that the last one wrote."""
    system: list[Block] = [{"type": "text", "text": history.system}] if history.system else []
    listed: list[Block] = [
        {"name": tool.name, "description": tool.description, "input_schema": dict(tool.parameters)}
        for tool in tools
    ]
    messages: list[dict[str, Any]] = [dict(message) for message in history.messages]
    if cache:
        if head := system or listed:
            head[-1] = {**head[-1], "cache_control": MARK}
        for message in [message for message in messages if message["role"] == "user"][-2:]:
            *others, last = message["content"]
            message["content"] = [*others, last | {"cache_control": MARK}]
    fields: dict[str, Any] = {"messages": messages}
    if system:
        fields["system"] = system
    if listed:
        fields["tools"] = listed
    return fields


@dataclass
class Answer:
    """An answer as far as it has come."""

    blocks: list[Block] = field(default_factory=list)
    stop_reason: str | None = None
    stop_details: Mapping[str, Any] | None = None
    ended: bool = False
    _usage: dict[str, int] = field(default_factory=dict)
    _inputs: dict[int, str] = field(default_factory=dict)
    """By block: the JSON text of a tool's input."""
    _closed: set[int] = field(default_factory=set)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take the next event. Raises `StreamError` where it is one, and `ValueError` where it does not fit."""
        if not isinstance(event, Mapping):
            raise ValueError(f"{event!r} is no event")
        if event.get("type") == "error":
            raise StreamError(event)
        try:
            self._add(event)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"the event {event} does not fit: {error!r}") from error

    def _add(self, event: Mapping[str, Any]) -> None:
        kind = event["type"]
        if kind == "message_start":
            self._count(event["message"].get("usage"))
        elif kind == "content_block_start":
            if event["index"] != len(self.blocks):
                raise IndexError(f"block {event['index']} begins behind {len(self.blocks)} others")
            self.blocks.append(_begun(event["content_block"]))
        elif kind == "content_block_delta":
            self._extend(event["index"], event["delta"])
        elif kind == "content_block_stop":
            self._close(event["index"])
        elif kind == "message_delta":
            reason = event["delta"].get("stop_reason")
            if not isinstance(reason, str | None):
                raise TypeError("its stop_reason is no text")
            self.stop_reason = reason
            self.stop_details = event["delta"].get("stop_details")
            self._count(event.get("usage"))
        elif kind == "message_stop":
            self.ended = True

    @property
    def finished(self) -> list[Block]:
        """The blocks that came to their end, and the texts."""
        return [b for i, b in enumerate(self.blocks) if i in self._closed or b["type"] == "text"]

    @property
    def text(self) -> str:
        return "".join(block["text"] for block in self.blocks if block["type"] == "text")

    @property
    def reasoning(self) -> str:
        return "\n\n".join(filter(None, (b["thinking"] for b in self.blocks if b["type"] == "thinking")))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Calls of the agent's tools, with the text of their arguments as it was written."""
        return tuple(
            ToolCall(block["id"], block["name"], self._inputs.get(index) or json.dumps(block["input"]))
            for index, block in enumerate(self.blocks)
            if block["type"] == "tool_use"
        )

    @property
    def usage(self) -> Usage:
        counts = self._usage
        return Usage(
            input=counts.get("input_tokens", 0),
            output=counts.get("output_tokens", 0),
            cache_write=counts.get("cache_creation_input_tokens", 0),
            cache_read=counts.get("cache_read_input_tokens", 0),
        )

    def _count(self, usage: Mapping[str, Any] | None) -> None:
        """Later counts are of the whole answer, and replace earlier ones."""
        for name, value in (usage or {}).items():
            if isinstance(value, int) and value >= 0:
                self._usage[name] = value

    def _extend(self, index: int, delta: Mapping[str, Any]) -> None:
        block, kind = self.blocks[index], delta["type"]
        if kind == "text_delta":
            block["text"] = block.get("text", "") + delta["text"]
        elif kind == "thinking_delta":
            block["thinking"] = block.get("thinking", "") + delta["thinking"]
        elif kind == "signature_delta":
            block["signature"] = delta["signature"]
        elif kind == "input_json_delta":
            self._inputs[index] = self._inputs.get(index, "") + delta["partial_json"]
        elif kind == "citations_delta":
            block["citations"] = [*(block.get("citations") or ()), delta["citation"]]

    def _close(self, index: int) -> None:
        block = self.blocks[index]
        self._closed.add(index)
        for name in ("text", "thinking"):
            if name in block:
                block[name] = whole(block[name])
        if text := self._inputs.get(index):
            block["input"] = _object(text)


def _begun(given: Mapping[str, Any]) -> Block:
    """A block as it begins. Raises `LookupError` or `TypeError` where it lacks what is read of its kind."""
    kinds = HELD.get(given["type"], {})
    block = dict(given)
    for name, kind in kinds.items():
        if not isinstance(block[name], kind):
            raise TypeError(f"its {name} is no {kind.__name__}")
    return block


def _append(messages: list[Mapping[str, Any]], role: str, blocks: list[Block]) -> None:
    """Add blocks in a message of their own, or to the last one where it is of the same role. Results of tools come
    before a user's text: the API takes them in no other place."""
    if messages and messages[-1]["role"] == role:
        blocks = [*messages.pop()["content"], *blocks]
    if role == "user":
        blocks = sorted(blocks, key=lambda block: block["type"] != "tool_result")
    if blocks:
        messages.append({"role": role, "content": blocks})


def _with_results(messages: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The same messages, with a result for each call of a tool that has none."""
    missing: list[Block] = []
    for message in messages:
        if message["role"] == "user":
            there = {block.get("tool_use_id") for block in message["content"]}
            added = [result for result in missing if result["tool_use_id"] not in there]
            yield {"role": "user", "content": [*added, *message["content"]]} if added else message
            missing = []
        else:
            yield message
            missing = [
                {"type": "tool_result", "tool_use_id": block["id"], "content": NO_RESULT, "is_error": True}
                for block in message["content"]
                if block["type"] == "tool_use"
            ]


def _answer_blocks(message: Message) -> list[Block]:
    """An assistant's message that this policy did not make in this conversation."""
    if message.blocks:
        return [block for block in json.loads(message.blocks) if _goes_back(block)]
    blocks: list[Block] = [{"type": "text", "text": message.content}] if message.content.strip() else []
    calls = message.tool_calls
    return blocks + [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)}
        for call in calls
    ]


def _goes_back(block: Block) -> bool:
    return block["type"] != "text" or bool(block["text"].strip())


def _visible(text: str) -> str:
    return text if text.strip() else EMPTY


def _object(text: str) -> dict[str, Any]:
    """What a tool's input says, for the API takes nothing but an object; empty where it is none, or has what JSON
    cannot say: an infinite number, half of a surrogate pair."""
    try:
        value = read_json(text)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
