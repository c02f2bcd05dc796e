"""What `train_grpo.py` trains on: toy tasks, an agent of one turn, and a model that takes new weights while it runs.

A task says "Print apple", after two such tasks with their answers. The agent runs the model's answer as a command and
leaves what it printed in /app/out and the answer in /app/answer. The verifier gives 1 where exactly the word was
printed, 0.5 where it is among other things, 0.1 for another answer of one line. SmolLM2-135M gets about half of it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import yaml

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.agents.commands import run_command
from rollcage.rollout.agents.conversation import Conversation, Limits
from rollcage.rollout.trajectory import Message

WORDS = ("apple", "river", "seven", "blue", "tiger", "music", "paper", "green")

SHOWN = (("Print cat", "echo cat"), ("Print sun", "echo sun"))

VERIFIER = """#!/bin/sh
lines=$(printf '%s\\n' "$(cat /app/answer)" | wc -l)
case "$(cat /app/out)" in
WORD) reward=1 ;;
*WORD*) reward=0.5 ;;
*) [ "$lines" -eq 1 ] && reward=0.1 || reward=0 ;;
esac
echo "$reward" >/logs/verifier/reward.txt
"""


class OneLine:
    """Asks once, and runs the whole answer as a command."""

    name = "one-line"
    needs_policy = True

    async def run(self, context: AgentContext) -> None:
        opening = [Message("system", "Answer in shell.")]
        for task, answer in SHOWN:
            opening += [Message("user", task), Message("assistant", answer)]
        opening.append(Message("user", context.step.instruction.strip()))
        turn, made = await Conversation(context, Limits(turns=1)).ask(opening)
        result = await run_command(context, turn, made.text, timeout=5)
        await context.sandbox.write({"/app/answer": made.text.encode(), "/app/out": result.stdout})


def write_tasks(folder: Path, words: tuple[str, ...] = WORDS, verifier: str = VERIFIER) -> Path:
    """A task for each word. They share one image."""
    for word in words:
        files = {
            "task.toml": '[environment]\nmemory_mb = 128\nnetwork_mode = "no-network"\n',
            "instruction.md": f"Print {word}\n",
            "environment/Dockerfile": "FROM debian:bookworm-slim\nWORKDIR /app\n",
            "solution/solve.sh": f"#!/bin/sh\necho {word} | tee /app/out >/app/answer\n",
            "tests/test.sh": verifier.replace("WORD", word),
        }
        for name, text in files.items():
            path = folder / f"print-{word}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


def write_job(path: Path, model: Path, tasks: Path, *, samples: int, max_lag_groups: int) -> Path:
    """A stream of these tasks by `OneLine`, with the model served by vLLM on the CPU."""
    policy = {
        "kind": "vllm",
        "model": str(model),
        "engine_args": {"max_model_len": 256, "max_num_seqs": 16, "block_size": 32},
        "sampling": {"max_tokens": 12},
    }
    job = {
        "mode": "stream",
        "stream": {"max_lag_groups": max_lag_groups},
        "tasks": [str(tasks)],
        "agents": ["train_grpo_toy:OneLine"],
        "policies": {"trained": policy},
        "samples": samples,
        "concurrency": 8,
    }
    path.write_text(yaml.safe_dump(job, sort_keys=False))
    return path


def untied_model(folder: Path) -> Path:
    """SmolLM2-135M with an output matrix of its own: on a CPU, vLLM loads the weights of such a model in place, and
    starts anew for one whose embeddings are tied."""
    from transformers import LlamaForCausalLM

    from rollcage.rollout.policies.smollm2 import prepare

    made = prepare()
    model = LlamaForCausalLM.from_pretrained(made, tie_word_embeddings=False)
    model.lm_head.weight.data = model.model.embed_tokens.weight.data.clone()
    shutil.copytree(made, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(folder)
    return folder
