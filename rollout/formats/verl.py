"""verl: `AgentLoopOutput` (`verl.experimental.agent_loop`) for each rollout, and a `DataProto` of several.

An output is one sequence: the prompt up to the first answer, and a response in which `response_mask` is 1 exactly on
sampled tokens. A rollout of several segments is none, and is refused. `uid` in `extra_fields` is the group, by which
verl computes advantages.

`arrays` pads as verl's agent loop does: prompts on the left, responses on the right, positions counted over what is
no padding, the reward on the last token of the response (`rm_scores`). It needs numpy, `data_proto` torch and verl.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from rollcage.rollout.formats.base import (
    IDS,
    LOGPROBS,
    ONE_SEGMENT,
    REWARD,
    Format,
    Row,
    Unfit,
    about,
    fit_rollouts,
    group_id,
    reward_of,
)
from rollcage.rollout.formats.sequences import by_segment
from rollcage.rollout.trajectory import Attempt

if TYPE_CHECKING:
    import numpy as np

NEEDS = (REWARD, IDS, LOGPROBS, ONE_SEGMENT)


def agent_loop_outputs(table: pa.Table) -> list[Row]:
    """The fields of an `AgentLoopOutput` for each rollout of a table of `schema.ROLLOUTS`. Raises `Unfit`."""
    return [_output(rollout) for rollout in fit_rollouts(table, NEEDS)]


def arrays(
    outputs: Sequence[Mapping[str, Any]],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The tensors and the other columns of a `DataProto` of these outputs, as numpy arrays of a row each.

    Lengths are in tokens, by default those of the longest. Raises `Unfit` where one is longer: nothing is cut.
    """
    import numpy as np

    prompts = [output["prompt_ids"] for output in outputs]
    responses = [output["response_ids"] for output in outputs]
    width = _width(prompts, prompt_length, "prompt")
    length = _width(responses, response_length, "response")
    shape = (len(outputs), width + length)
    input_ids = np.full(shape, pad_token_id, np.int64)
    attention_mask = np.zeros(shape, np.int64)
    response_mask = np.zeros((len(outputs), length), np.int64)
    logprobs = np.zeros((len(outputs), length), np.float32)
    scores = np.zeros((len(outputs), length), np.float32)
    for row, output in enumerate(outputs):
        prompt, response = prompts[row], responses[row]
        start, end = width - len(prompt), width + len(response)
        input_ids[row, start:end] = [*prompt, *response]
        attention_mask[row, start:end] = 1
        response_mask[row, : len(response)] = output["response_mask"]
        logprobs[row, : len(response)] = output["response_logprobs"]
        scores[row, len(response) - 1] = output["reward_score"]
    tensors = {
        "prompts": input_ids[:, :width],
        "responses": input_ids[:, width:],
        "response_mask": response_mask,
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": np.clip(attention_mask.cumsum(axis=1) - 1, 0, None),
        "rollout_log_probs": logprobs,
        "rm_scores": scores,
    }
    columns = {"__num_turns__": np.array([output["num_turns"] for output in outputs], np.int32)}
    for name in outputs[0]["extra_fields"] if outputs else ():
        columns[name] = np.empty(len(outputs), object)
        columns[name][:] = [output["extra_fields"][name] for output in outputs]
    return tensors, columns


def data_proto(
    outputs: Sequence[Mapping[str, Any]],
    *,
    pad_token_id: int,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> Any:
    """A `verl.DataProto` of these outputs. See `arrays`."""
    import torch
    from verl import DataProto  # type: ignore[import-not-found]

    tensors, columns = arrays(
        outputs, pad_token_id=pad_token_id, prompt_length=prompt_length, response_length=response_length
    )
    return DataProto.from_dict(
        tensors={name: torch.from_numpy(array.copy()) for name, array in tensors.items()},
        non_tensors=columns,
        meta_info={"metrics": [output["metrics"] for output in outputs], "reward_extra_keys": []},
    )


def _width(rows: Sequence[Sequence[int]], given: int | None, what: str) -> int:
    longest = max(map(len, rows), default=0)
    if given is None:
        return longest
    too_long = sum(len(row) > given for row in rows)
    if too_long:
        raise Unfit(
            f"{too_long} of {len(rows)} rollouts have a {what} of more than {given} tokens; the longest has {longest}. "
            f"Raise {what}_length or leave them out"
        )
    return given


def _output(rollout: Attempt) -> Row:
    (sequence,) = by_segment(rollout)
    trajectory = rollout.trajectory
    assert trajectory is not None, "it has a segment"
    generating = sum(turn.generate_seconds for turn in trajectory.turns)
    return {
        "prompt_ids": sequence.prompt_ids,
        "response_ids": sequence.response_ids,
        "response_mask": sequence.loss_mask,
        "response_logprobs": sequence.logprobs,
        "reward_score": reward_of(rollout),
        "num_turns": sum(message.role != "system" for message in trajectory.messages),
        "metrics": {
            "generate_sequences": generating,
            "tool_calls": sum(command.seconds for turn in trajectory.turns for command in turn.commands),
        },
        "extra_fields": {
            "uid": group_id(rollout),
            **about(rollout),
            "finish_reason": sequence.finish_reason,
        },
    }


def _rows(rollouts: Iterable[Attempt], _tools: object) -> Iterator[Row]:
    yield from map(_output, rollouts)


AGENT_LOOP = Format(
    "verl", "verl's AgentLoopOutput: a line a rollout of one segment", "jsonl", NEEDS, "verl 0.9.1", _rows
)
