"""The commands that read runs, as a user meets them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rollcage.cluster import cli_common
from rollcage.cluster.cli import app
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.rollout.location import Location
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.rows import attempts_batch, rollouts_batch
from rollcage.rollout.trajectory import Attempt, Reward


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs of one task: the first passes once in two, the second always."""
    found = []
    for name, passed in (("first", (1, 0)), ("second", (1, 1))):
        attempts = [
            Attempt(f"{name}-{k}", name, "say hello", "d", k, 0, "bash", "", "h", (Outcome.FAILED, Outcome.PASSED)[one],
                    reward=Reward(float(one)), started_at=1e9, ended_at=1e9 + 1)
            for k, one in enumerate(passed)
        ]  # fmt: skip
        run = Location(tmp_path / name)
        run.write_json("job.json", {})
        run.write_shard("attempts", [attempts_batch(attempts)])
        run.write_shard("rollouts", [rollouts_batch([(attempt, 1, 2) for attempt in attempts])])
        run.write_json("summary.json", {})
        found.append(tmp_path / name)
    return found[0], found[1]


@pytest.fixture
def rollcage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[str, str]]:
    """Run the command line: gives both of its streams, and raises what it would say as an error."""

    def run(*arguments: str | Path) -> tuple[str, str]:
        streams = io.StringIO(), io.StringIO()
        for console, stream in zip((cli_common.out, cli_common.err), streams, strict=True):
            monkeypatch.setattr(console, "_file", stream)
        assert not app(list(map(str, arguments)), standalone_mode=False)
        return streams[0].getvalue(), streams[1].getvalue()

    return run


Rollcage = Callable[..., tuple[str, str]]


def test_a_report_is_a_table_json_or_a_page(
    runs: tuple[Path, Path], rollcage: Rollcage, tmp_path: Path
) -> None:
    assert "pass@k" in rollcage("report", runs[0])[0]
    out, err = rollcage("report", runs[0], "--html", tmp_path / "page.html", "--json")
    assert json.loads(out)["pass_rate"] == 0.5
    assert f"written: {tmp_path / 'page.html'}" in err
    assert "50.0%" in (tmp_path / "page.html").read_text()


def test_a_report_of_a_run_at_a_uri(runs: tuple[Path, Path], rollcage: Rollcage) -> None:
    assert json.loads(rollcage("report", f"file://{runs[1]}", "--json")[0])["passed"] == 2


def test_two_runs_are_compared(runs: tuple[Path, Path], rollcage: Rollcage) -> None:
    found = json.loads(rollcage("compare", *runs, "--json")[0])
    assert [at["difference"] for at in found["pass_at_k"]] == [0.5, 0.0]
    assert "+50.0" in rollcage("compare", *runs)[0]


def test_what_cannot_be_read_or_written_is_said(
    runs: tuple[Path, Path], rollcage: Rollcage, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="no run here"):
        rollcage("report", tmp_path / "nothing")
    with pytest.raises(InputError, match="is a directory"):
        rollcage("report", runs[0], "--html", tmp_path)
    with pytest.raises(CouldNotRun, match="nowhere"):
        rollcage("report", runs[0], "--html", tmp_path / "nowhere" / "page.html")
    with pytest.raises(InputError, match="nosuchscheme"):
        rollcage("report", "nosuchscheme://bucket/run")
    with pytest.raises(InputError, match="--agent-a"):
        rollcage("compare", *runs, "--agent-a", "keys")
