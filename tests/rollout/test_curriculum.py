"""A trainer steers a stream by files: on this machine's disk and at any other place that pyarrow can write to."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from rollcage.cluster.drawing import _append, look
from rollcage.rollout.arrow import Location, NoRun
from rollcage.rollout.curriculum import NoStream, finish, read_history, set_weights


def elsewhere(folder: Path) -> Location:
    """The same files, as a file system that is not this machine's."""
    return Location("run", filesystem=pafs.SubTreeFileSystem(str(folder), pafs.LocalFileSystem()))


def here(folder: Path) -> Location:
    return Location(folder / "run")


Place = Callable[[Path], Location]


def a_run(location: Location, mode: str = "stream") -> Location:
    config = {"mode": mode, "stream": {"curriculum": {"hard": 4.0}}}
    tasks = [{"task": name, "digest": "d", "path": ""} for name in ("set/easy", "hard")]
    location.write_json("job.json", {"job": "j", "config": config, "tasks": tasks})
    return location


@pytest.mark.parametrize("place", [here, elsewhere])
def test_weights_add_up_and_the_job_sees_the_last_ones(tmp_path: Path, place: Place) -> None:
    run = a_run(place(tmp_path))
    assert look(run).weights is None
    assert set_weights(run, {"set/easy": 2}) == {"hard": 4.0, "set/easy": 2.0}
    assert set_weights(run, {"hard": 0}) == {"hard": 0.0, "set/easy": 2.0}
    seen = look(run)
    assert (seen.weights, seen.finish, seen.acknowledged) == ({"hard": 0.0, "set/easy": 2.0}, False, 0)
    finish(run)
    assert look(run).finish


@pytest.mark.parametrize("place", [here, elsewhere])
def test_what_is_refused_changes_nothing(tmp_path: Path, place: Place) -> None:
    run = a_run(place(tmp_path))
    for weights, words in [
        ({"esay": 1}, r"no task is called 'esay' \(did you mean 'set/easy'\?\)"),
        ({"hard": "4"}, "the weight of hard must be a number from 0 on, not '4'"),
        ({"hard": 0, "set/easy": 0}, "every task would have the weight 0"),
    ]:
        with pytest.raises(ValueError, match=words):
            set_weights(run, weights)  # type: ignore[arg-type]
    assert look(run).weights is None


def test_only_a_stream_is_steered(tmp_path: Path) -> None:
    with pytest.raises(NoRun, match="there is no run here"):
        set_weights(tmp_path / "none", {"hard": 1})
    run = a_run(here(tmp_path), mode="batch")
    for ask in (lambda: set_weights(run, {"hard": 1}), lambda: finish(run)):
        with pytest.raises(NoStream, match="draws each task once"):
            ask()


@pytest.mark.parametrize("place", [here, elsewhere])
def test_what_was_in_effect_is_kept_line_by_line(tmp_path: Path, place: Place) -> None:
    run = a_run(place(tmp_path))
    assert read_history(run) == []
    _append(run, '{"draw": 0}\n')
    _append(run, '{"draw": 7}\n')
    assert read_history(run) == [{"draw": 0}, {"draw": 7}]


def test_a_trainer_needs_pyarrow_for_it_and_no_more() -> None:
    others = ("ray", "docker", "pydantic", "yaml", "rich", "typer", "prometheus_client")
    code = (
        f"import sys, rollcage.rollout.curriculum; print([name for name in {others} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
