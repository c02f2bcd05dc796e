"""vLLM's `AsyncLLM` alone in a process of its own, fed conversations that were recorded: the other side of
`policy_throughput.py`, which starts it.

    python bare_vllm.py MODEL ENGINE_ARGS

It prints a line when the model is loaded. For each line on stdin, the name of a file with the conversations and how
many may be under way at once, it prints what came of them. A conversation's requests follow each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


async def conversation(llm: Any, name: str, turns: list[dict[str, Any]], made: dict[str, float]) -> None:
    """Make the answers to these prompts, one after the other, with the parameters that the rollouts' engine had."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for number, turn in enumerate(turns):
        params = SamplingParams(
            temperature=1.0,
            seed=turn["seed"],
            max_tokens=turn["tokens"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        began = time.monotonic()
        asked = llm.generate({"prompt_token_ids": turn["prompt"]}, params, request_id=f"{name}-{number}")
        [output] = [output async for output in asked]
        made["request_seconds"] += time.monotonic() - began
        made["tokens"] += len(output.outputs[0].token_ids)
        made["prompt"] += len(turn["prompt"])
        made["cached"] += output.num_cached_tokens or 0
        made["same"] += list(output.outputs[0].token_ids) == turn["answer"]


async def replay(llm: Any, conversations: list[list[dict[str, Any]]], concurrency: int) -> dict[str, float]:
    """All conversations, in their order, so many at once."""
    made = dict.fromkeys(("request_seconds", "tokens", "prompt", "cached", "same"), 0.0)
    left = iter(enumerate(conversations))

    async def worker() -> None:
        for number, turns in left:
            await conversation(llm, f"{time.monotonic_ns()}-{number}", turns, made)

    began = time.monotonic()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    return {"seconds": time.monotonic() - began, **made}


async def main(model: str, engine_args: dict[str, Any], answers: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, disable_log_stats=True, **engine_args))
    AsyncLLM.__del__ = lambda _: None  # it is shut down below; at the interpreter's end it would fail
    try:
        print("ready", file=answers, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            file, concurrency = json.loads(line)
            conversations = json.loads(await asyncio.to_thread(Path(file).read_text))
            made = await replay(llm, conversations, concurrency)
            print(json.dumps(made), file=answers, flush=True)
    finally:
        llm.shutdown()


if __name__ == "__main__":
    said = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), said))
