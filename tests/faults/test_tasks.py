"""Tasks, verifiers, agents and policies that fail: each in its own domain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import pytest_asyncio
from attempts import Site, given, site

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.outcome import TaskError
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.engine import Generation, TokenPolicy
from rollcage.rollout.policies.scripted import ByteTokenizer

pytestmark = [pytest.mark.docker, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

Record = Callable[[str, str], None]

IMAGE = "debian:bookworm-slim"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("tasks"), IMAGE) as here:
        yield here


async def test_images_that_cannot_be_built(here: Site, record: Record) -> None:
    """CASES 5 to 9: once for all samples, and no attempt is spent."""
    broken = {
        "parse": "COPY\n",
        "step": "RUN exit 7\n",
        "step_message": "RUN echo no space left on device; exit 1\n",
        "build_time": "RUN sleep 600\n",
        "unsupported": "RUN --mount=type=ssh true\n",
    }
    tasks = {key: here.task(dockerfile=here.dockerfile + lines) for key, lines in broken.items()}
    tasks["build_time"] = here.task(
        dockerfile=here.dockerfile + broken["build_time"], environment="build_timeout_sec = 1.5"
    )
    samples = [here.prepared(tasks["step"]) for _ in range(7)]
    ended = await asyncio.gather(*map(here.prepared, tasks.values()), *samples)
    for key, prepared in zip(tasks, ended, strict=False):
        record(key, given(prepared))
    assert {given(prepared) for prepared in ended[len(tasks) :]} == {"image_build"}
    assert here.pool.images.builds == 3
    assert await here.left() == []


async def test_a_task_that_cannot_be_read(here: Site, record: Record) -> None:
    """CASES 26."""
    path = here.task().path
    (path / "task.toml").write_text("[environment\n")
    with pytest.raises(TaskError) as refused:
        here.reload(path)
    record("malformed", given(refused.value))


async def test_an_environment_that_never_gets_well(here: Site, record: Record) -> None:
    check = '[environment.healthcheck]\ncommand = "false"\nretries = 1\ninterval_sec = 0.1\ntimeout_sec = 1\n'
    record("unhealthy", given(await here.attempt(here.task(environment=check))))


async def test_verifiers(here: Site, record: Record) -> None:
    """CASES 20 to 24."""
    reward = "/logs/verifier/reward.txt"
    pipe = f"(setsid sleep 600 & echo 1 >{reward}) | tee /tmp/log\n"
    short = "timeout_sec = 1.5"
    tasks = {
        "missing": here.task(test="true\n"),
        "malformed_reward": here.task(test=f"echo nan >{reward}\n"),
        "tampered": here.task(test="true\n", solution=f"mkdir -p /logs/verifier; echo 1 >{reward}\n"),
        "hangs": here.task(test="sleep 600\n", verifier=short),
        "pipe": here.task(test=pipe, verifier=short),
        "crash": here.task(test="exec /no/such/python\n"),
    }
    ended = await asyncio.gather(*map(here.attempt, tasks.values()))
    for key, attempt in zip(tasks, ended, strict=True):
        record(key, given(attempt))
    assert await here.left() == []


async def test_agents_at_their_limits(here: Site, record: Record) -> None:
    """CASES 25 and 28."""
    task = here.task()
    quick = here.task(agent="timeout_sec = 1.0")
    gone = "rm -f /bin/sh /usr/bin/sh /bin/bash /usr/bin/bash; exit 1"
    race = "(while :; do echo 1 >/logs/verifier/reward.txt; sleep 0.05; done) & sleep 600"

    def scripted(*turns: Any, **options: Any) -> dict[str, Any]:
        return {"agent": "bash", "agent_options": options, "policy": here.policy(*turns)}

    async def divide(context: AgentContext) -> None:
        await context.shell.run(f"sleep {1 / 0}")

    ways: dict[str, dict[str, Any]] = {
        "timeout": {"agent": here.shell_agent(race)},
        "turns": scripted("true", max_turns=2),
        "tokens": scripted("true", max_tokens=8),
        "form": scripted({"text": "hm"}),
        "context": scripted({"error": "context_overflow"}),
        "policy_gone": scripted({"error": "policy_unavailable"}),
        "policy_slow": scripted({"error": "policy_timeout"}),
        "policy_error": scripted({"error": "policy_error"}),
        "policy_limit": scripted({"error": "rate_limited"}),
        "no_shell": {"agent": here.shell_agent(gone, "true")},
        "bug": {"agent": here.agent(divide)},
    }
    ended = await asyncio.gather(
        *(here.attempt(quick if key == "timeout" else task, **way) for key, way in ways.items())
    )
    for key, attempt in zip(ways, ended, strict=True):
        record(key, given(attempt))
    assert await here.left() == []


class MovingEngine:
    """Answers with a command, and with newer weights at each turn."""

    tokenizer = ByteTokenizer()
    max_model_len = 8192
    version = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling, **_: Any) -> Generation:
        self.version += 1
        ids = [*b"```bash\ntrue\n```", ByteTokenizer.END]
        return Generation(ids, [0.0] * len(ids), "stop", 0.0, 0.0, version=self.version)

    async def release(self, session_id: str) -> None:
        """Nothing is kept."""


async def test_weights_that_move_on_under_a_rollout(here: Site, record: Record) -> None:
    here.policies["moving"] = TokenPolicy(MovingEngine(), name="moving", max_staleness=0)
    attempt = await here.attempt(here.task(), "bash", policy="moving")
    record("stale", given(attempt))
    assert attempt.evidence is not None
    assert "began with version 1 of policy moving, which is at version 2 now" in attempt.evidence.message
    assert attempt.trajectory is not None
    assert len(attempt.trajectory.turns) == 1
    assert await here.left() == []


async def test_a_rollout_that_is_called_off(here: Site, record: Record) -> None:
    began = asyncio.Event()

    async def run(context: AgentContext) -> None:
        began.set()
        await context.shell.run("sleep 600")

    attempt = asyncio.create_task(here.attempt(here.task(), here.agent(run)))
    await began.wait()
    await here.host.cancel()
    record("called_off", given(await attempt))
    assert await here.left() == []
