"""Models for tests in which it does not matter what an answer says."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from rollcage.rollout.policies import smollm2


def tiny_model(
    folder: Path, seed: int = 1, *, hidden: int = 64, spread: float = 0.02, tokens: Sequence[str] = ()
) -> Path:
    """Make a Llama of two layers with random weights and the small model's tokenizer, `tokens` added to it. It answers
    fast, and hardly ever ends an answer. `spread` is the weights' standard deviation."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    small = smollm2.prepare()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(small)
    if tokens:
        tokenizer.add_tokens(list(tokens))
        tokenizer.save_pretrained(folder)
    else:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(small / name, folder / name)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=spread,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,  # or vLLM on a CPU could not load it in place
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
