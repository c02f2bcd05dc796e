"""prime-rl: a verifiers `Trace` for each rollout (`verifiers.v1.WireTrace`), a line each as in its `traces.jsonl`.

A trace is a graph of messages; each path from a root to a leaf is a branch, of which prime-rl makes one
`TrainingSample`. Here a segment is a branch: its prompts' messages and its answers, one behind the other. The tokens
between two answers stand in front of the later answer's own, masked: which message they belong to is not recorded, and
the path's tokens are the segment's all the same.

`training_samples` are the fields of those samples, for code that feeds prime-rl's trainer itself. prime-rl fills in
temperatures and advantages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from rollcage.rollout.formats.base import (
    IDS,
    LOGPROBS,
    REWARD,
    Format,
    Row,
    about,
    fit_rollouts,
    group_id,
    reward_of,
    rollout_id,
)
from rollcage.rollout.formats.sequences import by_segment
from rollcage.rollout.trajectory import Attempt, Message, Turn

NEEDS = (REWARD, IDS, LOGPROBS)

_STOPS = {
    "turn_limit": "max_turns",
    "token_limit": "max_output_tokens",
    "context_overflow": "context_length",
    "agent_timeout": "timeout",
}
"""verifiers' words for what ended a trace, by error class; those that it counts as truncation, and the timeout."""


def traces(table: pa.Table) -> list[Row]:
    """The traces of a table of `schema.ROLLOUTS`. Raises `Unfit`."""
    return [_trace(rollout) for rollout in fit_rollouts(table, NEEDS)]


def training_samples(table: pa.Table, env_name: str = "rollcage") -> list[Row]:
    """The fields of prime-rl's `TrainingSample`s, one a segment of a table of `schema.ROLLOUTS`. `temperatures` is
    empty, for whoever knows the job's sampling to fill in. Raises `Unfit`."""
    return [
        {
            "token_ids": sequence.prompt_ids + sequence.response_ids,
            "mask": [False] * len(sequence.prompt_ids) + [mask == 1 for mask in sequence.loss_mask],
            "logprobs": [0.0] * len(sequence.prompt_ids) + sequence.logprobs,
            "temperatures": [],
            "env_name": env_name,
        }
        for rollout in fit_rollouts(table, NEEDS)
        for sequence in by_segment(rollout)
    ]


def _trace(rollout: Attempt) -> Row:
    nodes, calls = _graph(rollout)
    facts = about(rollout)
    return {
        "version": 1,
        # The id that verifiers makes is 32 hex digits, too.
        "id": hashlib.sha256(f"{rollout_id(rollout)}/{rollout.attempt_id}".encode()).hexdigest()[:32],
        "task": {
            "type": "rollcage",
            "data": {"idx": rollout.draw, "name": rollout.task, "prompt": None},
            "key": group_id(rollout),
            "hash": rollout.task_digest,
        },
        "agent": {"config": {"model": rollout.policy}, "name": rollout.agent},
        "nodes": nodes,
        "calls": calls,
        "rewards": {"reward": {"score": reward_of(rollout), "weight": 1.0}},
        "metrics": {
            name: float(facts[name]) for name in ("turn_count", "malformed_turns", "truncated_turns")
        },
        "info": facts,
        "is_completed": True,
        "ok": True,
        "stop_condition": _STOPS.get(rollout.error_class or "", "agent_completed"),
        "timing": {
            "start": rollout.started_at,
            "agent": {"start": 0.0, "end": rollout.phases.get("agent", 0.0)},
        },
    }


def _graph(rollout: Attempt) -> tuple[list[Row], list[Row]]:
    """The nodes of the trace, and the calls that made its answers."""
    trajectory = rollout.trajectory
    assert trajectory is not None, "it has token ids"
    nodes: list[Row] = []
    calls: list[Row] = []
    told: list[Message] = []
    """The conversation so far."""
    shown = 0
    """How many of `told` are on the current branch."""
    end = 0
    """Tokens of the segment that are on it."""
    segment: int | None = None
    for message in trajectory.messages:
        told.append(message)
        if message.role != "assistant" or message.turn is None:
            continue
        turn = trajectory.turns[message.turn]
        if turn.segment != segment:
            segment, shown, end = turn.segment, 0, 0
        for index in range(shown, len(told)):
            parent = len(nodes) - 1 if index else None
            answers = index == len(told) - 1
            nodes.append(_node(rollout, told[index], parent, turn if answers else None, end))
        shown, end = len(told), turn.prompt_len + turn.completion_len
        calls.append(_call(turn, len(nodes) - 1))
        if turn.purpose == "summary":
            told, shown = [], 0
    return nodes, calls


def _node(rollout: Attempt, message: Message, parent: int | None, turn: Turn | None, start: int) -> Row:
    """A message; with the tokens from `start` to the end of its answer where it is the answer of `turn`."""
    node: Row = {"parent": parent, "message": _message(message), "sampled": turn is not None}
    node["timestamp"] = rollout.started_at
    if turn is None or turn.segment is None:
        return node
    assert rollout.trajectory is not None
    segment = rollout.trajectory.segments[turn.segment]
    end = turn.prompt_len + turn.completion_len
    return node | {
        "token_ids": segment.ids[start:end],
        "mask": [mask == 1 for mask in segment.loss_mask[start:end]],
        "logprobs": segment.logprobs[turn.prompt_len : end],
    }


def _message(message: Message) -> Row:
    row: Row = {"role": message.role, "content": message.content}
    if message.role == "assistant":
        row["reasoning_content"] = message.reasoning or None
        row["tool_calls"] = [vars(call) for call in message.tool_calls] or None
    if message.role == "tool":
        row["tool_call_id"] = message.tool_call_id or ""
    return row


def _call(turn: Turn, node: int) -> dict[str, Any]:
    return {
        "node": node,
        "model": turn.policy,
        "finish_reason": turn.finish_reason
        if turn.finish_reason in ("stop", "length", "tool_calls")
        else None,
        "usage": {
            "prompt_tokens": turn.prompt_tokens - turn.cached_tokens,
            "completion_tokens": turn.completion_tokens,
            "cached_input_tokens": turn.cached_tokens,
            "cost": turn.cost_usd,
        },
    }


def _rows(rollouts: Iterable[Attempt], _tools: object) -> Iterator[Row]:
    yield from map(_trace, rollouts)


TRACES = Format(
    "prime-rl",
    "prime-rl's verifiers traces: a line a rollout, a branch a segment",
    "jsonl",
    NEEDS,
    "verifiers 0.4.0",
    _rows,
)
