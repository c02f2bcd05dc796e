"""What is found out about weights before an engine is asked to load them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.policies.vllm_weights import (
    adapter_rank,
    how_to_load,
    rank_for,
    read_checkpoint,
    require_adapter_fits,
)

TinyModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("first", seed=1)


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "other"))


def rewrite(file: Path, **changed: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


def test_other_weights_of_the_same_model_are_loaded_in_place(model: Path, tiny_model: TinyModel) -> None:
    assert how_to_load(str(model), tiny_model("second", seed=2)) == "reload"


def test_what_a_trainer_writes_of_itself_changes_nothing(model: Path, other: Path) -> None:
    rewrite(other / "config.json", transformers_version="9.9", use_cache=False)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (other / name).unlink()
    assert how_to_load(str(model), other) == "reload"


def test_another_shape_tokenizer_or_end_needs_another_engine(
    model: Path, other: Path, tiny_model: TinyModel
) -> None:
    assert how_to_load(str(model), tiny_model("wide", seed=1, hidden=96)) == "restart"
    tokenizer = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(tokenizer.replace("</think>", "</thought>"))
    assert how_to_load(str(model), other) == "restart"
    (other / "tokenizer.json").write_text(tokenizer)
    assert how_to_load(str(model), other) == "reload"
    rewrite(other / "generation_config.json", eos_token_id=[2, 0])
    assert how_to_load(str(model), other) == "restart"


def test_a_checkpoint_that_lacks_tensors_is_not_loaded_in_place(model: Path, other: Path) -> None:
    from safetensors.numpy import load_file, save_file

    weights = load_file(other / "model.safetensors")
    weights.pop("model.norm.weight")
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    assert how_to_load(str(model), other) == "restart"


def test_a_path_without_whole_weights_is_refused_with_what_is_wrong(
    model: Path, other: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="no such directory"):
        how_to_load(str(model), tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"no config\.json"):
        how_to_load(str(model), tmp_path / "empty")
    weights = other / "model.safetensors"
    whole = weights.read_bytes()
    for left in (whole[:-1], whole[:1000], b""):
        weights.write_bytes(left)
        with pytest.raises(ValueError, match="cut short"):
            how_to_load(str(model), other)
    weights.write_bytes(b"\x08" + b"\0" * 7 + b"not json")
    with pytest.raises(ValueError, match="no safetensors file"):
        how_to_load(str(model), other)
    weights.unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        how_to_load(str(model), other)


def test_a_missing_shard_is_named(other: Path) -> None:
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    shutil.copy(other / "model.safetensors", other / "model-1-of-2.safetensors")
    with pytest.raises(ValueError, match=r"model-2-of-2\.safetensors missing"):
        read_checkpoint(other)


def test_an_adapter_is_known_by_its_rank_and_its_shapes(
    model: Path, tiny_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    fits = tiny_adapter("fits", seed=1, rank=6)
    require_adapter_fits(fits, model)
    assert (adapter_rank(fits), rank_for(6)) == (6, 8)
    with pytest.raises(ValueError, match="for another model"):
        require_adapter_fits(tiny_adapter("narrow", seed=1, hidden=32), model)
    with pytest.raises(ValueError, match=r"no adapter_config\.json"):
        adapter_rank(tmp_path)
    rewrite(fits / "adapter_config.json", r=1000)
    with pytest.raises(ValueError, match="rank 1000"):
        adapter_rank(fits)
    (fits / "adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        adapter_rank(fits)
