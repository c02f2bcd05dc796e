"""Harbor's own models take the trajectories."""

from __future__ import annotations

from typing import Any

from rollcage.rollout.formats import atif

LOAD = """
from harbor.models.trajectories import Trajectory
from harbor.utils.trajectory_validator import TrajectoryValidator
result = []
for one in given:
    validator = TrajectoryValidator()
    assert validator.validate(one), validator.errors
    result.append(Trajectory.model_validate(one).to_json_dict())
broken = given[0] | {"steps": [step | {"step_id": 7} for step in given[0]["steps"]]}
assert not TrajectoryValidator().validate(broken), "its validator can fail"
"""


def test_harbor_takes_every_shape(table: Any, shapes: Any, in_package: Any) -> None:
    rollouts = table(
        shapes.attempt(shapes.text_turns()),
        shapes.attempt(shapes.tool_turns("not json"), sample=1),
        shapes.attempt(shapes.summed_up(), sample=2, reward=None),
        shapes.attempt(shapes.without_ids(shapes.text_turns()), sample=3),
    )
    tools = {"bash": [{"type": "function", "function": {"name": "bash", "parameters": {}}}]}
    text, called, summed, plain = in_package("harbor", LOAD, atif.trajectories(rollouts, tools))

    assert text["schema_version"] == "ATIF-v1.8"
    assert [step["source"] for step in text["steps"]] == ["system", "user", "agent", "agent"]
    looked = text["steps"][2]
    assert looked["tool_calls"][0]["arguments"] == {"command": "wc -l a"}
    assert looked["observation"]["results"] == [{"content": "3"}]
    assert looked["metrics"]["prompt_token_ids"] == [10, 11, 12, 13, 14, 15]
    assert looked["metrics"]["completion_token_ids"] == [1010, 1011]
    assert looked["metrics"]["logprobs"] == [-0.25, -0.5]
    assert text["final_metrics"]["total_completion_tokens"] == 5
    assert text["agent"]["tool_definitions"] == tools["bash"]

    step = called["steps"][2]
    assert step["reasoning_content"] == "A file; count."
    assert step["tool_calls"][0]["arguments"] == {"raw": "not json"}
    assert [one["source_call_id"] for one in step["observation"]["results"]] == ["c1", "c2"]

    assert [step.get("is_copied_context", False) for step in summed["steps"]] == [
        False, False, False, False, True, True, False, False,
    ]  # fmt: skip
    assert summed["extra"]["reward"] is None
    assert "prompt_token_ids" not in plain["steps"][2]["metrics"]


def test_files_of_all_rollouts_have_names_of_their_own(shapes: Any) -> None:
    named = [
        shapes.attempt(None, task, sample, draw=draw)
        for task in ("count", "org/count", "org_count", "../count", "ä" * 300, "ä" * 301)
        for sample in (0, 1)
        for draw in (0, 1)
    ]
    names = [atif.file_name(one) for one in named]
    assert len(set(names)) == len(named)
    assert names[0] == "count.bash.0-0.json"
    assert all("/" not in name and not name.startswith(".") and len(name) < 200 for name in names)
