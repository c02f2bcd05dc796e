"""Many rollouts through the ledger and two readers, with one kill and one resume: what they cost, and peak memory.

    python benchmarks/million.py [--rollouts 10000 20000 40000] [--samples 8] [--tokens 4000]

For each size a writing process records and commits that many simulated rollouts in groups, two readers that share them
by rank follow and look at every token, and the writer is killed with SIGKILL in the middle and goes on with
`Ledger.open`. Checked: each group is read once by one of the two, whole; no rollout is there twice. Printed: wall and
processor time a rollout, megabytes on disk, and the peak resident memory of each process (a reader's has its mapped
shards in it, which the kernel takes back when it needs the pages).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rollcage.cluster.ledger import Ledger
from rollcage.rollout.arrow import read_rollouts
from rollcage.rollout.feed import Feed
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.trajectory import Attempt, Message, Reward, Segment, Trajectory, Turn

AT_ONCE = 8
"""Groups that end at the same time."""

PATTERNS = 16
"""Different trajectories that are written again and again: making random ones would be most of the time."""


def patterns(tokens: int) -> list[Attempt]:
    chance = np.random.default_rng(1)
    made = []
    for _ in range(PATTERNS):
        ids = (50_000 * chance.random(tokens) ** 3).astype(int).tolist()
        logprobs = (-chance.exponential(0.5, tokens)).tolist()
        trajectory = Trajectory(
            [Message("user", "look"), Message("assistant", "ls", 0)],
            [Turn(0, "ls", "stop", 0, tokens // 2, tokens - tokens // 2, "model", 1, 1)],
            [Segment(ids, [0] * (tokens // 2) + [1] * (tokens - tokens // 2), logprobs)],
        )
        made.append(
            Attempt(
                attempt_id="",
                job="bench",
                task="",
                task_digest="ab" * 32,
                sample=0,
                number=1,
                agent="bash",
                policy="model",
                host="host",
                outcome=Outcome.PASSED,
                started_at=1.7e9,
                ended_at=1.7e9 + 12,
                trajectory=trajectory,
            )
        )
    return made


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def cpu_seconds() -> float:
    """Of all processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def say(**about: Any) -> None:
    print(json.dumps(about), flush=True)


async def write(run: Path, groups: int, samples: int, tokens: int) -> None:
    """Groups 0 to `groups` - 1, less what an earlier writer has written."""
    ledger = Ledger.open(run) if (run / "job.json").exists() else Ledger.create(run, {"job": "bench"})
    made = patterns(tokens)
    say(opened=len(ledger.known))

    async def group(number: int) -> None:
        task = f"t{number}"
        for sample in range(samples):
            pattern = made[(number + sample) % PATTERNS]
            reward = Reward(float((number + sample) % 3 == 0))
            attempt = replace(pattern, task=task, sample=sample, attempt_id=f"{task}-{sample}", reward=reward)
            if attempt.key not in ledger.known:
                await ledger.record_rollout(attempt, 1, samples)
        await ledger.commit_group("bash", task)

    for start in range(0, groups, AT_ONCE):
        await asyncio.gather(*(group(number) for number in range(start, min(start + AT_ONCE, groups))))
        say(written=min(start + AT_ONCE, groups))
    await ledger.finish({})
    say(peak=peak_mb())


def read(run: Path, rank: int) -> None:
    groups = rollouts = tokens = 0
    with Feed(run, rank=rank, world_size=2, columns=["segments"], on_dead="wait") as feed:
        for group in feed:
            groups += 1
            rollouts += len(group.samples)
            tokens += sum(int(np.count_nonzero(one.loss_mask)) for each in group.segments for one in each)
    say(groups=groups, rollouts=rollouts, trained=tokens, peak=peak_mb())


def start(kind: str, run: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, __file__, "--process", kind, "--run", str(run), *options],
        stdout=subprocess.PIPE,
        text=True,
    )


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"a process ended with status {process.wait()}")
    answer: dict[str, Any] = json.loads(line)
    return answer


def one(folder: Path, rollouts: int, samples: int, tokens: int) -> None:
    run, groups = folder / "run", rollouts // samples
    options = ["--rollouts", str(rollouts), "--samples", str(samples), "--tokens", str(tokens)]
    started, spent = time.monotonic(), cpu_seconds()
    writer = start("writer", run, *options)
    said(writer)
    readers = [start(f"reader-{rank}", run) for rank in range(2)]
    while said(writer)["written"] < groups // 2:
        pass
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    again = time.monotonic()
    writer = start("writer", run, *options)
    opened = said(writer)["opened"]
    reopening = time.monotonic() - again
    while "peak" not in (last := said(writer)):
        pass
    ends = [said(reader) for reader in readers]
    for process in (writer, *readers):
        process.wait()
    took = time.monotonic() - started
    read_groups = sum(end["groups"] for end in ends)
    if read_groups != groups or sum(end["rollouts"] for end in ends) != groups * samples:
        raise SystemExit(f"{read_groups} of {groups} groups were read")
    rows = read_rollouts(run, ["task", "sample"]).to_pylist()
    if len({(row["task"], row["sample"]) for row in rows}) != len(rows) or len(rows) != groups * samples:
        raise SystemExit(f"{len(rows)} rows of {groups * samples} rollouts")
    size = sum(path.stat().st_size for path in run.rglob("*") if path.is_file())
    shards = len(list((run / "rollouts").iterdir()))
    spent = cpu_seconds() - spent
    columns = (
        f"{rollouts:8d}",
        f"{took:7.0f}",
        f"{1e6 * took / rollouts:10.0f}",
        f"{1e6 * spent / rollouts:14.0f}",
        f"{size / 1e6:7.0f}",
        f"{shards:6d}",
        f"{last['peak']:9.0f}",
        f"{max(end['peak'] for end in ends):9.0f}",
        f"{opened:10d}",
        f"{reopening:6.1f}",
    )
    print("  ".join(columns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, nargs="+", default=[10_000, 20_000, 40_000])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process == "writer":
        [rollouts] = options.rollouts
        asyncio.run(write(options.run, rollouts // options.samples, options.samples, options.tokens))
    elif options.process:
        read(options.run, int(options.process.rpartition("-")[2]))
    else:
        print(
            "rollouts  seconds  us/rollout  cpu us/rollout  "
            "     MB  shards  writer MB  reader MB  resumed at  open s"
        )
        for rollouts in options.rollouts:
            folder = Path(tempfile.mkdtemp(prefix="million-", dir="."))
            try:
                one(folder, rollouts, options.samples, options.tokens)
            finally:
                shutil.rmtree(folder)


if __name__ == "__main__":
    main()
