"""What a sandbox costs: a command, a start, a warm one, a removal.

- command: over the sandbox's shell, against one `exec` of the engine (create, start, output to its end, exit code)
  through docker-py in the same container, one after the other in turn. Once with a builtin (`echo`), once with a
  program (`/bin/true`), which the shell has to fork for as well. Targets: a ratio of 50 in p50.
- start: `SandboxPool.acquire` of a sandbox that nobody expected: create, start, attach, shell ready.
- warm: the same of one that was announced and is in stock. Target: p50 of 20 ms.
- removal: kill, remove, and the engine no longer knows the container. Release: what of it a rollout waits for.

    python benchmarks/sandboxes.py [--rounds 60] [--network public]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from oracle_task import write_task

from rollcage.rollout.sandbox.base import Sandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.images import BuiltImage
from rollcage.rollout.sandbox.pool import Expected, SandboxPool, SandboxSettings
from rollcage.rollout.task import Environment, load_task

T = TypeVar("T")
RUNS_FOR_EXEC = 20
"""Commands over the shell for each `exec`, which takes so much longer."""
COMMANDS = {"builtin": "echo hello", "program": "/bin/true"}
FILL_SEC = 60.0


class Bench:
    """A pool, one image, and how long everything took, in milliseconds."""

    def __init__(
        self, engine: Engine, pool: SandboxPool, image: BuiltImage, environment: Environment
    ) -> None:
        self.engine = engine
        self.pool = pool
        self.image = image
        self.environment = environment

    async def acquire(self) -> Sandbox:
        return await self.pool.acquire(self.image, self.environment, attempt_id=uuid.uuid4().hex[:12])

    async def remove(self, sandbox: Sandbox) -> None:
        await self.pool.release(sandbox)
        await self.pool.drained()

    async def command(self, text: str, rounds: int) -> tuple[list[float], list[float]]:
        """Over the shell, and by `exec`."""
        sandbox = await self.acquire()
        shell = await sandbox.shell()
        over_shell, by_exec = [], []
        for _ in range(rounds):
            for _ in range(RUNS_FOR_EXEC):
                taken, result = await timed(lambda: shell.run(text))
                if result.exit_code != 0:
                    raise SystemExit(f"{text!r} ended with status {result.exit_code} over the shell")
                over_shell.append(taken)
            by_exec.append((await timed(lambda: asyncio.to_thread(self.exec, sandbox.id, text)))[0])
        await self.remove(sandbox)
        return over_shell, by_exec

    def exec(self, container: str, text: str) -> None:
        """One exec through docker-py, with its output and exit code, as any harness does it."""
        api = self.engine.api
        made = api.exec_create(container, ["/bin/sh", "-c", text])
        api.exec_start(made["Id"])
        if api.exec_inspect(made["Id"])["ExitCode"] != 0:
            raise SystemExit(f"{text!r} failed by exec")

    async def starts(self, rounds: int, at_once: int) -> tuple[list[float], list[float]]:
        """Starts and removals, `at_once` of them at a time."""
        starts, removals = [], []
        for _ in range(max(1, rounds // at_once)):
            started = await asyncio.gather(*(timed(self.acquire) for _ in range(at_once)))
            starts += [taken for taken, _ in started]
            removed = await asyncio.gather(*(timed(one.remove) for _, one in started))
            removals += [taken for taken, _ in removed]
            await asyncio.gather(*(self.remove(sandbox) for _, sandbox in started))
        return starts, removals

    async def warm(self, rounds: int) -> tuple[list[float], list[float]]:
        """Acquiring what was announced, and its release: each round waits until the stock is full, and takes one."""
        took, releases = [], []
        for _ in range(rounds):
            self.pool.expect([Expected(self.image, self.environment)] * self.pool.settings.warm)
            async with asyncio.timeout(FILL_SEC):
                while len(self.pool.stock) < self.pool.settings.warm:  # noqa: ASYNC110 -- it tells nobody
                    await asyncio.sleep(0.02)
            cold = self.pool.cold_starts
            taken, sandbox = await timed(self.acquire)
            if self.pool.cold_starts != cold:
                raise SystemExit("a sandbox in stock was not handed out")
            shell = await sandbox.shell()
            if (await shell.run("echo ready")).stdout != b"ready\n":
                raise SystemExit("a warm sandbox does not work")
            took.append(taken)
            releases.append((await timed(partial(self.pool.release, sandbox)))[0])
            await self.pool.drained()
        return took, releases


async def timed(work: Callable[[], Awaitable[T]]) -> tuple[float, T]:
    """Milliseconds, and what came of it."""
    started = time.perf_counter()
    result = await work()
    return (time.perf_counter() - started) * 1000, result


def show(name: str, took: Sequence[float]) -> None:
    p95 = statistics.quantiles(took, n=20)[-1]
    print(f"{name:34} {statistics.median(took):9.2f} {p95:9.2f}   {len(took)}", flush=True)


async def run(rounds: int, network: str, scratch: Path) -> None:
    task = load_task(write_task(scratch / "task", network_mode=network))
    engine = Engine()
    host = f"bench-{uuid.uuid4().hex[:8]}"
    pool = SandboxPool(engine, SandboxSettings(pids=256, deadline_sec=1800.0, warm=4), host=host, job=host)
    try:
        bench = Bench(engine, pool, await pool.image(task.environment, task.name), task.environment)
        await bench.remove(await bench.acquire())
        print(f"{'network ' + network:34} {'p50 ms':>9} {'p95 ms':>9}   times")
        ratios = {}
        for name, text in COMMANDS.items():
            over_shell, by_exec = await bench.command(text, rounds)
            show(f"{name} ({text}) over the shell", over_shell)
            show(f"{name} ({text}) by exec", by_exec)
            ratios[name] = statistics.median(by_exec) / statistics.median(over_shell)
        for at_once in (1, 8):
            starts, removals = await bench.starts(rounds, at_once)
            show(f"start, {at_once} at a time", starts)
            show(f"removal, {at_once} at a time", removals)
        warm, releases = await bench.warm(rounds)
        show("acquire of a warm one", warm)
        show("release", releases)
        for name, ratio in ratios.items():
            print(f"{name}: exec / shell in p50 = {ratio:.0f} (target: at least 50)")
        print(f"acquire of a warm one: p50 {statistics.median(warm):.1f} ms (target: at most 20)")
    finally:
        await pool.close()
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--network", choices=("public", "no-network"), default="public")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollcage-bench-") as scratch:
        asyncio.run(run(options.rounds, options.network, Path(scratch)))


if __name__ == "__main__":
    main()
