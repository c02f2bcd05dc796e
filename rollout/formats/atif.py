"""ATIF v1.8, the trajectory JSON of Harbor (RFC 0001): a file a rollout, for its viewer and whatever else reads it.

A step is a message: of the system, the user, or the agent; what an answer's calls or commands gave is the observation
of the answer's step. An agent that writes its commands as text has them as `tool_calls`, as Harbor's own agents do.
Metrics hold each turn's exact prompt and completion ids where the policy gave some: a prompt is the whole history, so
files grow with the square of the turns. Arguments that are no JSON object are under `raw`.

What follows a summary begins a new conversation: `extra.conversation` counts them, and its opening, which was said
before, is `is_copied_context`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any

import pyarrow as pa

from rollcage.rollout.formats.base import Format, Row, about, fit_rollouts, rollout_id
from rollcage.rollout.formats.conversations import CONVERSATION, Tools, arguments_of
from rollcage.rollout.trajectory import Attempt, Message, Turn

NEEDS = (CONVERSATION,)
SCHEMA_VERSION = "ATIF-v1.8"

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def trajectories(table: pa.Table, tools: Tools | None = None) -> list[Row]:
    """The ATIF trajectory of each rollout of a table of `schema.ROLLOUTS`. Raises `Unfit`."""
    rows = list(_rows(fit_rollouts(table, NEEDS), tools or {}))
    return [{name: value for name, value in row.items() if name != "_file"} for row in rows]


def file_name(rollout: Attempt) -> str:
    """A name for the rollout's file that no other rollout of the run has, and that any file system takes."""
    name = f"{rollout.task}.{rollout.agent}.{rollout.draw}-{rollout.sample}"
    safe = _UNSAFE.sub("_", name).lstrip(".")[:150]
    mark = "" if safe == name else f".{hashlib.sha256(rollout_id(rollout).encode()).hexdigest()[:8]}"
    return f"{safe}{mark}.json"


def _rows(rollouts: Iterable[Attempt], tools: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    for rollout in rollouts:
        yield _trajectory(rollout, tools.get(rollout.agent)) | {"_file": file_name(rollout)}


def _trajectory(rollout: Attempt, tools: Sequence[Row] | None) -> Row:
    trajectory = rollout.trajectory
    assert trajectory is not None, "it has an answer"
    return _present(
        {
            "schema_version": SCHEMA_VERSION,
            "session_id": rollout_id(rollout),
            "trajectory_id": rollout.attempt_id,
            "agent": _present(
                {
                    "name": rollout.agent,
                    "version": "rollcage",
                    "model_name": rollout.policy or None,
                    "tool_definitions": list(tools) if tools else None,
                }
            ),
            "steps": _steps(rollout),
            "final_metrics": _present(
                {
                    "total_prompt_tokens": trajectory.prompt_tokens,
                    "total_completion_tokens": trajectory.completion_tokens,
                    "total_cached_tokens": sum(turn.cached_tokens for turn in trajectory.turns),
                    "total_cost_usd": trajectory.cost_usd,
                }
            ),
            "extra": about(rollout)
            | {"verifier_output": rollout.reward.output_tail if rollout.reward else ""},
        }
    )


def _steps(rollout: Attempt) -> list[Row]:
    trajectory = rollout.trajectory
    assert trajectory is not None
    steps: list[Row] = []
    conversation = 0
    opening = True
    """Before the conversation's first answer."""
    answer: Row | None = None
    """The step of the conversation's last answer."""
    for message in trajectory.messages:
        if message.role == "assistant":
            turn = None if message.turn is None else trajectory.turns[message.turn]
            answer = _answer(rollout, message, turn)
            step = answer
        elif answer is not None and message.turn is not None:
            answer.setdefault("observation", {"results": []})["results"].append(_result(message, answer))
            continue
        else:
            step = {"source": "system" if message.role == "system" else "user", "message": message.content}
            if opening and conversation:
                step["is_copied_context"] = True
        steps.append({"step_id": len(steps) + 1, **step})
        if message.role != "assistant":
            continue
        answer, opening = steps[-1], False
        if conversation:
            answer.setdefault("extra", {})["conversation"] = conversation
        if turn is not None and turn.purpose == "summary":
            answer["extra"] = answer.get("extra", {}) | {"purpose": "summary"}
            conversation, opening, answer = conversation + 1, True, None
    return steps


def _answer(rollout: Attempt, message: Message, turn: Turn | None) -> Row:
    """The step of an answer, without its number."""
    called: list[Row] = [
        {
            "tool_call_id": call.id,
            "function_name": call.name,
            "arguments": arguments
            if (arguments := arguments_of(call)) is not None
            else {"raw": call.arguments},
        }
        for call in message.tool_calls
    ]
    if not called and turn is not None:
        called = [
            {
                "tool_call_id": f"turn-{turn.index}-{number}",
                "function_name": "keys" if command.keys else "bash",
                "arguments": {"keystrokes" if command.keys else "command": command.command},
            }
            for number, command in enumerate(turn.commands)
        ]
    said = {
        "source": "agent",
        "message": message.content,
        "reasoning_content": message.reasoning or None,
        "tool_calls": called or None,
    }
    return _present(said if turn is None else said | _of_turn(rollout, turn))


def _of_turn(rollout: Attempt, turn: Turn) -> Row:
    metrics: dict[str, Any] = {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "cached_tokens": turn.cached_tokens,
        "cost_usd": turn.cost_usd,
        "extra": {
            "finish_reason": turn.finish_reason,
            "policy_version": turn.policy_version,
            "policy_version_end": turn.policy_version_end,
            "queue_seconds": turn.queue_seconds,
            "generate_seconds": turn.generate_seconds,
        },
    }
    if turn.segment is not None:
        assert rollout.trajectory is not None
        segment = rollout.trajectory.segments[turn.segment]
        end = turn.prompt_len + turn.completion_len
        metrics["prompt_token_ids"] = segment.ids[: turn.prompt_len]
        metrics["completion_token_ids"] = segment.ids[turn.prompt_len : end]
        logprobs = segment.logprobs[turn.prompt_len : end]
        metrics["logprobs"] = logprobs if all(map(isfinite, logprobs)) else None
    model = turn.policy if turn.policy != rollout.policy else None
    return {"model_name": model, "metrics": _present(metrics), "llm_call_count": 1}


def _result(message: Message, answer: Row) -> Row:
    calls = {call["tool_call_id"] for call in answer.get("tool_calls", ())}
    named = {"source_call_id": message.tool_call_id} if message.tool_call_id in calls else {}
    return named | {"content": message.content}


def _present(row: Row) -> Row:
    """Without what is None: ATIF leaves it out."""
    return {name: value for name, value in row.items() if value is not None}


ATIF = Format(
    "atif",
    "Harbor's trajectory JSON (ATIF v1.8): a directory, a file a rollout",
    "json",
    NEEDS,
    "harbor 0.26.0",
    _rows,
    tools=True,
)
