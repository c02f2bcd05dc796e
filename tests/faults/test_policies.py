"""Model servers that fail under whole attempts: the class, what becomes of the reward, and that nothing is left.

Where the wire is enough, a server on this machine speaks it; the rest is vLLM's own server, and a replica in Ray.
"""

from __future__ import annotations

import asyncio
import io
import signal
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from attempts import OneHost, Site, given, nothing_of, site, until
from model_servers import CONTEXT, vllm_server, wire
from rich.console import Console
from tiny_models import tiny_model
from vllm_processes import all_engines, engines

from rollcage.cluster.actors import connected
from rollcage.cluster.config_policies import VllmPolicyConfig
from rollcage.cluster.decisions import TaskKey
from rollcage.cluster.driver import Driver
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import AgentPlan, JobPlan
from rollcage.cluster.policies import ServedPolicy
from rollcage.cluster.progress import JobProgress
from rollcage.cluster.replica_protocol import ReplicaInfo
from rollcage.cluster.replicas import Replicas
from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.conversation import Conversation, Limits
from rollcage.rollout.arrow import read_attempts, read_rollouts
from rollcage.rollout.outcome import BY_NAME, Domain, Outcome
from rollcage.rollout.policies.anthropic import AnthropicPolicy
from rollcage.rollout.policies.anthropic_client import Endpoint
from rollcage.rollout.policies.base import Policy, Sampling
from rollcage.rollout.policies.engine import TokenPolicy
from rollcage.rollout.policies.openai import openai_policy
from rollcage.rollout.policies.openai_chat import ChatPolicy
from rollcage.rollout.policies.openai_probe import Offer
from rollcage.rollout.policies.openai_wire import Server, ServerSettings
from rollcage.rollout.sandbox.pool import SandboxSettings
from rollcage.rollout.trajectory import Attempt, Message

