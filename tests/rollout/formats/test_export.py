"""`rollcage export`: what is selected, what is refused, and that a file is whole or not there."""

from __future__ import annotations

import fcntl
import io
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rollcage.rollout.formats import FORMATS, Unfit
from rollcage.rollout.formats.export import NothingToExport, OutputExists, export
from rollcage.rollout.formats.select import Selection
from rollcage.rollout.formats.where import Where


@pytest.fixture
def run(write_run: Any, shapes: Any) -> Any:
    """A whole group, one with an invalid rollout, one without token ids, and one of two agents' answers alike."""
    cut = shapes.text_turns()
    cut.turns[1].finish_reason = "length"
    longer = shapes.text_turns()
    longer.turns[0].completion_tokens = 50
    return write_run(
        [shapes.attempt(shapes.text_turns()), shapes.attempt(longer, sample=1, reward=0.0)],
        [
            shapes.attempt(shapes.tool_turns(), "calls", agent="tools"),
            shapes.attempt(None, "calls", 1, None, agent="tools"),
        ],
        [shapes.attempt(shapes.without_ids(shapes.summed_up()), "texts", n, float(n)) for n in (0, 1)],
        [shapes.attempt(cut, "cut")],
        job={"config": {"agents": [{"name": "tools", "options": {"done": "submit"}}, {"name": "nope:Nope"}]}},
    )  # fmt: skip


def exported(run: Any, name: str, skip_unfit: bool = False, **selection: Any) -> list[dict[str, Any]]:
    sink = io.BytesIO()
    export(run, FORMATS[name], sink, Selection(**selection), skip_unfit=skip_unfit)
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def named(rows: list[dict[str, Any]]) -> list[str]:
    return [f"{row['task']}/{row['sample']}" for row in rows]


@pytest.mark.parametrize(
    ("selection", "kept"),
    [
        ({}, ["count-lines/0", "count-lines/1", "calls/0", "texts/0", "texts/1", "cut/0"]),
        ({"where": Where("outcome = 'passed'")}, ["count-lines/0", "calls/0", "texts/1", "cut/0"]),
        ({"agents": ("too*",)}, ["calls/0"]),
        ({"tasks": ("c*t*", "calls")}, ["count-lines/0", "count-lines/1", "calls/0", "cut/0"]),
        ({"complete": True}, ["count-lines/0", "count-lines/1", "texts/0", "texts/1", "cut/0"]),
        ({"untruncated": True}, ["count-lines/0", "count-lines/1", "calls/0", "texts/0", "texts/1"]),
        ({"shortest": True}, ["count-lines/0", "calls/0", "texts/0", "cut/0"]),
        ({"distinct": True}, ["count-lines/0", "calls/0", "texts/0", "cut/0"]),
        ({"shortest": True, "where": Where("reward < 1")}, ["count-lines/1", "texts/0"]),
    ],
)
def test_what_is_asked_for_is_exported(run: Any, selection: dict[str, Any], kept: list[str]) -> None:
    rows = exported(run, "sharegpt", **selection)
    assert named([row for row in rows if row["conversation"] == 0]) == kept


def test_what_does_not_fit_is_refused_with_number_and_reason_and_nothing_is_left(
    run: Any, tmp_path: Path
) -> None:
    file = tmp_path / "deep" / "out.jsonl"
    with pytest.raises(
        Unfit, match=r"2 of 6 rollouts can't be said in the format skyrl:\n    2: .*token ids"
    ) as error:
        export(run, FORMATS["skyrl"], file)
    assert "(the first: demo/bash/texts/0/0)" in str(error.value)
    assert list(file.parent.iterdir()) == []

    done = export(run, FORMATS["skyrl"], file, skip_unfit=True)
    assert (done.rows, done.counts.kept, done.counts.unfit.total()) == (3, 4, 2)
    assert list(file.parent.iterdir()) == [file]
    groups = [json.loads(line) for line in file.read_text().splitlines()]
    assert [len(one["response_ids"]) for one in groups] == [4, 2, 2]


@pytest.mark.parametrize("name", ["skyrl", "skyrl-merged", "verl", "prime-rl"])
def test_a_trainers_format_never_holds_an_invalid_rollout(run: Any, name: str) -> None:
    with pytest.raises(Unfit, match=r"1: no valid reward: invalid \(image_build\)"):
        exported(run, name, invalid=True)


