"""Attempts on one host on one engine, in this process: small tasks, small agents, and how they end."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from rollcage.cluster.host import HostSpec, Prepared, SandboxHost
from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.commands import add_turn, run_command
from rollcage.rollout.outcome import RolloutError
from rollcage.rollout.policies.base import Policy
from rollcage.rollout.policies.scripted import ScriptedPolicy
from rollcage.rollout.rollout import AttemptSpec
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.pool import SandboxSettings
from rollcage.rollout.sandbox.reaper import reap
from rollcage.rollout.task import Task, load_task
from rollcage.rollout.trajectory import Attempt

TEST = """\
if [ "$(cat /app/answer 2>/dev/null)" = 42 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt
"""
SOLUTION = "echo 42 >/app/answer\n"
AGENTS = "rollcage_fault_agents"


class Site:
    """Tasks below `folder`, and attempts at them on one host. All tasks have one image unless they say otherwise:
    `base` with an empty `/app` for workdir. `emitted` is called with each line that an attempt shows."""

    def __init__(self, settings: SandboxSettings, folder: Path, base: str) -> None:
        self.policies: dict[str, Policy] = {}
        self.emitted: Callable[[str], None] = lambda _line: None
        spec = HostSpec("test-faults", settings, policies=self.policies)
        self.host = SandboxHost(spec, emit=lambda line: self.emitted(line))
        self.host.name = f"test-{self.host.name}"
        self.dockerfile = f"FROM {base}\nLABEL rollcage.test={self.host.name}\nWORKDIR /app\n"
        self._folder = folder
        self._agents = sys.modules.setdefault(AGENTS, ModuleType(AGENTS))

    @property
    def engine(self) -> Engine:
        return self.host._engine

    @property
    def pool(self) -> Any:
        return self.host._pool

    def task(
        self,
        *,
        test: str = TEST,
        solution: str = SOLUTION,
        dockerfile: str | None = None,
        context: Mapping[str, bytes] | None = None,
        network: str = "no-network",
        **tables: str,
    ) -> Task:
        """A task. `test` and `solution` are sh scripts; `tables` are the bodies of task.toml's tables, and
        `context` are files beside the Dockerfile."""
        path = self._folder / uuid.uuid4().hex[:12]
        tables["environment"] = f'network_mode = "{network}"\n' + tables.get("environment", "")
        contents = {
            "task.toml": "".join(f"\n[{name}]\n{body}\n" for name, body in tables.items()),
            "instruction.md": "Write 42 to /app/answer.\n",
            "environment/Dockerfile": dockerfile or self.dockerfile,
            "tests/test.sh": "#!/bin/sh\n" + test,
            "solution/solve.sh": "#!/bin/sh\n" + solution,
        }
        for name, content in contents.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_text(content, encoding="utf-8")
            (path / name).chmod(0o755)
        for name, data in (context or {}).items():
            (path / "environment" / name).write_bytes(data)
        return load_task(path)

    def reload(self, path: Path) -> Task:
        return load_task(path)

    def agent(self, run: Callable[[AgentContext], Awaitable[None]], *, needs_policy: bool = False) -> str:
        """The name of an agent that does `run`."""
        name = f"Agent{uuid.uuid4().hex}"
        setattr(self._agents, name, type(name, (), {"needs_policy": needs_policy, "run": staticmethod(run)}))
        return f"{AGENTS}:{name}"

    def shell_agent(self, *commands: str, timeout: float = 60.0) -> str:
        """The name of an agent that runs these commands in its shell, whatever they return."""

        async def run(context: AgentContext) -> None:
            for command in commands:
                await run_command(context, add_turn(context.trajectory), command, timeout=timeout)

        return self.agent(run)

    def policy(self, *turns: Any) -> str:
        """The name of a policy that gives these answers: a text is a command, a mapping a turn as it stands."""
        name = uuid.uuid4().hex
        script = self._folder / f"{name}.yaml"
        answers = [f"```bash\n{turn}\n```" if isinstance(turn, str) else turn for turn in turns]
        script.write_text(yaml.safe_dump({"default": answers, "tokens": True}), encoding="utf-8")
        self.policies[name] = ScriptedPolicy(script)
        return name

    def spec(self, task: Task, agent: str = "oracle", **settings: Any) -> AttemptSpec:
        return AttemptSpec(
            **{
                "attempt_id": uuid.uuid4().hex[:12],
                "job": "test-faults",
                "task": task,
                "sample": 0,
                "number": 1,
                "agent": agent,
                **settings,
            }
        )

    async def attempt(self, task: Task, agent: str = "oracle", **settings: Any) -> Attempt:
        """One attempt: images first, as the driver does."""
        policy = settings.pop("policy", None)
        prepared = await self.host.prepare(task)
        assert prepared.error_class is None, prepared
        return await self.host.run(self.spec(task, agent, **settings), policy)

    async def prepared(self, task: Task) -> Prepared:
        """What came of making the task's image: a build that fails spends no attempt."""
        return await self.host.prepare(task)

    async def left(self) -> list[str]:
        """What this host has on the engine but for named images and networks that it keeps for use: nothing is
        left of an attempt when its removal, which is on nobody's way, is done."""
        await self.pool.drained()
        label = {"label": f"rollcage.host={self.host.name}"}
        containers = await self.engine.call("list", lambda api: api.containers(all=True, filters=label))
        volumes = await self.engine.call("list", lambda api: api.volumes(filters=label))
        found = [name for one in containers for name in one["Names"]]
        return found + [one["Name"] for one in volumes.get("Volumes") or []]


class OneHost:
    """The driver's `Hosts`: one, in this process."""

    def __init__(self, host: SandboxHost) -> None:
        self.host = host

    async def start(self) -> list[Any]:
        return [self.host]

    async def replace(self, lost: Any) -> None:
        return None


def given(ended: Attempt | Prepared | RolloutError) -> str:
    """The error class, or how it ended without one."""
    if isinstance(ended, Attempt):
        return ended.error_class or ended.outcome.value
    return ended.error_class or "prepared"


async def until(condition: Callable[[], Awaitable[Any]], limit_sec: float = 60.0) -> Any:
    """What `condition` gives as soon as it is true of it; for what nobody tells of."""
    async with asyncio.timeout(limit_sec):
        while True:
            if found := await condition():
                return found
            await asyncio.sleep(0.05)


@asynccontextmanager
async def site(folder: Path, base: str, **settings: Any) -> AsyncIterator[Site]:
    """A host on an engine. When it is closed nothing of its is left there."""
    asked = SandboxSettings(**{"pids": 64, "insecure_network": True, "least_disk_mb": 0, **settings})
    here = Site(asked, folder, base)
    await here.host.open()
    try:
        yield here
    finally:
        await here.host.close()
        await nothing_of(here.host.name, asked.docker_host)


async def nothing_of(host: str, docker_host: str | None) -> None:
    """Of this host nothing is on the engine: not even what only a label tells. Its images go now."""
    engine = Engine(docker_host)
    try:
        label = {"label": f"rollcage.host={host}"}
        found = [*engine.api.containers(all=True, filters=label), *engine.api.networks(filters=label)]
        found += engine.api.volumes(filters=label).get("Volumes") or []
        assert found == []
        assert engine.api.images(filters={"label": f"rollcage.build={host}", "dangling": True}) == []
        await reap(engine, host=host, job=None, now=0, images=True)
    finally:
        engine.close()
