"""What is read from vLLM's source is what vLLM says."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from rollcage.rollout.policies import vllm_names
from rollcage.rollout.policies.vllm_names import engine_arguments, reasoning_parsers, tool_parsers


def test_the_names_are_those_that_vllm_knows() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    assert engine_arguments() == {field.name for field in fields(AsyncEngineArgs) if field.init}
    assert tool_parsers() == set(ToolParserManager.list_registered())
    assert reasoning_parsers() == set(ReasoningParserManager.list_registered())


def test_where_the_source_is_another_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm" / "engine").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    (tmp_path / "vllm" / "engine" / "arg_utils.py").write_text("AsyncEngineArgs = make()\n")
    monkeypatch.setattr(
        vllm_names,
        "find_spec",
        lambda _name: type("Spec", (), {"submodule_search_locations": [str(tmp_path / "vllm")]}),
    )
    assert engine_arguments.__wrapped__() is None
    assert tool_parsers.__wrapped__() is None
