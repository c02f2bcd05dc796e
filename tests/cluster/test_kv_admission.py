"""Admission by KV use: what always holds, and what it does to an engine (simulated)."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollcage.cluster.kv_admission import FIRST_WINDOW, SHED_FROM, KvAdmission

STEPS = st.lists(
    st.one_of(
        st.just(("request", False)),
        st.just(("request", True)),
        st.tuples(st.just("end"), st.integers(0, 1 << 30)),
        st.tuples(st.just("leave"), st.integers(0, 1 << 30)),
        st.tuples(st.just("measure"), st.floats(0, 1)),
    ),
    max_size=120,
)


@given(STEPS)
def test_whatever_happens_requests_go_in_order_and_never_stand_still(
    steps: list[tuple[str, float]],
) -> None:
    admission, waiting, running = KvAdmission(), [], set[str]()
    alone = set[str]()
    for number, (step, what) in enumerate(steps):
        if step == "request":
            name = f"r{number}"
            admission.request(name, alone=bool(what))
            waiting.append(name)
            if what:
                alone.add(name)
        elif step == "end" and running:
            admission.ended(gone := sorted(running)[int(what) % len(running)])
            running.discard(gone)
        elif step == "leave" and waiting:
            admission.ended(waiting.pop(int(what) % len(waiting)))
        elif step == "measure":
            admission.measured(what)
        before = set(running)
        admitted = admission.admit()
        # In their order: only what must run alone is passed, and only while another of its kind runs.
        passed = [name for name in waiting if name not in admitted]
        for name in passed:
            behind = [other for other in admitted if waiting.index(other) > waiting.index(name)]
            assert not behind or (name in alone and alone & (running | set(admitted)))
        assert admitted == [name for name in waiting if name in admitted]
        running |= set(admitted)
        waiting = passed
        assert admission.running == running
        assert admission.waiting == len(waiting)
        assert len(running & alone) <= 1
        assert running or not waiting, "nothing runs, and yet something waits"
        assert len(running) <= max(admission.window, len(before), 1)
        assert admission.window >= 1


@given(st.lists(st.floats(SHED_FROM, 1), min_size=1, max_size=60))
def test_a_full_cache_sheds_until_one_is_left_and_no_request_is_aborted(uses: list[float]) -> None:
    admission = KvAdmission()
    for number in range(2 * FIRST_WINDOW):
        admission.request(f"r{number}")
    started = admission.admit()
    for use in uses:
        before = admission.window
        admission.measured(use)
        assert admission.admit() == []
        assert admission.running == set(started)
        assert admission.window == min(before, int(len(started) * 0.9))
    for name in started:
        admission.ended(name)
    assert admission.admit(), "with nothing running the first one goes"


def test_the_window_grows_only_where_it_is_what_holds_requests_back() -> None:
    admission = KvAdmission()
    admission.request("only")
    admission.admit()
    for _ in range(50):
        admission.measured(0.1)
        admission.admit()
    assert admission.window == FIRST_WINDOW
    for number in range(1000):
        admission.request(f"r{number}")
    windows = []
    for _ in range(4):
        admission.admit()
        admission.measured(0.1)
        windows.append(admission.window)
    assert windows == [2 * FIRST_WINDOW, 4 * FIRST_WINDOW, 8 * FIRST_WINDOW, 16 * FIRST_WINDOW]
    for use, more in ((0.7, 1), (0.85, 0), (0.89, 0)):
        before = admission.window
        admission.admit()
        admission.measured(use)
        assert admission.window == before + more


def test_nothing_goes_while_it_is_paused() -> None:
    admission = KvAdmission()
    admission.pause()
    admission.request("a")
    assert admission.admit() == []
    admission.resume()
    assert admission.admit() == ["a"]


def test_an_id_twice_is_an_error() -> None:
    admission = KvAdmission()
    admission.request("a")
    with pytest.raises(ValueError, match="here already"):
        admission.request("a")


@dataclass
class Engine:
    """An engine with `blocks` of KV cache whose requests each grow by one block a step. What no longer fits is
    preempted as vLLM does it: the youngest gives up its blocks and computes them again."""

    blocks: int
    batch: int
    running: dict[str, int] = field(default_factory=dict)
    queue: deque[str] = field(default_factory=deque)
    lost: int = 0
    steps: int = 0
    done_blocks: int = 0

    @property
    def use(self) -> float:
        return min(1.0, sum(self.running.values()) / self.blocks)

    def step(self, sizes: dict[str, int], prompts: dict[str, int]) -> list[str]:
        self.steps += 1
        while self.queue and len(self.running) < self.batch:
            name = self.queue[0]
            if sum(self.running.values()) + prompts[name] > self.blocks:
                break
            self.running[self.queue.popleft()] = prompts[name]
        while self.running and sum(self.running.values()) + len(self.running) > self.blocks:
            youngest = next(reversed(self.running))
            self.lost += self.running.pop(youngest)
            self.queue.appendleft(youngest)
        ended = []
        for name in list(self.running):
            self.running[name] += 1
            self.done_blocks += 1
            if self.running[name] >= sizes[name]:
                del self.running[name]
                ended.append(name)
        return ended


def run(requests: int, blocks: int, window: int | None, *, every: int = 4, seed: int = 1) -> Engine:
    """Feed an engine `requests`, all there from the start; `window` None: by `KvAdmission`, else a constant."""
    numbers = random.Random(seed)
    prompts = {f"r{i}": numbers.randint(4, 40) for i in range(requests)}
    sizes = {name: size + numbers.randint(5, 60) for name, size in prompts.items()}
    engine, admission = Engine(blocks, batch=256), KvAdmission()
    for name in prompts:
        admission.request(name)
    if window is not None:
        admission.window = window
    left = requests
    while left:
        engine.queue.extend(admission.admit())
        for name in engine.step(sizes, prompts):
            admission.ended(name)
            left -= 1
        if engine.steps % every == 0 and window is None:
            admission.measured(engine.use, len(engine.queue))
        assert engine.steps < 200_000
    return engine


@pytest.mark.parametrize("blocks", [400, 1000, 3000])
def test_it_loses_little_to_preemption_and_keeps_the_engine_busy(blocks: int) -> None:
    """Against the best of several constant windows, which nobody could have known, and against no admission at all."""
    ours = run(300, blocks, None)
    constants = [run(300, blocks, window) for window in (8, 16, 32, 64, 300)]
    best, free = min(engine.steps for engine in constants), constants[-1]
    assert ours.steps <= 1.3 * best, (ours.steps, best)
    assert free.lost > 5000, "without admission the engine preempts"
    assert ours.lost <= 0.4 * free.lost, (ours.lost, free.lost)
