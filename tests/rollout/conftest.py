"""Tasks of a few lines, and attempts at them on a real engine, without Ray."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import pytest_asyncio
import yaml
from built_images import build_image

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.commands import add_turn, run_command
from rollcage.rollout.outcome import BY_NAME, Outcome
from rollcage.rollout.policies.base import Policy
from rollcage.rollout.policies.scripted import ScriptedPolicy
from rollcage.rollout.rollout import AttemptSpec, run_attempt
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.pool import SandboxPool, SandboxSettings
from rollcage.rollout.sandbox.reaper import reap
from rollcage.rollout.task import Task, load_task
from rollcage.rollout.trajectory import Attempt
from rollcage.verifier.verify import TestsVerifier

sys.path.insert(0, str(Path(__file__).parent))  # tests are no packages; `feed_runs` is this folder's alone

TEST = """\
if [ "$(cat /app/answer 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
"""
SOLUTION = "echo 42 >/app/answer\n"
AGENTS = "rollcage_test_agents"
TOOLS = (
    "FROM debian:bookworm-slim\n"
    "RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends vim less procps python3-minimal\n"
    "RUN useradd -m -s /bin/bash alice\n"
)


class Rollouts:
    """Writes tasks below `folder` and runs attempts at them on one pool. All tasks have one image unless they say
    otherwise: Debian with an empty `/app` for workdir."""

    def __init__(self, pool: SandboxPool, folder: Path) -> None:
        self.pool = pool
        self.engine = pool.engine
        self.dockerfile = f"FROM debian:bookworm-slim\nLABEL rollcage.test={pool.host}\nWORKDIR /app\n"
        self._folder = folder
        self._agents = sys.modules.setdefault(AGENTS, ModuleType(AGENTS))

    def task(
        self,
        *,
        test: str | None = TEST,
        solution: str | None = SOLUTION,
        dockerfile: str | None = None,
        files: Mapping[str, str] | None = None,
        root: str = "",
        **tables: str,
    ) -> Task:
        """A task. `test` and `solution` are sh scripts; `tables` are the bodies of task.toml's tables, `root` what
        stands before and `files` more files, by path."""
        path = self._folder / uuid.uuid4().hex[:12]
        tables["environment"] = 'network_mode = "no-network"\n' + tables.get("environment", "")
        toml = root + "".join(f"\n[{name}]\n{body}\n" for name, body in tables.items())
        contents = {
            "task.toml": toml,
            "environment/Dockerfile": dockerfile or self.dockerfile,
            **(files or {}),
        }
        contents.setdefault("instruction.md", "Write 42 to /app/answer.\n")
        if test is not None:
            contents["tests/test.sh"] = "#!/bin/sh\n" + test
        if solution is not None:
            contents["solution/solve.sh"] = "#!/bin/sh\n" + solution
        for name, content in contents.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(content, encoding="utf-8")
            (path / name).chmod(0o755)
        return load_task(path)

    def agent(self, run: Callable[[AgentContext], Awaitable[None]]) -> str:
        """The name of an agent that does `run`."""
        name = f"Agent{uuid.uuid4().hex}"
        setattr(self._agents, name, type(name, (), {"needs_policy": False, "run": staticmethod(run)}))
        return f"{AGENTS}:{name}"

    def shell_agent(self, *commands: str) -> str:
        """The name of an agent that runs these commands in its shell, whatever they return."""

        async def run(context: AgentContext) -> None:
            for command in commands:
                await run_command(context, add_turn(context.trajectory), command, timeout=60)

        return self.agent(run)

    def policy(self, *turns: Any) -> Policy:
        """A policy that gives these answers: a text is a command, a mapping a turn of a script as it stands."""
        script = self._folder / f"{uuid.uuid4().hex}.yaml"
        answers = [f"```bash\n{turn}\n```" if isinstance(turn, str) else turn for turn in turns]
        script.write_text(yaml.safe_dump({"default": answers, "tokens": True}), encoding="utf-8")
        return ScriptedPolicy(script)

    async def attempt(self, task: Task, agent: str = "oracle", **settings: Any) -> Attempt:
        """One attempt. Nothing of it may be left on the engine, and what it says must fit together."""
        policy = settings.pop("policy", None)
        verifier = settings.pop("verifier", TestsVerifier())
        spec = AttemptSpec(**{**self.named(), "task": task, "agent": agent, **settings})
        attempt = await run_attempt(spec, self.pool, verifier, policy)
        await self.pool.drained()
        assert await self.left(spec.attempt_id) == []
        check(attempt)
        return attempt

    async def attempts(self, *work: Awaitable[Attempt], at_once: int = 4) -> list[Attempt]:
        """Several attempts, few at once, in their order."""
        slots = asyncio.Semaphore(at_once)

        async def one(attempt: Awaitable[Attempt]) -> Attempt:
            async with slots:
                return await attempt

        return await asyncio.gather(*map(one, work))

    def named(self) -> dict[str, Any]:
        """Names for a spec."""
        return {"attempt_id": uuid.uuid4().hex[:12], "job": "test", "sample": 0, "number": 1}

    async def left(self, attempt_id: str) -> list[str]:
        """Names of containers that an attempt still has."""
        found = await self.containers(attempt_id)
        return [name for container in found for name in container["Names"]]

    async def containers(self, attempt_id: str) -> Sequence[Mapping[str, Any]]:
        """The attempt's containers, as the engine lists them."""
        label = f"rollcage.rollout={attempt_id}"
        found: Sequence[Mapping[str, Any]] = await self.engine.call(
            "list containers", lambda api: api.containers(all=True, filters={"label": label})
        )
        return found


def check(attempt: Attempt) -> None:
    """What is true of every attempt that has ended."""
    assert attempt.reward_valid == (attempt.reward is not None)
    assert sum(attempt.phases.values()) <= attempt.ended_at - attempt.started_at + 0.05
    assert attempt.phases["teardown"] >= 0
    if attempt.error_class is None:
        assert attempt.reward_valid
        assert attempt.stage is None
        return
    row = BY_NAME[attempt.error_class]
    assert attempt.reward_valid == row.reward_valid
    assert attempt.stage in row.stages
    assert attempt.evidence is not None
    assert attempt.evidence.message
    assert (attempt.outcome == Outcome.CANCELLED) == (row.name == "cancelled")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rollouts(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rollouts]:
    """One engine and one pool for the tests of a module, and nothing of theirs left behind it."""
    engine = Engine()
    host = f"test-rollout-{uuid.uuid4().hex[:8]}"
    pool = SandboxPool(engine, SandboxSettings(pids=64), host=host, job="test")
    yield Rollouts(pool, tmp_path_factory.mktemp("rollouts"))
    await pool.drained()
    mine = {"label": f"rollcage.host={host}"}
    containers = engine.api.containers(all=True, filters=mine)
    volumes = engine.api.volumes(filters=mine)["Volumes"]
    # Not by what `close` says: it counts what strangers left past its deadline, too.
    await pool.close()
    await reap(engine, host=host, job=None, now=0, images=True)
    engine.close()
    assert (containers, volumes or []) == ([], [])  # private networks are kept for the next task


@pytest.fixture(scope="session")
def tools_image() -> str:
    """An image with programs that take the whole screen. It is kept: making it takes half a minute."""
    engine = Engine()
    tag = f"rollcage-test/terminal:{hashlib.sha256(TOOLS.encode()).hexdigest()[:12]}"
    if not engine.api.images(tag):
        build_image(engine.api, tag, TOOLS)
    engine.close()
    return tag
