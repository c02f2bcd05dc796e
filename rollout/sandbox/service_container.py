"""One container of a task of several: what can be asked of it, and whether it is ready.

Health is asked for by us, soon after the start and then more seldom, not by the engine every `interval`: a service
that is ready after a second is not waited for ten. It counts as unhealthy no sooner than the engine would say so.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollcage.rollout.compose import MAIN, Check
from rollcage.rollout.outcome import Evidence, RolloutError, SandboxError, TaskError
from rollcage.rollout.sandbox import files
from rollcage.rollout.sandbox.base import OUTPUT_BYTES, CommandResult
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.output import demultiplex
from rollcage.rollout.sandbox.program import run_program
from rollcage.rollout.sandbox.service_config import LOG_LINES

SETTLE_SEC = 0.5
"""A service without a healthcheck has to run so long: compose too looks half a second after the start."""

FIRST_POLL_SEC = 0.1
MOST_POLL_SEC = 1.0

END_SEC = 5.0
"""From the engine's refusal of an exec, because the container is ending, to its saying so of the container."""

DEFAULT_CHECK = Check(interval_sec=30.0, timeout_sec=30.0, start_period_sec=0.0, retries=3)
"""The engine's own: https://docs.docker.com/reference/dockerfile/#healthcheck"""

OUTPUT_TAIL = 2000


class DockerService:
    """One service's container. Implements `ServiceContainer`."""

    def __init__(self, engine: Engine, name: str, container_id: str, user: str | None = None) -> None:
        self.name = name
        self.id = container_id
        self._user = user
        self._engine = engine

    async def run(self, command: str, *, user: str | int | None = None, timeout: float) -> CommandResult:
        """See `ServiceContainer.run`."""
        settings = {} if user is None else {"user": str(user)}
        began = time.monotonic()
        try:
            return await run_program(
                self._engine, self.id, ["/bin/sh", "-c", command], settings, timeout, OUTPUT_BYTES
            )
        except SandboxError as error:
            if error.error_class != "container_lost" or not await self._stopped():
                raise
            return CommandResult(None, b"", error.message.encode(), time.monotonic() - began)

    async def download(self, path: str, target: Path, *, max_bytes: int) -> bool:
        """See `Sandbox.download`."""
        return await files.download(self._engine, self.id, path, target, max_bytes)

    async def state(self) -> dict[str, Any]:
        """The engine's own word on it."""
        found = await self._engine.call("inspect a service", lambda api: api.inspect_container(self.id))
        state: dict[str, Any] = found["State"]
        return state

    async def log_tail(self) -> str:
        """The end of what it wrote; nothing for `main`, whose output nobody keeps."""
        if self.name == MAIN:
            return ""
        log: bytes = await self._engine.call(
            "read a service's log", lambda api: api.logs(self.id, stdout=True, stderr=True, tail=LOG_LINES)
        )
        return log[-OUTPUT_TAIL:].decode("utf-8", "replace")

    async def _probe(self, check: Check, state: Mapping[str, Any]) -> tuple[bool, str]:
        """Run a healthcheck once: whether it passed, and what it printed. `state`: the container's, as it was just
        before. Raises `SandboxError` where the engine cannot run it although the container goes on as it was."""
        try:
            return await self._probed(check)
        except SandboxError as error:
            if error.error_class != "container_lost" or not await self._stopped(since=state["StartedAt"]):
                raise
            return False, "it does not run"

    async def _stopped(self, *, since: str | None = None) -> bool:
        """Whether it does not run, or was started anew after `since`, now that the engine has refused an exec in it.
        Its answer depends on the moment (404, 409 or 500), and it may know later of the container that it has ended."""
        began = time.monotonic()
        while True:
            state = await self.state()
            if (
                not state["Running"]
                or state.get("Restarting")
                or state["StartedAt"] != (since or state["StartedAt"])
            ):
                return True
            if time.monotonic() - began > END_SEC:
                return False
            await asyncio.sleep(FIRST_POLL_SEC)

    async def _probed(self, check: Check) -> tuple[bool, str]:
        argv = list(check.argv or ())
        made = await self._engine.call(
            "create an exec for a healthcheck",
            lambda api: api.exec_create(self.id, argv, user=self._user or ""),
        )
        reader, writer = await self._engine.exec_stream(made["Id"])
        said = bytearray()
        try:
            async with asyncio.timeout(check.timeout_sec):
                await demultiplex(reader, lambda _, data: said.extend(data[: OUTPUT_TAIL - len(said)]))
        except TimeoutError:
            return False, f"it did not end within {check.timeout_sec:g} s"
        finally:
            writer.close()
        ended = await self._engine.call("inspect an exec", lambda api: api.exec_inspect(made["Id"]))
        return ended["ExitCode"] == 0, said.decode("utf-8", "replace")

    async def healthy(self, check: Check) -> None:
        """Wait until the healthcheck passes; where there is none, until it has run for `SETTLE_SEC`.

        Raises `TaskError` (`healthcheck`) where it fails too often in a row, or the service has ended; `SandboxError`
        (`container_lost`) where it was killed from outside.
        """
        began = counted = time.monotonic()
        failures, pause = 0, FIRST_POLL_SEC
        while True:
            state = await self.state()
            if _has_ended(state):
                raise await self._end(state)
            at = time.monotonic()
            if not check.argv and (self.name == MAIN or at - began >= SETTLE_SEC):
                return
            if check.argv:
                passed, said = await self._probe(check, state)
                if not passed and _has_ended(state := await self.state()):
                    raise await self._end(state)
                if passed:
                    return
                if at - counted >= (check.interval_sec or 0) and at - began >= (check.start_period_sec or 0):
                    failures, counted = failures + 1, time.monotonic()
                if failures >= (check.retries or 1):
                    how = f"the healthcheck of the service {self.name} failed {failures} times in a row"
                    raise TaskError("healthcheck", how, await self._evidence(f"{how}: {said}".strip()))
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_POLL_SEC, max(check.interval_sec or 0, FIRST_POLL_SEC))

    async def completed(self) -> None:
        """Wait until it has ended with status 0. Raises as `healthy` does."""
        pause = FIRST_POLL_SEC
        while not _has_ended(state := await self.state()):
            await asyncio.sleep(pause)
            pause = min(2 * pause, MOST_POLL_SEC)
        if state["ExitCode"] != 0 or state.get("Error"):
            raise await self._end(state)

    async def _end(self, state: Mapping[str, Any]) -> RolloutError:
        """Whose doing its end was."""
        code, oom = state["ExitCode"], bool(state["OOMKilled"])
        how = "went past its memory limit" if oom else f"ended with status {code}"
        said = f"the service {self.name} {how} before the agent could start"
        evidence = replace(await self._evidence(said), exit_code=code, oom_killed=oom)
        if code == 137 and not oom:
            lost = f"the service {self.name} was killed from outside"
            return SandboxError("container_lost", lost, evidence)
        return TaskError("healthcheck", said, evidence)

    async def _evidence(self, said: str) -> Evidence:
        return Evidence(said, "container state", log_tail=await self.log_tail())


