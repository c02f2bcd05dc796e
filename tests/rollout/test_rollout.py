"""Attempts on a real engine: what passes and fails, and whose fault it is where neither can be said."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.outcome import Outcome, Stage
from rollcage.rollout.rollout import AttemptSpec, run_attempt
from rollcage.verifier.verify import TestsVerifier

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]

PHASES = {"queue", "image", "start", "agent", "verify", "teardown"}


async def test_the_oracle_passes_and_every_phase_is_timed(rollouts: Any) -> None:
    attempt = await rollouts.attempt(rollouts.task(), sample=3, number=2, agent_label="reference")
    assert (attempt.outcome, attempt.error_class, attempt.stage) == (Outcome.PASSED, None, None)
    assert attempt.reward.value == 1.0
    assert attempt.evidence is None
    assert (attempt.sample, attempt.number, attempt.agent, attempt.policy) == (3, 2, "reference", "")
    assert set(attempt.phases) == PHASES
    assert all(seconds > 0 for phase, seconds in attempt.phases.items() if phase != "queue")
    assert 0 <= attempt.phases["queue"] < attempt.phases["start"]
    (turn,) = attempt.trajectory.turns
    assert turn.commands[0].exit_code == 0


async def test_an_agent_that_does_nothing_fails_without_an_error_class(rollouts: Any) -> None:
    attempt = await rollouts.attempt(rollouts.task(), "nop")
    assert (attempt.outcome, attempt.error_class, attempt.stage) == (Outcome.FAILED, None, None)
    assert attempt.reward.value == 0.0
    assert set(attempt.phases) == PHASES


async def test_the_pass_threshold_decides_what_has_passed(rollouts: Any) -> None:
    task = rollouts.task(test="echo 0.5 >/logs/verifier/reward.txt")
    failed, passed = await rollouts.attempts(
        rollouts.attempt(task, "nop"), rollouts.attempt(task, "nop", pass_threshold=0.5)
    )
    assert (failed.outcome, failed.reward.value) == (Outcome.FAILED, 0.5)
    assert (passed.outcome, passed.reward.value) == (Outcome.PASSED, 0.5)


async def test_a_policy_solves_the_task_turn_by_turn(rollouts: Any) -> None:
    policy = rollouts.policy("answer=42", "echo $answer >answer\nsubmit")
    attempt = await rollouts.attempt(rollouts.task(), "bash", policy=policy)
    assert (attempt.outcome, attempt.error_class, attempt.policy) == (Outcome.PASSED, None, "scripted")
    trajectory = attempt.trajectory
    assert [turn.commands[0].exit_code for turn in trajectory.turns] == [0, 0]
    (segment,) = trajectory.segments
    assert trajectory.completion_tokens == sum(turn.completion_len for turn in trajectory.turns) > 0
    assert len(segment.ids) == len(segment.loss_mask) == len(segment.logprobs)


async def test_thirty_two_attempts_at_once_all_pass(rollouts: Any) -> None:
    task = rollouts.task()
    attempts = await rollouts.attempts(*(rollouts.attempt(task) for _ in range(32)), at_once=16)
    assert [attempt.outcome for attempt in attempts] == [Outcome.PASSED] * 32
    assert len({attempt.attempt_id for attempt in attempts}) == 32


class TestWhatTheTaskAsksFor:
    """The task's own faults: no reward, and the stage that the outcome table gives them."""

    async def test_a_build_step_that_fails(self, rollouts: Any) -> None:
        task = rollouts.task(dockerfile=f"{rollouts.dockerfile}RUN echo no such luck && exit 7\n")
        before = rollouts.pool.images.builds
        attempts = await rollouts.attempts(*(rollouts.attempt(task) for _ in range(3)))
        for attempt in attempts:
            assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "image_build")
            assert attempt.stage == Stage.BUILD
            assert attempt.evidence.exit_code == 7
            assert "no such luck" in attempt.evidence.log_tail
            assert set(attempt.phases) == {"image", "teardown"}
        assert rollouts.pool.images.builds == before + 1

    async def test_a_dockerfile_that_is_none(self, rollouts: Any) -> None:
        attempt = await rollouts.attempt(rollouts.task(dockerfile="FROM debian:bookworm-slim\nRUNN true\n"))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "dockerfile_parse")
        assert "2" in attempt.evidence.message

    async def test_a_healthcheck_that_never_passes(self, rollouts: Any) -> None:
        check = 'command = "echo not yet; exit 3"\ninterval_sec = 0.05\nretries = 2'
        attempt = await rollouts.attempt(rollouts.task(**{"environment.healthcheck": check}))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "healthcheck")
        assert attempt.stage == Stage.START
        assert attempt.evidence.exit_code == 3
        assert "not yet" in attempt.evidence.log_tail
        assert "agent" not in attempt.phases

    async def test_a_healthcheck_that_hangs(self, rollouts: Any) -> None:
        check = 'command = "sleep inf"\ninterval_sec = 0.05\ntimeout_sec = 0.3\nretries = 2'
        attempt = await rollouts.attempt(rollouts.task(**{"environment.healthcheck": check}))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "healthcheck")

    @pytest.mark.parametrize("patience", ["retries = 3", "retries = 1\nstart_period_sec = 30"])
    async def test_a_healthcheck_that_passes_at_the_third_try(self, rollouts: Any, patience: str) -> None:
        command = "echo x >>/tries; [ $(wc -l </tries) -ge 3 ]"
        check = f'command = "{command}"\ninterval_sec = 0.05\nstart_interval_sec = 0.05\n{patience}'
        attempt = await rollouts.attempt(rollouts.task(**{"environment.healthcheck": check}))
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)

    async def test_an_agent_user_that_the_image_does_not_have(self, rollouts: Any) -> None:
        attempt = await rollouts.attempt(rollouts.task(agent='user = "nobody-of-that-name"'))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "container_config")
        assert attempt.stage == Stage.START
        assert "nobody-of-that-name" in attempt.evidence.message

    async def test_a_workdir_that_is_a_file(self, rollouts: Any) -> None:
        attempt = await rollouts.attempt(rollouts.task(environment='workdir = "/etc/passwd"'))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "container_config")
        assert attempt.stage == Stage.START

    async def test_a_workdir_that_is_not_there_is_made(self, rollouts: Any) -> None:
        task = rollouts.task(environment='workdir = "/not/there"', solution="pwd; echo 42 >/app/answer")
        attempt = await rollouts.attempt(task)
        assert attempt.outcome == Outcome.PASSED
        assert attempt.trajectory.turns[0].commands[0].stdout == "/not/there\n"

    async def test_more_memory_than_an_engine_takes_for_a_limit(self, rollouts: Any) -> None:
        task = rollouts.task()  # whose file the loader would refuse
        task = replace(task, environment=replace(task.environment, memory_mb=1))
        attempt = await rollouts.attempt(task)
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "container_config")

    async def test_an_image_without_a_shell(self, rollouts: Any) -> None:
        task = rollouts.task(dockerfile=f"{rollouts.dockerfile}RUN rm -f /bin/sh /bin/dash\n")
        attempt = await rollouts.attempt(task)
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "container_config")

    async def test_no_solution_for_the_oracle(self, rollouts: Any) -> None:
        attempt = await rollouts.attempt(rollouts.task(solution=None))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "task_malformed")
        assert attempt.stage == Stage.LOAD

    async def test_a_variable_that_is_not_set(self, rollouts: Any) -> None:
        task = rollouts.task(**{"environment.env": 'KEY = "${ROLLCAGE_TEST_NOT_SET}"'})
        attempt = await rollouts.attempt(task)
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "unsupported")
        assert attempt.stage == Stage.LOAD
        assert "ROLLCAGE_TEST_NOT_SET" in attempt.evidence.message


