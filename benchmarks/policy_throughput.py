"""Tokens a second through rollouts, against vLLM alone; and what several replicas cost the prefix cache.

Rollcage's side is whole rollouts of a job: the driver, a host's actor, Docker sandboxes, an agent that runs a trivial
command after each answer, the verifier, the ledger, and a replica of vLLM in Ray. The other side is vLLM's `AsyncLLM`
in a bare process, with the same arguments and threads, fed the very prompts of those rollouts, turn after turn, with
the same seeds, lengths and concurrency. The length of each answer is drawn from a seed, between half of `--tokens` and
one and a half (`trivial_agent.py`). Runs of both are interleaved; medians are compared.

Then new replicas: the same rollouts over one and over two, and what part of their prompts was in a prefix cache.

    python benchmarks/policy_throughput.py [--rollouts 24] [--concurrency 8] [--turns 5] [--tokens 48] [--repeats 3]
    python benchmarks/policy_throughput.py --waiting 2000       memory and threads of sessions that wait
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle_task import FILES, write_task
from rich.console import Console
from trivial_agent import TrivialAgent
from waiting_sessions import waiting

from rollcage.cluster.actors import RayHosts, connected
from rollcage.cluster.config_policies import VllmPolicyConfig
from rollcage.cluster.decisions import Assignment, RolloutKey, TaskKey
from rollcage.cluster.driver import Driver
from rollcage.cluster.host import HostSpec
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import AgentPlan, JobPlan
from rollcage.cluster.policies import ServedPolicy
from rollcage.cluster.progress import JobProgress
from rollcage.rollout.feed import read_attempts, read_rollouts
from rollcage.rollout.policies import smollm2
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.vllm import CPU_ARGUMENTS, CPU_ENVIRONMENT, QUIET_ENVIRONMENT, cpu_threads
from rollcage.rollout.task import load_task

ENGINE_ARGS = {"max_model_len": 2048, "max_num_seqs": 32, "block_size": 32}
"""A CPU's own block, 128 tokens, is longer than what a turn adds."""

PARTS = ("start", "generate", "queue", "command", "rest of agent", "verify")


@dataclass(frozen=True)
class Run:
    """What one side did. `tokens` were sampled within `seconds`; `engine_seconds` are those of all requests together,
    `parts` where the seconds of a rollout went, `conversations` its prompts by rollout."""

    seconds: float
    tokens: int
    prompt: int
    cached: int
    engine_seconds: float
    parts: dict[str, float]
    conversations: list[list[dict[str, Any]]]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def hits(self) -> float:
        return self.cached / self.prompt

    @property
    def in_engine(self) -> float:
        """Requests in the engine, on average."""
        return self.engine_seconds / self.seconds


class Rollouts:
    """Jobs of one task, whose policy is `served`."""

    def __init__(self, scratch: Path, options: argparse.Namespace) -> None:
        settings = FILES["task.toml"].replace("timeout_sec = 60.0", "timeout_sec = 3600.0")
        task = write_task(scratch / f"task-{uuid.uuid4().hex[:8]}", files={"task.toml": settings})
        self.task = load_task(task)
        self.runs = scratch
        self.options = options

    async def run(self, served: ServedPolicy, *, seed: int) -> Run:
        """One job: its rollouts' samples draw with seeds of this `seed`."""
        options, key = self.options, TaskKey(self.task.name, self.task.digest)
        sampling = Sampling(max_tokens=options.tokens * 3 // 2, extra={"ignore_eos": True})
        agent = AgentPlan(
            "trivial",
            f"{TrivialAgent.__module__}:{TrivialAgent.__name__}",
            samples=options.rollouts,
            options={"max_turns": options.turns},
            policy="p",
            sampling=sampling,
        )
        job, tasks = f"bench-{uuid.uuid4().hex[:8]}", {key: self.task}
        plan = JobPlan(job, (agent,), tasks, concurrency=options.concurrency, warm=2, seed=seed)
        run = self.runs / job
        ledger = Ledger.create(run, {"job": job})
        hosts = RayHosts(HostSpec(job, policies={"p": served.policy}))
        with JobProgress(options.rollouts, Console(stderr=True, quiet=True)) as progress:
            await Driver(plan, ledger, hosts, progress).run()
        await ledger.finish({})
        return _what_was_done(run, plan)


def _what_was_done(run: Path, plan: JobPlan) -> Run:
    attempts = read_attempts(run).to_pylist()
    rollouts = sorted(read_rollouts(run).to_pylist(), key=lambda row: row["sample"])
    if bad := [row for row in attempts if (row["outcome"], row["error_class"]) != ("passed", "turn_limit")]:
        raise SystemExit(f"{len(bad)} of {len(attempts)} attempts went wrong: {bad[0]['evidence']}")
    turns = [turn for row in rollouts for turn in row["turns"]]
    began, ended = (
        min(row["started_at"] for row in attempts),
        max(row["ended_at"] for row in attempts),
    )
    spent = dict.fromkeys(PARTS, 0.0)
    for row in rollouts:
        spent["start"] += (row["phases"]["image"] or 0.0) + row["phases"]["start"]
        spent["verify"] += row["phases"]["verify"] + row["phases"]["teardown"]
        spent["rest of agent"] += row["phases"]["agent"]
    spent["generate"] = sum(turn["generate_seconds"] for turn in turns)
    spent["queue"] = sum(turn["queue_seconds"] for turn in turns)
    spent["command"] = sum(command["seconds"] for turn in turns for command in turn["commands"])
    spent["rest of agent"] -= spent["generate"] + spent["queue"] + spent["command"]
    return Run(
        (ended - began).total_seconds(),
        sum(turn["completion_tokens"] for turn in turns),
        sum(turn["prompt_tokens"] for turn in turns),
        sum(turn["cached_tokens"] for turn in turns),
        spent["generate"] + spent["queue"],
        {part: seconds / len(rollouts) for part, seconds in spent.items()},
        [_conversation(row, plan) for row in rollouts],
    )


def _conversation(row: dict[str, Any], plan: JobPlan) -> list[dict[str, Any]]:
    """The exact prompts of a rollout, what was answered, and the seed of each turn (`TokenSession.complete`)."""
    key = RolloutKey(plan.job, row["agent"], row["task"], row["task_digest"], row["sample"], row["draw"])
    seed = plan.attempt(Assignment(key, 1, "", row["attempt_id"])).sampling.seed
    assert seed is not None
    asked = []
    for number, turn in enumerate(row["turns"], start=1):
        ids, start = row["segments"][turn["segment"]]["ids"], turn["prompt_len"]
        answer = ids[start : start + turn["completion_len"]]
        asked.append({"prompt": ids[:start], "answer": answer, "tokens": len(answer), "seed": seed + number})
    return asked


class Bare:
    """`bare_vllm.py`, started."""

    def __init__(self, process: asyncio.subprocess.Process, scratch: Path) -> None:
        self._process = process
        self._scratch = scratch

    async def run(self, conversations: list[list[dict[str, Any]]], concurrency: int) -> dict[str, float]:
        """What it made of these conversations."""
        file = self._scratch / "conversations.json"
        file.write_text(json.dumps(conversations))
        assert self._process.stdin is not None
        self._process.stdin.write((json.dumps([str(file), concurrency]) + "\n").encode())
        await self._process.stdin.drain()
        made: dict[str, float] = json.loads(await self.line())
        return made

    async def line(self) -> str:
        assert self._process.stdout is not None
        if not (line := await self._process.stdout.readline()):
            raise SystemExit("the bare vLLM ended")
        return line.decode()


@asynccontextmanager
async def bare(model: str, scratch: Path) -> AsyncIterator[Bare]:
    """A bare vLLM with the arguments and the threads that a replica has."""
    script = Path(__file__).with_name("bare_vllm.py")
    args = json.dumps({**CPU_ARGUMENTS, **ENGINE_ARGS})
    threads = {"OMP_NUM_THREADS": str(cpu_threads())}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(script), model, args),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **threads, **CPU_ENVIRONMENT, **QUIET_ENVIRONMENT},
    )
    try:
        there = Bare(process, scratch)
        await there.line()
        yield there
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


