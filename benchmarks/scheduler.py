"""The scheduler alone, in simulated time: decisions a second, and what a rollout costs at 10,000 in flight.

    python benchmarks/scheduler.py [--hosts 16] [--rounds 3]

Attempts last 30 to 90 simulated seconds, builds about 0.1 (longer ones would keep 10,000 from running at once);
one attempt in twenty fails of infra and is tried again. Each size runs three times its concurrency in rollouts, in
groups of 8; sizes are interleaved, and the median of the rounds counts. Reached when 10,000
in flight do >= 300 rollouts/s, and a rollout costs <= 1.3 times as much among them as among 100.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
import tracemalloc
from dataclasses import dataclass
from heapq import heappop, heappush

from rollcage.cluster.scheduler import RolloutKey, Scheduler
from rollcage.rollout.outcome import Outcome

SAMPLES = 8
ROLLOUTS_PER_SLOT = 3
INFRA_SHARE = 0.05


@dataclass(frozen=True)
class Measured:
    """One simulated job. `seconds` is the CPU time inside the scheduler; a decision is an assignment or an end."""

    rollouts: int
    decisions: int
    most_in_flight: int
    seconds: float

    @property
    def microseconds_per_rollout(self) -> float:
        return 1e6 * self.seconds / self.rollouts


def simulate(concurrency: int, hosts: int, seed: int) -> Measured:
    """Run a whole job. Only calls of the scheduler are timed; the simulation's own heap is not."""
    chance = random.Random(seed)
    clock = time.process_time
    groups = -(-concurrency * ROLLOUTS_PER_SLOT // SAMPLES)
    keys = [
        RolloutKey("job", "agent", f"task-{task}", f"digest-{task}", sample)
        for task in range(groups)
        for sample in range(SAMPLES)
    ]
    began = clock()
    scheduler = Scheduler(
        keys, concurrency=concurrency, hosts={f"host-{n}": -(-concurrency // hosts) for n in range(hosts)}
    )
    spent = clock() - began
    events: list[tuple[float, bool, str]] = []
    now, decisions, most = 0.0, 0, 0
    while True:
        began = clock()
        assignments = scheduler.next(now)
        preparations = scheduler.prepare(now)
        scheduler.finished()
        scheduler.groups_done()
        done, due, counts = scheduler.done, scheduler.wake_at(), scheduler.counts()
        spent += clock() - began
        if done:
            break
        decisions += len(assignments)
        for assignment in assignments:
            heappush(events, (now + chance.uniform(30, 90), True, assignment.attempt_id))
        for preparation in preparations:
            heappush(events, (now + chance.uniform(0.05, 0.15), False, preparation.preparation_id))
        most = max(most, counts.in_flight)
        if due is not None and (not events or due < events[0][0]):
            now = due
            continue
        now, is_attempt, name = heappop(events)
        infra = chance.random() < INFRA_SHARE
        began = clock()
        if not is_attempt:
            scheduler.prepared(name, None, None, now)
        elif infra:
            scheduler.ended(name, Outcome.INVALID, "container_start", None, now)
        else:
            scheduler.ended(name, Outcome.PASSED, None, None, now)
        spent += clock() - began
        decisions += 1
    assert counts.dispatched == counts.ended
    assert most == concurrency
    assert sum(counts.outcomes.values()) == len(keys)
    return Measured(len(keys), decisions, most, spent)


def memory_mib(concurrency: int, hosts: int) -> float:
    """Peak memory of a whole simulated job, MiB."""
    tracemalloc.start()
    simulate(concurrency, hosts, seed=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sizes = (100, 1_000, 10_000)
    measured: dict[int, list[Measured]] = {size: [] for size in sizes}
    for round_number in range(arguments.rounds):
        for size in sizes:
            # A small job is over in milliseconds: as many of them as it takes to compare like with like.
            for repeat in range(max(1, 2_000 // size)):
                gc.collect()
                measured[size].append(simulate(size, arguments.hosts, seed=100 * round_number + repeat))
    print(f"{'in flight':>10} {'rollouts':>9} {'decisions/s':>12} {'rollouts/s':>11} {'us/rollout':>11}")
    cost = {}
    for size in sizes:
        cost[size] = statistics.median(run.microseconds_per_rollout for run in measured[size])
        rate = statistics.median(run.decisions / run.seconds for run in measured[size])
        one = measured[size][0]
        print(f"{size:>10} {one.rollouts:>9} {rate:>12,.0f} {1e6 / cost[size]:>11,.0f} {cost[size]:>11.1f}")
    ratio = cost[10_000] / cost[100]
    print(f"cost of a rollout at 10,000 in flight, against 100: {ratio:.2f} (reach <= 1.3)")
    print(f"rollouts/s at 10,000 in flight: {1e6 / cost[10_000]:,.0f} (reach >= 300)")
    print(f"peak memory at 10,000 in flight: {memory_mib(10_000, arguments.hosts):.0f} MiB (reach < 4096)")
    return 0 if ratio <= 1.3 and cost[10_000] <= 1e6 / 300 else 1


if __name__ == "__main__":
    sys.exit(main())
