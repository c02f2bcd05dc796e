"""A writer that is killed at 200 points: what was acknowledged is there, what was torn is run again, nothing twice."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollcage.cluster.ledger import Ledger
from rollcage.rollout.arrow import read_attempts, read_rollouts, recover
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.trajectory import Attempt, Message, Reward, RolloutKey, Trajectory

KILLS, CUTS = 40, 160

TASKS, SAMPLES = 10, 2


def an_attempt(key: RolloutKey) -> Attempt:
    trajectory = Trajectory([Message("user", "x" * 200)])
    return Attempt(
        f"{key.task}-{key.sample}", key.job, key.task, "digest", key.sample, 1, key.agent, "model", "host",
        Outcome.PASSED, reward=Reward(1.0), trajectory=trajectory,
    )  # fmt: skip


def keys() -> list[RolloutKey]:
    return [
        RolloutKey("demo", "bash", f"t{task}", sample) for task in range(TASKS) for sample in range(SAMPLES)
    ]


KILLER = """
import asyncio, json, os, random, select, signal, sys
sys.path.insert(0, {folder!r})
from test_ledger_kills import SAMPLES, TASKS, Ledger, an_attempt, keys

def write(run, say):
    async def rollout(ledger, key):
        attempt = an_attempt(key)
        await ledger.record_attempt(attempt)
        os.write(say, f"attempt {{attempt.attempt_id}}\\n".encode())
        await ledger.record_rollout(attempt, 1, SAMPLES)
        os.write(say, f"rollout {{key.task}} {{key.sample}}\\n".encode())

    async def main():
        ledger = Ledger.create(run, {{}})
        for first in range(0, TASKS, 2):
            two = [key for key in keys() if key.task in (f"t{{first}}", f"t{{first + 1}}")]
            await asyncio.gather(*(rollout(ledger, key) for key in two))
            for task in (first, first + 1):
                await ledger.commit_group("bash", f"t{{task}}")
        await asyncio.sleep(100)

    asyncio.run(main())

chance = random.Random({seed})
for number in range({kills}):
    heard, say = os.pipe()
    writer = os.fork()
    if not writer:
        write(f"{{sys.argv[1]}}/{{number}}", say)
        os._exit(1)
    os.close(say)
    lines, wanted = b"", chance.randrange(2 * SAMPLES * TASKS)
    while lines.count(b"\\n") < wanted and (more := os.read(heard, 65536)):
        lines += more
    select.select([], [], [], chance.random() * 0.01)  # the moment is what chance wants: nothing is waited for
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    while more := os.read(heard, 65536):
        lines += more
    with open(f"{{sys.argv[1]}}/{{number}}.said", "wb") as file:
        file.write(lines)
    os.close(heard)
"""


def go_on(run: Path) -> None:
    """Run what has not ended, as a resumed job does, and end the run."""

    async def work() -> None:
        ledger = Ledger.open(run)
        left = [an_attempt(key) for key in keys() if key not in ledger.known]
        new = [attempt for attempt in left if not ledger.known.has_attempt(attempt.attempt_id)]
        await asyncio.gather(*(ledger.record_attempt(attempt) for attempt in new))
        await asyncio.gather(*(ledger.record_rollout(attempt, 1, SAMPLES) for attempt in left))
        await ledger.finish({})

    asyncio.run(work())


def rows(run: Path) -> list[tuple[str, int]]:
    return [(row["task"], row["sample"]) for row in read_rollouts(run, ["task", "sample"]).to_pylist()]


def check(run: Path, attempts: set[str], rollouts: set[tuple[str, int]]) -> None:
    """The run holds at least these, and once it has been gone on with everything, once."""
    assert rollouts <= set(rows(run))
    assert attempts <= set(read_attempts(run, ["attempt_id"])["attempt_id"].to_pylist())
    before = rows(run)
    assert len(before) == len(set(before))
    go_on(run)
    assert sorted(rows(run)) == sorted((key.task, key.sample) for key in keys())
    found = read_attempts(run, ["attempt_id"])["attempt_id"].to_pylist()
    assert len(found) == len(set(found))
    assert attempts <= set(found)


@pytest.fixture(scope="module")
def killed() -> Iterator[Path]:
    """Runs whose writers were killed at moments of chance, and what each had said before. In memory where there is
    room: a killed process leaves what it has written, synced or not."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 500 << 20
    with tempfile.TemporaryDirectory(prefix="rollcage-", dir=memory if roomy else None) as place:
        code = KILLER.format(folder=str(Path(__file__).parent), seed=5, kills=KILLS)
        subprocess.run([sys.executable, "-c", code, place], check=True, timeout=200)
        yield Path(place)


def said(killed: Path, number: int) -> tuple[set[str], set[tuple[str, int]]]:
    lines = [line.split() for line in (killed / f"{number}.said").read_text().splitlines()]
    attempts = {words[1] for words in lines if words[0] == "attempt"}
    return attempts, {(words[1], int(words[2])) for words in lines if words[0] == "rollout"}


def test_killed_at_any_moment_nothing_is_lost_and_nothing_twice(killed: Path) -> None:
    cut_short = 0
    for number in range(KILLS):
        attempts, rollouts = said(killed, number)
        cut_short += len(rollouts) < TASKS * SAMPLES
        run = killed / str(number)
        if not (run / "job.json").exists():
            assert not attempts, "nothing is acknowledged before there is a run"
            continue
        copy = killed / f"{number}-copy"
        shutil.copytree(run, copy)
        check(copy, attempts, rollouts)
        shutil.rmtree(copy)
    assert cut_short > KILLS / 2


def test_cut_at_any_byte_what_lies_whole_before_it_is_there(killed: Path) -> None:
    """What was acknowledged is what a journal holds whole up to some byte, wherever a kill has cut it."""
    chance = random.Random(6)
    runs = [
        killed / str(number) for number in range(KILLS) if any((killed / str(number) / "journal").glob("*"))
    ]
    assert len(runs) > KILLS / 2
    for number in range(CUTS):
        run = chance.choice(runs)
        copy = killed / f"cut-{number}"
        shutil.copytree(run, copy)
        journals = sorted((copy / "journal").iterdir())
        path = chance.choice(journals)
        data = path.read_bytes()
        path.write_bytes(data[: chance.randrange(len(data) + 1)])
        column = "task" if path.name.startswith("rollouts") else "attempt_id"
        kept = [row for batch in recover(path) for row in batch.to_pylist()]
        attempts = {row["attempt_id"] for row in kept} if column == "attempt_id" else set()
        rollouts = {(row["task"], row["sample"]) for row in kept} if column == "task" else set()
        check(copy, attempts, rollouts)
        shutil.rmtree(copy)
