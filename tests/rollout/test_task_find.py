"""Tasks are found by path, directory and glob, the broken ones too."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rollcage.rollout.task import find_tasks, load_task, name_apart


def touch(root: Path, *paths: str) -> None:
    for path in paths:
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


def names(root: Path, *paths: str) -> list[str]:
    return [task.relative_to(root).as_posix() for task in find_tasks(paths, root)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    touch(
        tmp_path,
        "set/b/task.toml",
        "set/a/task.toml",
        "set/a/environment/deep/task.toml",
        "set/deep/er/c/task.toml",
        "set/.git/x/task.toml",
        "set/node_modules/x/task.toml",
        "set/README.md",
        "empty/README.md",
    )
    return tmp_path


def test_a_task_a_directory_and_a_glob(tree: Path) -> None:
    assert names(tree, "set/a") == ["set/a"]
    assert names(tree, "set/a/task.toml") == ["set/a"]
    assert names(tree, str(tree / "set/a")) == ["set/a"]
    assert names(tree, "set") == ["set/a", "set/b", "set/deep/er/c"]
    assert names(tree, "set/[ab]") == ["set/a", "set/b"]
    assert names(tree, "set/**/c") == ["set/deep/er/c"]
    assert names(tree, ".") == names(tree, "set")


def test_the_order_is_the_users_and_sorted_within_an_argument(tree: Path) -> None:
    assert names(tree, "set/deep", "set") == ["set/deep/er/c", "set/a", "set/b"]


def test_a_task_that_is_found_twice_counts_once(tree: Path) -> None:
    os.symlink(tree / "set", tree / "link")
    os.symlink(tree / "set", tree / "set/deep/loop")
    assert names(tree, "set/a", "set", "link", "set/../set/a") == ["set/a", "set/b", "set/deep/er/c"]


def test_a_directory_whose_name_looks_like_a_glob_is_itself(tmp_path: Path) -> None:
    touch(tmp_path, "set [1]/a/task.toml")
    assert names(tmp_path, "set [1]") == ["set [1]/a"]


@pytest.mark.parametrize(
    "mark",
    [
        "instruction.md",
        "environment/Dockerfile",
        "tests/test.sh",
        "solution/solve.sh",
        "steps/a/instruction.md",
    ],
)
def test_a_broken_task_is_found_so_that_it_can_be_reported(tree: Path, mark: str) -> None:
    touch(tree, f"set/broken/{mark}")
    assert "set/broken" in names(tree, "set")


def test_a_repository_with_tests_of_its_own_is_not_a_task(tree: Path) -> None:
    touch(tree, "tests/test.sh", "environment/Dockerfile")
    assert names(tree, ".") == ["set/a", "set/b", "set/deep/er/c"]


def test_an_old_terminal_bench_task_is_found(tmp_path: Path) -> None:
    touch(tmp_path, "old/task.yaml", "old/run-tests.sh", "other/run-tests.sh")
    assert names(tmp_path, ".") == ["old"]


@pytest.mark.parametrize("path", ["empty", "nowhere", "none-*", "set/README.md"])
def test_a_path_without_a_task_is_named(tree: Path, path: str) -> None:
    with pytest.raises(ValueError, match=path.replace("*", r"\*")):
        find_tasks(["set", path], tree)


def test_tasks_of_the_same_name_are_told_apart_by_their_path(tmp_path: Path) -> None:
    for path in ("x/a", "y/a", "y/b"):
        touch(tmp_path, f"{path}/task.toml")
        (tmp_path / path / "instruction.md").write_text("Do it.\n")
        (tmp_path / path / "environment").mkdir()
        (tmp_path / path / "environment/Dockerfile").write_text("FROM debian\n")
        touch(tmp_path, f"{path}/tests/test.sh")
    tasks = [load_task(path) for path in find_tasks(["."], tmp_path)]
    assert [task.name for task in tasks] == ["a", "a", "b"]
    apart = name_apart(tasks, tmp_path)
    assert [task.name for task in apart] == ["x/a", "y/a", "b"]
    assert apart[0] == replace(tasks[0], name="x/a")
    assert name_apart(tasks, tmp_path / "x")[0].name == "a"
    assert name_apart(tasks, tmp_path / "x")[1].name == str(tmp_path / "y/a")
