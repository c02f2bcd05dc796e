"""A shell of this machine behind the sandbox's protocol, and contexts for agents to work in."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shlex
import shutil
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from rollcage.rollout.agents.base import AgentContext
from rollcage.rollout.clock import AgentClock
from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.scripted import ScriptedPolicy
from rollcage.rollout.sandbox.base import OUTPUT_BYTES, CommandResult
from rollcage.rollout.task import Environment, Step, Task
from rollcage.rollout.trajectory import Trajectory


def _of_sandbox_tests() -> ModuleType:
    path = Path(__file__).parents[1] / "sandbox" / "conftest.py"
    spec = importlib.util.spec_from_file_location("rollcage_test_sandboxes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_sandboxes = _of_sandbox_tests()
# Sandboxes of three kinds of image: with bash, with dash alone, and with nothing but busybox.
engine = _sandboxes.engine
build_image = _sandboxes.build_image
busybox_image = _sandboxes.busybox_image
images = _sandboxes.images
kind = _sandboxes.kind
make_sandbox = _sandboxes.make_sandbox
sandbox = _sandboxes.sandbox


class LocalShell:
    """`bash` in a directory: what a `Shell` must do, for commands that are well behaved."""

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir
        self._bash: asyncio.subprocess.Process | None = None

    async def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        stdin: bytes = b"",
        output_bytes: int = OUTPUT_BYTES,
    ) -> CommandResult:
        started = time.monotonic()
        bash = self._bash or await self._start()
        mark = uuid.uuid4().hex
        assert bash.stdin is not None
        bash.stdin.write(
            f"eval {shlex.quote(command)} </dev/null; "
            f"printf '\\n{mark} %d\\n' $?; printf '\\n{mark}\\n' >&2\n".encode()
        )
        try:
            async with asyncio.timeout(timeout):
                (stdout, status), (stderr, _) = await asyncio.gather(
                    self._until(bash.stdout, mark), self._until(bash.stderr, mark)
                )
        except TimeoutError:
            await self.close()
            seconds = time.monotonic() - started
            return CommandResult(None, b"", b"", seconds, timed_out=True, shell_replaced=True)
        left_out = max(0, len(stdout) - output_bytes) + max(0, len(stderr) - output_bytes)
        return CommandResult(
            None if status is None else int(status),
            stdout[:output_bytes],
            stderr[:output_bytes],
            time.monotonic() - started,
            omitted_bytes=left_out,
        )

    async def close(self) -> None:
        bash, self._bash = self._bash, None
        if bash is not None:
            os.killpg(bash.pid, signal.SIGKILL)
            await bash.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        self._bash = await asyncio.create_subprocess_exec(
            "bash", stdin=pipe, stdout=pipe, stderr=pipe, cwd=self._workdir, start_new_session=True
        )
        return self._bash

    @staticmethod
    async def _until(stream: asyncio.StreamReader | None, mark: str) -> tuple[bytes, bytes | None]:
        assert stream is not None
        output = b""
        while line := await stream.readline():
            if line.startswith(mark.encode()):
                return output[:-1], line[len(mark) :].strip() or None
            output += line
        return output, None


class LocalSandbox:
    """Files of a directory that stands for the sandbox's root."""

    def __init__(self, root: Path) -> None:
        self.root = root

    async def upload(
        self, source: Path, target: str, *, mode: int | None = None, exclude: Sequence[str] = ()
    ) -> None:
        shutil.copytree(
            source,
            self._place(target),
            ignore=shutil.ignore_patterns(*exclude),
            dirs_exist_ok=True,
        )

    async def write(self, files: Mapping[str, bytes], *, mode: int = 0o644) -> None:
        for name, content in files.items():
            path = Path(name) if Path(name).is_relative_to(self.root) else self._place(name)
            path.write_bytes(content)
            path.chmod(mode)

    async def exec(self, argv: Sequence[str], **_: Any) -> CommandResult:
        assert list(argv[:2]) == ["rm", "-rf"]
        shutil.rmtree(self._place(argv[2]))
        return CommandResult(0, b"", b"", 0.0)

    def _place(self, path: str) -> Path:
        return self.root / path.lstrip("/")


MakeContext = Callable[..., AgentContext]


@pytest.fixture
async def make_context(tmp_path: Path) -> AsyncIterator[MakeContext]:
    """Make a context whose policy gives the answers `turns`; keyword arguments replace its fields."""
    workdir = tmp_path / "workdir"
    workdir.mkdir()
    shell = LocalShell(workdir)

    def make(
        turns: Sequence[Any] = (), *, tokens: bool = False, max_model_len: int | None = None, **fields: Any
    ) -> AgentContext:
        task = Task("org/task", tmp_path, "0" * 64, Environment(None, "image"), ())
        step = Step("main", "Do it.", tests=tmp_path, solution=None)
        session = None
        if turns:
            script = tmp_path / "answers.yaml"
            answers: dict[str, Any] = {"default": list(turns), "tokens": tokens}
            answers |= {} if max_model_len is None else {"max_model_len": max_model_len}
            script.write_text(yaml.safe_dump(answers), encoding="utf-8")
            session = ScriptedPolicy(script).session("attempt", task=task.name, sample=0)
        given: dict[str, Any] = {
            "task": task,
            "step": step,
            "sandbox": LocalSandbox(tmp_path),
            "shell": shell,
            "session": session,
            "sampling": Sampling(),
            "trajectory": Trajectory(),
            "clock": AgentClock(None),
        }
        return AgentContext(**(given | fields))

    yield make
    await shell.close()
