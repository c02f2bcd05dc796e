"""What a verifier in a sandbox of its own receives of what the agent left, as Harbor 0.26 does it.

`/logs/artifacts` and the artifacts that the task and its step declare, each at the path it had; nothing else, in
particular not the working directory. Everything passes through this machine: set-id bits are dropped on the way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollcage.rollout.compose import MAIN
from rollcage.rollout.sandbox.base import Sandbox
from rollcage.rollout.task import Artifact, Step, Task

log = logging.getLogger(__name__)

ARTIFACTS = "/logs/artifacts"

ARTIFACT_BYTES = 2 << 30
"""A larger artifact is not handed over; the tests then find nothing there."""


async def collect(sandbox: Sandbox, hook: Mapping[str, Any]) -> None:
    """Run one `[[verifier.collect]]` command, in the agent's sandbox or in another of the task's services. That it
    failed is logged, no more: the tests say what a missing file means."""
    user, timeout = hook.get("user"), hook.get("timeout_sec", 60.0)
    if in_main(hook):
        shell = await sandbox.shell(user)
        result = await shell.run(f"( {hook['command']}\n)", timeout=timeout)
    else:
        service = sandbox.service(hook["service"])
        result = await service.run(hook["command"], user=user, timeout=timeout)
    if result.exit_code != 0:
        log.info("collect command ended with %s: %s", result.exit_code, hook["command"])


def in_main(hook: Mapping[str, Any]) -> bool:
    """Whether a `collect` command is run in the agent's sandbox."""
    return bool(hook.get("service", MAIN) == MAIN)


async def hand_over(source: Sandbox, target: Sandbox, task: Task, step: Step) -> None:
    """Copy the artifacts from sandbox to sandbox. What is missing, or too large, is left out."""
    for artifact in artifacts(task, step):
        with tempfile.TemporaryDirectory(prefix="rollcage-artifact-") as folder:
            copy = Path(folder, "copy")
            try:
                place = source if artifact.service == MAIN else source.service(artifact.service)
                found = await place.download(artifact.source, copy, max_bytes=ARTIFACT_BYTES)
            except ValueError as error:
                log.info("artifact %s is left out: %s", artifact.source, error)
                continue
            if found:
                await asyncio.to_thread(_drop_set_id, copy)
                await target.upload(copy, artifact.source, exclude=artifact.exclude)


def artifacts(task: Task, step: Step) -> Iterator[Artifact]:
    """The artifacts to hand over, `/logs/artifacts` first unless it is declared, each source once."""
    declared = {_absolute(artifact.source): artifact for artifact in (*task.artifacts, *step.artifacts)}
    if ARTIFACTS not in declared:
        yield Artifact(ARTIFACTS)
    for source, artifact in declared.items():
        yield replace(artifact, source=source)


def _absolute(source: str) -> str:
    """Relative sources are seen from `/`, as the engine sees them."""
    return "/" + source.strip("/")


def _drop_set_id(path: Path) -> None:
    for folder, _, names in os.walk(path) if path.is_dir() else [(str(path.parent), [], [path.name])]:
        for name in names:
            mode = os.lstat(Path(folder, name)).st_mode
            if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
                Path(folder, name).chmod(stat.S_IMODE(mode) & ~(stat.S_ISUID | stat.S_ISGID))
