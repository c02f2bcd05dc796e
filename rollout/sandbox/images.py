"""Images for tasks: built or fetched once per host, however many samples wait.

An environment's image is `rollcage/env:<digest>`, where the digest covers the context's paths, modes and bytes, the
Dockerfile, the build's options and the version of the lowering. So the same environment is never built twice, and a
changed one never passes for the old.

- Single flight: all who ask for an image while it is made wait for the same build. One who is cancelled leaves the
  others theirs.
- A failure in the task's domain is remembered, and given again without a build. Others may be tried again.
- Base images are fetched before the build, so that a registry's fault is never taken for the builder's.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

from docker.errors import ImageNotFound

from rollcage.rollout.outcome import BY_NAME, BuildError, Domain, Evidence
from rollcage.rollout.sandbox.build import STREAM_ERRORS, Build
from rollcage.rollout.sandbox.context import Context, write_tar
from rollcage.rollout.sandbox.dockerfile import Dockerfile, parse
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.faults import pull_fault
from rollcage.rollout.sandbox.lowering import LOWERING_VERSION, BaseConfig, lower
from rollcage.rollout.sandbox.reaper import (
    BUILD_LABEL,
    REPOSITORY,
    remove_dangling_images,
    wait_for_build_containers,
)
from rollcage.rollout.sandbox.stages import base_images
from rollcage.rollout.task import Environment

P = ParamSpec("P")
T = TypeVar("T")

PULL_WAITS_SEC = (2.0, 8.0)
"""Waits between tries of one pull. More patience is the scheduler's: it has other work to do meanwhile."""

LOOK_SEC = 0.3
QUIET_LOOKS = 5


@dataclass(frozen=True)
class BuiltImage:
    """An image that the engine has. `user`, `workdir` and `env` are its configuration.

    `built`: this very call made it, in `build_seconds`, with the log that ends in `log_tail`. `cached`: it
    was there, or another call made it.
    """

    id: str
    reference: str
    user: str
    workdir: str
    env: Mapping[str, str] = field(default_factory=dict)
    built: bool = False
    cached: bool = True
    build_seconds: float = 0.0
    log_tail: str = ""


