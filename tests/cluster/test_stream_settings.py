"""What a job's file says of a stream, what is refused, and what the command line shows of its weights."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rollcage.cluster import cli_common, cli_stream
from rollcage.cluster.cli_stream import _read, curriculum
from rollcage.cluster.config import ConfigError, job_schema, load_job
from rollcage.cluster.errors import InputError
from rollcage.cluster.plan_tasks import make_plan

WriteTask = Callable[..., Path]


def a_job(tmp_path: Path, write_task: WriteTask, **settings: Any) -> Path:
    for name in ("easy", "hard"):
        write_task(f"tasks/{name}")
    file = tmp_path / "job.yaml"
    file.write_text(
        yaml.safe_dump({"tasks": ["tasks"], "agents": ["oracle", "nop"], "samples": 3, **settings})
    )
    return file


def test_a_stream_is_planned_from_the_file(tmp_path: Path, write_task: WriteTask) -> None:
    settings = {"mode": "stream", "stream": {"max_lag_groups": 8, "draws": 10, "curriculum": {"hard": 3}}}
    plan = make_plan(load_job(a_job(tmp_path, write_task, **settings)))
    assert plan.stream is not None
    assert (plan.stream.max_lag_groups, plan.stream.draws, plan.stream.weights) == (8, 10, {"hard": 3.0})
    assert list(plan.rollouts()) == []
    assert plan.total() == 10 * 2 * 3
    [key, _] = plan.task_keys()
    assert [(one.agent, one.sample, one.draw) for one in plan.drawn(key, 4)] == [
        (agent, sample, 4) for agent in ("oracle", "nop") for sample in range(3)
    ]


def test_a_job_is_no_stream_unless_it_says_so(tmp_path: Path, write_task: WriteTask) -> None:
    plan = make_plan(load_job(a_job(tmp_path, write_task)))
    assert plan.stream is None
    assert plan.total() == 12


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"stream": {"draws": 3}},
            r"stream: says how a stream draws, and this job is none \(add `mode: stream`",
        ),
        ({"mode": "streaming"}, "mode: must be 'batch' or 'stream'"),
        ({"mode": "stream", "stream": {"max_lag_groups": 0}}, "greater than or equal to 1, not 0"),
        ({"mode": "stream", "stream": {"curriculum": {"hard": -1}}}, "greater than or equal to 0, not -1"),
        ({"mode": "stream", "stream": {"curriculum": {"hard": True}}}, "valid number, not true"),
        ({"mode": "stream", "draws": 3}, "it is a setting of `stream`"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_their_line(
    tmp_path: Path, write_task: WriteTask, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        load_job(a_job(tmp_path, write_task, **settings))
    assert "job.yaml:" in str(refused.value)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"esay": 2}, r"stream\.curriculum: no task is called 'esay' \(did you mean 'easy'\?\)"),
        ({"easy": 0, "hard": 0}, "every task would have the weight 0"),
    ],
)
def test_weights_of_tasks_that_are_not_there_are_refused_before_anything_is_begun(
    tmp_path: Path, write_task: WriteTask, weights: dict[str, float], words: str
) -> None:
    config = load_job(a_job(tmp_path, write_task, mode="stream", stream={"curriculum": weights}))
    with pytest.raises(InputError, match=words):
        make_plan(config)


def test_the_schema_knows_streams() -> None:
    assert job_schema()["$defs"]["StreamConfig"]["properties"].keys() == {
        "max_lag_groups",
        "draws",
        "curriculum",
    }


def test_the_weights_that_were_in_effect_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    for module in (cli_stream, cli_common):
        monkeypatch.setattr(module, "out", Console(file=shown, width=100))
    with pytest.raises(InputError, match="there is no run here"):
        curriculum(tmp_path)
    (tmp_path / "job.json").write_text("{}")
    changes = [
        {"at": 1.0, "draw": 0, "by": "job", "weights": {}},
        {"at": 2.0, "draw": 40, "by": "trainer", "weights": {"easy": 0, "hard": 2.5}},
    ]
    (tmp_path / "curriculum.jsonl").write_text("".join(json.dumps(change) + "\n" for change in changes))
    curriculum(tmp_path)
    assert [line.split() for line in shown.getvalue().splitlines()][1:] == [
        ["0", "job", "every", "task", "1"],
        ["40", "trainer", "easy", "0"],
        ["hard", "2.5"],
    ]
    shown.truncate(shown.seek(0))
    curriculum(tmp_path, as_json=True)
    assert json.loads(shown.getvalue()) == changes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("easy: [", r"weights\.yaml:1: this is neither JSON nor YAML"),
        ("- easy", "not list"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_weights_that_is_none_is_refused(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "weights.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(InputError, match=words):
        _read(file)
