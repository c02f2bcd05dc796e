"""GRPO on a stream of rollouts, on one machine without a GPU: the mean reward of toy tasks rises in a few steps.

    python examples/train_grpo.py [--work runs/grpo] [--steps 8] [--groups 4] [--samples 8]

    rollcage run (mode: stream): sandboxes, agent, vLLM  --groups-->  Feed  -->  a step of GRPO
              ^----------------- rollcage policy update: weights, version ------------/

The job goes on while the trainer works, at most `--groups` groups ahead: some groups are sampled from the weights of
the step before, and the log-probabilities that are stored with their tokens are those of whoever sampled them.
Advantages are a group's rewards less their mean, by their deviation; the loss is per sampled token, with the ratio to
the stored log-probabilities clipped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from rollcage.cluster.control import update_policy
from rollcage.rollout.feed import Feed, Group

HERE = Path(__file__).parent
CLIP = (0.2, 0.28)
"""How far the ratio counts below and above 1."""


class Trainer:
    """A policy that is trained: the last `layers` of a Llama, by AdamW."""

    def __init__(self, model: Path, *, layers: int = 8, rate: float = 5e-5) -> None:
        self.source = model
        self.model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.model.requires_grad_(False)
        for layer in self.model.model.layers[-layers:]:
            layer.requires_grad_(True)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)

    def logprobs(self, ids: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        """Of the sampled tokens. Both (sequences, tokens); the result is flat, in the order of `ids[sampled]`."""
        hidden = self.model.model(ids).last_hidden_state[:, :-1][sampled[:, 1:]]
        return self.model.lm_head(hidden).log_softmax(-1).gather(-1, ids[sampled][:, None])[:, 0]

    def step(self, groups: Sequence[Group]) -> dict[str, float]:
        """One step of GRPO on these groups."""
        ids, sampled, old, advantages = batch(groups)
        new = self.logprobs(ids, sampled)
        ratio = (new - old).exp()
        clipped = ratio.clamp(1 - CLIP[0], 1 + CLIP[1])
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"loss": loss.item(), "ratio": ratio.mean().item(), "tokens": len(new)}

    def save(self, folder: Path) -> Path:
        """The weights as a model's directory, with the tokenizer of the model that was begun with."""
        shutil.copytree(self.source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        self.model.save_pretrained(folder)
        return folder


def batch(groups: Sequence[Group]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids and which of them were sampled, padded on the right; and, of the sampled ones, log-probabilities as the
    policy had them and advantages."""
    segments, advantages = [], []
    for group in groups:
        rewards = np.array(group.rewards)
        scaled = (rewards - rewards.mean()) / (rewards.std() + 1e-6) * group.weight
        for advantage, parts in zip(scaled, group.segments, strict=True):
            segments += parts
            advantages += [np.full(int(part.loss_mask.sum()), advantage, np.float32) for part in parts]
    length = max(len(part.ids) for part in segments)
    ids = np.stack([np.pad(part.ids, (0, length - len(part.ids))) for part in segments])
    sampled = np.stack([np.pad(part.loss_mask, (0, length - len(part.ids))) for part in segments]) == 1
    old = np.concatenate([part.logprobs[part.loss_mask == 1] for part in segments])
    flat = torch.from_numpy(np.concatenate(advantages))
    return torch.from_numpy(ids).long(), torch.from_numpy(sampled), torch.from_numpy(old), flat


def begin_job(job: Path, run: Path) -> subprocess.Popen[bytes]:
    """Start the job, and return once its run is there to be read."""
    rollcage = Path(sys.executable).parent / "rollcage"
    paths = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    running = subprocess.Popen(
        [rollcage, "run", job, "--output", run],
        env={**os.environ, "PYTHONPATH": paths},
        start_new_session=True,
    )
    while not (run / "job.json").exists():
        if running.poll() is not None:
            raise SystemExit(f"the job did not begin: exit status {running.returncode}")
        time.sleep(0.1)
    return running


def train(run: Path, trainer: Trainer, work: Path, *, steps: int, groups: int) -> list[dict[str, Any]]:
    """The loop. Returns a row for each step: its groups' mean reward, the versions that they were sampled from."""
    told: list[dict[str, Any]] = []
    feed = Feed(run, max_staleness=2, columns=["segments", "turns"])
    feed.version = 0
    for taken in feed.batches(groups=groups):
        version = len(told) + 1
        reward = float(np.mean([reward for group in taken for reward in group.rewards]))
        sampled_from = sorted({one for group in taken for one in group.versions})
        told.append({"step": version, "reward": reward, "versions": sampled_from, **trainer.step(taken)})
        print(" ".join(f"{name} {_shown(value)}" for name, value in told[-1].items()), flush=True)
        if version == steps:
            break
        update_policy(run, trainer.save(work / f"weights-{version}"), version)
        feed.version = version
        shutil.rmtree(work / f"weights-{version - 2}", ignore_errors=True)
    feed.close()
    feed.finish()
    return told


def _shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def main() -> int:
    """Make the toy, start the job, train, and end it."""
    from train_grpo_toy import untied_model, write_job, write_tasks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/grpo"), help="for tasks, weights and the run")
    for name, default in (("--steps", 8), ("--groups", 4), ("--samples", 8)):
        parser.add_argument(name, type=int, default=default)
    given = parser.parse_args()
    work = given.work.absolute()
    work.mkdir(parents=True)
    model, tasks = untied_model(work / "model"), write_tasks(work / "tasks")
    job = write_job(work / "job.yaml", model, tasks, samples=given.samples, max_lag_groups=given.groups)
    running = begin_job(job, work / "run")
    try:
        told = train(work / "run", Trainer(model), work, steps=given.steps, groups=given.groups)
        status = running.wait()
    finally:
        if running.poll() is None:
            running.terminate()
            running.wait()
    print(
        f"mean reward {told[0]['reward']:.2f} -> {told[-1]['reward']:.2f}; the job ended with exit status {status}"
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