class TestTheVerifier:
    """A reward that cannot be trusted is no reward; what the verifier printed is kept."""

    @pytest.mark.parametrize(
        ("script", "error_class"),
        [
            ("echo last words", "reward_missing"),
            ("echo last words; echo maybe >/logs/verifier/reward.txt", "reward_malformed"),
            ("echo last words; echo nan >/logs/verifier/reward.txt", "reward_malformed"),
            ("echo last words; sleep inf", "verifier_timeout"),
            ("echo last words; kill -9 $$", "verifier_crash"),
            ("echo last words; no-such-program", "verifier_crash"),
        ],
    )
    async def test_errors_end_invalid_with_the_end_of_its_output(
        self, rollouts: Any, script: str, error_class: str
    ) -> None:
        attempt = await rollouts.attempt(rollouts.task(test=script, verifier="timeout_sec = 1"))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, error_class)
        assert attempt.stage == Stage.VERIFY
        assert attempt.reward is None
        assert "last words" in attempt.evidence.log_tail
        assert attempt.trajectory.turns, "what the agent did is kept"

    async def test_its_exit_code_is_ignored(self, rollouts: Any) -> None:
        task = rollouts.task(test="echo 1 >/logs/verifier/reward.txt; exit 1")
        assert (await rollouts.attempt(task)).outcome == Outcome.PASSED

    async def test_its_memory_is_not_charged_to_the_agent(self, rollouts: Any) -> None:
        script = "tail /dev/zero; echo 1 >/logs/verifier/reward.txt"
        attempt = await rollouts.attempt(rollouts.task(test=script, environment="memory_mb = 32"))
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)


