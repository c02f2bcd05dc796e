"""The house keeps its rules: one engine, one room; one direction of imports; light imports stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("rollout", "verifier", "generator", "metrics", "cluster")

ROOMS = {
    "ray": ("cluster/",),
    "docker": ("rollout/sandbox/",),
    "vllm": ("rollout/policies/vllm",),
    "prometheus_client": ("metrics/",),
}
"""Where each engine may be imported."""

MAY_IMPORT = {
    "rollout": {"rollout"},
    "verifier": {"rollout", "verifier"},
    "generator": {"rollout", "verifier", "generator"},
    "metrics": {"rollout", "metrics"},
    "cluster": {"rollout", "verifier", "generator", "metrics", "cluster"},
}
"""The one direction of imports between the folders."""


def imports(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.lineno, node.module
        elif isinstance(node, ast.ImportFrom) and node.level:
            yield node.lineno, "a relative import"


def violations(root: Path) -> list[str]:
    found = []
    for folder in FOLDERS:
        for file in sorted((root / folder).rglob("*.py")):
            name = file.relative_to(root).as_posix()
            for line, module in imports(file):
                top, _, rest = module.partition(".")
                if top in ROOMS and not name.startswith(ROOMS[top]):
                    found.append(f"{name}:{line} imports {top}")
                if top == "rollcage" and rest.split(".")[0] not in MAY_IMPORT[folder]:
                    found.append(f"{name}:{line} imports {module}")
                if module == "a relative import":
                    found.append(f"{name}:{line} has {module}")
    return found


def test_each_engine_is_imported_in_its_own_room_only() -> None:
    assert violations(ROOT) == []


def test_the_rule_sees_an_engine_in_the_wrong_room(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
    (tmp_path / "verifier" / "bad.py").write_text("def f():\n    import docker.errors\n")
    (tmp_path / "rollout" / "bad.py").write_text("from rollcage.verifier import verify\n")
    assert violations(tmp_path) == [
        "rollout/bad.py:1 imports rollcage.verifier",
        "verifier/bad.py:2 imports docker",
    ]


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("rollcage.rollout.feed", "ray docker vllm torch transformers pydantic yaml"),
        ("rollcage.rollout.formats.export", "ray docker vllm torch transformers pydantic yaml"),
        ("rollcage.rollout.outcome", "ray docker vllm torch pyarrow"),
        ("rollcage.rollout.task", "ray docker vllm torch"),
        ("rollcage.rollout.arrow", "ray docker vllm torch"),
        ("rollcage.rollout.rollout", "ray vllm torch prometheus_client"),
        ("rollcage.metrics.report", "ray docker vllm torch"),
        ("rollcage.cluster.scheduler", "ray docker vllm torch"),
        ("rollcage.cluster.cli", "ray docker vllm torch transformers"),
    ],
)
def test_a_light_import_stays_light(module: str, unwanted: str) -> None:
    code = f"import sys, {module}\nprint(*[name for name in {unwanted.split()!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
