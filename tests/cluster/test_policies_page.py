"""docs/policies.md: what it shows can be written so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from rollcage.cluster.config_policies import PolicyConfig

PAGE = Path(__file__).parents[2] / "docs/policies.md"
SHOWN = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]
POLICIES = {name: policy for job in SHOWN for name, policy in job.get("policies", {}).items()}


def test_each_kind_with_a_server_is_shown() -> None:
    assert {policy["kind"] for policy in POLICIES.values()} >= {"vllm", "openai", "anthropic"}


@pytest.mark.parametrize("name", POLICIES)
def test_what_is_shown_is_a_policy(name: str) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(PolicyConfig)
    assert adapter.validate_python(POLICIES[name]).kind == POLICIES[name]["kind"]
