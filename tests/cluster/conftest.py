"""Small tasks on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

DOCKERFILE = "FROM debian:bookworm-slim\nWORKDIR /app\n"
SOLVE = "#!/bin/sh\necho hello >/app/hello\n"
TEST = "#!/bin/sh\nif [ -e /app/hello ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"

WriteTask = Callable[..., Path]


@pytest.fixture
def write_task(tmp_path: Path) -> WriteTask:
    """Write a task that the oracle passes and nop fails, or one with other files; `where` is its directory below
    the test's own."""

    def write(
        where: str,
        *,
        toml: str = "",
        dockerfile: str = DOCKERFILE,
        solve: str = SOLVE,
        test: str = TEST,
    ) -> Path:
        root = tmp_path / where
        files = {
            "task.toml": f'version = "1.0"\n{toml}',
            "instruction.md": "Make /app/hello.\n",
            "environment/Dockerfile": dockerfile,
            "solution/solve.sh": solve,
            "tests/test.sh": test,
        }
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    return write
