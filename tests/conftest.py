"""What all tests share."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

# In one process Ray keeps the first token that it was given, for every cluster that is started later.
os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)

ROOT = Path(__file__).parent.parent
ON_VLLM = "tests/rollout/policies/"
ON_THE_ENGINE = ("tests/conformance/", "tests/faults/")


class OneEngine(LoadScopeScheduling):  # type: ignore[misc]
    """Side by side (`-n 2`), tests on the one Docker Engine stay in one process, in their order: some look at all there
    is on it. So do those that share a vLLM engine, for the last of them kills it. Each other file goes where there is
    time."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file.startswith(ON_VLLM):
            return ON_VLLM
        return "engine" if _is_on_the_engine(file) else file


@cache
def _is_on_the_engine(file: str) -> bool:
    return file.startswith(ON_THE_ENGINE) or "mark.docker" in (ROOT / file).read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneEngine:
    """See `OneEngine`."""
    return OneEngine(config, log)
