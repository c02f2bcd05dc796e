"""A job is driven to its end whatever its hosts do. Hosts are scripted, the ledger is real."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollcage.cluster import driver as driver_module
from rollcage.cluster import progress as progress_module
from rollcage.cluster import retries as retries_module
from rollcage.cluster.decisions import TaskKey
from rollcage.cluster.driver import Driver, job_counts
from rollcage.cluster.earlier import count_earlier
from rollcage.cluster.host import HostLoad, HostLost, Prepared
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.plan import AgentPlan, BrokenTask, JobPlan
from rollcage.cluster.progress import JobProgress
from rollcage.metrics.definitions import FAMILIES
from rollcage.rollout.arrow import Location, read_attempts, read_rollouts, read_shards
from rollcage.rollout.outcome import BY_NAME, TABLE, Domain, Evidence, Outcome, RolloutError, SandboxError
from rollcage.rollout.rollout import AttemptSpec
from rollcage.rollout.task import Environment, Step, Task, hide_values
from rollcage.rollout.trajectory import Attempt, Reward, Trajectory

Answer = str | BaseException | Awaitable[str]
"""How an attempt ends: `passed`, `failed` or an error class; what the host raises; or what will say so."""


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of the real backoff."""
    real = retries_module.backoff
    monkeypatch.setattr(retries_module, "backoff", lambda name, retry: real(name, retry) / 1000)


class World:
    """A job of `tasks` x `samples`, the hosts it runs on, and everything that was asked of them."""

    def __init__(
        self,
        run: Path,
        *,
        tasks: int = 2,
        samples: int = 4,
        hosts: int = 1,
        replacements: int = 0,
        agents: tuple[str, ...] = ("a",),
        redact: Callable[[str], str] = lambda text: text,
        **plan: Any,
    ) -> None:
        made = [make_task(f"task{number}") for number in range(tasks)]
        self.plan = JobPlan(
            job="job-1",
            agents=tuple(AgentPlan(label, "nop", samples) for label in agents),
            tasks={TaskKey(task.name, task.digest): task for task in made},
            **plan,
        )
        self.run = run
        self.ledger = Ledger.create(run, {"job": "job-1"})
        self.attempt: Callable[[AttemptSpec, Host], Answer] = lambda _spec, _host: "passed"
        self.build: Callable[[Task, Host], Prepared | BaseException] = lambda _task, _host: Prepared()
        self.hosts = [Host(self, f"host{number}") for number in range(hosts)]
        self.replacements = replacements
        self.asked: list[AttemptSpec] = []
        self.built: list[tuple[str, str]] = []
        self.said = io.StringIO()
        self.total = sum(1 for _ in self.plan.rollouts())
        progress = JobProgress(self.total, Console(file=self.said, width=200), redact)
        self.driver = Driver(self.plan, self.ledger, self, progress)

    async def start(self) -> list[Any]:
        return list(self.hosts)

    async def replace(self, lost: Any) -> Any:
        assert not lost.running, "a lost host is drained first"
        await asyncio.sleep(0.02)  # it takes some time to start one
        if not self.replacements:
            return None
        self.replacements -= 1
        self.hosts.append(Host(self, f"{lost.name}-again"))
        return self.hosts[-1]

    async def drive(self) -> Ends:
        """Run the job, finish the ledger, and hold what must hold of every job."""
        async with asyncio.timeout(60):
            await self.driver.run()
        return await self.ends()

    async def ends(self) -> Ends:
        # Before `finish`: it is the driver that commits groups, each as one batch.
        batches = list(read_shards(Location(self.run), "rollouts", ["agent", "task", "sample"]))
        groups = [{(row["agent"], row["task"]) for row in batch.to_pylist()} for batch in batches]
        assert all(len(group) == 1 for group in groups)
        assert len(groups) == len(self.plan.task_keys()) * len(self.plan.agents)
        for batch in batches:
            assert batch["sample"].to_pylist() == list(range(self.plan.agents[0].samples))
        await self.ledger.finish({})
        ends = Ends(self.run)
        asked = [spec.attempt_id for spec in self.asked]
        assert sorted(ends.attempt_ids) == sorted(asked), "attempts in the ledger = attempts dispatched"
        assert len(set(asked)) == len(asked)
        keys = [(row["agent"], row["task"], row["sample"]) for row in ends.rollouts]
        assert sorted(keys) == sorted((key.agent, key.task, key.sample) for key in self.plan.rollouts())
        self.check_counts()
        return ends

    def check_counts(self) -> None:
        """What was counted for Prometheus is what the ledger holds, and what a driver that goes on begins with."""
        held = job_counts(self.plan)
        count_earlier(Location(self.run), held, ())
        then, now = held.snapshot(), self.driver.counts.snapshot()
        for family in FAMILIES:
            if family.ledger:
                assert now.values[family.name] == then.values[family.name], family.name
        assert now.values["attempts_in_flight"] == {(): 0.0}

    @property
    def text(self) -> str:
        return self.said.getvalue()


