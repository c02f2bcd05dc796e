"""A run that is killed leaves nothing that `rollcage gc` does not find. benchmarks/kill_moments.py has more moments."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import private_dockerd
import pytest

from rollcage.rollout.sandbox.engine import Engine

pytestmark = [pytest.mark.docker, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def kill_moments() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks/kill_moments.py"
    spec = importlib.util.spec_from_file_location("kill_moments", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["kill_moments"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("delay_sec", "building"), [(0.2, False), (1.5, True), (4.0, False)])
def test_nothing_is_left_of_a_run_that_was_killed(
    kill_moments: ModuleType, delay_sec: float, building: bool
) -> None:
    if why := private_dockerd.missing():
        pytest.skip(why.replace("a private dockerd", "keeping sandboxes with internet from the machine"))
    engine = Engine()
    try:
        seen = kill_moments.kill_at(engine, delay_sec, sandboxes=8, with_ray=False, building=building)
    finally:
        engine.close()
    assert seen["left"] == {}
    assert seen["alive"] >= 4
    assert seen["steps"] == int(building)
