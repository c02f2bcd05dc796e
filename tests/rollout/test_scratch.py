"""What killed processes leave in the folder for temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollcage.rollout.scratch import VLLM, make_scratch, remove_abandoned, remove_scratch

PROGRAM = """
import os, signal
from rollcage.rollout.scratch import VLLM, make_scratch
place, lock = make_scratch(VLLM)
(place / "socket").write_text("")
print(place, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    left = Path(done.stdout.strip())
    ours, lock = make_scratch(VLLM)
    assert left.parent == ours.parent == tmp_path
    assert (left / "socket").exists()
    remove_abandoned([VLLM])
    assert not left.exists()
    assert ours.exists()
    remove_scratch(ours, lock)
    assert not ours.exists()
