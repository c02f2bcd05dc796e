"""What all tests share: how they are spread over two processes (`-n 2`), and where their helpers are.

A file goes where there is time. Some go together, in their order:

- Those with a vLLM engine: two at once would take each other's processor, and tests of one folder share theirs.
- Those that lease small parts of one range of networks, or look at all rules of the firewall.
- Those that look for what `rollcage doctor` leaves.
- The conformance suite, whose cases share a sandbox.

All others look at what they have made themselves, so that two may be on the one Docker Engine. Long ones come first.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

sys.path.insert(0, str(Path(__file__).parent))  # tests are no packages: local_ray, tiny_models

# In one process Ray keeps the first token that it was given, for every cluster that is started later.
os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)

# Of an engine's first token, 7 s of a processor are a kernel that torch compiles for it: once is enough, for the
# engine of tests/rollout/policies that has the small model.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

# How fast a machine makes examples is no fault of the tests'.
settings.register_profile("rollcage", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rollcage")

# A shell has what it starts in the background ignore Ctrl-C, and all that is started below inherits that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent.parent

VLLM = "vllm"
TOGETHER = {
    "tests/rollout/policies/": VLLM,
    "tests/conformance/": "conformance",
    "tests/faults/test_kill_moments.py": "networks",
    "tests/rollout/test_rollout_compose.py": "networks",
    "tests/rollout/sandbox/test_egress.py": "networks",
    "tests/rollout/sandbox/test_firewall.py": "networks",
    "tests/rollout/sandbox/test_networks.py": "networks",
    "tests/rollout/sandbox/test_pool.py": "networks",
    "tests/rollout/sandbox/test_services.py": "networks",
    "tests/rollout/sandbox/test_diagnose.py": "doctor",
    "tests/cluster/test_cli.py": "doctor",
}
"""By what a path begins with: the name of those that go together."""

LONGEST_FIRST = ("mark.vllm", "mark.ray", "mark.docker")
"""What a file with long tests holds. A file of short ones, come last, leaves no process without work for long."""


class Together(LoadScopeScheduling):  # type: ignore[misc]
    """See the module."""

    def _split_scope(self, nodeid: str) -> str:
        return _scope(nodeid.partition("::")[0])


@cache
def _scope(file: str) -> str:
    if LONGEST_FIRST[0] in _text(file):
        return VLLM
    return next((name for path, name in TOGETHER.items() if file.startswith(path)), file)


@cache
def _rank(file: str) -> int:
    """Of the files that come first, 0; all of `VLLM` are such."""
    if _scope(file) == VLLM:
        return 0
    marks = [mark in _text(file) for mark in LONGEST_FIRST]
    return marks.index(True) if any(marks) else len(marks)


@cache
def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Together:
    """See `Together`. Not in xdist's own order, by the number of tests."""
    config.option.loadscopereorder = False
    return Together(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In several processes, in the order of `LONGEST_FIRST`."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _rank(item.nodeid.partition("::")[0]))
