"""Tasks of several steps, and verifiers with a sandbox of their own."""

from __future__ import annotations

from typing import Any

import pytest

from rollcage.rollout.outcome import Outcome, Stage
from rollcage.verifier.verify import TestsVerifier

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]

REWARD = "/logs/verifier/reward.txt"


def steps(*rewards: float | str, floors: dict[int, float] | None = None, **more: str) -> dict[str, Any]:
    """A task's settings: one step for each reward (or sh script of its test), with files of `more` by path."""
    toml, files = "", {}
    for number, reward in enumerate(rewards, 1):
        floor = f"min_reward = {floors[number]}\n" if floors and number in floors else ""
        toml += f'[[steps]]\nname = "s{number}"\n{floor}'
        test = reward if isinstance(reward, str) else f"echo {reward} >{REWARD}"
        files[f"steps/s{number}/instruction.md"] = f"Step {number}.\n"
        files[f"steps/s{number}/tests/test.sh"] = f"#!/bin/sh\n{test}\n"
        files[f"steps/s{number}/solution/solve.sh"] = f"#!/bin/sh\necho {number} >>/app/done; pwd\n"
    return {"root": toml, "files": files | more, "test": None, "solution": None}


class TestSteps:
    async def test_share_one_sandbox_and_are_graded_one_by_one(self, rollouts: Any) -> None:
        task = rollouts.task(**steps(f"wc -l </app/done >{REWARD}", f"wc -l </app/done >{REWARD}"))
        attempt = await rollouts.attempt(task)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)
        assert attempt.reward.steps == (("s1", 1.0), ("s2", 2.0))
        assert attempt.reward.value == 1.5
        assert attempt.reward.skipped_steps == ()
        assert len(attempt.trajectory.turns) == 2

    async def test_the_final_one_alone_counts_where_the_task_says_so(self, rollouts: Any) -> None:
        settings = steps(1, 0.25)
        settings["root"] = 'multi_step_reward_strategy = "final"\n' + settings["root"]
        attempt = await rollouts.attempt(rollouts.task(**settings))
        assert (attempt.outcome, attempt.reward.value) == (Outcome.FAILED, 0.25)

    async def test_a_step_below_its_floor_ends_the_task(self, rollouts: Any) -> None:
        task = rollouts.task(**steps(1, 1, 0.5, 1, floors={3: 0.75}))
        attempt = await rollouts.attempt(task)
        assert (attempt.outcome, attempt.error_class) == (Outcome.FAILED, None)
        assert attempt.reward.steps == (("s1", 1.0), ("s2", 1.0), ("s3", 0.5))
        assert attempt.reward.skipped_steps == ("s4",)
        assert len(attempt.trajectory.turns) == 3

    async def test_bring_their_own_files_and_set_up(self, rollouts: Any) -> None:
        more = {
            "steps/s2/workdir/given.txt": "given\n",
            "steps/s2/workdir/setup.sh": "echo $(id -un) $(pwd) $(cat given.txt) >>/tmp/setup\n",
        }
        settings = steps(
            f"if [ -e /app/given.txt ]; then echo 0; else echo 1; fi >{REWARD}",
            f'if [ "$(cat /tmp/setup)" = "root /app given" ]; then echo 1; else echo 0; fi >{REWARD}',
            **more,
        )
        attempt = await rollouts.attempt(rollouts.task(**settings))
        assert (attempt.outcome, attempt.reward.steps) == (Outcome.PASSED, (("s1", 1.0), ("s2", 1.0)))

    async def test_the_verifiers_memory_in_one_is_not_the_agents_in_the_next(self, rollouts: Any) -> None:
        hungry = f"tail /dev/zero; echo 1 >{REWARD}"
        attempt = await rollouts.attempt(rollouts.task(environment="memory_mb = 48", **steps(hungry, 1)))
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)

    async def test_the_first_that_stops_the_agent_names_the_attempt(self, rollouts: Any) -> None:
        policy = rollouts.policy("true")
        options = {"max_turns": 1}
        task = rollouts.task(**steps(1, 1))
        attempt = await rollouts.attempt(task, "bash", policy=policy, agent_options=options)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, "turn_limit")
        assert attempt.stage == Stage.AGENT

    async def test_a_verifier_that_fails_in_one_leaves_no_reward_at_all(self, rollouts: Any) -> None:
        attempt = await rollouts.attempt(rollouts.task(**steps(1, "true")))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "reward_missing")


