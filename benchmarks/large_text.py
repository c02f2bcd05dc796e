"""A column that holds more than 2 GiB of text in one batch, through the ledger, the feed and a merge.

    python benchmarks/large_text.py [--samples 264] [--mib 8]

One group of so many samples, each with an answer of so many MiB: offsets of 32 bits, which plain strings have, end at
2 GiB; those of `large_string` do not. Checked: every answer is read as it was written, by the feed and as one table,
and once more after its shard was merged with another. Printed: the bytes of the column, and of each process the seconds
and the peak of resident memory.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from million import patterns, peak_mb

from rollcage.cluster.ledger import Ledger
from rollcage.rollout.arrow import Location, read_rollouts
from rollcage.rollout.feed import Feed
from rollcage.rollout.rewrite import compact
from rollcage.rollout.trajectory import Message, Reward, Trajectory


def answer(sample: int, size: int) -> str:
    """Text of so many bytes that tells which sample it is of."""
    line = f"{sample:07d} drwxr-xr-x 2 root root\n"
    return (line * (size // len(line) + 1))[:size]


async def write(run: Path, samples: int, size: int) -> None:
    ledger = Ledger.create(run, {"job": "bench"})
    [pattern, *_] = patterns(8)
    for task, count in (("large", samples), ("small", 1)):
        for sample in range(count):
            said = Trajectory([Message("assistant", answer(sample, size if task == "large" else 8), 0)])
            attempt = replace(pattern, task=task, sample=sample, trajectory=said, reward=Reward(1.0))
            await ledger.record_rollout(attempt, 1, count)
        await ledger.commit_group("bash", task)
    await ledger.finish({})


def checked(table: pa.Table, size: int) -> int:
    """The bytes of the answers, each of which was compared."""
    total = 0
    for chunk in table["messages"].chunks:
        texts = chunk.flatten().field("content")
        total += pc.sum(pc.binary_length(texts)).as_py()
        for sample, text in enumerate(texts):
            if text.as_py() != answer(sample, size):
                raise SystemExit(f"the answer of sample {sample} is another one")
    return total


def read(run: Path, samples: int, size: int) -> None:
    group = next(Feed(run, columns=["messages"]))
    parts = group.table["messages"].num_chunks
    total = checked(group.table, size)
    del group
    table = read_rollouts(run, ["task", "messages"]).filter(pc.field("task") == "large")
    if checked(table.combine_chunks(), size) != total or table.num_rows != samples:
        raise SystemExit("the table is not what the feed gave")
    print(f"{total / 2**30:.2f} GiB of text in {parts} batch, ", end="")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=264)
    parser.add_argument("--mib", type=int, default=8)
    parser.add_argument("--process", help=argparse.SUPPRESS)
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    started = time.monotonic()
    if options.process == "write":
        asyncio.run(write(options.run, options.samples, options.mib << 20))
    elif options.process == "read":
        read(options.run, options.samples, options.mib << 20)
    elif options.process == "merge":
        if compact(Location(options.run), "rollouts") != 1:
            raise SystemExit("the shards were not merged")
    else:
        sizes = ["--samples", str(options.samples), "--mib", str(options.mib)]
        with tempfile.TemporaryDirectory(prefix="large-", dir=".") as scratch:
            for kind in ("write", "read", "merge", "read"):
                print(f"{kind:7}", end="", flush=True)
                command = [sys.executable, __file__, "--process", kind, "--run", f"{scratch}/run", *sizes]
                subprocess.run(command, check=True)
        return
    print(f"{time.monotonic() - started:.0f} s, peak {peak_mb() / 1024:.1f} GiB")


if __name__ == "__main__":
    main()
