"""The log-probabilities that a trainer gets are those of the weights.

Bound: 2e-4 for each token, in absolute terms. vLLM and transformers compute the same float32 operations in another
order: vLLM with a KV cache, in batches that change with every step, transformers over the whole sequence at once. A
sum of n products is off by some sqrt(n) * 6e-8 of its size; through 30 layers whose logits are of size 20 to 30, a
few 1e-5 come out. Measured on the 679 sampled tokens of the 20 rollouts: 3.6e-5 at most, 5.4e-6 on average; the bound
leaves room for another CPU's order of summation. What an error of ours would make is far above: one token later or
earlier, a template's token left out, weights in bfloat16 (1e-2 and more).
"""

from __future__ import annotations

import asyncio

import pytest

from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.engine import TokenPolicy
from rollcage.rollout.policies.vllm import VllmEngine
from rollcage.rollout.trajectory import Message, Segment

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

BOUND = 2e-4
ROLLOUTS = 20
TOPICS = ("rivers", "bread", "a clock", "the moon", "wolves")


async def rollout(policy: TokenPolicy, number: int) -> Segment:
    """Two or three turns."""
    session = policy.session(f"rollout-{number}", task="t", sample=number)
    sampling = Sampling(temperature=1.0, max_tokens=14, seed=number)
    for turn in range(2 + number % 2):
        said = f"Tell me about {TOPICS[number % len(TOPICS)]}." if turn == 0 else "Go on."
        await session.complete([Message("system", "Be brief."), Message("user", said)][turn > 0 :], sampling)
    (segment,) = session.segments
    return segment


async def test_stored_log_probabilities_equal_a_fresh_forward_pass(engine: VllmEngine) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    policy = TokenPolicy(engine)
    segments = await asyncio.gather(*(rollout(policy, number) for number in range(ROLLOUTS)))
    model = AutoModelForCausalLM.from_pretrained(engine.model, dtype=torch.float32)
    longest = max(len(segment.ids) for segment in segments)
    ids = torch.zeros(
        (ROLLOUTS, longest), dtype=torch.long
    )  # padded behind, where a causal model does not look
    sampled = torch.zeros((ROLLOUTS, longest), dtype=torch.bool)
    stored = torch.zeros((ROLLOUTS, longest))
    for row, segment in enumerate(segments):
        ids[row, : len(segment.ids)] = torch.tensor(segment.ids)
        sampled[row, : len(segment.ids)] = torch.tensor(segment.loss_mask, dtype=torch.bool)
        stored[row, : len(segment.ids)] = torch.tensor(segment.logprobs)
    assert int(sampled.sum()) > ROLLOUTS * 2 * 7
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state[:, :-1][sampled[:, 1:]]  # logits of what was sampled only
        fresh = torch.log_softmax(model.lm_head(hidden), dim=-1)
    apart = (fresh.gather(1, ids[sampled][:, None])[:, 0] - stored[sampled]).abs()
    assert float(apart.max()) < BOUND, f"{float(apart.max()):.2e} apart, {float(apart.mean()):.2e} on average"
