"""A small image with things in it that an agent might want to replace, and sandboxes of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from built_images import build_image

from rollcage.rollout.sandbox.base import Sandbox, SandboxSpec
from rollcage.rollout.sandbox.container import start_sandbox
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.task import Environment, Step, Task, Verifier

BASE = "debian:bookworm-slim"
LABELS = {"rollcage.host": "test-verifier"}

DOCKERFILE = f"""\
FROM {BASE}
RUN mkdir -p /app /usr/local/lib/python3.11/site-packages/_pytest /usr/lib/python3.11 \\
 && printf '#!/bin/sh\\necho genuine pytest; exit 1\\n' >/usr/local/bin/pytest \\
 && printf '#!/bin/sh\\necho genuine python3\\n' >/usr/bin/python3 \\
 && printf 'genuine' >/usr/local/lib/python3.11/site-packages/_pytest/main.py \\
 && printf 'genuine' >/usr/lib/python3.11/os.py \\
 && printf '/app/src\\n' >/usr/local/lib/python3.11/site-packages/easy-install.pth \\
 && chmod +x /usr/local/bin/pytest /usr/bin/python3 && useradd -m tester
WORKDIR /app
"""


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def image(engine: Engine) -> Iterator[str]:
    tag = f"rollcage-test/verifier:{uuid4().hex[:8]}"
    yield build_image(engine.api, tag, DOCKERFILE, labels=LABELS)
    engine.api.remove_image(tag, force=True, noprune=True)  # two at once would meet at its parents


@pytest.fixture
async def make_sandbox(engine: Engine, image: str) -> AsyncIterator[Callable[..., Awaitable[Sandbox]]]:
    """Start sandboxes; they are removed after the test."""
    made: list[Sandbox] = []

    async def make(**settings: Any) -> Sandbox:
        name = f"rollcage-test-verifier-{uuid4().hex[:12]}"
        spec = SandboxSpec(
            **{"image": image, "name": name, "workdir": "/app", "pids": 256, "labels": LABELS, **settings}
        )
        made.append(await start_sandbox(engine, spec))
        return made[-1]

    yield make
    for sandbox in made:
        await sandbox.remove()


@pytest.fixture
async def sandbox(make_sandbox: Callable[..., Awaitable[Sandbox]]) -> Sandbox:
    return await make_sandbox()


@pytest.fixture
def make_task(tmp_path: Path) -> Callable[..., Task]:
    """A task of one step whose test.sh is the given text (or bytes), with other files of tests/ by name."""
    number = count()

    def make(
        script: str | bytes | None = "echo 1 >/logs/verifier/reward.txt\n",
        *,
        files: dict[str, str] | None = None,
        shebang: str = "#!/bin/bash\n",
        **verifier: Any,
    ) -> Task:
        root = tmp_path / f"task{next(number)}"
        tests = root / "tests"
        tests.mkdir(parents=True)
        if script is not None:
            text = script if isinstance(script, bytes) else (shebang + script).encode()
            (tests / "test.sh").write_bytes(text)
        for name, content in (files or {}).items():
            (tests / name).parent.mkdir(parents=True, exist_ok=True)
            (tests / name).write_text(content)
        settings = Verifier(**{"timeout_sec": 60.0, **verifier})
        step = Step("main", "do it", tests, None, verifier=settings)
        return Task("t", root, "0" * 64, Environment(None, "image", workdir="/app"), (step,))

    return make
