"""What all tests share."""

from __future__ import annotations

import os

import pytest

# In one process Ray keeps the first token that it was given, for every cluster that is started later.
os.environ.setdefault("RAY_AUTH_TOKEN", "0" * 64)

ON_THE_ENGINE = ("tests/conformance/", "tests/faults/")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run side by side (`-n 2 --dist loadgroup`), tests on the one engine stay in one process, in their order: some
    look at all there is on it. Each other file is a group of its own."""
    for item in items:
        on_engine = item.get_closest_marker("docker") is not None or item.nodeid.startswith(ON_THE_ENGINE)
        group = "engine" if on_engine else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
