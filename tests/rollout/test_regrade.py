"""Attempts whose states are kept, and their verifiers run again on them, without Ray."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from rollcage.rollout.outcome import Outcome
from rollcage.rollout.regrade import regrade_attempt
from rollcage.rollout.rollout import AttemptSpec, run_attempt
from rollcage.rollout.sandbox.pool import SandboxPool
from rollcage.rollout.sandbox.states import list_states, remove_states
from rollcage.rollout.task import Task, load_task
from rollcage.rollout.trajectory import Attempt
from rollcage.verifier.verify import TestsVerifier

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]

REWARD = "/logs/verifier/reward.txt"


class Kept:
    """Attempts on a pool that keeps all states."""

    def __init__(self, rollouts: Any, pool: SandboxPool) -> None:
        self.rollouts = rollouts
        self.pool = pool

    async def attempt(self, task: Task, agent: str = "oracle", **settings: Any) -> Attempt:
        spec = AttemptSpec(task=task, agent=agent, **{**self.rollouts.named(), **settings})
        return await run_attempt(spec, self.pool, TestsVerifier())

    async def again(self, attempt: Attempt, task: Task) -> Attempt:
        """The verdict of the task as it lies there now."""
        images: Mapping[str, str] = attempt.extra["state"]["images"]
        assert attempt.extra["state"]["missing"] == {}
        states = {step: await self.pool.states.image(name) for step, name in images.items()}
        spec = AttemptSpec(task=load_task(task.path), agent="oracle", **self.rollouts.named())
        given = {step: found[0] for step, found in states.items() if found is not None}
        pool = self.rollouts.pool
        graded = await regrade_attempt(attempt, spec, given, pool, TestsVerifier())
        await pool.drained()
        assert await self.rollouts.left(spec.attempt_id) == []
        return graded


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def kept(rollouts: Any) -> AsyncIterator[Kept]:
    settings = replace(rollouts.pool.settings, keep_states="all")
    job = f"test-{uuid.uuid4().hex[:8]}"
    pool = SandboxPool(rollouts.engine, settings, host=f"{rollouts.pool.host}-kept", job=job)
    yield Kept(rollouts, pool)
    await pool.close()
    await remove_states(rollouts.engine, job=job)
    assert await list_states(rollouts.engine, job) == []


async def test_each_step_is_graded_on_its_own_state(kept: Kept) -> None:
    files = {}
    for name in ("s1", "s2"):
        files[f"steps/{name}/instruction.md"] = "Go on.\n"
        files[f"steps/{name}/tests/test.sh"] = f"#!/bin/sh\nwc -l </app/done >{REWARD}\n"
        files[f"steps/{name}/solution/solve.sh"] = "#!/bin/sh\necho x >>/app/done\n"
    task = kept.rollouts.task(
        root='[[steps]]\nname = "s1"\n[[steps]]\nname = "s2"\n', files=files, test=None, solution=None
    )
    attempt = await kept.attempt(task)
    assert attempt.reward is not None
    assert attempt.reward.steps == (("s1", 1.0), ("s2", 2.0))
    assert list(attempt.extra["state"]["images"]) == ["s1", "s2"]
    graded = await kept.again(attempt, task)
    assert graded.reward is not None
    assert (graded.reward.steps, graded.reward.value) == (attempt.reward.steps, 1.5)
    (task.path / "steps/s1/tests/test.sh").write_text(f"#!/bin/sh\necho 5 >{REWARD}\n")
    graded = await kept.again(attempt, task)
    assert graded.reward is not None
    assert graded.reward.steps == (("s1", 5.0), ("s2", 2.0))
    assert graded.extra["regraded_from"]["reward"] == 1.5


async def test_a_separate_verifier_gets_what_was_collected_then(kept: Kept) -> None:
    """What `collect` asks of running processes cannot be asked again."""
    collect = '[[verifier.collect]]\ncommand = "kill -0 $(cat /app/pid) && echo 42 >/app/answer"\n'
    task = kept.rollouts.task(
        root='artifacts = ["/app/answer"]\n',
        files={"tests/Dockerfile": f"{kept.rollouts.dockerfile}COPY test.sh /tests/test.sh\n"},
        verifier=f'environment_mode = "separate"\nnetwork_mode = "no-network"\n{collect}',
    )
    agent = kept.rollouts.shell_agent("sleep 600 & echo $! >/app/pid")
    attempt = await kept.attempt(task, agent)
    assert attempt.outcome is Outcome.PASSED
    graded = await kept.again(attempt, task)
    assert (graded.outcome, graded.error_class) == (Outcome.PASSED, None)


async def test_what_stopped_the_agent_still_names_it_and_a_verifier_that_fails_names_itself(
    kept: Kept,
) -> None:
    task = kept.rollouts.task()
    attempt = await kept.attempt(task, kept.rollouts.shell_agent("sleep 60"), agent_timeout_sec=0.5)
    assert (attempt.outcome, attempt.error_class) == (Outcome.FAILED, "agent_timeout")
    script = task.path / "tests/test.sh"
    script.write_text(f"#!/bin/sh\necho 1 >{REWARD}\n")
    graded = await kept.again(attempt, task)
    assert (graded.outcome, graded.error_class, graded.stage) == (Outcome.PASSED, "agent_timeout", "agent")
    script.write_text("#!/bin/sh\ntrue\n")
    graded = await kept.again(attempt, task)
    assert (graded.outcome, graded.error_class, graded.reward) == (Outcome.INVALID, "reward_missing", None)
    assert graded.extra["regraded_from"]["error_class"] == "agent_timeout"


async def test_the_hosts_values_are_in_no_state_and_those_of_the_task_are_there_again(kept: Kept) -> None:
    test = f'if [ "$A" = own ]; then echo 1; else echo 0; fi >{REWARD}\n'
    task = kept.rollouts.task(test=test, **{"environment.env": 'A = "own"'})
    attempt = await kept.attempt(task)
    [name] = attempt.extra["state"]["images"].values()
    api = kept.pool.engine.api
    assert "A=" in api.inspect_image(name)["Config"]["Env"]
    assert (await kept.again(attempt, task)).outcome is Outcome.PASSED
    secret = kept.rollouts.task(test=test, **{"environment.env": 'A = "${ROLLCAGE_TEST_TOKEN:-own}"'})
    attempt = await kept.attempt(secret)
    assert attempt.outcome is Outcome.PASSED
    images, missing = attempt.extra["state"]["images"], attempt.extra["state"]["missing"]
    if images:  # engines from 25 on
        assert "A=own" not in str(api.inspect_image(images["main"]))
    else:
        assert missing == {"main": "an image of this engine would hold the host's values of A"}
        assert not [
            state for state in await list_states(kept.pool.engine) if state.attempt_id == attempt.attempt_id
        ]