class Host:
    """A host that does what its world says. Gone once it has raised `HostLost`."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.running: set[asyncio.Task[Any]] = set()
        self.cancels = 0
        self.closed = 0
        self.gone: HostLost | None = None
        self.room: int | None = None
        self.so_far = (0, 0)
        self.coming: list[list[str]] = []

    async def prepare(self, task: Task) -> Prepared:
        self.world.built.append((task.name, self.name))
        await asyncio.sleep(0)
        prepared = self.world.build(task, self)
        if isinstance(prepared, BaseException):
            raise prepared
        return prepared

    async def expect(self, coming: Sequence[str]) -> HostLoad:
        self.coming.append(list(coming))
        if self.gone is not None:
            raise self.gone
        return HostLoad(self.room, *self.so_far)

    async def run(self, spec: AttemptSpec, policy: str | None) -> Attempt:
        self.world.asked.append(spec)
        me = asyncio.ensure_future(self._run(spec))
        self.running.add(me)
        me.add_done_callback(self.running.discard)
        return await me

    async def _run(self, spec: AttemptSpec) -> Attempt:
        await asyncio.sleep(0)
        if self.gone is not None:
            raise self.gone
        answer = self.world.attempt(spec, self)
        if isinstance(answer, HostLost):
            self.gone = answer
        try:
            if isinstance(answer, BaseException):
                raise answer
            said = answer if isinstance(answer, str) else await answer
        except asyncio.CancelledError:
            if isinstance(answer, asyncio.CancelledError):
                raise
            said = "cancelled"
        if self.gone is not None:
            raise self.gone
        return self.record(spec, said)

    def record(self, spec: AttemptSpec, said: str) -> Attempt:
        row = BY_NAME.get(said)
        outcome = Outcome(said) if said in tuple(Outcome) else Outcome.INVALID
        if row is not None and row.reward_valid:
            outcome = Outcome.FAILED
        valid = outcome in (Outcome.PASSED, Outcome.FAILED)
        return Attempt(
            spec.attempt_id,
            spec.job,
            spec.task.name,
            spec.task.digest,
            spec.sample,
            spec.number,
            spec.agent_label,
            "",
            self.name,
            outcome,
            error_class=None if row is None else row.name,
            evidence=None if row is None else Evidence(f"{said} on {self.name}", "engine"),
            reward=Reward(float(outcome is Outcome.PASSED)) if valid else None,
            trajectory=Trajectory(),
            draw=spec.draw,
        )

    async def cancel(self) -> None:
        self.cancels += 1
        for attempt in self.running:
            attempt.cancel()

    async def close(self) -> None:
        self.closed += 1
        await self.cancel()
        if self.running:
            await asyncio.wait(self.running)


class Ends:
    """What the run's files say."""

    def __init__(self, run: Path) -> None:
        self.rollouts: list[dict[str, Any]] = read_rollouts(run).to_pylist()
        self.attempts: list[dict[str, Any]] = read_attempts(run).to_pylist()
        self.attempt_ids = [row["attempt_id"] for row in self.attempts]
        self.outcomes = Counter((row["outcome"], row["error_class"]) for row in self.rollouts)
        self.attempt_errors = Counter(row["error_class"] for row in self.attempts)


def make_task(name: str) -> Task:
    step = Step("main", "do it", Path("tests"), None)
    return Task(name, Path(name), f"digest-of-{name}", Environment(None, "image"), (step,))


def broken_task(name: str) -> BrokenTask:
    said = f"{name}/task.toml:3: this is not TOML (mend the line)"
    return BrokenTask(TaskKey(name, "d"), "task_malformed", Evidence(said, "task files"))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 -- any of many things may make it true
            await asyncio.sleep(0.001)