pytestmark = [pytest.mark.docker, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

Record = Callable[[str, str], None]

IMAGE = "debian:bookworm-slim"
ENDLESS = Sampling(max_tokens=1900, extra={"ignore_eos": True})
LONG = Sampling(max_tokens=300, extra={"ignore_eos": True})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    async with site(tmp_path_factory.mktemp("policies"), IMAGE) as here:
        yield here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wide enough that an endless answer takes many seconds, however slowly the test looks."""
    return tiny_model(tmp_path_factory.mktemp("tiny"), hidden=512)


def openai(base_url: str, **settings: Any) -> Policy:
    given = {"base_url": f"{base_url}/v1", "model": "tiny", "tokens": "auto", "retry_sec": 0.3, **settings}
    given.setdefault("headers", {"X-Session-ID": "{session}"})
    return ChatPolicy(Server(ServerSettings(**given)), Offer())


def anthropic(base_url: str, **settings: Any) -> AnthropicPolicy:
    return AnthropicPolicy(Endpoint("tiny", base_url=base_url, **{"retry_sec": 0.3, **settings}))


async def ended_by(
    here: Site, policies: dict[str, Policy], *, first_turn: bool = True, **spec: Any
) -> dict[str, Attempt]:
    """One attempt of the bash agent with each policy, all at once; those that are no reward's are looked at. The fault
    comes upon the `first_turn`, or upon whichever they are at."""
    here.policies.update(policies)
    task = spec.pop("task", None) or here.task()
    given = {"agent": "bash", "sampling": ENDLESS, **spec}
    ended = await asyncio.gather(*(here.attempt(task, policy=name, **given) for name in policies))
    for attempt in ended:
        check(attempt, first_turn=first_turn)
    return dict(zip(policies, ended, strict=True))


def check(attempt: Attempt, *, first_turn: bool = True) -> None:
    """What the class says of reward and retry holds, and of the turn that the fault came upon there is no answer."""
    if attempt.error_class is None:
        assert attempt.reward_valid
        return
    row = BY_NAME[attempt.error_class]
    assert attempt.reward_valid == row.reward_valid == (row.domain is Domain.AGENT)
    assert (attempt.reward is None) == (row.domain is Domain.INFRA)
    assert (row.retries > 0) == (row.domain is Domain.INFRA and row.name != "policy_refused")
    assert attempt.stage == "agent"
    assert attempt.evidence is not None
    assert attempt.evidence.message
    assert attempt.trajectory is not None
    assert not first_turn or attempt.trajectory.segments == []


async def test_servers_of_either_api_that_fail(here: Site, record: Record) -> None:
    """CASES 28 and 29. What is the infrastructure's is not the agent's, and a storm takes none of its time."""
    async with wire() as server:
        at = server.url
        late = {"request_timeout_sec": 0.5}
        policies: dict[str, Policy] = {
            "openai_storm": openai(f"{at}/storm"),
            "openai_storm_wait": openai(f"{at}/wait"),
            "openai_storm_passes": openai(f"{at}/passes", retry_sec=30.0),
            "openai_500": openai(f"{at}/500"),
            "openai_dead": openai(f"{at}/dead"),
            "openai_503": openai(f"{at}/503"),
            "openai_504": openai(f"{at}/504"),
            "openai_reset": openai(f"{at}/reset"),
            "openai_endless": openai(f"{at}/endless", **late),
            "openai_refused": openai(f"{at}/refused"),
            "openai_long": openai(f"{at}/long"),
            "anthropic_storm": anthropic(f"{at}/storm"),
            "anthropic_overloaded": anthropic(f"{at}/overloaded"),
            "anthropic_500": anthropic(f"{at}/500"),
            "anthropic_dead": anthropic(f"{at}/dead"),
            "anthropic_reset": anthropic(f"{at}/reset"),
            "anthropic_endless": anthropic(f"{at}/endless", **late),
            "anthropic_long": anthropic(f"{at}/too_long"),
        }
        ended = await ended_by(here, policies)
        for key, attempt in ended.items():
            record(key, given(attempt))
        asked_to_wait = ended["openai_storm_wait"].retry_after_sec
        assert asked_to_wait is not None
        assert 100 < asked_to_wait <= 120
        assert server.asked["wait"] == 1, "a wait that is longer than a turn's own time is not begun"
        passed = ended["openai_storm_passes"]
        assert server.asked["passes"] == 4
        assert passed.infra_seconds >= passed.trajectory.turns[0].queue_seconds > 0  # type: ignore[union-attr]
        await until(lambda: _is(server.open == 0))
    assert await here.left() == []


async def test_a_rollout_that_a_server_failed_is_run_again(record: Record, tmp_path: Path) -> None:
    here = Site(SandboxSettings(pids=64, insecure_network=True, least_disk_mb=0), tmp_path, IMAGE)
    task = here.task()
    key = TaskKey(task.name, task.digest)
    async with wire() as server:
        here.policies["p"] = openai(f"{server.url}/one_fails")
        agents = (AgentPlan("bash", "bash", samples=3, policy="p"),)
        plan = JobPlan("test-faults", agents, {key: task}, concurrency=3)
        ledger = Ledger.create(tmp_path / "run", {"job": plan.job})
        progress = JobProgress(3, Console(file=io.StringIO()))
        await here.host.open()
        await Driver(plan, ledger, OneHost(here.host), progress).run()
        await ledger.finish({})
    rollouts = read_rollouts(tmp_path / "run").to_pylist()
    attempts = read_attempts(tmp_path / "run").to_pylist()
    assert sorted(row["attempts"] for row in rollouts) == [1, 1, 2], "only the one that failed"
    assert [row["error_class"] for row in attempts if row["error_class"]] == ["policy_error"]
    record("retried", "; ".join({row["outcome"] for row in rollouts}))
    await nothing_of(here.host.name, None)


@pytest.mark.vllm
async def test_vllms_own_server(here: Site, model: Path, record: Record) -> None:
    """CASES 28 and 29: by messages, by ids and by the Messages API. The port of a dead engine still answers."""
    with vllm_server(model) as server:
        await server.started()
        at = server.url

        async def policies(**settings: Any) -> dict[str, Policy]:
            ids = ServerSettings(f"{at}/v1", "tiny", tokenizer=str(model), **{"retry_sec": 0.3, **settings})
            messages = {name: value for name, value in settings.items() if name != "pulse_sec"}
            return {
                "by messages": openai(at, **settings),
                "by ids": await openai_policy(ids),
                "messages api": anthropic(at, **messages),
            }

        def classes(ended: dict[str, Attempt]) -> str:
            return "; ".join(sorted({given(attempt) for attempt in ended.values()}))

        long = here.task()
        (long.path / "instruction.md").write_text("word " * (2 * CONTEXT))
        ended = await ended_by(here, await policies(), task=here.reload(long.path))
        record("vllm_long", classes(ended))

        ended = await ended_by(here, await policies(request_timeout_sec=0.5))
        record("vllm_endless", classes(ended))
        await until(server.running_none)

        stopped = await policies(pulse_sec=0.3, request_timeout_sec=8.0)
        under_way = asyncio.create_task(ended_by(here, stopped, first_turn=False))
        await until(server.running_some)
        server.signal(signal.SIGSTOP)
        ended = await under_way
        server.signal(signal.SIGCONT)
        record("vllm_stopped_messages", given(ended.pop("messages api")))
        record("vllm_stopped", classes(ended))
        await until(server.running_none)

        again = await policies()
        under_way = asyncio.create_task(ended_by(here, again, first_turn=False))
        await until(server.running_some)
        server.engine().kill()
        ended = await under_way
        record("vllm_engine", classes(ended))
        assert all("/health says 503" in attempt.evidence.message for attempt in ended.values())  # type: ignore[union-attr]
        assert server.process.poll() is None, "it still answers"

        server.signal(signal.SIGKILL)
        record("vllm_gone", classes(await ended_by(here, again)))
    assert await here.left() == []


@pytest.fixture
def ray() -> Iterator[None]:
    with connected(num_cpus=1):
        yield


@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.usefixtures("ray")
async def test_a_replica_whose_engine_is_killed(here: Site, record: Record, tmp_path: Path) -> None:
    """CASES 28, 29 and 30: the rollout goes on with the ids as they were sampled, where there is time for that. What a
    random model says is not what its text would be tokenized to."""
    model = tiny_model(tmp_path / "tiny")  # a fast one: the engine is stopped before it is asked
    config = VllmPolicyConfig(
        kind="vllm", model=str(model), engine_args={"max_model_len": 4096, "max_num_seqs": 8}
    )
    served = ServedPolicy("replicas", config, str(model))
    others = set(engines())  # of other tests in this process
    await served.start()
    try:
        engine = served.policy._engine
        info = ReplicaInfo(engine.tokenizer, engine.max_model_len)
        hasty = TokenPolicy(Replicas(served._router, info, retry_sec=0.2), name="hasty")
        here.policies.update(patient=served.policy, hasty=hasty)

        arrived, gate = [], asyncio.Event()

        async def twice(context: AgentContext) -> None:
            talk = Conversation(context, Limits())
            if not context.sample:
                arrived.append(context)
                await gate.wait()
            await talk.ask([Message("user", "Count.")])
            await talk.ask([Message("user", "word " * 10_000 if context.sample else "Go on.")])
            await context.shell.run("echo 42 >/app/answer")

        agent, task = here.agent(twice, needs_policy=True), here.task(agent="timeout_sec = 600.0")
        short = Sampling(max_tokens=8)
        overflown = await here.attempt(task, agent, policy="patient", sample=1, sampling=short)
        record("replica_long", given(overflown))
        assert overflown.outcome is Outcome.FAILED, "graded: it left no answer"

        attempts = {
            name: asyncio.create_task(here.attempt(task, agent, policy=name, sampling=LONG))
            for name in ("patient", "hasty")
        }
        await until(lambda: _is(len(arrived) == 2))
        [killed] = await asyncio.to_thread(all_engines, 1, but=others)
        before = served.status()[0]
        if before["restarts"]:
            warnings.warn(f"the engine has ended by itself before: {before}", stacklevel=1)
        assert killed.nice() == psutil.Process().nice(), "a busy sandbox must not take its processor"
        killed.suspend()  # it is at their first turns when it dies, however fast it is
        gate.set()
        await until(lambda: _is(served.status()[0]["running"] == 2))
        killed.kill()
        passed, lost = await asyncio.gather(*attempts.values())
        record("replica_killed", given(passed))
        record("replica_killed_late", given(lost))
        check(lost)
        assert served.status()[0]["restarts"] == before["restarts"] + 1, served.status()
        trajectory = passed.trajectory
        assert trajectory is not None
        [segment], (first, second) = trajectory.segments, trajectory.turns
        sampled = [number for number, ours in zip(segment.ids, segment.loss_mask, strict=True) if ours]
        assert len(sampled) == first.completion_len + second.completion_len
        assert segment.loss_mask[first.prompt_len : first.prompt_len + first.completion_len] == (
            [1] * first.completion_len
        )
        text = engine.tokenizer.decode(sampled, skip_special_tokens=False)
        assert engine.tokenizer.encode(text, add_special_tokens=False) != sampled
        assert passed.infra_seconds > first.queue_seconds - 1 > 0
    finally:
        await served.close()
    await until(lambda: _is(not set(engines()) - others))
    assert await here.left() == []


async def _is(true: bool) -> bool:
    return true