@asynccontextmanager
async def served(model: str, replicas: int) -> AsyncIterator[ServedPolicy]:
    config = VllmPolicyConfig(kind="vllm", model=model, replicas=replicas, engine_args=dict(ENGINE_ARGS))
    policy = ServedPolicy("p", config, model)
    await policy.start()
    try:
        yield policy
    finally:
        await policy.close()


async def throughput(model: str, scratch: Path, options: argparse.Namespace) -> Run:
    """Print both sides. Returns the rollouts of the cold replica, for `routing`."""
    rollouts = Rollouts(scratch, options)
    print("tokens/s: repeat  rollcage    bare  ratio   prefix hits  requests in the engine  same answers")
    ours: list[Run] = []
    theirs: list[float] = []
    async with served(model, 1) as policy, bare(model, scratch) as alone:
        cold = await rollouts.run(policy, seed=0)
        await alone.run(cold.conversations, options.concurrency)
        for repeat in range(1, options.repeats + 1):
            mine = await rollouts.run(policy, seed=repeat)
            other = await alone.run(mine.conversations, options.concurrency)
            if other["tokens"] != mine.tokens:
                raise SystemExit(f"{mine.tokens} tokens on one side, {other['tokens']:.0f} on the other")
            rate, bare_rate = mine.rate, other["tokens"] / other["seconds"]
            ours.append(mine)
            theirs.append(bare_rate)
            print(
                f"          {repeat:6d}  {rate:8.1f}  {bare_rate:6.1f}  {rate / bare_rate:5.2f}   "
                f"{mine.hits:.3f} {other['cached'] / other['prompt']:.3f}  "
                f"{mine.in_engine:10.2f} {other['request_seconds'] / other['seconds']:10.2f}  "
                f"{other['same'] / sum(map(len, mine.conversations)):12.2f}",
                flush=True,
            )
    mine_rate, bare_rate = statistics.median(run.rate for run in ours), statistics.median(theirs)
    print(f"          median  {mine_rate:8.1f}  {bare_rate:6.1f}  {mine_rate / bare_rate:5.2f}")
    print("seconds of a rollout, on average: ", end="")
    parts = {part: statistics.fmean(run.parts[part] for run in ours) for part in PARTS}
    print(", ".join(f"{part} {seconds:.3f}" for part, seconds in parts.items()), flush=True)
    return cold


async def routing(model: str, scratch: Path, options: argparse.Namespace, one: Run) -> None:
    """Print the prefix cache's hits of the same rollouts over one replica and over two, each begun cold."""
    async with served(model, 2) as policy:
        two = await Rollouts(scratch, options).run(policy, seed=0)
    print("prefix hits: 2 replicas  1 replica  ratio")
    print(f"             {two.hits:10.3f}  {one.hits:9.3f}  {two.hits / one.hits:5.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=24)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer, on average")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--waiting", type=int, metavar="SESSIONS", help="measure this many that wait, instead"
    )
    options = parser.parse_args()
    if options.waiting:
        waiting(options.waiting)
        return
    model = str(smollm2.prepare())

    async def both() -> None:
        one = await throughput(model, Path(scratch), options)
        await routing(model, Path(scratch), options, one)

    with tempfile.TemporaryDirectory() as scratch, connected():
        asyncio.run(both())


if __name__ == "__main__":
    main()
