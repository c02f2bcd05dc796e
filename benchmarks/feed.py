"""The trainer's feed against pyarrow, and how soon a group can be read.

    python benchmarks/feed.py [--groups 64] [--samples 16] [--rounds 15] [--rate 100] [--seconds 20] [--only read]

- write: shards of four groups through `Location`, against a plain `pyarrow.ipc` file for each, same compression. Both
  sync each file; ours also renames it and syncs its folder. Reach: ratio >= 0.8.
- read: every token column of every group as numpy through `Feed`, against pyarrow's memory map of the same files, each
  segment added up; beside it the memory map of a file that is not compressed. Reach: ratio >= 0.8.
- latency: a process writes groups through the ledger at a steady rate, another follows; from the moment in which a
  group's last reward is there to the moment in which the trainer has the group. Reach: p95 <= 250 ms at 100 groups/s.

Both sides of a ratio are run in turns, and the ratio is that of the medians; the one of their processor time, which
other work on the machine changes less, stands beside it. The load average is printed before and after, and how long a
bare fsync of 4 kB took during the latency: a commit is a few of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from arrow_writing import an_attempt

from rollcage.cluster.ledger import Ledger
from rollcage.rollout.feed import Feed
from rollcage.rollout.location import Location
from rollcage.rollout.rows import rollouts_batch
from rollcage.rollout.schema import ROLLOUTS
from rollcage.rollout.shards import SHARD_OPTIONS
from rollcage.rollout.trajectory import Attempt, Message, Segment, Trajectory, Turn

GROUPS_A_COMMIT = 4
"""Groups that end while a ledger is writing go into its next shard together."""

GROUPS_A_SHARD = 32
"""Of the files that are read: shards of a run are merged while it goes on."""


def make_groups(groups: int, samples: int) -> list[pa.RecordBatch]:
    chance = random.Random(1)
    return [
        rollouts_batch([(an_attempt(f"t{group}", n, chance), 1, samples) for n in range(samples)])
        for group in range(groups)
    ]


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_plain(path: Path, batches: Iterable[pa.RecordBatch], options: pa.ipc.IpcWriteOptions) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, ROLLOUTS, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    sync(path)


def write_pyarrow(folder: Path, groups: list[pa.RecordBatch]) -> None:
    for start in range(0, len(groups), GROUPS_A_COMMIT):
        write_plain(folder / f"{start}.arrow", groups[start : start + GROUPS_A_COMMIT], SHARD_OPTIONS)


def write_rollcage(folder: Path, groups: list[pa.RecordBatch]) -> None:
    run = Location(folder)
    for start in range(0, len(groups), GROUPS_A_COMMIT):
        run.write_shard("rollouts", groups[start : start + GROUPS_A_COMMIT])


def added_up(*columns: np.ndarray) -> int:
    """Looks at every token of ids, loss mask and logprobs."""
    return sum(int(column.view(np.int8).sum(dtype=np.int64)) for column in columns)


def read_rollcage(run: Path) -> int:
    total = 0
    for group in Feed(run, columns=["segments"]):
        for segments in group.segments:
            for tokens in segments:
                total += added_up(*tokens)
    return total


def read_pyarrow(files: Iterable[Path | str]) -> int:
    options = pa.ipc.IpcReadOptions(included_fields=[ROLLOUTS.get_field_index("segments")])
    total = 0
    for file in files:
        reader = pa.ipc.open_file(pa.memory_map(str(file)), options=options)
        for number in range(reader.num_record_batches):
            segments = reader.get_batch(number).column(0).values
            columns = [segments.field(name) for name in ("ids", "loss_mask", "logprobs")]
            tokens = [column.values.to_numpy(zero_copy_only=True) for column in columns]
            for start, end in pairwise(columns[0].offsets.to_pylist()):
                total += added_up(*(array[start:end] for array in tokens))
    return total


class Seconds(NamedTuple):
    """What a side took, as the median of its rounds."""

    wall: float
    processor: float


def timed(work: Callable[[], object]) -> Seconds:
    started, spent = time.perf_counter(), time.process_time()
    work()
    return Seconds(time.perf_counter() - started, time.process_time() - spent)


def in_turns(rounds: int, *sides: Callable[[], object]) -> list[Seconds]:
    rows = [[timed(side) for side in sides] for _ in range(rounds)]
    return [Seconds(*map(statistics.median, zip(*times, strict=True))) for times in zip(*rows, strict=True)]


def compared(kind: str, size: float, ours: Seconds, theirs: Seconds) -> None:
    """One line about `size` MB."""
    print(
        f"{kind:8} rollcage {size / ours.wall:5.0f} MB/s   pyarrow {size / theirs.wall:5.0f} MB/s   "
        f"ratio {theirs.wall / ours.wall:.2f} (of processor time {theirs.processor / ours.processor:.2f})"
    )


def writing(folder: Path, groups: list[pa.RecordBatch], rounds: int) -> None:
    def side(write: Callable[[Path, list[pa.RecordBatch]], None]) -> Callable[[], None]:
        def work() -> None:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                write(Path(place), groups)

        return work

    ours, theirs = in_turns(rounds, side(write_rollcage), side(write_pyarrow))
    compared("write", sum(group.nbytes for group in groups) / 1e6, ours, theirs)


def reading(folder: Path, groups: list[pa.RecordBatch], rounds: int) -> None:
    run = Location(folder / "run")
    run.write_json("job.json", {})
    for start in range(0, len(groups), GROUPS_A_SHARD):
        run.write_shard("rollouts", groups[start : start + GROUPS_A_SHARD])
    run.write_json("summary.json", {})
    files = run.shards("rollouts")
    raw = folder / "raw.arrow"
    write_plain(raw, groups, pa.ipc.IpcWriteOptions(compression=None))
    total = read_rollcage(folder / "run")
    if not total == read_pyarrow(files) == read_pyarrow([raw]):
        raise SystemExit("the three sides did not read the same tokens")
    ours, theirs, map_only = in_turns(
        rounds,
        lambda: read_rollcage(folder / "run"),
        lambda: read_pyarrow(files),
        lambda: read_pyarrow([raw]),
    )
    size = sum(group.column("segments").nbytes for group in groups) / 1e6
    compared("read", size, ours, theirs)
    disk = sum(os.path.getsize(file) for file in files)
    print(
        f"         not compressed: pyarrow {size / map_only.wall:.0f} MB/s, "
        f"{raw.stat().st_size / disk:.1f} times the size ("
        f"{disk / 1e3 / sum(group.num_rows for group in groups):.0f} kB a rollout compressed)"
    )


def a_small_attempt(task: str, sample: int, tokens: int) -> Attempt:
    ids = list(range(tokens))
    trajectory = Trajectory(
        [Message("user", "look"), Message("assistant", "ls", 0)],
        [Turn(0, "ls", "stop", 0, tokens // 2, tokens // 2, "model", 1, 1)],
        [Segment(ids, [1] * tokens, [-0.5] * tokens)],
    )
    made = an_attempt(task, sample, random.Random(1))
    return replace(made, trajectory=trajectory)


async def write_at_rate(run: Path, rate: int, seconds: float, samples: int, tokens: int) -> None:
    """Groups whose samples end one after the other; each attempt says when it ended."""
    ledger = Ledger.create(run, {"job": "bench"})
    pattern = [a_small_attempt("t", sample, tokens) for sample in range(samples)]
    print("ready", flush=True)

    async def group(number: int) -> None:
        for attempt in pattern:
            name = f"t{number}"
            ended = replace(attempt, task=name, attempt_id=f"{name}-{attempt.sample}", ended_at=time.time())
            await ledger.record_attempt(ended)
            await ledger.record_rollout(ended, 1, samples)
        await ledger.commit_group("bash", f"t{number}")

    started = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for number in range(int(rate * seconds)):
            await asyncio.sleep(started + number / rate - time.monotonic())
            tasks.create_task(group(number))
    print(f"{time.monotonic() - started:.2f}", flush=True)
    await ledger.finish({})


class BareSyncs(threading.Thread):
    """Asks the disk of `folder` some times a second how long one fsync takes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.milliseconds: list[float] = []
        self._folder = folder
        self._enough = threading.Event()

    def run(self) -> None:
        with (self._folder / "bare").open("wb", buffering=0) as file:
            while not self._enough.wait(0.1):
                file.write(bytes(4096))
                started = time.perf_counter()
                os.fsync(file.fileno())
                self.milliseconds.append(1000 * (time.perf_counter() - started))

    def stop(self) -> None:
        self._enough.set()
        self.join()