# Whole jobs


async def test_every_rollout_of_every_agent_is_run_once_and_written(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=3, samples=4, agents=("a", "b"), concurrency=5)
    world.attempt = lambda spec, _host: "passed" if spec.sample % 2 else "failed"
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 12, ("failed", None): 12}
    assert len(ends.attempts) == 24
    assert len(world.built) == 3
    assert {row["group_size"] for row in ends.rollouts} == {4}
    assert {row["attempts"] for row in ends.rollouts} == {1}
    assert [host.closed for host in world.hosts] == [1]
    assert "24/24 rollouts, 12 passed, 12 failed" in world.text


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_lost_or_counted_twice_when_anything_may_happen(tmp_path: Path, seed: int) -> None:
    random_ = random.Random(seed)
    classes = [row.name for row in TABLE if row.domain in (Domain.INFRA, Domain.AGENT, Domain.VERIFIER)]
    world = World(
        tmp_path, tasks=10, samples=5, hosts=3, replacements=40, concurrency=12, broken=(broken_task("bad"),)
    )

    async def later(said: str) -> str:
        await asyncio.sleep(random_.random() / 200)
        return said

    def attempt(_spec: AttemptSpec, host: Host) -> Answer:
        draw = random_.random()
        if draw < 0.02:
            return HostLost(f"{host.name} is gone")
        if draw < 0.05:
            return RuntimeError("no name for this")
        return later(random_.choice(["passed", "failed", "passed", "failed", *random_.sample(classes, 1)]))

    def build(_task: Task, _host: Host) -> Prepared | BaseException:
        draw = random_.random()
        if draw < 0.1:
            return Prepared(error_class="image_pull", evidence=Evidence("the registry is away"))
        return HostLost("gone while it built") if draw < 0.13 else Prepared()

    world.attempt, world.build = attempt, build
    ends = await world.drive()
    assert len(ends.rollouts) == 55
    assert all(row["evidence"] for row in ends.rollouts if row["outcome"] == "invalid")
    assert all(host.closed == (0 if host.name in world.driver._lost else 1) for host in world.hosts)


async def test_every_error_class_is_tried_as_often_as_the_table_says(tmp_path: Path) -> None:
    rows = [row for row in TABLE if row.name != "cancelled" and row.domain is not Domain.TASK]
    world = World(tmp_path, tasks=len(rows), samples=1, hosts=2, concurrency=4)
    world.attempt = lambda spec, _host: rows[int(spec.task.name[4:])].name
    ends = await world.drive()
    for rollout in ends.rollouts:
        row = rows[int(rollout["task"][4:])]
        assert rollout["error_class"] == row.name
        assert rollout["outcome"] == ("failed" if row.reward_valid else "invalid")
        assert rollout["attempts"] == (1 if row.reward_valid else row.retries + 1), row.name
        assert rollout["evidence"]["message"].startswith(row.name)


async def test_a_job_may_have_budgets_of_its_own(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=1, samples=2, retries={"docker_timeout": 0, "image_pull": 7})
    world.attempt = lambda spec, _host: ["docker_timeout", "image_pull"][spec.sample]
    ends = await world.drive()
    assert {row["error_class"]: row["attempts"] for row in ends.rollouts} == {
        "docker_timeout": 1,
        "image_pull": 8,
    }


async def test_only_the_sample_that_infra_failed_is_run_again(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=1, samples=8, concurrency=8)
    world.attempt = lambda spec, _host: (
        "container_lost" if spec.sample == 3 and spec.number == 1 else "passed"
    )
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 8}
    assert sorted(row["attempts"] for row in ends.rollouts) == [1] * 7 + [2]
    assert "retried container_lost 1" in world.text


# Quarantine


