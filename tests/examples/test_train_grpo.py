"""The loop of `examples/train_grpo.py` with a tiny model: the mechanics, not the learning, which the example's own run
shows. Real Ray, Docker and vLLM."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rollcage.rollout.arrow import read_rollouts
from rollcage.rollout.feed import Feed
from rollcage.rollout.policies import smollm2

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.docker, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, GROUPS, SAMPLES = 3, 2, 4
NOISE = 5e-3
"""Nats between vLLM's float32 and transformers'. A step of this test moves most tokens by ten times as much."""

VERIFIER = """#!/bin/sh
echo "0.$(($(wc -c </app/answer) % 7))" >/logs/verifier/reward.txt
"""
"""A random model earns something by it now and then, and never all samples the same."""


def tiny_model(folder: Path) -> Path:
    """A Llama of two layers with random weights and the small model's tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(smollm2.prepare() / name, folder / name)
    return folder


@pytest.fixture
def short_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="rc-", dir="/tmp") as scratch:  # short: it holds Ray's sockets
        monkeypatch.setenv("TMPDIR", scratch)
        yield


@pytest.mark.usefixtures("short_tmp")
def test_each_step_samples_from_the_weights_of_the_last_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import torch
    from train_grpo import Trainer, batch, begin_job, train
    from train_grpo_toy import write_job, write_tasks

    model = tiny_model(tmp_path / "model")
    tasks = write_tasks(tmp_path / "tasks", ("apple", "river"), VERIFIER)
    job = write_job(tmp_path / "job.yaml", model, tasks, samples=SAMPLES, max_lag_groups=GROUPS)
    run = tmp_path / "run"
    running = begin_job(job, run)
    try:
        told = train(run, Trainer(model, layers=2, rate=1e-2), tmp_path, steps=STEPS, groups=GROUPS)
        assert running.wait(120) == 0
    finally:
        if running.poll() is None:
            running.terminate()
            running.wait(60)

    assert [row["step"] for row in told] == [1, 2, 3]
    for row in told:
        # The job is at most a step ahead: some groups are sampled from the weights before the last ones.
        assert set(row["versions"]) <= {max(0, row["step"] - 2), row["step"] - 1}
    assert told[-1]["versions"][-1] >= 1
    assert told[0]["ratio"] == pytest.approx(1.0, abs=NOISE)

    trainers = [Trainer(tmp_path / name) for name in ("model", "weights-1", "weights-2")]
    seen = set()
    for group in Feed(run, follow=False):
        assert group.complete
        ids, sampled, given, _ = batch([group])
        whose = np.concatenate(
            [
                np.full(turn["completion_len"], turn["policy_version"])
                for turns in group.table["turns"].to_pylist()
                for turn in turns
            ]
        )
        for version in range(STEPS):
            mine = torch.from_numpy(whose == version)
            if not mine.any():
                continue
            seen.add(version)
            with torch.no_grad():
                fresh = [(one.logprobs(ids, sampled) - given)[mine].abs() for one in trainers]
            assert fresh[version].max() < NOISE, "sampled from these weights"
            others = [float(fresh[other].mean()) for other in range(STEPS) if other != version]
            assert min(others) > 10 * NOISE, "and from no others"
    assert {0, 1} <= seen
    rows = read_rollouts(run, ["task", "draw", "outcome"]).to_pylist()
    assert len(rows) % SAMPLES == 0
    assert not [row for row in rows if row["outcome"] in ("invalid", "cancelled")]
    assert json.loads((run / "feed/trainer-0.json").read_text())["version"] == STEPS - 1
    assert os.path.samefile(sys.modules["train_grpo"].__file__ or "", EXAMPLES / "train_grpo.py")
