"""What lies at a path that is to become an engine's weights, and how the engine can take it.

Read from the files' headers, before anything is touched: an engine that loads a checkpoint in place does not mind
missing tensors, and one that fails on the way is half loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

How = Literal["reload", "lora", "restart"]

ADAPTER_CONFIG = "adapter_config.json"

SAID_ONLY = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Of a model's configuration: what changes nothing about what its weights must be."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Formats of numbers that a loader turns into each other."""

HEADERLESS = ("*.bin", "*.pt", "*.gguf")
"""Other files of weights that vLLM loads."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""


@dataclass(frozen=True)
class Checkpoint:
    """A model's directory. `tensors`: format ("float" for any of `FLOATS`) and shape by name; None where the weights
    are in files without headers. `ends` and `tokenizer` are None where the directory does not say."""

    path: Path
    config: Mapping[str, Any]
    ends: Any
    tokenizer: Any
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None

    def takes(self, other: Checkpoint) -> bool:
        """Whether an engine that has loaded this one can load the weights of `other` in place."""
        return (
            self.tensors is not None
            and self.tensors == other.tensors
            and self.config == other.config
            and other.ends in (None, self.ends)
            and other.tokenizer in (None, self.tokenizer)
        )


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises `ValueError` where the directory is missing, holds no weights, or not all of them."""
    if not path.is_dir():
        raise ValueError(f"{path}: there is no such directory of weights")
    config = _json(path / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no config.json: it is no model's directory")
    generation = _json(path / "generation_config.json")
    return Checkpoint(
        path=path,
        config={key: value for key, value in config.items() if key not in SAID_ONLY},
        ends=generation.get("eos_token_id") if isinstance(generation, dict) else None,
        tokenizer=_json(path / "tokenizer.json"),
        tensors=_tensors(path),
    )


def adapter_rank(path: Path) -> int:
    """The rank of a LoRA adapter's directory. Raises `ValueError` where it is none."""
    config = _json(path / ADAPTER_CONFIG)
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no {ADAPTER_CONFIG}: it is no LoRA adapter's directory")
    if not any((path / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin")):
        raise ValueError(f"{path} holds no weights: neither adapter_model.safetensors nor adapter_model.bin")
    _read_headers(file for file in [path / "adapter_model.safetensors"] if file.is_file())
    rank = config.get("r")
    if not isinstance(rank, int) or not 1 <= rank <= RANKS[-1]:
        raise ValueError(f"{path / ADAPTER_CONFIG} gives the rank {rank!r}; vLLM takes 1 to {RANKS[-1]}")
    return rank


def require_adapter_fits(adapter: Path, model: Path | None) -> None:
    """Raise `ValueError` where the adapter's matrices are not those of the model's layers: vLLM copies as much of
    them as there is room for. Where the files do not tell, nothing is raised."""
    file = adapter / "adapter_model.safetensors"
    base = None if model is None else _tensors(model)
    if base is None or not file.is_file():
        return
    for name, (_, shape) in _read_headers([file]).items():
        layer, _, part = name.removeprefix("base_model.model.").rpartition(".lora_")
        _, whole = base.get(f"{layer}.weight", ("", ()))
        if len(whole) != 2 or part not in ("A.weight", "B.weight"):
            continue
        given, wanted = (shape[-1], whole[1]) if part == "A.weight" else (shape[0], whole[0])
        if given != wanted:
            raise ValueError(f"{file} is for another model: {name} has {given} where {layer} has {wanted}")


def rank_for(rank: int) -> int:
    """The least `max_lora_rank` that holds an adapter of `rank`."""
    return next(held for held in RANKS if held >= rank)


def is_adapter(path: Path) -> bool:
    return (path / ADAPTER_CONFIG).is_file()


def local_directory(model: str) -> Path | None:
    """Where the files of a model are that an engine has loaded by its directory or its Hugging Face name."""
    from huggingface_hub import try_to_load_from_cache

    if Path(model).is_dir():
        return Path(model)
    cached = try_to_load_from_cache(model, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def how_to_load(model: str, path: Path) -> How:
    """How an engine that has loaded `model` takes the checkpoint at `path`. Raises `ValueError` as
    `read_checkpoint` does."""
    new = read_checkpoint(path)
    now = local_directory(model)
    try:
        return "reload" if now is not None and read_checkpoint(now).takes(new) else "restart"
    except ValueError:  # what it was loaded from is no longer there
        return "restart"


def _tensors(path: Path) -> Mapping[str, tuple[str, tuple[int, ...]]] | None:
    index = _json(path / "model.safetensors.index.json")
    if isinstance(index, dict):
        files = {path / name for name in index["weight_map"].values()}
        if missing := sorted(file.name for file in files if not file.is_file()):
            raise ValueError(f"{path} holds not all of its weights: {', '.join(missing)} missing")
        return _read_headers(files)
    if files := set(path.glob("*.safetensors")):
        return _read_headers(files)
    if any(file.stat().st_size for pattern in HEADERLESS for file in path.glob(pattern)):
        return None
    raise ValueError(f"{path} holds no weights: no *.safetensors")


def _read_headers(files: Iterable[Path]) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Of safetensors files: 8 bytes that give the length of a JSON header, the header, the tensors' bytes."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in files:
        try:
            with file.open("rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                size = file.stat().st_size
                header = json.loads(stream.read(length)) if 8 + length <= size else None
        except ValueError as error:
            raise ValueError(f"{file} is no safetensors file: {error}") from error
        if not isinstance(header, dict):
            raise ValueError(f"{file} is cut short")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        if 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0) > size:
            raise ValueError(f"{file} is cut short")
        for name, entry in entries.items():
            kind = "float" if entry["dtype"] in FLOATS else entry["dtype"]
            tensors[name] = (kind, tuple(entry["shape"]))
    return tensors


def _json(path: Path) -> Any:
    """What a JSON file holds; None where there is none. Raises `ValueError` for one that cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
