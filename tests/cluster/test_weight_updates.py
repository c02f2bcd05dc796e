"""Weights that are replaced under a job: real vLLM and sandboxes, and log-probabilities that say whose a turn is.

Two tiny models, A and B. A job with two policies begins on A: `finishing` lets turns in flight end on the weights that
they began with, `continuing` goes on with the new ones. An agent of the test's own holds its turns: each begins when
the test says so.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from tiny_models import tiny_model
from vllm_processes import all_engines, slowed

from rollcage.cluster.control import PolicyStatus, policy_status, update_policy
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.rollout.arrow import read_attempts, read_rollouts
from rollcage.rollout.rows import attempt_from_row
from rollcage.rollout.trajectory import Attempt, Turn

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.docker, pytest.mark.timeout(600)]

ROLLCAGE = Path(sys.executable).parent / "rollcage"
NOISE = 2e-3
"""Nats between vLLM's float32 and transformers': 1e-4 was seen. A and B are tenths apart."""

AGENT = '''
import asyncio
from dataclasses import replace
from pathlib import Path

from rollcage.rollout.agents.conversation import Conversation, Limits
from rollcage.rollout.trajectory import Message


class Held:
    """A turn of each number of tokens. It waits for a turn's gate before it, and tells of its end."""

    name = "held"
    needs_policy = True

    def __init__(self, gates: str, tokens: list[int]) -> None:
        self.gates = gates
        self.tokens = tokens

    async def run(self, context):
        talk, sampling = Conversation(context, Limits()), context.sampling
        for number, tokens in enumerate(self.tokens):
            while not Path(f"{self.gates}-{number}-open").exists():
                await asyncio.sleep(0.02)
            context.sampling = replace(sampling, max_tokens=tokens)
            await talk.ask([Message("user", "Go on.")])
            Path(f"{self.gates}-{number}-ended").touch()
