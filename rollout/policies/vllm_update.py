"""New weights in a vLLM engine that runs, by vLLM's own means: pause, load, resume."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from rollcage.rollout.policies.vllm_weights import (
    How,
    adapter_rank,
    how_to_load,
    is_adapter,
    local_directory,
    require_adapter_fits,
)

UPDATE_SEC = 900.0
"""Loading a large checkpoint in place from a network disk takes minutes. Past this the engine is given up."""

LORA_ID, LORA_PROBE_ID = 1, 2
"""vLLM's numbers for the adapter that is served, and for the next one while it is tried."""


class AdapterRefused(ValueError):
    """vLLM does not take an adapter; what it had before it has still."""


TIED = "tied embeddings cannot be loaded in place on a CPU"
OTHER = (
    "the weights have other tensors, another configuration or another tokenizer than those that are loaded"
)
"""Why an engine is started anew with a model's weights."""


def how_to_update(
    llm: Any, model: str, lora: tuple[str, str] | None, path: Path, given: Any
) -> tuple[How, str]:
    """How an engine with these weights takes those at `path`, and of a restart, why. `given`: the user's own
    `max_lora_rank`, if any. Reads the files. Raises `ValueError` where there is no way."""
    if not is_adapter(path):
        if how_to_load(model, path) == "restart":
            return "restart", OTHER
        return ("restart", TIED) if _keeps_old_head(llm) else ("reload", "")
    if lora is None:
        raise ValueError(f"{path} is a LoRA adapter, and this engine was started without one")
    require_adapter_fits(path, local_directory(model))
    rank, held = adapter_rank(path), llm.vllm_config.lora_config.max_lora_rank
    if rank <= held:
        return "lora", ""
    if given is not None:
        raise ValueError(f"{path} has rank {rank}, and the engine's max_lora_rank is {held}")
    return "restart", f"the adapter has rank {rank}, and the engine has room for {held}"


def _keeps_old_head(llm: Any) -> bool:
    """Whether loading in place would leave the old output layer: on a CPU vLLM packs a copy of it, which it makes anew
    for weights of its own only, not for those that are the embedding's (0.32; the log-probabilities show it)."""
    from vllm.platforms import current_platform

    tied = getattr(llm.model_config.hf_text_config, "tie_word_embeddings", False)
    return bool(tied and current_platform.is_cpu())


async def replace_in_place(llm: Any, how: How, path: str, version: int, lora: tuple[str, str] | None) -> None:
    """Freeze what is under way, change the weights, empty the caches, go on.

    Raises `AdapterRefused` where the engine goes on as it was, and anything else where it must not go on.
    """
    async with asyncio.timeout(UPDATE_SEC):
        await llm.pause_generation(mode="keep", clear_cache=True)
        try:
            if how == "lora":
                assert lora is not None, "`how_to_update` refuses adapters otherwise"
                await _swap_adapter(llm, lora[0], path)
            else:
                await llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        except AdapterRefused:
            await llm.resume_generation()
            raise
        if not await llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not empty its prefix cache")
        await llm.update_weight_version(str(version))
        await llm.resume_generation()


async def try_adapter(llm: Any, name: str, number: int, path: str) -> None:
    """Load an adapter as `number`. Raises `AdapterRefused`."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        await llm.add_lora(LoRARequest(name, number, path))
    except EngineDeadError:
        raise
    except Exception as error:  # vLLM hands on what was raised in its process as a bare one
        raise AdapterRefused(f"vLLM does not take the LoRA adapter {path}: {error}") from error


async def _swap_adapter(llm: Any, name: str, path: str) -> None:
    """First beside the one that is served, where vLLM finds out what is wrong with it. Then in its place, under its
    number, which requests under way have."""
    from vllm.lora.request import LoRARequest

    await try_adapter(llm, f"{name}-next", LORA_PROBE_ID, path)
    await llm.remove_lora(LORA_PROBE_ID)
    await llm.add_lora(LoRARequest(name, LORA_ID, path, load_inplace=True))