def _has_ended(state: Mapping[str, Any]) -> bool:
    return not state["Running"] and not state.get("Restarting")


async def check_of(engine: Engine, own: Check, image_id: str | None) -> Check:
    """A service's healthcheck, with what its image (None: it does not count) and the engine say where the file says
    nothing."""
    image: dict[str, Any] = {}
    if image_id is not None and own.argv != ():
        found = await engine.call("inspect an image", lambda api: api.inspect_image(image_id))
        image = (found.get("Config") or {}).get("Healthcheck") or {}
    argv = own.argv
    if argv is None:
        kind, *words = image.get("Test") or ["NONE"]
        argv = {"CMD": tuple(words), "CMD-SHELL": ("/bin/sh", "-c", " ".join(words))}.get(kind, ())

    def seconds(value: float | None, key: str, default: float | None) -> float | None:
        return value if value is not None else (image.get(key) or 0) / 1e9 or default

    return Check(
        argv,
        seconds(own.interval_sec, "Interval", DEFAULT_CHECK.interval_sec),
        seconds(own.timeout_sec, "Timeout", DEFAULT_CHECK.timeout_sec) or DEFAULT_CHECK.timeout_sec,
        seconds(own.start_period_sec, "StartPeriod", DEFAULT_CHECK.start_period_sec),
        own.retries or image.get("Retries") or DEFAULT_CHECK.retries,
    )
