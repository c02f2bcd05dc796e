"""What the tests of reports share, and sources that no host and no job is behind, for the exporter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rollcage.metrics.exporter import Exporter
from rollcage.metrics.simulated import simulate

sys.path.insert(0, str(Path(__file__).parent))  # tests are no packages; these helpers are this folder's alone


@pytest.fixture
def simulated() -> Exporter:
    """An exporter that has heard of 3 hosts and 2 jobs."""
    exporter = Exporter()
    simulate(exporter, hosts=3, jobs=2, policies=2, ticks=3)
    return exporter
