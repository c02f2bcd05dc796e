"""TRL: conversations (`prompt` and `completion`, with tool calls), and exact tokens.

`trl` is text: a row a conversation, the prompt up to the first answer, the completion all that follows, arguments of
calls as objects, `tools` as JSON where they are known. A template tokenizes it anew, and its mask covers what tools
said as well, unless `assistant_only_loss` is set and the template marks answers.

`trl-ids` is what `SFTTrainer` takes as processed: `input_ids` and `labels`, a row a segment, where a label is -100
exactly on what was not sampled.

`rollout_output` is what a `rollout_func` of `GRPOTrainer` returns: ids, log-probabilities and `env_mask` of rollouts of
one segment; rewards and the names of groups are passed on to the reward function.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from rollcage.rollout.formats.base import (
    IDS,
    LOGPROBS,
    ONE_SEGMENT,
    REWARD,
    Format,
    Row,
    about,
    fit_rollouts,
    group_id,
    reward_of,
)
from rollcage.rollout.formats.conversations import CALLS, CONVERSATION, Tools, chat_messages, conversations
from rollcage.rollout.formats.sequences import by_segment
from rollcage.rollout.trajectory import Attempt

CHECKED = "trl 1.16.0"
IGNORED = -100
"""The label of a token that is not trained on, in torch's cross entropy as in TRL."""


def conversation_rows(table: pa.Table, tools: Tools | None = None) -> list[Row]:
    """`prompt` and `completion` of each conversation of a table of `schema.ROLLOUTS`. Raises `Unfit`."""
    return list(_conversations(fit_rollouts(table, (CONVERSATION, CALLS)), tools or {}))


def token_rows(table: pa.Table) -> list[Row]:
    """`input_ids` and `labels` of each segment of a table of `schema.ROLLOUTS`. Raises `Unfit`."""
    return list(_tokens(fit_rollouts(table, (IDS,)), None))


def rollout_output(table: pa.Table) -> dict[str, list[object]]:
    """What a `rollout_func` returns of a table of `schema.ROLLOUTS`, an entry a rollout. Raises `Unfit`."""
    output: dict[str, list[object]] = {
        name: []
        for name in (
            "prompt_ids",
            "completion_ids",
            "logprobs",
            "env_mask",
            "rollcage_reward",
            "rollcage_group",
        )
    }
    for rollout in fit_rollouts(table, (REWARD, IDS, LOGPROBS, ONE_SEGMENT)):
        (sequence,) = by_segment(rollout)
        output["prompt_ids"].append(sequence.prompt_ids)
        output["completion_ids"].append(sequence.response_ids)
        output["logprobs"].append(sequence.logprobs)
        output["env_mask"].append(sequence.loss_mask)
        output["rollcage_reward"].append(reward_of(rollout))
        output["rollcage_group"].append(group_id(rollout))
    return output


def _conversations(rollouts: Iterable[Attempt], tools: Mapping[str, Sequence[Row]]) -> Iterator[Row]:
    for rollout in rollouts:
        facts = about(rollout)
        offered = tools.get(rollout.agent)
        for number, messages in enumerate(conversations(rollout)):
            first = next(index for index, message in enumerate(messages) if message.role == "assistant")
            chat = chat_messages(messages)
            row: Row = {"prompt": chat[:first], "completion": chat[first:]}
            if offered:
                row["tools"] = json.dumps(list(offered))
            yield row | facts | {"conversation": number}


def _tokens(rollouts: Iterable[Attempt], _tools: object) -> Iterator[Row]:
    for rollout in rollouts:
        facts = about(rollout)
        for sequence in by_segment(rollout):
            labels = [IGNORED] * len(sequence.prompt_ids)
            labels += [
                number if sampled else IGNORED
                for number, sampled in zip(sequence.response_ids, sequence.loss_mask, strict=True)
            ]
            ids = sequence.prompt_ids + sequence.response_ids
            yield {"input_ids": ids, "labels": labels} | facts | {"segment": sequence.index}


CONVERSATIONAL = Format(
    "trl",
    "TRL's prompt and completion, with tool calls: a line a conversation",
    "jsonl",
    (CONVERSATION, CALLS),
    CHECKED,
    _conversations,
    tools=True,
)
TOKENS = Format(
    "trl-ids",
    "input_ids and labels, ready for SFTTrainer: a line a segment",
    "jsonl",
    (IDS,),
    CHECKED,
    _tokens,
)