def latency(folder: Path, rate: int, seconds: float, samples: int, tokens: int) -> None:
    run = folder / "followed"
    options = [
        "--rate",
        str(rate),
        "--seconds",
        str(seconds),
        "--pair",
        str(samples),
        "--tokens",
        str(tokens),
    ]
    writer = subprocess.Popen(
        [sys.executable, __file__, "--writer", str(run), *options], stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout
    writer.stdout.readline()
    waits = []
    bare = BareSyncs(folder)
    bare.start()
    spent = time.process_time()
    with Feed(run) as feed:
        for group in feed:
            now = time.time()
            waits.append(now - max(time.timestamp() for time in group.table["ended_at"].to_pylist()))
    spent = time.process_time() - spent
    took = float(writer.stdout.readline())
    writer.wait()
    bare.stop()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if len(waits) != int(rate * seconds):
        raise SystemExit(f"{len(waits)} groups came of {int(rate * seconds)}")
    waits.sort()
    at = {share: 1000 * waits[int(share * (len(waits) - 1))] for share in (0.5, 0.95, 0.99, 1.0)}
    print(
        f"latency  p50 {at[0.5]:.0f} ms   p95 {at[0.95]:.0f} ms   p99 {at[0.99]:.0f} ms   most {at[1.0]:.0f} ms   at "
        f"{len(waits) / took:.0f} groups/s of {samples} samples with {tokens} tokens; the reader used "
        f"{100 * spent / took:.0f}% of a core, the writer {100 * (used.ru_utime + used.ru_stime) / took:.0f}%"
    )
    bare.milliseconds.sort()
    at = {share: bare.milliseconds[int(share * (len(bare.milliseconds) - 1))] for share in (0.5, 0.95, 1.0)}
    print(
        f"         a bare fsync meanwhile: p50 {at[0.5]:.1f} ms   p95 {at[0.95]:.1f} ms   most {at[1.0]:.1f} ms"
    )


def print_load() -> None:
    print("load average", *(f"{load:.1f}" for load in os.getloadavg()), f"on {os.cpu_count()} cores")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rate", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--pair", type=int, default=2, help="samples of a group, for the latency")
    parser.add_argument("--tokens", type=int, default=400, help="of a rollout, for the latency")
    parser.add_argument("--only", choices=["write", "read", "latency"])
    parser.add_argument("--writer", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.writer:
        asyncio.run(
            write_at_rate(options.writer, options.rate, options.seconds, options.pair, options.tokens)
        )
        return
    print_load()
    with tempfile.TemporaryDirectory(prefix="feed-", dir=".") as scratch:
        groups = make_groups(options.groups, options.samples)
        if options.only in ("write", None):
            writing(Path(scratch), groups, options.rounds)
        if options.only in ("read", None):
            reading(Path(scratch), groups, options.rounds)
        if options.only in ("latency", None):
            latency(Path(scratch), options.rate, options.seconds, options.pair, options.tokens)
    print_load()


if __name__ == "__main__":
    main()
