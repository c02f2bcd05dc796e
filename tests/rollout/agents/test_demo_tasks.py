"""The demo's tasks on a real engine: the oracle passes each, doing nothing passes none."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from built_images import build_image

from rollcage.rollout.agents.base import AgentContext, load_agent
from rollcage.rollout.clock import AgentClock
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.sandbox.base import SandboxSpec
from rollcage.rollout.sandbox.container import start_sandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.task import load_task
from rollcage.rollout.trajectory import Trajectory

pytestmark = pytest.mark.docker

TASKS = sorted((Path(__file__).parents[3] / "examples" / "tasks").iterdir())
LABELS = {"rollcage.host": "test-demo-tasks"}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.mark.parametrize("path", TASKS, ids=lambda path: path.name)
@pytest.mark.parametrize(("agent", "reward"), [("oracle", b"1\n"), ("nop", b"0\n")])
async def test_the_oracle_passes_and_doing_nothing_fails(
    engine: Engine, path: Path, agent: str, reward: bytes
) -> None:
    task = load_task(path)
    assert task.environment.context is not None
    folder, image = task.environment.context, f"rollcage-test/demo:{uuid.uuid4().hex[:12]}"
    text = (folder / "Dockerfile").read_text()
    await engine.call("build", lambda api: build_image(api, image, text, context=folder, labels=LABELS))
    spec = SandboxSpec(image, f"test-demo-{uuid.uuid4().hex[:8]}", labels=LABELS, pids=64, deadline_sec=120.0)
    sandbox = await start_sandbox(engine, spec)
    try:
        context = AgentContext(
            task=task,
            step=task.steps[0],
            sandbox=sandbox,
            shell=await sandbox.shell(),
            session=None,
            sampling=Sampling(),
            trajectory=Trajectory(),
            clock=AgentClock(None),
        )
        await load_agent(agent).run(context)
        assert all(command.exit_code == 0 for turn in context.trajectory.turns for command in turn.commands)
        await sandbox.stop_processes()
        await sandbox.upload(task.steps[0].tests, "/tests")
        await sandbox.exec(["sh", "-c", "mkdir -p /logs/verifier && /tests/test.sh"])
        assert await sandbox.read("/logs/verifier/reward.txt") == reward
    finally:
        await sandbox.remove()
        await engine.call("remove an image", lambda api: api.remove_image(image, force=True, noprune=True))