class TestWhatNobodyForesaw:
    """Unknown is internal_error, with a traceback: never a silent 0, never the end of the process."""

    async def test_an_agent_that_raises(self, rollouts: Any) -> None:
        async def run(context: AgentContext) -> None:
            raise KeyError("a slip")

        attempt = await rollouts.attempt(rollouts.task(), rollouts.agent(run))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "internal_error")
        assert attempt.stage == Stage.AGENT
        assert "a slip" in attempt.evidence.message
        assert "KeyError" in attempt.evidence.log_tail
        assert "test_rollout.py" in attempt.evidence.log_tail

    async def test_an_agent_that_exits(self, rollouts: Any) -> None:
        async def run(context: AgentContext) -> None:
            raise SystemExit(3)

        attempt = await rollouts.attempt(rollouts.task(), rollouts.agent(run))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "internal_error")
        assert "sys.exit(3)" in attempt.evidence.message

    async def test_an_agent_that_ends_as_if_it_had_been_cancelled(self, rollouts: Any) -> None:
        async def run(context: AgentContext) -> None:
            helper = asyncio.ensure_future(asyncio.sleep(60))
            helper.cancel()
            await helper

        attempt = await rollouts.attempt(rollouts.task(), rollouts.agent(run))
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "internal_error")

    async def test_an_agent_that_does_not_exist(self, rollouts: Any) -> None:
        attempt = await rollouts.attempt(rollouts.task(), "no-such-agent")
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "internal_error")
        assert "oracle" in attempt.evidence.message

    async def test_an_agent_that_needs_a_policy_and_has_none(self, rollouts: Any) -> None:
        attempt = await rollouts.attempt(rollouts.task(), "bash")
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "internal_error")
        assert set(attempt.phases) == {"teardown"}, "nothing is made for it"

    async def test_a_verifier_that_raises(self, rollouts: Any) -> None:
        class Broken:
            async def verify(self, sandbox: Any, task: Any, step: Any, left: Any) -> Any:
                raise ZeroDivisionError

        attempt = await rollouts.attempt(rollouts.task(), verifier=Broken())
        assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "internal_error")
        assert attempt.stage == Stage.VERIFY


async def test_a_sandbox_that_is_kept_is_left_running(rollouts: Any) -> None:
    spec = AttemptSpec(task=rollouts.task(), agent="oracle", **rollouts.named())
    attempt = await run_attempt(spec, rollouts.pool, TestsVerifier(), keep=True)
    assert attempt.outcome == Outcome.PASSED
    (kept,) = await rollouts.containers(spec.attempt_id)
    assert kept["Names"] == [f"/rollcage-{spec.attempt_id}-main"]
    assert kept["State"] == "running"
    await rollouts.engine.call("remove a container", lambda api: api.remove_container(kept["Id"], force=True))


async def test_what_is_shown_tells_the_way(rollouts: Any) -> None:
    task = replace(rollouts.task(), name="org/shown")
    lines: list[str] = []
    spec = AttemptSpec(task=task, agent="nop", **rollouts.named())
    await run_attempt(spec, rollouts.pool, TestsVerifier(), emit=lines.append)
    assert [line.split(" ")[0] for line in lines] == [
        "image",
        "sandbox",
        "agent",
        "nothing",
        "verifier",
        "reward",
    ]
    assert "org/shown" in lines[0]


async def test_no_value_of_the_hosts_variables_is_kept_beside_the_trajectory(
    rollouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"JUDGE_KEY": "sk-0123456789abcdef"}
    monkeypatch.setattr(rollouts.pool, "settings", replace(rollouts.pool.settings, environ=environ))
    tests = ('echo "key $KEY"; echo 1 >/logs/verifier/reward.txt', 'echo "key $KEY"')
    for test, error_class in zip(tests, (None, "reward_missing"), strict=True):
        task = rollouts.task(test=test, **{"verifier.env": 'KEY = "${JUDGE_KEY}"'})
        attempt = await rollouts.attempt(task, "nop", verifier=TestsVerifier(environ=environ))
        assert attempt.error_class == error_class
        kept = attempt.reward.output_tail if attempt.reward else attempt.evidence.log_tail
        assert kept == "key ${JUDGE_KEY}\n"