class Images:
    """The images of one engine.

    `host` labels what its builds leave, and must not be shared by two of these at one time. `build_args` are
    given to every build (proxies, for instance). `pull_waits_sec`: see `PULL_WAITS_SEC`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        host: str | None = None,
        build_slots: int = 2,
        build_args: Mapping[str, str] | None = None,
        pull_waits_sec: Sequence[float] = PULL_WAITS_SEC,
    ) -> None:
        self.engine = engine
        self.host = host or f"images-{uuid.uuid4().hex[:12]}"
        self.build_args = dict(build_args or {})
        self.pull_waits_sec = tuple(pull_waits_sec)
        self.builds = 0
        self._slots = asyncio.Semaphore(build_slots)
        self.building = 0
        self._clearing = asyncio.Lock()
        self._flights: dict[str, asyncio.Task[BuiltImage]] = {}
        self._failures: dict[str, BuildError] = {}
        self._closed_until: dict[str, tuple[float, BuildError]] = {}
        self._digests: dict[Path, tuple[str, str]] = {}
        self._platform = ""

    async def ensure(
        self, environment: Environment, *, task: str, context_digest: str | None = None
    ) -> BuiltImage:
        """The environment's image. `context_digest`, where the caller has one, stands for the context's files.

        Raises `BuildError`, and `SandboxError` where the engine itself fails.
        """
        if environment.context is None:
            return await self._fetched(environment.docker_image or "")
        reference = await self._reference(environment, environment.context, context_digest)
        return await self._joined(reference, lambda: self._environment(environment, reference, task))

    async def close(self) -> None:
        """End the builds and pulls that are under way, and remove what unfinished ones left."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await remove_dangling_images(self.engine, self.host)

    # single flight

    async def _joined(self, reference: str, make: Any) -> BuiltImage:
        if reference in self._failures:
            raise copy(self._failures[reference])
        flight = self._flights.get(reference)
        first = flight is None
        if flight is None:
            flight = self._flights[reference] = asyncio.create_task(make())
            flight.add_done_callback(lambda done: self._landed(reference, done))
        try:
            image = await asyncio.shield(flight)
        except BuildError as error:
            raise copy(error) from error
        return image if first else replace(image, built=False, cached=True, build_seconds=0.0)

    def _landed(self, reference: str, flight: asyncio.Task[BuiltImage]) -> None:
        del self._flights[reference]
        error = None if flight.cancelled() else flight.exception()
        if isinstance(error, BuildError) and BY_NAME[error.error_class].domain is Domain.TASK:
            self._failures[reference] = error

    # environments

    async def _reference(self, environment: Environment, root: Path, context_digest: str | None) -> str:
        digest = context_digest or await _in_thread(self._context_digest, root, environment.dockerfile)
        options = [LOWERING_VERSION, digest, environment.dockerfile, sorted(self.build_args.items())]
        return f"{REPOSITORY}:{hashlib.sha256(json.dumps(options).encode()).hexdigest()}"

    def _context_digest(self, root: Path, dockerfile: str) -> str:
        """The digest of a context and its Dockerfile; read again only where a file looks changed."""
        context = Context.read(root, dockerfile)
        looks = hashlib.sha256()
        for path in (*(root / entry for entry in context.entries), root / dockerfile):
            info = path.lstat() if path.is_symlink() or path.exists() else None
            seen = None if info is None else (info.st_mode, info.st_size, info.st_mtime_ns, info.st_ino)
            looks.update(repr((str(path), seen)).encode())
        known = self._digests.get(root / dockerfile)
        if known is None or known[0] != looks.hexdigest():
            text = (root / dockerfile).read_bytes() if (root / dockerfile).is_file() else b""
            digest = hashlib.sha256(context.digest().encode() + text).hexdigest()
            known = self._digests[root / dockerfile] = (looks.hexdigest(), digest)
        return known[1]

    async def _environment(self, environment: Environment, reference: str, task: str) -> BuiltImage:
        if (present := await self._inspect(reference)) is not None:
            return _described(present, reference)
        assert environment.context is not None
        raw = await _in_thread((environment.context / environment.dockerfile).read_bytes)
        dockerfile = parse(raw.decode("utf-8", "surrogateescape"), file=environment.dockerfile)
        platform = await self._engine_platform()
        bases = {}
        for base in base_images(dockerfile, build_args=self.build_args, platform=platform):
            await self._fetched(base)
            bases[base] = _base_config(await self._inspect(base) or {})
        async with self._slots:
            return await self._built(environment, dockerfile, bases, reference, task)

    async def _built(
        self,
        environment: Environment,
        dockerfile: Dockerfile,
        bases: Mapping[str, BaseConfig],
        reference: str,
        task: str,
    ) -> BuiltImage:
        started = time.monotonic()
        build = Build(reference, f"build the image of task {task}", self.build_args)
        with tempfile.TemporaryFile() as tar:
            await _in_thread(self._write_context, tar, environment, dockerfile, bases)
            async with self._clearing:
                self.building += 1
            self.builds += 1
            try:
                image_id = await self._run(build, tar, environment.build_timeout_sec)
            finally:
                self.building -= 1
                async with self._clearing:
                    await self._clear(after=build)
        image = _described(await self._inspect(image_id) or {}, reference)
        seconds = time.monotonic() - started
        return replace(image, built=True, cached=False, build_seconds=seconds, log_tail=build.log_tail)

    async def _clear(self, *, after: Build) -> None:
        """Remove what builds left unnamed. After a build that was ended the engine goes on for a moment: it ends
        its step, and may keep one more image. It tells nobody when it is done, so look until all is quiet."""
        if self.building:
            return  # whoever ends last clears for all
        await remove_dangling_images(self.engine, self.host)
        quiet = 0 if after.ended else QUIET_LOOKS
        while quiet < QUIET_LOOKS:
            await asyncio.sleep(LOOK_SEC)
            await self.engine.call(
                "wait for a killed step", partial(wait_for_build_containers, host=self.host)
            )
            quiet = 0 if await remove_dangling_images(self.engine, self.host) else quiet + 1

    def _write_context(
        self,
        tar: IO[bytes],
        environment: Environment,
        dockerfile: Dockerfile,
        bases: Mapping[str, BaseConfig],
    ) -> None:
        assert environment.context is not None
        context = Context.read(environment.context, environment.dockerfile)
        lowered = lower(
            dockerfile,
            context,
            bases=bases,
            build_args=self.build_args,
            platform=self._platform,
            labels={BUILD_LABEL: self.host},
        )
        write_tar(tar, context, lowered.dockerfile.encode("utf-8", "surrogateescape"), lowered.files)
        tar.seek(0)

    async def _run(self, build: Build, tar: IO[bytes], timeout_sec: float) -> str:
        call = asyncio.ensure_future(
            self.engine.call(build.doing, lambda api: build.run(api, tar, timeout_sec))
        )
        timer = asyncio.get_running_loop().call_later(timeout_sec, build.end)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            build.end()
            await asyncio.wait([call])
            if not call.cancelled():
                call.exception()
            raise
        except BuildError as error:
            if not build.ended:
                raise
            said = f"could not {build.doing}: it was not done after {timeout_sec:g} s (build_timeout_sec)"
            evidence = Evidence(said, said_by="rollcage", seconds=timeout_sec, log_tail=build.log_tail)
            raise BuildError("image_build", said, evidence) from error
        finally:
            timer.cancel()

    # images of others

    async def _fetched(self, reference: str) -> BuiltImage:
        return await self._joined(reference, lambda: self._pull(reference))

    async def _pull(self, reference: str) -> BuiltImage:
        if (present := await self._inspect(reference)) is not None:
            return _described(present, reference)
        until, refusal = self._closed_until.get(reference, (0.0, None))
        if refusal is not None and (wait := until - time.monotonic()) > 0:
            again = copy(refusal)
            again.retry_after_sec = wait
            raise again
        waits = iter(self.pull_waits_sec)
        while True:
            try:
                await self.engine.call(f"pull {reference}", lambda api: _pull(api, reference))
                break
            except BuildError as error:
                if error.retry_after_sec is not None:
                    self._closed_until[reference] = (time.monotonic() + error.retry_after_sec, error)
                pause = next(waits, None)
                if pause is None or error.error_class != "image_pull" or error.retry_after_sec is not None:
                    raise
                await asyncio.sleep(pause)
        present = await self._inspect(reference)
        if present is None:
            said = f"{reference} was pulled and the engine does not have it"
            raise BuildError("image_pull", said, Evidence(said, said_by="engine"))
        return replace(_described(present, reference), cached=False)

    async def _inspect(self, reference: str) -> dict[str, Any] | None:
        def inspect(api: Any) -> dict[str, Any] | None:
            try:
                found: dict[str, Any] = api.inspect_image(reference)
            except ImageNotFound:
                return None
            return found

        return await self.engine.call(f"look up the image {reference}", inspect)

    async def _engine_platform(self) -> str:
        if not self._platform:
            version = await self.engine.call("ask the engine's version", lambda api: api.version())
            self._platform = f"{version.get('Os', 'linux')}/{version.get('Arch', 'amd64')}"
        return self._platform