async def test_an_image_that_does_not_build_costs_no_attempt(tmp_path: Path) -> None:
    """CASES 9."""
    evidence = Evidence("RUN exit 7 returned 7", "builder", exit_code=7, log_tail="Step 2/2 : RUN exit 7")
    world = World(tmp_path, tasks=1, samples=8, concurrency=8)
    world.build = lambda _task, _host: Prepared(error_class="image_build", evidence=evidence)
    ends = await world.drive()
    assert ends.attempts == []
    assert world.built == [("task0", "host0")]
    assert ends.outcomes == {("invalid", "image_build"): 8}
    for row in ends.rollouts:
        assert Evidence(**row["evidence"] | {"also": ()}) == evidence
        assert (row["stage"], row["attempts"], row["attempt_id"]) == ("build", 0, "")
    assert world.text.count("quarantined task0: image_build: RUN exit 7 returned 7") == 1


async def test_a_broken_task_does_not_stop_the_others(tmp_path: Path) -> None:
    """CASES 26."""
    world = World(tmp_path, tasks=3, samples=2, broken=(broken_task("bad"),))
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 6, ("invalid", "task_malformed"): 2}
    [bad, _] = [row for row in ends.rollouts if row["task"] == "bad"]
    assert bad["evidence"]["message"].startswith("bad/task.toml:3:")
    assert (bad["stage"], bad["attempts"]) == ("load", 0)
    assert len(ends.attempts) == 6


async def test_a_verifier_that_fails_twice_takes_its_task_out_and_the_others_go_on(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=2, samples=6, concurrency=1)
    world.attempt = lambda spec, _host: "reward_missing" if spec.task.name == "task0" else "passed"
    ends = await world.drive()
    assert ends.outcomes == {("invalid", "reward_missing"): 6, ("passed", None): 6}
    assert ends.attempt_errors["reward_missing"] < 12
    assert all(row["evidence"]["message"].startswith("reward_missing on") for row in ends.rollouts[:6])


@pytest.mark.parametrize("limit", [0, 1])
async def test_the_job_stops_when_too_many_tasks_are_quarantined(tmp_path: Path, limit: int) -> None:
    world = World(tmp_path, tasks=6, samples=2, concurrency=1, build_slots=1, max_quarantined_tasks=limit)
    world.build = lambda task, _host: (
        Prepared(error_class="image_build") if task.name in ("task0", "task1") else Prepared()
    )
    ends = await world.drive()
    invalid = ends.outcomes["invalid", "image_build"]
    assert invalid == 2 * (limit + 1)
    assert ends.outcomes["cancelled", "cancelled"] > 0
    assert f"more than {limit} tasks are quarantined: the job stops" in world.text


async def test_a_broken_task_counts_among_the_quarantined(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=2, samples=2, max_quarantined_tasks=0, broken=(broken_task("bad"),))
    ends = await world.drive()
    assert ends.outcomes == {("invalid", "task_malformed"): 2, ("cancelled", "cancelled"): 4}
    assert ends.attempts == []


# Hosts


async def test_hosts_are_told_what_comes_next_in_the_jobs_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "STEER_SEC", 0.01)
    world = World(tmp_path / "run", tasks=3, samples=2, concurrency=2, warm=3)
    world.attempt = lambda _spec, _host: asyncio.sleep(0.05, "passed")
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 6}
    digests = [key.digest for key in world.plan.task_keys()]
    ahead = [coming for coming in world.hosts[0].coming if coming]
    assert [digests[1], digests[1], digests[2]] in ahead
    assert all(coming == sorted(coming, key=digests.index) for coming in ahead)
    assert all(len(coming) <= 3 for coming in ahead)


async def test_a_host_that_cannot_be_steered_is_told_of_once_and_runs_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "STEER_SEC", 0.01)
    world = World(tmp_path / "run", tasks=2, samples=2, concurrency=2, warm=1)
    world.attempt = lambda _spec, _host: asyncio.sleep(0.05, "passed")

    async def expect(_coming: Sequence[str]) -> HostLoad:
        raise ValueError("a slip")

    monkeypatch.setattr(world.hosts[0], "expect", expect)
    assert (await world.drive()).outcomes == {("passed", None): 4}
    assert world.text.count("starts nothing ahead") == 1


async def test_while_nothing_ends_the_turns_say_that_something_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in (
        (driver_module, "STEER_SEC"),
        (driver_module, "HEARTBEAT_SEC"),
        (progress_module, "LINE_SEC"),
    ):
        monkeypatch.setattr(module, name, 0.02)
    world = World(tmp_path, tasks=1, samples=1)
    world.hosts[0].so_far = (3, 120)
    held = Held(world)
    job = asyncio.ensure_future(world.drive())
    await until(lambda: "0/1 rollouts, 1 in flight (3 turns, 120 tokens so far), " in world.text)
    held.go.set()
    assert (await job).outcomes == {("passed", None): 1}
    assert "1/1 rollouts, 1 passed, 0 in flight, " in world.text