'''

AGENTS = {"finishing": ("finishing", [800, 40]), "continuing": ("continuing", [2000, 40]),
          "stale": ("finishing", [40, 40])}  # fmt: skip
"""By label: the policy, and the tokens of each turn. Where an update is to come upon a turn, that takes seconds."""

POLICIES = {
    "finishing": {"on_update": "finish", "max_staleness": 1},
    "continuing": {"on_update": "continue"},
}

TASK = {
    "task.toml": '[environment]\nmemory_mb = 64\nnetwork_mode = "no-network"\n',
    "instruction.md": "Go on.\n",
    "environment/Dockerfile": "FROM debian:bookworm-slim\n",
    "tests/test.sh": "#!/bin/sh\necho 1 >/logs/verifier/reward.txt\n",
}


class Fresh:
    """Log-probabilities by a forward pass of its own."""

    def __init__(self, model: Path) -> None:
        from transformers import LlamaForCausalLM

        self._model = LlamaForCausalLM.from_pretrained(model).eval()

    def differs(self, turn: Turn, ids: list[int], given: np.ndarray) -> np.ndarray:
        """Of each token of a turn, whether its log-probability is not this model's."""
        import torch

        start, end = turn.prompt_len, turn.prompt_len + turn.completion_len
        with torch.no_grad():
            hidden = self._model.model(torch.tensor([ids[:end]])).last_hidden_state[0, start - 1 : end - 1]
            asked = torch.tensor(ids[start:end])[:, None]
            found = [
                self._model.lm_head(some).float().log_softmax(-1).gather(1, those)[:, 0].numpy()
                for some, those in zip(hidden.split(200), asked.split(200), strict=True)
            ]
        differs: np.ndarray = np.abs(np.concatenate(found) - given) > NOISE
        return differs


class Job:
    """`rollcage run`, and what its agents wait for."""

    def __init__(self, folder: Path, model: Path, scratch: str) -> None:
        self.run = folder / "run"
        self._folder = folder
        self._errors = folder / "stderr.txt"
        (folder / "held_agent.py").write_text(AGENT)
        for file, text in TASK.items():
            (folder / "task" / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / "task" / file).write_text(text)
        engine = {"max_model_len": 4096, "max_num_seqs": 4, "block_size": 32}
        served = {"kind": "vllm", "model": str(model), "threads": 1, "engine_args": engine}
        sampling = {"seed": 5, "extra": {"ignore_eos": True}}
        job = {
            "tasks": [str(folder / "task")],
            "agents": [
                {
                    "name": "held_agent:Held",
                    "label": label,
                    "policy": policy,
                    "options": {"gates": str(folder / label), "tokens": tokens},
                }
                for label, (policy, tokens) in AGENTS.items()
            ],
            "samples": 1,
            "policies": {
                name: {**served, **settings, "sampling": sampling} for name, settings in POLICIES.items()
            },
            "concurrency": len(AGENTS),
        }
        (folder / "job.yaml").write_text(yaml.safe_dump(job))
        with self._errors.open("w") as stderr:
            self.process = subprocess.Popen(
                [ROLLCAGE, "run", folder / "job.yaml", "--output", self.run, "--json"],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, "TMPDIR": scratch},
                cwd=folder,
                start_new_session=True,
            )

    def open(self, turn: int, *labels: str) -> None:
        """The agents with these labels may begin their turns of this number."""
        for label in labels:
            (self._folder / f"{label}-{turn}-open").touch()

    def until_ended(self, turn: int, label: str) -> None:
        """The turn of this number has, of the agent with this label."""
        self.until((self._folder / f"{label}-{turn}-ended").exists)

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + 240
        while not condition():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def at_work(self, *policies: str) -> bool:
        """Each of these has a turn in flight."""
        found = self.status()
        return bool(found) and all(sum(one["running"] for one in found[name].replicas) for name in policies)

    def status(self) -> dict[str, PolicyStatus]:
        try:
            return policy_status(self.run)
        except (InputError, CouldNotRun):
            return {}  # not yet

    def update(self, policy: str, path: Path, version: int) -> dict[int, str]:
        return update_policy(self.run, path, version, policy=policy).replicas

    def end(self) -> dict[str, Any]:
        """Its report, once it has ended well."""
        out, _ = self.process.communicate(timeout=200)
        assert self.process.returncode == 0, self.said
        report: dict[str, Any] = json.loads(out)
        return report

    @property
    def said(self) -> str:
        return self._errors.read_text()


@pytest.fixture
def models(tmp_path: Path) -> tuple[Path, Path]:
    a, b = (tiny_model(tmp_path / name, seed, spread=0.1) for seed, name in enumerate("ab"))
    return a, b


@pytest.fixture
def job(tmp_path: Path, models: tuple[Path, Path]) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as scratch:  # short: it holds Ray's sockets
        job = Job(tmp_path, models[0], scratch)
        yield job
        if job.process.poll() is None:
            job.process.terminate()
            job.process.wait(60)


def turns_of(attempt: Attempt) -> Iterator[tuple[Turn, list[int], np.ndarray]]:
    """Each turn, the ids of its segment, and the log-probabilities that the run holds of the answer."""
    assert attempt.trajectory is not None
    for turn in attempt.trajectory.turns:
        assert turn.segment is not None
        segment, end = attempt.trajectory.segments[turn.segment], turn.prompt_len + turn.completion_len
        yield turn, segment.ids, np.array(segment.logprobs[turn.prompt_len : end])


def test_log_probabilities_change_where_the_version_does(
    tmp_path: Path, models: tuple[Path, Path], job: Job
) -> None:
    a, b = models
    job.open(0, "stale")
    job.until_ended(0, "stale")
    with ThreadPoolExecutor() as threads:
        with slowed(all_engines(len(POLICIES), below=job.process.pid)):
            job.open(0, "finishing", "continuing")
            job.until(lambda: job.at_work(*POLICIES))
            updates = {name: threads.submit(job.update, name, b, 1) for name in POLICIES}
            assert updates["continuing"].result(200) == {1: "reload"}
        assert updates["finishing"].result(200) == {1: "reload"}

    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"holds no config\.json"):
        update_policy(job.run, tmp_path / "empty", 2, policy="finishing")
    command = [ROLLCAGE, "policy", "update", "--run", job.run, "--policy", "finishing"]
    told = subprocess.run(
        [*command, "--path", a, "--version", "0"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 1
    assert "0 is older" in told.stderr

    job.open(1, "finishing", "continuing")
    job.until_ended(1, "finishing")
    assert job.update("finishing", a, 3) == {1: "reload"}
    job.open(1, "stale")
    report = job.end()
    assert not (job.run / "control").exists()
    assert report["passed"] == 3

    old, new = Fresh(a), Fresh(b)
    found = {
        row["agent"]: (attempt_from_row(row), row["attempts"]) for row in read_rollouts(job.run).to_pylist()
    }
    for name, first in (("finishing", (0, 0)), ("continuing", (0, 1))):
        attempt, attempts = found[name]
        assert attempts == 1, "one version is within max_staleness"
        spans = [(turn.policy_version, turn.policy_version_end) for turn, *_ in turns_of(attempt)]
        assert spans == [first, (1, 1)]
        for turn, ids, given in turns_of(attempt):
            not_a, not_b = old.differs(turn, ids, given), new.differs(turn, ids, given)
            match turn.policy_version, turn.policy_version_end:
                case 0, 0:
                    assert not not_a.any()
                    assert not_b.mean() > 0.9
                case 1, 1:
                    assert not not_b.any()
                    assert not_a.mean() > 0.9
                case 0, 1:
                    changed = int(np.argmax(not_a))
                    assert not_a.any()
                    assert 0 < changed < len(given) - 1
                    assert not not_b[changed:].any(), "from one token on, all are the new model's"
                    assert not_b[:changed].mean() > 0.9

    # The second update took `finishing` three versions on: what had begun before the first began again.
    attempt, attempts = found["stale"]
    assert attempts == 2
    assert [turn.policy_version for turn, *_ in turns_of(attempt)] == [3, 3]
    for turn, ids, given in turns_of(attempt):
        assert not old.differs(turn, ids, given).any()
    rows = read_attempts(job.run, ["agent", "error_class", "domain"]).to_pylist()
    assert [row for row in rows if row["error_class"]] == [
        {"agent": "stale", "error_class": "stale", "domain": "service"}
    ]
    assert len(rows) == 4
