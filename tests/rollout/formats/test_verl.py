"""verl's own classes take what is made for it."""

from __future__ import annotations

from typing import Any

import pytest

from rollcage.rollout.formats import Unfit, verl

BUILD = """
import torch
from rollcage.rollout.formats import verl as ours
from verl import DataProto
proto = ours.data_proto(given, pad_token_id=7, prompt_length=8, response_length=12)
assert isinstance(proto, DataProto) and len(proto) == 3
chunks = proto.chunk(3)
again = DataProto.concat(chunks)
result = {name: tensor.tolist() for name, tensor in again.batch.items()} | {
    "uid": again.non_tensor_batch["uid"].tolist(),
    "picked": proto[torch.tensor([2])].non_tensor_batch["sample"].tolist(),
    "metrics": len(proto.meta_info["metrics"]), "scores": proto.batch["rm_scores"].sum(-1).tolist(),
}
"""

OUTPUTS = """
import ast, pathlib, typing
import torch
import verl.experimental
from pydantic import BaseModel
# Its module imports a whole trainer; the two classes need nothing of that.
source = pathlib.Path(verl.experimental.__path__[0], "agent_loop", "agent_loop.py").read_text()
wanted = [n for n in ast.parse(source).body
          if isinstance(n, ast.ClassDef) and n.name in ("AgentLoopMetrics", "AgentLoopOutput")]
names = {"BaseModel": BaseModel, "Optional": typing.Optional, "Any": typing.Any, "torch": torch, "__name__": "checked"}
exec(compile(ast.Module(wanted, []), "agent_loop.py", "exec"), names)
AgentLoopOutput = names["AgentLoopOutput"]
assert not set().union(*given) - set(AgentLoopOutput.model_fields)
outputs = [AgentLoopOutput.model_validate(one) for one in given]
result = [{"rm_scores": one.as_dict()["rm_scores"].tolist(), "turns": one.num_turns} for one in outputs]
"""


@pytest.fixture
def outputs(table: Any, shapes: Any) -> list[dict[str, Any]]:
    return verl.agent_loop_outputs(
        table(
            shapes.attempt(shapes.text_turns()),
            shapes.attempt(shapes.text_turns(), sample=1, reward=0.0),
            shapes.attempt(shapes.tool_turns(), sample=2, reward=0.5, task="other"),
        )
    )


def test_verl_builds_a_data_proto_and_its_agent_loop_outputs(outputs: Any, in_package: Any) -> None:
    built = in_package(
        "verl", OUTPUTS.replace("result =", "loops =") + BUILD + "result['loops'] = loops", outputs, ("ray",)
    )

    assert built["prompts"][0] == [7, 7, 10, 11, 12, 13, 14, 15]
    assert built["responses"][0] == [1010, 1011, 18, 19, 20, 1010, 1011, 1012, *[7] * 4]
    assert built["response_mask"][0] == [1, 1, 0, 0, 0, 1, 1, 1, *[0] * 4]
    assert built["attention_mask"][0] == [0, 0, *[1] * 14, *[0] * 4]
    assert built["position_ids"][0] == [0, 0, *range(14), *[13] * 4]
    assert built["rm_scores"][0] == [*[0] * 7, 1, *[0] * 4]
    assert built["rollout_log_probs"][0] == [-0.25, -0.5, 0, 0, 0, -0.25, -0.5, -0.75, *[0] * 4]
    assert built["uid"] == ["demo/bash/count-lines/0", "demo/bash/count-lines/0", "demo/bash/other/0"]
    assert built["scores"] == [1.0, 0.0, 0.5]
    assert (built["picked"], built["metrics"]) == ([2], 3)
    assert [sum(one["rm_scores"]) for one in built["loops"]] == [1.0, 0.0, 0.5]
    assert [one["turns"] for one in built["loops"]] == [4, 4, 5]


def test_what_does_not_fit_the_lengths_is_refused_and_never_cut(outputs: Any) -> None:
    with pytest.raises(
        Unfit, match="3 of 3 rollouts have a response of more than 7 tokens; the longest has 12"
    ):
        verl.arrays(outputs, pad_token_id=0, response_length=7)


def test_a_rollout_of_several_segments_is_no_single_sequence(table: Any, shapes: Any) -> None:
    with pytest.raises(Unfit, match="several segments"):
        verl.agent_loop_outputs(table(shapes.attempt(shapes.summed_up())))
