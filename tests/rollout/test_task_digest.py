"""Two tasks have the same digest exactly where their files are the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollcage.rollout.task import task_digest


@pytest.fixture
def task(tmp_path: Path) -> Path:
    root = tmp_path / "task"
    for path, text in {"a": "1", "dir/b": "2", "dir/c/d": "3", "ä": "4"}.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o644)
    os.symlink("a", root / "link")
    return root


def test_a_copy_elsewhere_has_the_same_digest(task: Path, tmp_path: Path) -> None:
    shutil.copytree(task, tmp_path / "copy", symlinks=True)
    os.utime(tmp_path / "copy/a", (1, 1))
    (tmp_path / "copy/a").chmod(0o600)
    os.symlink(tmp_path / "copy", tmp_path / "linked")
    assert task_digest(tmp_path / "copy") == task_digest(task) == task_digest(tmp_path / "linked")


def test_the_digest_is_the_same_on_every_machine(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x\n")
    (tmp_path / "a").chmod(0o644)
    assert task_digest(tmp_path) == "e628beb8606294fbc841cf2ae147e6126542dd1a3c97f3bc14df26b8c936327c"


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "a").write_text("2"),
        lambda root: (root / "a").chmod(0o755),
        lambda root: (root / "a").rename(root / "A"),
        lambda root: (root / "dir/b").rename(root / "b"),
        lambda root: (root / "new").touch(),
        lambda root: (root / "link").unlink(),
        lambda root: ((root / "link").unlink(), os.symlink("dir", root / "link")),
        lambda root: ((root / "link").unlink(), (root / "link").write_text("a")),
        lambda root: (root / ".gitignore").touch(),
        lambda root: os.mkfifo(root / "pipe"),
    ],
)
def test_any_change_of_the_files_changes_it(task: Path, change: Callable[[Path], object]) -> None:
    before = task_digest(task)
    change(task)
    assert task_digest(task) != before


def test_what_tools_leave_behind_does_not_count(task: Path) -> None:
    before = task_digest(task)
    for path in (".git/HEAD", "dir/__pycache__/x.pyc", ".DS_Store", "dir/.DS_Store", "dir/c/.git"):
        (task / path).parent.mkdir(exist_ok=True)
        (task / path).touch()
    (task / "empty").mkdir()
    assert task_digest(task) == before


def test_a_ring_of_links_and_a_name_that_is_not_utf8_are_no_trouble(task: Path) -> None:
    os.symlink(".", task / "dir/ring")
    os.symlink("self", task / "self")
    (Path(os.fsdecode(os.fsencode(task) + b"/\xff"))).touch()
    assert task_digest(task) == task_digest(task)
