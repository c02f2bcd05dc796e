"""The `tools` agent in whole attempts: steps in one session, summed up in between, graded each."""

from __future__ import annotations

from typing import Any

import pytest

from rollcage.rollout.outcome import Outcome, Stage

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]

STEPS = {
    "steps/one/instruction.md": "Write 41 to /app/answer.\n",
    "steps/one/tests/test.sh": "#!/bin/sh\ngrep -qx 41 /app/answer && echo 1 >/logs/verifier/reward.txt\n",
    "steps/two/instruction.md": "Now make it 42.\n",
    "steps/two/tests/test.sh": "#!/bin/sh\ngrep -qx 42 /app/answer && echo 1 >/logs/verifier/reward.txt\n",
}
ROOT = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool_calls": [{"name": name, "arguments": arguments}]}


async def test_steps_are_one_conversation_and_each_is_graded(rollouts: Any) -> None:
    task = rollouts.task(root=ROOT, files=STEPS, test=None, solution=None)
    policy = rollouts.policy(
        call("write_file", path="answer", content="41\n"),
        {"text": "It is written."},
        {"error": "context_overflow"},
        {"text": "41 is in /app/answer."},
        call("edit", path="answer", old_string="41", new_string="42"),
        {"text": "It is mended."},
    )
    attempt = await rollouts.attempt(task, "tools", policy=policy, agent_options={"summarize": True})
    assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None), attempt.evidence
    assert [reward for _, reward in attempt.reward.steps] == [1.0, 1.0]
    turns = attempt.trajectory.turns
    assert [turn.purpose for turn in turns] == ["act", "act", "summary", "act", "act"]
    assert [turn.segment for turn in turns] == [0, 0, 0, 1, 1]
    assert [len(turn.commands) for turn in turns] == [1, 0, 0, 1, 0]
    again = attempt.trajectory.messages[-4]
    assert again.content.startswith("Now make it 42.\n\n")
    assert again.content.endswith("\n\n41 is in /app/answer.")
    assert sum(map(len, (segment.ids for segment in attempt.trajectory.segments))) > 0


async def test_a_refusal_is_graded_and_named(rollouts: Any) -> None:
    policy = rollouts.policy(
        call("bash", command="echo 42 >/app/answer"), {"text": "No more.", "finish_reason": "refusal"}
    )
    attempt = await rollouts.attempt(rollouts.task(), "tools", policy=policy)
    assert (attempt.outcome, attempt.error_class, attempt.stage) == (
        Outcome.PASSED,
        "malformed_actions",
        Stage.AGENT,
    )
    assert "the policy refused to answer: No more." in attempt.evidence.message