class TestStepsThatDoNotGetReady:
    async def test_the_first_is_the_tasks_fault(self, rollouts: Any) -> None:
        settings = steps(1, 1, **{"steps/s1/workdir/setup.sh": "echo broken; exit 4\n"})
        attempt = await rollouts.attempt(rollouts.task(**settings))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "container_config")
        assert attempt.stage == Stage.START
        assert (attempt.evidence.exit_code, attempt.evidence.log_tail) == (4, "broken\n")

    async def test_a_later_one_is_the_agents(self, rollouts: Any) -> None:
        settings = steps(1, 1, **{"steps/s2/workdir/setup.sh": "cat /app/done; rm /app/needed\n"})
        attempt = await rollouts.attempt(rollouts.task(**settings))
        assert (attempt.outcome, attempt.error_class) == (Outcome.FAILED, "agent_killed_sandbox")
        assert attempt.stage == Stage.AGENT
        assert attempt.reward.value == 0.0
        assert "setup.sh of step s2" in attempt.evidence.message

    async def test_a_healthcheck_of_a_later_one(self, rollouts: Any) -> None:
        settings = steps(1, 1)
        settings["root"] += '[steps.healthcheck]\ncommand = "false"\ninterval_sec = 0.05\nretries = 2\n'
        attempt = await rollouts.attempt(rollouts.task(**settings))
        assert (attempt.outcome, attempt.error_class) == (Outcome.FAILED, "agent_killed_sandbox")

    @pytest.mark.parametrize(
        "sabotage",
        [
            "cd /; rm -rf /app; echo file >/app",
            "sed -i /games/d /etc/passwd",
            "rm -f /usr/bin/sh /usr/bin/bash /usr/bin/dash",
        ],
    )
    async def test_what_the_agent_has_broken_never_quarantines_the_task(
        self, rollouts: Any, sabotage: str
    ) -> None:
        more = {"steps/s2/workdir/given.txt": "given\n", "steps/s2/workdir/setup.sh": "true\n"}
        settings = steps(1, 1, **more)
        settings["root"] += '[steps.agent]\nuser = "games"\n'
        attempt = await rollouts.attempt(rollouts.task(**settings), rollouts.shell_agent(sabotage))
        assert attempt.reward_valid, attempt.evidence
        assert attempt.error_class in (None, "agent_killed_sandbox")


class TestAVerifierOfItsOwn:
    TEST = f'if [ "$(cat /app/answer)" = 42 ] && [ ! -e /app/other ]; then echo 1; else echo 0; fi >{REWARD}'

    def separate(self, rollouts: Any, test: str = TEST, verifier: str = "", **settings: Any) -> Any:
        """A task whose tests are in an image of their own, and whose artifact is the answer."""
        root = 'artifacts = ["/app/answer"]\n'
        files = {"tests/Dockerfile": f"{rollouts.dockerfile}COPY test.sh /tests/test.sh\n"}
        verifier = f'environment_mode = "separate"\nnetwork_mode = "no-network"\n{verifier}'
        return rollouts.task(root=root, files=files, test=test, verifier=verifier, **settings)

    async def test_gets_the_artifacts_and_nothing_else(self, rollouts: Any) -> None:
        task = self.separate(rollouts, solution="echo 42 >/app/answer; touch /app/other\n")
        passed, failed = await rollouts.attempts(rollouts.attempt(task), rollouts.attempt(task, "nop"))
        assert (passed.outcome, passed.error_class) == (Outcome.PASSED, None)
        assert (failed.outcome, failed.error_class) == (Outcome.FAILED, None)

    async def test_knows_what_stopped_the_agent(self, rollouts: Any) -> None:
        task = self.separate(rollouts, environment="memory_mb = 48")
        agent = rollouts.shell_agent("tail /dev/zero | cat", "echo 42 >/app/answer")
        attempt = await rollouts.attempt(task, agent)
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, "agent_oom")

    @pytest.mark.parametrize(
        ("test", "error_class"), [("true", "reward_missing"), ("sleep inf", "verifier_timeout")]
    )
    async def test_that_gives_no_reward(self, rollouts: Any, test: str, error_class: str) -> None:
        attempt = await rollouts.attempt(self.separate(rollouts, test, "timeout_sec = 1"))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, error_class)
        assert attempt.stage == Stage.VERIFY

    async def test_whose_image_cannot_be_built(self, rollouts: Any) -> None:
        task = self.separate(rollouts)
        dockerfile = task.path / "tests" / "Dockerfile"
        dockerfile.write_text(dockerfile.read_text() + "COPY nothing-there /\n")
        attempt = await rollouts.attempt(task)
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "image_build")
        assert "nothing-there" in attempt.evidence.message

    async def test_has_both_sandboxes_while_it_runs(self, rollouts: Any) -> None:
        names: list[str] = []

        class Looking:
            """Looks at what is there, and grades as usual."""

            def __init__(self) -> None:
                self._verifier = TestsVerifier()

            async def verify_separate(self, sandbox: Any, other: Any, task: Any, step: Any, left: Any) -> Any:
                names.extend(await rollouts.left(sandbox.spec.labels["rollcage.rollout"]))
                return await self._verifier.verify_separate(sandbox, other, task, step, left)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._verifier, name)

        attempt = await rollouts.attempt(self.separate(rollouts), verifier=Looking())
        assert attempt.outcome == Outcome.PASSED
        assert sorted(names) == [f"/rollcage-{attempt.attempt_id}-{role}" for role in ("main", "verifier1")]
