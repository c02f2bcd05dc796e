"""Writing trajectories through rollcage, against pyarrow writing the same batches. Reach: ratio >= 0.8.

    python benchmarks/arrow_writing.py [--groups 64] [--samples 8] [--rounds 7]

Three pairs, in interleaved rounds, medians; each side ends with its data on disk (fsync):

- shards: `Location.write_shard` of ready batches, against a plain `pyarrow.ipc` file for each, same compression;
- journal: `Journal.append`, one group at a time, against one plain `pyarrow.ipc` stream, synced as often;
- objects: `rollouts_batch` from `Attempt` objects, against `RecordBatch.from_pylist` of rows that are ready.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from rollcage.rollout.arrow import JOURNAL_OPTIONS, SHARD_OPTIONS, Journal, Location
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.rows import rollouts_batch
from rollcage.rollout.schema import ROLLOUTS
from rollcage.rollout.trajectory import (
    Attempt,
    CommandRecord,
    Message,
    Phase,
    Reward,
    Segment,
    Trajectory,
    Turn,
)

TURNS, PROMPT, ANSWER = 10, 300, 100
"""A trajectory of 4,000 tokens: ten turns, each with 300 new prompt tokens and 100 sampled ones."""

WORDS = [
    "file",
    "error:",
    "ls -la",
    "/app/src",
    "test",
    "passed",
    "grep -rn",
    "import os",
    "\n",
    "return",
    "0x7f",
]


def an_attempt(task: str, sample: int, chance: random.Random) -> Attempt:
    trajectory, segment = Trajectory(), Segment()
    for index in range(TURNS):
        segment.ids += [int(50_000 * chance.random() ** 3) for _ in range(PROMPT)]
        segment.loss_mask += [0] * PROMPT
        segment.logprobs += [math.nan] * PROMPT
        prompt_len = len(segment.ids)
        segment.ids += [int(50_000 * chance.random() ** 3) for _ in range(ANSWER)]
        segment.loss_mask += [1] * ANSWER
        segment.logprobs += [-chance.expovariate(2) for _ in range(ANSWER)]
        seen, text = (" ".join(chance.choices(WORDS, k=k)) for k in (PROMPT, ANSWER))
        command = CommandRecord(text[:120], 0, seen, "", 0.2)
        trajectory.messages += [Message("user", seen, index), Message("assistant", text, index)]
        trajectory.turns.append(
            Turn(
                index,
                text,
                "stop",
                0,
                prompt_len,
                ANSWER,
                "model",
                1,
                1,
                0.1,
                0.9,
                prompt_len,
                ANSWER,
                commands=[command],
            )
        )
    trajectory.segments.append(segment)
    return Attempt(
        f"{task}-{sample}", "bench", task, "ab" * 32, sample, 0, "bash", "model", "host", Outcome.PASSED,
        reward=Reward(1.0), started_at=1.7e9, ended_at=1.7e9 + 12, phases={Phase.AGENT.value: 11.0},
        trajectory=trajectory,
    )  # fmt: skip


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def shards_ours(directory: Path, groups: list[pa.RecordBatch]) -> None:
    run = Location(directory)
    for group in groups:
        run.write_shard("rollouts", [group])


def shards_pyarrow(directory: Path, groups: list[pa.RecordBatch]) -> None:
    for number, group in enumerate(groups):
        path = directory / f"{number}.arrow"
        with (
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_file(sink, ROLLOUTS, options=SHARD_OPTIONS) as writer,
        ):
            writer.write_batch(group)
        sync(path)


def journal_ours(directory: Path, groups: list[pa.RecordBatch]) -> None:
    journal = Journal(directory, "rollouts")
    for group in groups:
        journal.append([group])
    journal.close()


def journal_pyarrow(directory: Path, groups: list[pa.RecordBatch]) -> None:
    path = directory / "plain.arrows"
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_stream(sink, ROLLOUTS, options=JOURNAL_OPTIONS) as writer,
    ):
        for group in groups:
            writer.write_batch(group)
            sync(path)


def timed(work: Callable[[Path], None]) -> float:
    directory = Path(tempfile.mkdtemp(prefix="arrow-writing-", dir="."))
    try:
        started = time.perf_counter()
        work(directory)
        return time.perf_counter() - started
    finally:
        shutil.rmtree(directory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    chance = random.Random(1)
    attempts = [
        [an_attempt(f"t{g}", s, chance) for s in range(options.samples)] for g in range(options.groups)
    ]
    rows = [[(attempt, 1, options.samples) for attempt in group] for group in attempts]
    groups = [rollouts_batch(group) for group in rows]
    ready = [group.to_pylist() for group in groups]
    pairs: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
        "shards": (lambda d: shards_ours(d, groups), lambda d: shards_pyarrow(d, groups)),
        "journal": (lambda d: journal_ours(d, groups), lambda d: journal_pyarrow(d, groups)),
        "objects": (
            lambda _: [rollouts_batch(group) for group in rows] and None,
            lambda _: [pa.RecordBatch.from_pylist(group, ROLLOUTS) for group in ready] and None,
        ),
    }
    rollouts = options.groups * options.samples
    size = sum(group.nbytes for group in groups)
    print(
        f"{rollouts} rollouts of {TURNS * (PROMPT + ANSWER)} tokens, {size / 1e6:.0f} MB, {options.rounds} rounds"
    )
    for name, (ours, plain) in pairs.items():
        times = [(timed(ours), timed(plain)) for _ in range(options.rounds)]
        mine, theirs = (statistics.median(side) for side in zip(*times, strict=True))
        print(
            f"{name:8} rollcage {rollouts / mine:8.0f} rollouts/s ({size / mine / 1e6:6.1f} MB/s)   "
            f"pyarrow {rollouts / theirs:8.0f} rollouts/s   ratio {theirs / mine:.2f}"
        )


if __name__ == "__main__":
    main()
