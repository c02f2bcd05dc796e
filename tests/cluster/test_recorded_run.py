"""What a run says of itself: told when it cannot be read, and never written to."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console

from rollcage.cluster.config import load_job
from rollcage.cluster.errors import InputError
from rollcage.cluster.ledger import Ledger
from rollcage.cluster.recorded_run import Selection, check_output, open_run, plan_again, select_uncancelled
from rollcage.cluster.replay import ReplayOptions, replay
from rollcage.rollout.outcome import Outcome
from rollcage.rollout.schema import SCHEMAS
from rollcage.rollout.trajectory import Attempt, Reward, Trajectory

SECRET = '[environment.env]\nTOKEN = "${ROLLCAGE_TEST_UNSET}"\n'


@pytest.fixture
def run(tmp_path: Path, write_task: Callable[..., Path]) -> Path:
    """A run of two tasks, of which one needs a variable that is not set any more. Its rollouts are not written yet."""
    tasks = [write_task("plain"), write_task("needy", toml=SECRET)]
    settings = {"tasks": [str(task) for task in tasks], "agents": ["oracle"], "skip_unready": True}
    job = {
        "job": "j",
        "config": load_job(None, (), settings).model_dump(mode="json"),
        "tasks": [{"task": task.name, "digest": "d", "path": str(task)} for task in tasks],
    }
    Ledger.create(tmp_path / "run", job).close()
    return tmp_path / "run"


async def write_rollout(run: Path, *called_off: str) -> Path:
    """One row; the shard it is in. `called_off`: the attempts of further ones, which ended cancelled; empty where
    none was made."""
    attempt = Attempt(
        "a", "j", "plain", "d", 0, 1, "oracle", "", "h", Outcome.PASSED, reward=Reward(1.0), trajectory=Trajectory()
    )  # fmt: skip
    ledger = Ledger.open(run)
    await ledger.record_rollout(attempt, attempts=1, group_size=1)
    for sample, attempt_id in enumerate(called_off, 1):
        cancelled = replace(
            attempt,
            attempt_id=attempt_id,
            sample=sample,
            outcome=Outcome.CANCELLED,
            error_class="cancelled",
            reward=None,
        )
        await ledger.record_rollout(cancelled, attempts=int(bool(attempt_id)), group_size=1)
    await ledger.finish({})
    [shard] = (run / "rollouts").iterdir()
    return shard


def rows(run: Path) -> int:
    return len(list(open_run(run).rows(("attempt_id",))))


def flipped(content: bytes) -> bytes:
    """The first half of it is something else: what is behind still says that it is an Arrow file."""
    half = len(content) // 2
    return content[:8] + bytes(byte ^ 0xFF for byte in content[8:half]) + content[half:]


@pytest.mark.parametrize("damage", [lambda _: b"", lambda content: content[:200], flipped])
async def test_a_damaged_file_is_named(run: Path, damage: Callable[[bytes], bytes]) -> None:
    shard = await write_rollout(run)
    assert rows(run) == 1
    shard.write_bytes(damage(shard.read_bytes()))
    with pytest.raises(InputError, match=r"part-00000\.arrow: this shard is damaged"):
        rows(run)


async def test_of_a_run_that_has_not_ended_it_is_said_that_what_has_ended_is_replayed(run: Path) -> None:
    said = StringIO()
    with pytest.raises(InputError, match="holds no rollout"):
        replay(ReplayOptions(run, Selection()), Console(file=said, width=1000), show=print)
    assert "run has not ended: it is still going on, or was killed; what has ended" in said.getvalue()
    await write_rollout(run)
    assert open_run(run).finished


async def test_rollouts_that_were_called_off_are_left_out_and_counted(run: Path) -> None:
    await write_rollout(run, "b", "", "c")
    opened = open_run(run)
    ended = list(opened.rows(("attempt_id", "outcome")))
    left, cancelled = select_uncancelled(opened, Selection(), ended)
    assert ([row["attempt_id"] for row in left], cancelled) == (["a"], 3)
    assert select_uncancelled(opened, Selection(sample=0), ended) == (left, 0)
    with pytest.raises(InputError, match=r"ended cancelled, and is not replayed:\n  plain#1 by oracle: b"):
        select_uncancelled(opened, Selection(rollout="b"), ended)


async def test_files_of_another_version_are_named(run: Path) -> None:
    shard = await write_rollout(run)
    schema = SCHEMAS["rollouts"].with_metadata({"rollcage.schema_version": "999"})
    with pa.OSFile(str(shard), "wb") as sink, pa.ipc.new_file(sink, schema):
        pass
    with pytest.raises(InputError, match=r"part-00000\.arrow: schema version 999"):
        rows(run)


@pytest.mark.parametrize("text", ["", "{", "[1]", '"x"', '{"config": {}, "tasks": []}'])
def test_a_job_that_cannot_be_done_again_is_told(run: Path, text: str) -> None:
    (run / "job.json").write_text(text)
    with pytest.raises(
        InputError, match=r"job\.json(: this file is damaged| is not of a job that this version can do again)"
    ):
        open_run(run)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("run", "is in the run itself"),
        ("run/again", "is in the run itself"),
        ("link", "is in the run itself"),
        ("other", "holds a run already: name another directory"),
        ("file", "is no directory"),
    ],
)
def test_a_place_that_is_not_free_is_told_before_anything_is_begun(
    run: Path, tmp_path: Path, where: str, said: str
) -> None:
    (tmp_path / "link").symlink_to(run)
    Ledger.create(tmp_path / "other", {}).close()
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for free in ("empty", "not-there"):
        check_output(open_run(run), tmp_path / free)
    with pytest.raises(InputError, match=f"--output .*{where} {said}"):
        check_output(open_run(run), tmp_path / where)


def test_a_task_whose_variables_are_not_set_any_more_is_not_left_out_silently(run: Path) -> None:
    opened = open_run(run)
    assert [key.name for key in plan_again(opened, opened.config, ["plain"]).tasks] == ["plain"]
    with pytest.raises(InputError, match=r"leave these tasks out with --task:(.|\n)*ROLLCAGE_TEST_UNSET"):
        plan_again(opened, opened.config, ["plain", "needy"])


def test_a_folder_whose_name_is_a_pattern_is_found_again(
    tmp_path: Path, write_task: Callable[..., Path]
) -> None:
    task = write_task("task[s] *")
    config = load_job(None, (), {"tasks": [str(task)], "agents": ["oracle"]})
    job = {
        "config": config.model_dump(mode="json"),
        "tasks": [{"task": "t", "digest": "d", "path": str(task)}],
    }
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "job.json").write_text(json.dumps(job))
    opened = open_run(tmp_path / "run")
    assert [key.name for key in plan_again(opened, opened.config, ["t"]).tasks] == ["t"]