async def test_a_host_that_is_full_gets_no_more_than_it_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "STEER_SEC", 0.01)
    world = World(tmp_path / "run", tasks=10, samples=4, hosts=2, concurrency=16)
    small = world.hosts[0]
    small.room = 2
    most = 0

    async def take(_spec: AttemptSpec, host: Host) -> str:
        nonlocal most
        await asyncio.sleep(0.02)
        if len(world.asked) > 16 and host is small:
            most = max(most, len(host.running))
        return "passed"

    world.attempt = take
    assert (await world.drive()).outcomes == {("passed", None): 40}
    assert 1 <= most <= 2


async def test_a_host_lost_among_20_rollouts_is_replaced_and_all_end(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=4, samples=5, concurrency=8, replacements=1)

    def attempt(_spec: AttemptSpec, host: Host) -> Answer:
        if host.name == "host0" and len(world.asked) > 10:
            return HostLost("its node is gone")
        return "passed"

    world.attempt = attempt
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 20}
    assert 1 <= ends.attempt_errors["host_lost"] <= 8
    lost = next(row for row in ends.attempts if row["error_class"] == "host_lost")
    assert (lost["host"], lost["evidence"]["message"]) == ("host0", "its node is gone")
    assert [(host.name, host.closed) for host in world.hosts] == [("host0", 0), ("host0-again", 1)]
    assert world.driver.unclean == set()


async def test_the_other_host_takes_over_where_none_can_be_had_in_a_lost_ones_place(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=4, samples=5, hosts=2, concurrency=8)
    world.attempt = lambda _spec, host: HostLost("its node is gone") if host.name == "host1" else "passed"
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 20}
    assert ends.attempt_errors["host_lost"] >= 1
    assert "no host could be had in the place of host1" in world.text


async def test_with_no_host_left_the_rest_is_written_as_cancelled(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=4, samples=5, concurrency=4)
    world.attempt = lambda _spec, _host: HostLost("gone") if len(world.asked) > 10 else "passed"
    with pytest.raises(HostLost, match="every host is lost"):
        await world.drive()
    ends = await world.ends()
    assert set(ends.outcomes) == {("passed", None), ("cancelled", "cancelled")}
    assert ends.outcomes.total() == 20
    assert "no host could be had in the place of host0" in world.text
    assert world.driver.unclean == {"host0"}


async def test_with_no_host_at_all_nothing_is_begun(tmp_path: Path) -> None:
    world = World(tmp_path)

    async def start() -> list[Any]:
        raise SandboxError("docker_unavailable", "the engine does not answer")

    world.start = start  # type: ignore[method-assign]
    with pytest.raises(RolloutError, match="docker_unavailable"):
        await world.driver.run()
    assert not world.driver.begun
    assert read_rollouts(tmp_path).num_rows == 0


async def test_a_host_lost_while_it_builds_is_replaced(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=2, samples=2, replacements=1)
    world.build = lambda _task, host: HostLost("oom", "host_oom") if host.name == "host0" else Prepared()
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 4}
    assert not ends.attempt_errors["host_lost"]


async def test_one_call_of_a_lost_host_that_ends_late_is_waited_for(tmp_path: Path) -> None:
    """The host is drained before another takes its place, so that nothing of it ends twice."""
    world = World(tmp_path, tasks=1, samples=2, concurrency=2, replacements=1)
    late = asyncio.Event()

    async def end_late() -> str:
        await late.wait()
        return "passed"

    def attempt(spec: AttemptSpec, host: Host) -> Answer:
        if host.name != "host0":
            return "passed"
        if spec.sample == 0:
            return end_late()
        asyncio.get_running_loop().call_later(0.05, late.set)
        return HostLost("gone")

    world.attempt = attempt
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 2}
    assert ends.attempt_errors == {"host_lost": 2, None: 2}