@pytest.mark.parametrize("name", ["sharegpt", "atif", "parquet"])
def test_what_a_killed_export_left_goes_with_the_next_and_what_one_at_work_holds_stays(
    run: Any, tmp_path: Path, name: str
) -> None:
    place = tmp_path / "here"
    place.mkdir()
    (place / ".out.export-left").write_text("half")
    (place / ".out.export-folder").mkdir()
    (place / ".out.export-folder" / "one.json").write_text("half")
    for other in (".out.mine", ".outer.export-left"):
        (place / other).touch()
    held = place / ".out.export-held"
    held.touch()
    with held.open() as at_work:
        fcntl.flock(at_work, fcntl.LOCK_EX)
        export(run, FORMATS[name], place / "out", Selection(where=Where("task = 'calls'")), skip_unfit=True)
    assert {path.name for path in place.iterdir()} == {held.name, ".out.mine", ".outer.export-left", "out"}


def test_an_invalid_rollout_is_exported_where_it_is_asked_for(run: Any, tmp_path: Path) -> None:
    assert export(run, FORMATS["parquet"], tmp_path / "valid.parquet").rows == 6
    done = export(run, FORMATS["parquet"], tmp_path / "all.parquet", Selection(invalid=True))
    assert done.rows == done.counts.read == 7
    done = export(run, FORMATS["parquet"], tmp_path / "short.parquet", Selection(shortest=True))
    assert done.rows == done.counts.kept == 4


def test_nothing_to_export_is_said_and_not_written(run: Any, tmp_path: Path) -> None:
    with pytest.raises(
        NothingToExport, match=r"7 rollouts were read\n    6: not what `where` asks for\n    1: no valid"
    ):
        export(run, FORMATS["sharegpt"], tmp_path / "none", Selection(where=Where("sample = 99")))
    assert not (tmp_path / "none").exists()


def test_what_is_there_is_not_replaced_unasked(run: Any, tmp_path: Path) -> None:
    lines, folder = tmp_path / "out.jsonl", tmp_path / "out"
    lines.write_text("mine")
    folder.mkdir()
    (folder / "mine").write_text("mine")
    for name, place in (("sharegpt", lines), ("atif", folder)):
        with pytest.raises(OutputExists, match="is there already"):
            export(run, FORMATS[name], place)
        export(run, FORMATS[name], place, overwrite=True)
    assert len(lines.read_text().splitlines()) == 8
    assert (folder / "mine").read_text() == "mine"
    assert len(list(folder.glob("*.json"))) == 6


def test_memory_is_that_of_a_group_however_long_the_run_is(
    write_run: Any, shapes: Any, tmp_path: Path
) -> None:
    def large(number: int) -> Any:
        trajectory = shapes.text_turns()
        trajectory.messages[1].content = chr(97 + number % 26) * 200_000
        return trajectory

    def peak(groups: int) -> int:
        run = write_run(*([shapes.attempt(large(n), f"t{n}")] for n in range(groups)))
        tracemalloc.start()
        export(run, FORMATS["prime-rl"], tmp_path / f"{groups}.jsonl")
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(1)
    assert peak(30) < 1.5 * peak(5)


def test_the_page_names_every_format_and_what_it_is_checked_against() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "formats.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    for one in FORMATS.values():
        assert any(row.startswith(f"| `{one.name}` |") and row.endswith(f"| {one.checked} |") for row in rows)


def rollcage(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from rollcage.cluster.cli import main; main()", "export", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_writes_and_says_what_it_left_out(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    done = rollcage(
        str(run),
        "--format",
        "trl",
        "--output",
        str(file),
        "--where",
        "outcome = 'passed'",
        "--agent",
        "tools",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"1 of 7 rollouts as trl: 1 rows in {file}",
        "left out 5: another agent",
        "left out 1: no valid reward",
    ]
    assert "the tools of agent nope:Nope are not known" in done.stderr
    (row,) = map(json.loads, file.read_text().splitlines())
    names = [tool["function"]["name"] for tool in json.loads(row["tools"])]
    assert names == ["bash", "read_file", "write_file", "edit", "submit"]


def test_the_command_refuses_with_the_remedy(run: Any) -> None:
    done = rollcage(str(run), "--format", "verl", "--where", "rewrd > 0")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "error: --where: there is no column `rewrd` (`reward`?)" in done.stderr

    done = rollcage(str(run), "--format", "verl")
    assert (done.returncode, done.stdout) == (1, "")
    assert "--skip-unfit leaves them out" in done.stderr
