"""Which of an agent's changes are undone before the verifier runs, and which honest ones are not."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rollcage.verifier.plants import Plants, find_plants, plugins_to_switch_off, runs_code

PATH = ("/opt/venv/bin", "/usr/local/bin", "/usr/bin", "/bin")
SITE = "/usr/local/lib/python3.12/site-packages"


@dataclass(frozen=True)
class Change:
    path: str
    kind: str


def find(kind: str, *paths: str, workdir: str = "/app") -> Plants:
    return find_plants([Change(path, kind) for path in paths], workdir=workdir, path=PATH, home="/root")


@pytest.mark.parametrize("kind", ["modified", "deleted"])
@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/bash", "/bin/sh", "/usr/bin/python3.11", "/opt/venv/bin/pytest", "/usr/local/bin/uvx",
        "/usr/lib/python3.11/json/__init__.py", "/usr/local/lib/python3.12/os.py", "/usr/local/lib/python3.12",
        f"{SITE}/_pytest/runner.py", f"{SITE}/pluggy", f"{SITE}/pytest-8.0.dist-info", f"{SITE}/sitecustomize.py",
        f"{SITE}/pytest_json_ctrf/plugin.py", "/etc/ld.so.preload", "/conftest.py", "/usr/local/bin",
    ],
)  # fmt: skip
def test_what_verifiers_run_of_the_image_is_put_back(kind: str, path: str) -> None:
    assert find(kind, path) == Plants(restore=(path,))


@pytest.mark.parametrize("kind", ["modified", "deleted"])
@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/gcc", "/usr/local/bin/server", "/app/bin/test", "/usr/bin/pip", "/etc/profile", "/etc/hosts",
        f"{SITE}/numpy/core.py", f"{SITE}/pip/__init__.py", "/app/json.py", "/app/conftest.py",
        "/usr/lib/x86_64-linux-gnu/libc.so.6", "/root/.bashrc",
    ],
)  # fmt: skip
def test_what_a_task_may_ask_to_change_is_left_alone(kind: str, path: str) -> None:
    assert find(kind, path) == Plants()


@pytest.mark.parametrize(
    "path",
    [
        "/etc/ld.so.preload", "/conftest.py", "/pytest.ini", "/setup.cfg", "/app/pytest.py",
        "/app/_pytest/__init__.py", "/app/json.py", "/app/pluggy/x.py",
        f"{SITE}/sitecustomize.py", f"{SITE}/usercustomize/__init__.py",
        f"{SITE}/sitecustomize.cpython-312-x86_64-linux-gnu.so", "/usr/lib/python3.11/pytest.py",
        f"{SITE}/pytest.py",
        "/root/.local/lib/python3.11/site-packages/sitecustomize.py", "/usr/bin/pyvenv.cfg", "/root/.local/bin/env",
    ],
)  # fmt: skip
def test_what_no_honest_work_adds_is_taken_away(path: str) -> None:
    assert find("added", path) == Plants(remove=(path,))


@pytest.mark.parametrize(
    "path",
    [
        "/usr/bin/curl", "/usr/local/bin/server", "/app/main.py", "/app/calendar.py", "/app/src/json.py",
        "/app/json", "/app/data.json",
        "/app/tests/conftest.py", "/app/pyproject.toml", "/app/venv/bin/python3",
        "/app/venv/pyvenv.cfg", f"{SITE}/numpy/__init__.py", "/root/.local/bin/uv", "/root/.bashrc",
        "/usr/lib/python3.11/tkinter/__init__.py",
    ],
)  # fmt: skip
def test_what_agents_add_honestly_is_left_alone(path: str) -> None:
    assert find("added", path) == Plants()


def test_a_task_that_works_in_the_root_directory_may_have_its_project_there() -> None:
    assert find("added", "/pyproject.toml", "/conftest.py", workdir="/") == Plants()


def test_pytest_that_was_installed_with_its_distribution_is_left_alone() -> None:
    assert find("added", f"{SITE}/pytest/__init__.py", f"{SITE}/pytest-8.4.1.dist-info/RECORD") == Plants()


def test_a_program_in_front_of_one_of_the_images_counts_where_the_image_has_one() -> None:
    (shadow,) = find("added", "/usr/local/bin/grep").shadows
    program, elsewhere = shadow
    assert program == "/usr/local/bin/grep"
    assert {"/usr/bin/grep", "/bin/grep", "/opt/venv/bin/grep"} <= set(elsewhere)
    assert program not in elsewhere


def test_a_program_that_was_added_twice_shadows_nothing_of_the_images() -> None:
    (shadow,) = find("added", "/usr/local/bin/curl", "/usr/bin/curl").shadows
    assert {"/usr/bin/curl", "/bin/curl"}.isdisjoint(shadow[1])


def test_of_a_directory_that_is_gone_its_children_are_what_is_put_back() -> None:
    changes = [
        Change("/usr/local/lib/python3.12", "modified"),
        Change("/usr/local/lib/python3.12/os.py", "deleted"),
    ]
    plants = find_plants(changes, workdir="/app", path=PATH, home="/root")
    assert plants.restore == ("/usr/local/lib/python3.12/os.py",)


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("/app/src\n", False),
        ("# import os\n/app\n", False),
        ("import os; os._exit(0)\n", True),
        ("import\tevil\n", True),
        ("import __editable___mypkg_1_0_finder; __editable___mypkg_1_0_finder.install()\n", False),
        ("import __editable___a_finder; __editable___b_finder.install()\n", True),
        ("import __editable___a_finder; __editable___a_finder.install(); import evil\n", True),
        ("import _virtualenv\n", False),
        ("/app/src\nimport evil\n", True),
    ],
)
def test_a_pth_file_is_code_where_a_line_imports_something_unknown(text: str, runs: bool) -> None:
    assert runs_code(text) == runs


def test_pth_files_and_entry_points_are_for_reading() -> None:
    plants = find("added", f"{SITE}/a.pth", f"{SITE}/x-1.0.dist-info/entry_points.txt", "/app/model.pth")
    assert plants.startup == ((f"{SITE}/a.pth", False),)
    assert plants.plugins == (f"{SITE}/x-1.0.dist-info/entry_points.txt",)
    assert find("modified", f"{SITE}/a.pth").startup == ((f"{SITE}/a.pth", True),)


def test_only_plugins_that_the_tests_do_not_name_are_switched_off() -> None:
    points = {
        f"{SITE}/evil-1.0.dist-info/entry_points.txt": "[console_scripts]\na = b\n[pytest11]\nhelper = evil\n",
        f"{SITE}/pytest_asyncio-0.24.dist-info/entry_points.txt": "[pytest11]\nasyncio = pytest_asyncio.plugin\n",
        f"{SITE}/rich-1.0.dist-info/entry_points.txt": "[console_scripts]\nrich = rich\n",
        f"{SITE}/odd-1.0.dist-info/entry_points.txt": "[pytest11]\na b; rm = odd\n",
    }
    assert plugins_to_switch_off(points, "pip install pytest-asyncio==0.24") == ("helper",)
    assert plugins_to_switch_off(points, "") == ("helper", "asyncio")
