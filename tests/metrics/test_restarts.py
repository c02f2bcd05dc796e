"""Whatever is killed and whichever snapshot is lost, doubled or late: what is scraped stays true."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from rollcage.metrics.counts import Counts, Snapshot
from rollcage.metrics.definitions import FAMILIES, Kind, Sender
from rollcage.metrics.exporter import Exporter
from rollcage.metrics.job_counts import JobCounts, ending
from rollcage.rollout.outcome import BY_NAME, Outcome

CLASSES = (None, "turn_limit", "network_pool", "reward_missing")
"""Of the attempts that end here: what a scheduler would call passed, failed and twice invalid."""

COUNTERS = {"rollcage_" + family.name for family in FAMILIES if family.kind is Kind.COUNTER} - {
    "rollcage_exporter_snapshots"
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

EVENTS = (
    *("dispatch", "job sends", "host counts", "host sends") * 2,
    *(("end", error_class) for error_class in CLASSES),
    *("kill driver", "kill host", "kill exporter", "job is over", "the last rollout is run again"),
)
events = st.lists(
    st.sampled_from(EVENTS) | st.tuples(st.just("again"), st.integers(0, 30)), min_size=20, max_size=60
)


class World:
    """A run with its ledger, one driver, one host and one exporter."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.exporter = Exporter(state)
        self.ledger: list[tuple[str, str, str, str | None]] = []
        self.rollouts: list[tuple[str, str, str, str | None, int]] = []
        self.again = 0
        self.in_flight = self.drivers = self.hosts = 0
        self.sent: list[tuple[str, Snapshot, str]] = []
        self.host_before = self.host_sent = 0.0
        self.start_driver()
        self.start_host()

    def start_driver(self) -> None:
        self.drivers += 1
        self.in_flight = 0
        self.driver = JobCounts("j", ["a"], [])
        self.driver.resumed(self.ledger, self.rollouts, [])

    def start_host(self) -> None:
        self.hosts += 1
        self.host_before += self.host_sent
        self.host_sent = 0.0
        self.host = Counts(Sender.HOST, {"host": ["h"]})

    def send(self, source: str, snapshot: Snapshot, incarnation: str, *, final: bool = False) -> None:
        self.sent.append((source, snapshot, incarnation))
        self.exporter.accept(source, snapshot, incarnation=incarnation, final=final)

    def do(self, event: str | tuple[str, object]) -> None:
        match event:
            case "dispatch":
                self.in_flight += 1
                self.driver.dispatched()
            case ("end", error_class) if self.in_flight:
                self.in_flight -= 1
                self.end(None if error_class is None else str(error_class))
            case "job sends":
                self.send("j", self.driver.snapshot(), str(self.drivers))
            case "job is over":
                self.send("j", self.driver.snapshot(), str(self.drivers), final=True)
                self.start_driver()
            case "the last rollout is run again" if self.rollouts:
                self.send("j", self.driver.snapshot(), str(self.drivers), final=True)
                self.rollouts.pop()
                self.again += 1
                self.start_driver()
                # A driver tells the exporter as it begins. That of one that never told it anything cannot be known.
                self.send("j", self.driver.snapshot(), str(self.drivers))
            case "host counts":
                self.host.add("image_builds", "built")
                self.host.observe("image_build_seconds", 3)
            case "host sends":
                self.send("h", self.host.snapshot(), str(self.hosts))
                self.host_sent = self.host.value("image_builds", "built")
            case ("again", int(number)) if self.sent:
                source, snapshot, incarnation = self.sent[-1 - number % len(self.sent)]
                self.exporter.accept(source, snapshot, incarnation=incarnation)
            case "kill driver":
                self.start_driver()
            case "kill host":
                self.start_host()
            case "kill exporter":
                self.exporter = Exporter(self.state)

    def end(self, error_class: str | None) -> None:
        outcome = Outcome.PASSED
        if error_class is not None:
            outcome = Outcome.FAILED if BY_NAME[error_class].reward_valid else Outcome.INVALID
        self.ledger.append((str(len(self.ledger)), "a", outcome.value, error_class))
        counts = self.driver._counts
        counts.add("attempts_ended")
        counts.set("attempts_in_flight", self.in_flight)
        counts.add("attempts", *ending(outcome, error_class), "a")
        if outcome is Outcome.INVALID:
            self.driver.retried(error_class)
        else:
            self.rollouts.append((*self.ledger[-1], 1))
            self.driver.rollout("a", outcome, error_class, trajectory=True)

    def scrape(self) -> Samples:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for metric in self.exporter.collect()
            for sample in metric.samples
            if metric.type == "histogram" or metric.name in COUNTERS or metric.name.endswith("_in_flight")
        }


def value(found: Samples, name: str) -> float:
    return found[f"rollcage_{name}", ()]


@settings(max_examples=25, deadline=None)
@given(events)
@example(
    [
        "dispatch",
        "dispatch",
        "job sends",
        ("end", None),
        "kill driver",
        "job sends",
        ("again", 1),
        "job sends",
    ]
)
@example(
    ["dispatch", "job sends", "job is over", "kill exporter", "dispatch", ("end", "turn_limit"), "job sends"]
)
@example(
    [
        "dispatch",
        ("end", None),
        "the last rollout is run again",
        "job sends",
        "kill exporter",
        "dispatch",
        ("end", "turn_limit"),
        "kill driver",
    ]
)
@example(
    [
        "dispatch",
        ("end", None),
        "job sends",
        "the last rollout is run again",
        "dispatch",
        ("end", None),
        "job sends",
    ]
)
@example(
    ["host counts", "host sends", "kill host", "host sends", ("again", 1), "kill exporter", "host counts"]
)
def test_no_counter_falls_and_the_counts_agree_with_the_ledger(
    happened: list[str | tuple[str, object]],
) -> None:
    with tempfile.TemporaryDirectory() as state:
        world = World(Path(state))
        before = world.scrape()
        for event in happened:
            world.do(event)
            now = world.scrape()
            fallen = {key for key, had in before.items() if now[key] < had and "_in_flight" not in key[0]}
            assert not fallen, event
            assert value(now, "attempts_dispatched_total") == (
                value(now, "attempts_ended_total")
                + value(now, "attempts_abandoned_total")
                + value(now, "attempts_in_flight")
            ), event
            before = now
        world.do("job sends")
        world.do("host sends")
        found = world.scrape()
        assert value(found, "attempts_ended_total") == len(world.ledger)
        assert value(found, "attempts_in_flight") == world.in_flight
        ended = {
            key: number for key, number in found.items() if key[0] == "rollcage_attempts_total" and number
        }
        assert sum(ended.values()) == len(world.ledger)
        for error_class in ("turn_limit", "network_pool", "reward_missing"):
            counted = sum(number for key, number in ended.items() if ("error_class", error_class) in key[1])
            assert counted == sum(row[3] == error_class for row in world.ledger)
        retries = sum(number for key, number in found.items() if key[0] == "rollcage_retries_total")
        assert retries == sum(row[2] == "invalid" for row in world.ledger)
        rollouts = sum(number for key, number in found.items() if key[0] == "rollcage_rollouts_total")
        assert rollouts == len(world.rollouts) + world.again
        built = world.host_before + world.host_sent
        assert found["rollcage_image_builds_total", (("result", "built"),)] == built
        assert found["rollcage_image_build_seconds_count", ()] == built
