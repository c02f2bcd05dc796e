"""verifiers' own models take the traces, and prime-rl's samples come out of them token for token."""

from __future__ import annotations

from typing import Any

from rollcage.rollout.formats import prime_rl

STAND_INS = ("prime_sandboxes", "prime_tunnel", "math_verify", "tenacity", "tomli_w")

LOAD = """
from verifiers.v1 import WireTrace
traces = [WireTrace.model_validate(one) for one in given]
result = [
    {
        "reward": one.reward, "ok": one.ok, "turns": one.num_turns, "truncated": one.is_truncated, "key": one.task.key,
        "branches": [{"token_ids": b.token_ids, "mask": b.sampled_mask, "logprobs": b.logprobs,
                      "roles": [m.role for m in b.messages], "calls": len(b.calls)} for b in one.branches],
    }
    for one in traces
]
"""


def test_a_segment_is_a_branch_with_its_very_tokens(table: Any, shapes: Any, in_package: Any) -> None:
    rollouts = table(
        shapes.attempt(shapes.text_turns(), reward=0.5, error_class="turn_limit"),
        shapes.attempt(shapes.tool_turns(), sample=1),
        shapes.attempt(shapes.summed_up(), sample=2),
    )
    loaded = in_package("verifiers", LOAD, prime_rl.traces(rollouts), STAND_INS)

    samples = prime_rl.training_samples(rollouts)
    branches = [branch for one in loaded for branch in one["branches"]]
    assert len(branches) == len(samples) == 5
    for branch, sample in zip(branches, samples, strict=True):
        assert {name: branch[name] for name in ("token_ids", "mask", "logprobs")} == {
            name: sample[name] for name in ("token_ids", "mask", "logprobs")
        }
    text, tools, summed = loaded
    assert (text["reward"], text["truncated"], text["turns"]) == (0.5, True, 2)
    assert (tools["ok"], tools["truncated"]) == (True, False)
    assert tools["branches"][0]["roles"] == ["system", "user", "assistant", "tool", "tool", "assistant"]
    assert [one["roles"] for one in summed["branches"]] == [
        ["system", "user", "assistant", "user", "assistant"],
        ["system", "user", "assistant"],
        ["system", "user", "assistant", "user", "assistant"],
    ]
    assert [one["calls"] for one in summed["branches"]] == [2, 1, 1]
    assert {one["key"] for one in loaded} == {"demo/bash/count-lines/0"}


def test_the_samples_train_on_what_was_sampled_alone(table: Any, shapes: Any) -> None:
    (sample,) = prime_rl.training_samples(table(shapes.attempt(shapes.text_turns())))
    assert sample["mask"] == [*[False] * 6, True, True, *[False] * 3, True, True, True]
    assert sample["logprobs"][6:9] == [-0.25, -0.5, 0.0]
