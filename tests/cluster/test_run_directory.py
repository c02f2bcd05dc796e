"""Where a run goes that was given no directory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rollcage.cluster.job import new_run_directory


def test_jobs_of_one_name_that_start_in_the_same_second_have_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda _format: "20261129-120000")
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: new_run_directory(tmp_path / "runs", "nightly"), range(8)))
    names = sorted(directory.name for directory in made)
    assert names == ["nightly-20261129-120000", *(f"nightly-20261129-120000-{n}" for n in range(2, 9))]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