@pytest.mark.parametrize("error", [RuntimeError("no name for this"), asyncio.CancelledError(), KeyError("x")])
async def test_what_has_no_name_is_an_internal_error_tried_once_more(
    tmp_path: Path, error: BaseException
) -> None:
    world = World(tmp_path, tasks=1, samples=3)
    world.attempt = lambda spec, _host: error if spec.sample == 1 else "passed"
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 2, ("invalid", "internal_error"): 1}
    [bad] = [row for row in ends.rollouts if row["outcome"] == "invalid"]
    assert bad["attempts"] == 2
    assert type(error).__name__ in bad["evidence"]["message"]
    assert "Traceback" in bad["evidence"]["log_tail"]


async def test_a_build_that_raises_without_a_name_is_tried_once_more_and_quarantines(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=2, samples=3)
    world.build = lambda task, _host: OSError("odd") if task.name == "task1" else Prepared()
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 3, ("invalid", "internal_error"): 3}
    assert len(world.built) == 3
    assert {row["evidence"]["message"] for row in ends.rollouts if row["task"] == "task1"} == {"OSError: odd"}


async def test_a_host_that_does_not_close_well_is_told_of(tmp_path: Path) -> None:
    world = World(tmp_path, hosts=2)

    async def close() -> None:
        raise SandboxError("docker_timeout", "no answer")

    world.hosts[0].close = close  # type: ignore[method-assign]
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 8}
    assert "host host0 did not close well: docker_timeout: no answer" in world.text
    assert world.driver.unclean == {"host0"}
    assert world.hosts[1].closed == 1


# Interrupts


class Held:
    """Attempts that run until they are let go."""

    def __init__(self, world: World) -> None:
        self.go = asyncio.Event()
        world.attempt = lambda _spec, _host: self._wait()

    async def _wait(self) -> str:
        await self.go.wait()
        return "passed"


async def test_interrupted_once_what_runs_ends_and_nothing_new_begins(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=4, samples=5, concurrency=3)
    held = Held(world)
    job = asyncio.ensure_future(world.drive())
    await until(lambda: len(world.asked) == 3)
    world.driver.stop()
    held.go.set()
    ends = await job
    assert ends.outcomes == {("passed", None): 3, ("cancelled", "cancelled"): 17}
    assert len(ends.attempts) == 3
    assert all(row["evidence"] is None for row in ends.rollouts)
    assert world.hosts[0].closed == 1


async def test_interrupted_twice_what_runs_is_cancelled_and_written(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=4, samples=5, hosts=2, concurrency=3)
    Held(world)
    job = asyncio.ensure_future(world.drive())
    await until(lambda: len(world.asked) == 3)
    world.driver.stop()
    world.driver.stop()
    ends = await job
    assert ends.outcomes == {("cancelled", "cancelled"): 20}
    assert len(ends.attempts) == 3
    assert all(host.cancels >= 1 and host.closed == 1 for host in world.hosts)


async def test_after_the_grace_what_still_runs_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "GRACE_SEC", 0.05)
    world = World(tmp_path, tasks=1, samples=3, concurrency=3)
    Held(world)
    job = asyncio.ensure_future(world.drive())
    await until(lambda: len(world.asked) == 3)
    world.driver.stop()
    assert (await job).outcomes == {("cancelled", "cancelled"): 3}


async def test_once_money_runs_out_what_runs_ends_without_a_limit_and_an_interrupt_cancels_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_module, "GRACE_SEC", 0.05)
    world = World(tmp_path, tasks=1, samples=5, concurrency=3)
    held = Held(world)
    job = asyncio.ensure_future(world.drive())
    await until(lambda: len(world.asked) == 3)
    world.driver.run_out("the job's budget of $1 is spent")
    await asyncio.sleep(0.2)
    assert all(host.cancels == 0 for host in world.hosts)
    held.go.set()
    ends = await job
    assert ends.outcomes == {("passed", None): 3, ("cancelled", "cancelled"): 2}
    told = [row["evidence"] and row["evidence"]["message"] for row in ends.rollouts if not row["attempt_id"]]
    assert told == ["the job's budget of $1 is spent"] * 2, "who reads them can tell them from Ctrl-C"

    world = World(tmp_path / "again", tasks=1, samples=5, concurrency=3)
    Held(world)
    job = asyncio.ensure_future(world.drive())
    await until(lambda: len(world.asked) == 3)
    world.driver.run_out()
    world.driver.run_out()
    world.driver.stop()
    assert (await job).outcomes == {("cancelled", "cancelled"): 5}


