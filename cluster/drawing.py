"""The drawing of tasks for a stream that runs: as much as its readers leave room for, by the weights in effect.

    RUN/feed/<name>-<rank>.json   a reader's progress        -> room
    RUN/feed/weights.json         what a trainer wants drawn -> the stream's weights, noted in RUN/curriculum.jsonl
    RUN/feed/finish.json          a trainer has enough       -> no more is drawn, groups under way end

Files are looked at every `LOOK_SEC`, in a thread. What cannot be read is said once and changes nothing: readers replace
their files whole, and what lies there otherwise is nobody's progress.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollcage.cluster.decisions import TaskKey
from rollcage.cluster.plan import JobPlan
from rollcage.cluster.scheduler import Scheduler
from rollcage.cluster.stream import Stream, room
from rollcage.rollout import curriculum
from rollcage.rollout.arrow import Location
from rollcage.rollout.feed_files import acknowledged, acknowledgements

WHILE_IDLE = 4
"""How many times the concurrency may wait while slots idle: what waits then waits for images. Else as many as that: the
fewer, the sooner other weights are felt."""

LOOK_SEC, LOOK_AFAR_SEC = 0.1, 1.0
"""Between looks at the readers' files: on this machine's disk, and at an object store."""

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)
"""What a file raises that is not what it should be."""


@dataclass(frozen=True)
class Seen:
    """What lies in RUN/feed/. `weights`: what `weights.json` holds, None where there is none."""

    acknowledged: int
    weights: Mapping[str, Any] | None
    finish: bool


def look(location: Location) -> Seen:
    """Read the files of RUN/feed/. Raises `OSError`, `ValueError` and `TypeError` for one that cannot be read."""
    weights = location.read_json(curriculum.WEIGHTS)
    finish = location.read_json(curriculum.FINISH)
    return Seen(acknowledged(acknowledgements(location)), weights and weights["weights"], finish is not None)


class Drawing:
    """A stream's draws, put into the scheduler as there is room. `committed`: batches of `rollouts/` that
    the run held when its driver began."""

    def __init__(self, plan: JobPlan, location: Location, say: Callable[[str], None]) -> None:
        assert plan.stream is not None
        self.committed = 0
        self._plan = plan
        self._max_lag = max(plan.stream.max_lag_groups, len(plan.agents))
        self._keys: dict[str, TaskKey] = {key.name: key for key in plan.task_keys()}
        self._stream = Stream(
            self._keys,
            seed=plan.seed,
            draws=plan.stream.draws,
            weights=plan.stream.weights,
            drawn=plan.stream.drawn,
        )
        self._wanted: dict[str, float] = dict(plan.stream.weights)
        self._taken: Mapping[str, Any] | None = None
        self._location = location
        self._say = say
        self._said: set[str] = set()
        self._changed: Callable[[], object] = lambda: None
        self._acknowledged = 0
        self._finished = False
        self._broken = {broken.key.name for broken in plan.broken}

    async def begin(self) -> None:
        """Note the weights that the job begins with. An end that an earlier driver was asked for is over. Raises
        `OSError` where the run directory cannot be written."""
        await asyncio.to_thread(self._location.remove, curriculum.FINISH)
        await self._note("job")
        await self._look()

    async def set_weights(self, weights: Mapping[str, float]) -> int:
        """As `rollcage.rollout.curriculum.set_weights`, and have them in effect. Returns the draw from which on. Raises
        `ValueError` and `OSError`."""
        await asyncio.to_thread(curriculum.set_weights, self._location, weights)
        await self._look()
        return self._stream.total

    async def watch(self, changed: Callable[[], object]) -> None:
        """Look at what readers and trainers write, for ever; `changed` is told where that is something new."""
        self._changed = changed
        while True:
            await asyncio.sleep(LOOK_SEC if self._location.local else LOOK_AFAR_SEC)
            await self._look()

    async def _look(self) -> None:
        try:
            seen = await asyncio.to_thread(look, self._location)
        except (OSError, *UNREADABLE) as error:
            self._say_once(f"{self._location}/feed holds what cannot be read, and is not heeded: {error!r}")
            return
        if seen.weights is not None and seen.weights != self._taken:
            self._taken = seen.weights
            await self._take(seen.weights)
        finish, moved = seen.finish and not self._finished, seen.acknowledged != self._acknowledged
        if finish:
            self._say("the trainer has enough: no more groups; those under way end")
        self._finished = self._finished or seen.finish
        self._acknowledged = seen.acknowledged
        if finish or moved:
            self._changed()

    async def _take(self, weights: Mapping[str, Any]) -> None:
        try:
            self._stream.set_weights(weights)
        except (ValueError, AttributeError) as error:
            self._say(f"{self._location}/{curriculum.WEIGHTS} changes nothing: {error}")
            return
        self._wanted.update(weights)
        self._say(f"new weights for {len(weights)} tasks from draw {self._stream.total} on")
        await self._note("trainer")

    async def _note(self, by: str) -> None:
        line = {"at": time.time(), "draw": self._stream.total, "by": by, "weights": self._wanted}
        await asyncio.to_thread(_append, self._location, json.dumps(line) + "\n")

    def drop(self, task: str) -> None:
        """Draw this task no more: it is quarantined. One that could not be loaded is drawn once all the same, so
        that the run has it."""
        if task not in self._broken:
            self._stream.drop(task)

    def end(self) -> None:
        """Draw no more."""
        self._finished = True

    @property
    def ended(self) -> bool:
        """Nothing more will be drawn."""
        return self._finished or self._stream.ended

    def fill(self, scheduler: Scheduler, now: float) -> None:
        """Give the scheduler as many groups as there is room for and it may soon begin. Ask it for what is to be begun
        first: slots that idle then have nothing that they could do. Once nothing more is to be
        drawn because the trainer has enough, what is not begun is withdrawn."""
        if self._finished:
            scheduler.withdraw(now)
            return
        while not self._stream.ended:
            counts = scheduler.counts()
            left = room(
                self._max_lag,
                committed=self.committed + counts.groups_done,
                acknowledged=self._acknowledged,
                open_groups=counts.groups - counts.groups_done,
            )
            if left < len(self._plan.agents):
                if not self._acknowledged:
                    self._say_once(
                        f"{self._max_lag} groups wait for a reader: more are begun as they are read"
                    )
                return
            idle = counts.in_flight < self._plan.concurrency
            if counts.waiting >= self._plan.concurrency * (WHILE_IDLE if idle else 1):
                return
            draw = self._stream.draw()
            assert draw is not None
            scheduler.add(self._plan.drawn(self._keys[draw.task], draw.draw), now)
            if draw.task in self._broken:
                self._stream.drop(draw.task)
        if self._stream.starved:
            self._say_once("no task is left to draw: every one is quarantined, or has the weight 0")

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self._say(line)


def _append(location: Location, text: str) -> None:
    path = f"{location.path}/{curriculum.HISTORY}"
    if location.local is None:  # an object is written whole; there are few of these lines
        lines = [json.dumps(line) + "\n" for line in curriculum.read_history(location)]
        with location.filesystem.open_output_stream(path) as sink:
            sink.write("".join([*lines, text]).encode())
        return
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
