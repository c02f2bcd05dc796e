"""What is lost or called off on the way: containers killed from outside, cancellation, a teardown that fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.outcome import Outcome, SandboxError, Stage
from rollcage.rollout.rollout import AttemptSpec, run_attempt
from rollcage.rollout.sandbox import container
from rollcage.rollout.sandbox import pool as pool_module
from rollcage.rollout.task import Task
from rollcage.rollout.trajectory import Attempt
from rollcage.verifier.verify import TestsVerifier

pytestmark = [pytest.mark.docker, pytest.mark.asyncio(loop_scope="module")]

SLOW_TEST = "touch /began; sleep 60"
BOTH_WAYS = pytest.mark.parametrize("way", ["kill", "rm"])


class Running:
    """An attempt under way, and what can be done to it."""

    def __init__(self, rollouts: Any, task: Task, agent: str = "oracle") -> None:
        self.rollouts = rollouts
        self.spec = AttemptSpec(task=task, agent=agent, **rollouts.named())
        self.name = f"rollcage-{self.spec.attempt_id}-main"
        self._lines: asyncio.Queue[str] = asyncio.Queue()
        work = run_attempt(self.spec, rollouts.pool, TestsVerifier(), emit=self._lines.put_nowait)
        self.task = asyncio.create_task(work)

    async def reached(self, line: str) -> None:
        """Wait until it shows a line that starts so."""
        async with asyncio.timeout(60):
            while not (await self._lines.get()).startswith(line):
                pass

    async def in_test(self) -> None:
        """Wait until its `SLOW_TEST` runs."""

        def wait(api: Any) -> None:
            while all(change["Path"] != "/began" for change in api.diff(self.name) or ()):
                time.sleep(0.02)

        await self.reached("verifier")
        await self.rollouts.engine.call("wait for the test", wait)

    async def lose(self, way: str) -> None:
        """Have somebody else kill or remove its container."""
        if way == "kill":
            await self.rollouts.engine.call("kill", lambda api: api.kill(self.name))
        else:
            await self.rollouts.engine.call("remove", lambda api: api.remove_container(self.name, force=True))

    async def ended(self) -> Attempt:
        """How it ended; nothing of it is left."""
        attempt = await self.task
        await self.rollouts.pool.drained()
        assert await self.rollouts.left(self.spec.attempt_id) == []
        assert attempt.phases["teardown"] >= 0
        return attempt


@BOTH_WAYS
async def test_a_container_lost_while_the_agent_works(rollouts: Any, way: str) -> None:
    running = Running(rollouts, rollouts.task(), rollouts.shell_agent("echo begun", "sleep 60"))
    await running.reached("$ sleep 60")
    await running.lose(way)
    attempt = await running.ended()
    assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "container_lost")
    assert attempt.stage == Stage.AGENT
    assert attempt.reward is None
    first, second = (turn.commands[0] for turn in attempt.trajectory.turns)
    assert (first.stdout, first.exit_code, second.exit_code) == ("begun\n", 0, None)


@BOTH_WAYS
async def test_a_container_lost_while_the_verifier_works(rollouts: Any, way: str) -> None:
    running = Running(rollouts, rollouts.task(test=SLOW_TEST))
    await running.in_test()
    await running.lose(way)
    attempt = await running.ended()
    assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "container_lost")
    assert attempt.stage == Stage.VERIFY


async def test_a_container_lost_between_two_commands(rollouts: Any) -> None:
    lost = asyncio.Event()

    async def run(context: AgentContext) -> None:
        await context.shell.run("true")
        context.emit("between")
        await lost.wait()
        await context.shell.run("true")

    running = Running(rollouts, rollouts.task(), rollouts.agent(run))
    await running.reached("between")
    await running.lose("kill")
    lost.set()
    attempt = await running.ended()
    assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "container_lost")


async def test_an_agent_that_hides_the_loss_does_not_hide_it_from_the_verifier(rollouts: Any) -> None:
    async def run(context: AgentContext) -> None:
        context.emit("begun")
        with pytest.raises(SandboxError):
            await context.shell.run("sleep 60")

    running = Running(rollouts, rollouts.task(), rollouts.agent(run))
    await running.reached("begun")
    await running.lose("kill")
    attempt = await running.ended()
    assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "container_lost")
    assert attempt.stage == Stage.VERIFY


def assert_cancelled(attempt: Attempt, stage: Stage) -> None:
    assert (attempt.outcome, attempt.error_class) == (Outcome.CANCELLED, "cancelled")
    assert attempt.stage == stage
    assert attempt.reward is None


class TestCancelled:
    async def test_before_anything_was_made(self, rollouts: Any) -> None:
        running = Running(rollouts, rollouts.task())
        await asyncio.sleep(0)
        running.task.cancel()
        assert_cancelled(await running.ended(), Stage.BUILD)

    @pytest.mark.parametrize("twice", [False, True])
    async def test_while_the_container_is_made(self, rollouts: Any, twice: bool) -> None:
        """The engine has been asked and makes it all the same: it is removed nevertheless."""
        task = rollouts.task()
        await rollouts.pool.image(task.environment, task.name)
        running = Running(rollouts, task)
        await running.reached("sandbox")
        await asyncio.sleep(0.005)
        running.task.cancel()
        if twice:
            await asyncio.sleep(0)
            running.task.cancel()
        assert_cancelled(await running.ended(), Stage.START)

    async def test_while_the_image_is_built(self, rollouts: Any) -> None:
        task = rollouts.task(dockerfile=f"{rollouts.dockerfile}RUN sleep 3\n")
        running = Running(rollouts, task)
        await running.reached("image")
        await asyncio.sleep(0.3)
        running.task.cancel()
        assert_cancelled(await running.ended(), Stage.BUILD)
        assert (await rollouts.attempt(task)).outcome == Outcome.PASSED

    async def test_while_the_agent_works(self, rollouts: Any) -> None:
        running = Running(rollouts, rollouts.task(), rollouts.shell_agent("sleep 60"))
        await running.reached("$ sleep")
        running.task.cancel()
        attempt = await running.ended()
        assert_cancelled(attempt, Stage.AGENT)
        assert attempt.trajectory.turns[0].commands[0].exit_code is None

    async def test_while_the_verifier_works(self, rollouts: Any) -> None:
        running = Running(rollouts, rollouts.task(test=SLOW_TEST))
        await running.in_test()
        running.task.cancel()
        assert_cancelled(await running.ended(), Stage.VERIFY)

    async def test_twice_as_its_sandbox_is_removed(
        self, rollouts: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is known stays known, and what it holds is released."""
        removing = asyncio.Event()
        remove = container.remove_container

        async def slow(*arguments: Any) -> None:
            removing.set()
            await asyncio.sleep(0.3)
            await remove(*arguments)

        monkeypatch.setattr(container, "remove_container", slow)
        running = Running(rollouts, rollouts.task())
        await removing.wait()
        running.task.cancel()
        await asyncio.sleep(0.05)
        running.task.cancel()
        attempt = await running.ended()
        assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)

    async def test_and_the_agent_does_not_care(self, rollouts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        go_away = asyncio.Event()

        async def run(context: AgentContext) -> None:
            context.emit("begun")
            while not go_away.is_set():
                try:
                    await go_away.wait()
                except asyncio.CancelledError:
                    continue

        monkeypatch.setattr("rollcage.rollout.agents.run.AGENT_END_SEC", 0.2)
        running = Running(rollouts, rollouts.task(), rollouts.agent(run))
        await running.reached("begun")
        running.task.cancel()
        assert_cancelled(await running.ended(), Stage.AGENT)
        go_away.set()

    async def test_sixteen_at_random_moments(self, rollouts: Any) -> None:
        task = rollouts.task()
        running = [Running(rollouts, task) for _ in range(16)]
        for number, one in enumerate(running):
            asyncio.get_running_loop().call_later(0.1 * number, one.task.cancel)
        attempts = [await one.ended() for one in running]
        outcomes = {attempt.outcome for attempt in attempts}
        assert outcomes <= {Outcome.PASSED, Outcome.CANCELLED}
        assert Outcome.CANCELLED in outcomes


@pytest.mark.parametrize("error", [SandboxError("docker_timeout", "no answer"), OSError("a slip")])
async def test_a_removal_that_fails_is_tried_again_and_changes_no_outcome(
    rollouts: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(pool_module, "REMOVAL_WAITS_SEC", (0.01,))
    monkeypatch.setattr(container, "remove_container", failing(container.remove_container, error, times=1))
    attempt = await Running(rollouts, rollouts.task()).ended()
    assert (attempt.outcome, attempt.error_class) == (Outcome.PASSED, None)
    assert rollouts.pool.failed_removals == []


async def test_a_removal_that_never_works_is_said_and_left_to_the_reaper(
    rollouts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = SandboxError("docker_unavailable", "nobody there")
    monkeypatch.setattr(pool_module, "REMOVAL_WAITS_SEC", (0.01, 0.01))
    monkeypatch.setattr(container, "remove_container", failing(container.remove_container, error, times=3))
    running = Running(rollouts, rollouts.task(test="true"))
    attempt = await running.task
    assert (attempt.outcome, attempt.error_class) == (Outcome.INVALID, "reward_missing")
    await rollouts.pool.drained()
    (said,) = rollouts.pool.failed_removals
    rollouts.pool.failed_removals.clear()
    assert running.name in said
    assert "nobody there" in said
    await running.lose("rm")


async def test_what_a_pool_still_holds_goes_when_it_is_closed(rollouts: Any) -> None:
    pool = type(rollouts.pool)(
        rollouts.engine, rollouts.pool.settings, host=f"{rollouts.pool.host}-2", job="test"
    )
    environment = rollouts.task().environment
    image = await rollouts.pool.image(environment, "task")
    names = [rollouts.named()["attempt_id"] for _ in range(2)]
    first, second = [await pool.acquire(image, environment, attempt_id=name) for name in names]
    await pool.release(first)
    await pool.release(first)
    await pool.drained()
    assert [len(await rollouts.containers(name)) for name in names] == [0, 1]
    await pool.close()
    assert [len(await rollouts.containers(name)) for name in names] == [0, 0]
    await pool.release(second)


def failing(
    remove: Callable[..., Awaitable[None]], error: Exception, *, times: int
) -> Callable[..., Awaitable[None]]:
    """`remove` that fails so many times first."""
    errors = [error] * times

    async def fail(*arguments: Any) -> None:
        if errors:
            raise errors.pop()
        await remove(*arguments)

    return fail