async def _in_thread(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run what reads a task's files. Raises `BuildError`: `task_malformed` where they cannot be read, `disk_full`
    where there is no room to pack them."""
    try:
        return await asyncio.to_thread(read, *args, **kwargs)
    except OSError as error:
        error_class = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "task_malformed"
        evidence = Evidence(f"the build context cannot be read: {error}", said_by="task files")
        raise BuildError(error_class, evidence.message, evidence) from error


def _pull(api: Any, reference: str) -> None:
    try:
        for message in api.pull(reference, stream=True, decode=True):
            if "error" in message or "errorDetail" in message:
                raise pull_fault(message, reference)
    except STREAM_ERRORS as error:
        raise pull_fault(error, reference) from error


def _config(inspected: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
    config = inspected.get("Config") or {}
    pairs = (entry.partition("=") for entry in config.get("Env") or [])
    return config, {key: value for key, _, value in pairs}


def _base_config(inspected: Mapping[str, Any]) -> BaseConfig:
    config, env = _config(inspected)
    return BaseConfig(env, tuple(config.get("Shell") or ()), tuple(config.get("OnBuild") or ()))


def _described(inspected: Mapping[str, Any], reference: str) -> BuiltImage:
    config, env = _config(inspected)
    return BuiltImage(
        id=str(inspected.get("Id", reference)),
        reference=reference,
        user=config.get("User") or "",
        workdir=config.get("WorkingDir") or "",
        env=env,
    )