async def test_what_waits_for_a_retry_is_cancelled_at_the_first_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries_module, "backoff", lambda _name, _retry: 3600.0)
    world = World(tmp_path, tasks=1, samples=2)
    world.attempt = lambda _spec, _host: "docker_timeout"
    job = asyncio.ensure_future(world.drive())
    await until(lambda: world.driver._scheduler.counts().delayed == 2)
    world.driver.stop()
    ends = await job
    assert ends.outcomes == {("cancelled", "cancelled"): 2}
    assert ends.attempt_errors == {"docker_timeout": 2}
    assert {row["attempts"] for row in ends.rollouts} == {1}


async def test_interrupted_before_there_is_a_host(tmp_path: Path) -> None:
    world = World(tmp_path)
    start = world.start

    async def interrupted_start() -> list[Any]:
        world.driver.stop()
        return await start()

    world.start = interrupted_start  # type: ignore[method-assign]
    ends = await world.drive()
    assert ends.outcomes == {("cancelled", "cancelled"): 8}
    assert world.hosts[0].closed == 1
    assert world.built == []


async def test_a_host_lost_after_the_interrupt_is_still_cleaned_up_after(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=1, samples=3, concurrency=3, replacements=1)
    go = asyncio.Event()

    async def end() -> str:
        await go.wait()
        world.hosts[0].gone = HostLost("killed")
        return "passed"

    world.attempt = lambda _spec, _host: end()
    job = asyncio.ensure_future(world.drive())
    await until(lambda: len(world.asked) == 3)
    world.driver.stop()
    go.set()
    ends = await job
    assert ends.outcomes == {("cancelled", "cancelled"): 3}
    assert ends.attempt_errors == {"host_lost": 3}
    assert [host.closed for host in world.hosts] == [0, 1]


# The ledger


async def test_a_full_disk_ends_the_job_and_hosts_are_closed(tmp_path: Path) -> None:
    world = World(tmp_path, tasks=4, samples=5, hosts=2, concurrency=4)
    held = Held(world)
    record = world.ledger.record_attempt

    async def record_attempt(attempt: Attempt) -> None:
        if len(world.ledger.known) >= 5:
            raise OSError(28, "No space left on device")
        await record(attempt)

    world.ledger.record_attempt = record_attempt  # type: ignore[method-assign]
    held.go.set()
    async with asyncio.timeout(30):
        with pytest.raises(OSError, match="No space left"):
            await world.driver.run()
    assert [host.closed for host in world.hosts] == [1, 1]
    assert not any(host.running for host in world.hosts)
    assert read_rollouts(tmp_path).num_rows >= 5
    world.ledger.close()


@pytest.mark.parametrize("part", ["attempt", "rollout"])
async def test_one_record_that_cannot_be_written_is_one_bad_rollout(tmp_path: Path, part: str) -> None:
    world = World(tmp_path, tasks=1, samples=4)

    async def odd(attempt: Attempt) -> Attempt:
        if attempt.sample != 2:
            return attempt
        if part == "attempt":
            return dataclasses.replace(attempt, phases={"lunch": 1.0})
        return dataclasses.replace(attempt, trajectory=Trajectory(messages=["no message"]))  # type: ignore[list-item]

    run = world.hosts[0].run

    async def run_oddly(spec: AttemptSpec, policy: str | None) -> Attempt:
        return await odd(await run(spec, policy))

    world.hosts[0].run = run_oddly  # type: ignore[method-assign]
    ends = await world.drive()
    assert ends.outcomes == {("passed", None): 3, ("invalid", "internal_error"): 1}


async def test_what_a_host_raises_is_told_and_kept_without_the_values_of_variables(tmp_path: Path) -> None:
    redact = hide_values({"KEY": "s3cret-token-12345"})
    world = World(tmp_path / "run", tasks=1, samples=1, redact=redact)
    world.build = lambda _task, _host: ValueError("bad: S3cret-token-12345")
    ends = await world.drive()
    [row] = ends.rollouts
    assert row["evidence"]["message"] == "ValueError: bad: ${KEY}"
    assert "${KEY}" in row["evidence"]["log_tail"]
    assert "bad: ${KEY}" in world.text
    assert "12345" not in f"{row} {world.text}"
