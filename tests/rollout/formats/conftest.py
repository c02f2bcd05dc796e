"""Rollouts of every shape that a format meets, runs that hold them, and the packages that check what is written.

The packages are no dependencies: each is installed without its own into a folder of the cache, once per machine, and
runs in a process of its own. Where the package index cannot be reached the test is skipped, and says so.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollcage.rollout.arrow import Location
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.policies.smollm2 import cache_dir
from rollcage.rollout.rows import rollouts_batch
from rollcage.rollout.trajectory import (
    Attempt,
    CommandRecord,
    Message,
    Reward,
    Segment,
    ToolCall,
    Trajectory,
    Turn,
)

PACKAGES = {
    "skyrl": ["skyrl==0.4.0", "loguru==0.7.3"],
    "verl": ["verl==0.9.1", "tensordict==0.15.3", "pyvers==0.2.3", "omegaconf==2.4.0"],
    "trl": ["trl==1.16.0"],
    "verifiers": ["verifiers==0.4.0", "renderers==0.1.12", "prime-pydantic-config==0.4.3"],
    "harbor": ["harbor==0.26.0"],
    "llamafactory": ["llamafactory==0.9.5"],
}
"""What each check installs."""

Talk = list[tuple[list[Message], str, int]]
"""Turns: what is new to the policy, its answer, and how many tokens that has."""


def _segment(talk: Talk, first: int, start: int) -> tuple[Segment, list[Turn]]:
    """Tokens that say where they are from: `start` counts up in prompts, down from -1 is no token of a model."""
    segment, turns = Segment(), []
    for index, (new, text, length) in enumerate(talk, first):
        prompt = [start + len(segment.ids) + n for n in range(3 * len(new))]
        segment.ids += prompt
        segment.loss_mask += [0] * len(prompt)
        segment.logprobs += [math.nan] * len(prompt)
        turns.append(
            Turn(
                index, text, "stop", 0, len(segment.ids), length, "model", 3, 3, 0.5, 1.5,
                prompt_tokens=len(segment.ids), completion_tokens=length, cached_tokens=1,
            )
        )  # fmt: skip
        segment.ids += [1000 + start + n for n in range(length)]
        segment.loss_mask += [1] * length
        segment.logprobs += [-0.25 * (n + 1) for n in range(length)]
    return segment, turns


def attempt(
    trajectory: Trajectory | None,
    task: str = "count-lines",
    sample: int = 0,
    reward: float | None = 1.0,
    **changes: Any,
) -> Attempt:
    outcome = Outcome.INVALID if reward is None else Outcome.PASSED if reward >= 1 else Outcome.FAILED
    fields: dict[str, Any] = {
        "attempt_id": f"{task}-{sample}-a", "job": "demo", "task": task, "task_digest": "ab" * 32, "sample": sample,
        "number": 0, "agent": "bash", "policy": "model", "host": "host-1", "outcome": outcome,
        "error_class": "image_build" if reward is None else None,
        "reward": None if reward is None else Reward(reward), "started_at": 1700000000.0,
        "ended_at": 1700000009.0, "phases": {"agent": 6.5}, "trajectory": trajectory,
    }  # fmt: skip
    return Attempt(**(fields | changes))


def text_turns() -> Trajectory:
    """Two turns of commands written as text, in one segment."""
    opening = [Message("system", "You have a shell."), Message("user", "Count the lines.")]
    told = [Message("user", "3", 0)]
    segment, turns = _segment([(opening, "wc -l a", 2), (told, "done", 3)], 0, 10)
    turns[0].commands.append(CommandRecord("wc -l a", 0, "3\n", "", 0.1))
    answers = [Message("assistant", turn.text, turn.index) for turn in turns]
    return Trajectory([*opening, answers[0], *told, answers[1]], turns, [segment])


def tool_turns(arguments: str = '{"command": "wc -l a"}') -> Trajectory:
    """An answer with two calls, and one without; what it thought is apart."""
    opening = [Message("system", "Use the tools."), Message("user", "Count the lines.")]
    calls = (ToolCall("c1", "bash", arguments), ToolCall("c2", "read_file", '{"path": "a"}'))
    told = [Message("tool", "3", 0, tool_call_id="c1"), Message("tool", "x\ny\nz", 0, tool_call_id="c2")]
    segment, turns = _segment([(opening, "I look.", 4), (told, "There are 3.", 2)], 0, 50)
    turns[0].finish_reason = "tool_calls"
    answers = [
        Message("assistant", "I look.", 0, tool_calls=calls, reasoning="A file; count."),
        Message("assistant", "There are 3.", 1),
    ]
    return Trajectory([*opening, answers[0], *told, answers[1]], turns, [segment])


def summed_up() -> Trajectory:
    """Three segments: two turns, the second a summary; one turn; and one whose template rewrote what was said."""
    opening = [Message("system", "You have a shell."), Message("user", "Count the lines.")]
    asked = [Message("user", "Sum up.", 0)]
    again = [
        Message("system", "You have a shell.", 1),
        Message("user", "Count the lines.\n\nYou looked.", 1),
    ]
    told = [Message("user", "3", 2)]
    first, turns = _segment([(opening, "ls", 2), (asked, "I looked.", 3)], 0, 10)
    second, more = _segment([(again, "wc -l a", 2)], 2, 110)
    rewritten = [*again, Message("assistant", "wc -l a", 2), *told]
    third, last = _segment([(rewritten, "done", 2)], 3, 210)
    turns[1].purpose = "summary"
    for index, turn in ((1, more[0]), (2, last[0])):
        turn.segment = index
    turns += more + last
    answers = [Message("assistant", turn.text, turn.index) for turn in turns]
    return Trajectory(
        [*opening, answers[0], *asked, answers[1], *again, answers[2], *told, answers[3]],
        turns,
        [first, second, third],
    )


def without_ids(trajectory: Trajectory) -> Trajectory:
    """As a policy that gives text only has it."""
    for turn in trajectory.turns:
        turn.segment, turn.prompt_len, turn.completion_len = None, 0, 0
    trajectory.segments = []
    return trajectory


@pytest.fixture
def shapes() -> Any:
    """The functions above, for tests, which are in no package that could be imported."""
    return sys.modules[__name__]


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Location]:
    """Writes a run with these groups, a batch each."""

    def write(*groups: Sequence[Attempt], job: dict[str, Any] | None = None) -> Location:
        location = Location(tmp_path / f"run-{uuid.uuid4().hex[:6]}")
        location.write_json("job.json", job or {})
        batches = [rollouts_batch([(one, 1, len(group)) for one in group]) for group in groups]
        location.write_shard("rollouts", batches)
        return location

    return write


@pytest.fixture
def table() -> Callable[..., pa.Table]:
    """A table of `schema.ROLLOUTS` of these rollouts, as a feed gives a group."""

    def make(*rollouts: Attempt) -> pa.Table:
        return pa.Table.from_batches([rollouts_batch([(one, 1, len(rollouts)) for one in rollouts])])

    return make


@pytest.fixture
def in_package(tmp_path: Path) -> Callable[..., Any]:
    """Runs Python code where a package of `PACKAGES` can be imported. The code finds `given` as JSON gives it back, and
    what it leaves in `result` is returned. `stand_ins`: modules that the package imports and the check needs not."""

    def run(package: str, code: str, given: Any, stand_ins: Sequence[str] = ()) -> Any:
        place = _installed(package)
        source, result = tmp_path / "given.json", tmp_path / "result.json"
        source.write_text(json.dumps(given))
        lines = [
            "import json",
            "import stand_ins",
            f"stand_ins.use({list(stand_ins)!r})",
            f"given = json.load(open({str(source)!r}))",
            code,
            f"json.dump(result, open({str(result)!r}, 'w'))",
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(place), str(Path(__file__).parent))),
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [sys.executable, "-c", "\n".join(lines)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(result.read_text())

    return run


def _installed(package: str) -> Path:
    wanted = PACKAGES[package]
    place = cache_dir() / "checked-against" / "_".join(wanted).replace("==", "-")
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    made = place.with_name(f".{place.name}.{os.getpid()}")
    # Some ask for a newer Python than their checked modules need.
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--ignore-requires-python"]
    limits = ["--no-compile", "--retries", "1", "--timeout", "20", "--target", str(made)]
    done = subprocess.run([*pip, *limits, *wanted], capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(made, ignore_errors=True)
        said = done.stderr.strip().rpartition("\n")[2]
        pytest.skip(f"{', '.join(wanted)} cannot be had from the package index: {said}")
    if not place.is_dir():
        made.rename(place)
    return place
