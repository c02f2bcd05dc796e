"""Images for tasks: built or fetched once per host, however many samples wait.

An environment's image is `rollcage/env:<digest>`, where the digest covers the context's paths, modes and bytes, the
Dockerfile, the build's options, the builder and the version of the lowering. So the same environment is never built
twice, and a changed one never passes for the old.

- Single flight (`flights.py`): all who ask for an image while it is made wait for the same build.
- A failure in the task's domain is remembered, and given again without a build. Others may be tried again.
- Base images are fetched before the build (`pulls.py`), so that a registry's fault is never taken for the builder's.
- Room is made before a build, within a budget, and when the disk is found full; then the build is tried once more
  (`image_gc.py`).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import re
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any, ParamSpec, TypeVar

from rollcage.rollout.outcome import BuildError, Evidence
from rollcage.rollout.sandbox.build import Build
from rollcage.rollout.sandbox.buildkit import offered
from rollcage.rollout.sandbox.context import Context, write_tar
from rollcage.rollout.sandbox.dockerfile import Dockerfile, parse
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.flights import Flights
from rollcage.rollout.sandbox.image_gc import Collector
from rollcage.rollout.sandbox.lowering import LOWERING_VERSION, BaseConfig, Lowered, lower
from rollcage.rollout.sandbox.mounts import Api
from rollcage.rollout.sandbox.pulls import (
    PULL_WAITS_SEC,
    BuiltImage,
    Pulls,
    described,
    image_config,
    inspect,
    touch,
)
from rollcage.rollout.sandbox.reaper import (
    BUILD_LABEL,
    REPOSITORY,
    remove_dangling_images,
    wait_for_build_containers,
)
from rollcage.rollout.sandbox.stages import base_images, until
from rollcage.rollout.sandbox.streams import followed
from rollcage.rollout.sandbox.trust import Proxies, Trust
from rollcage.rollout.task import Environment

__all__ = ["BuiltImage", "Images"]

P = ParamSpec("P")
T = TypeVar("T")

LAYER_GONE = re.compile(r"failed to get digest sha256:\w+: open \S+: no such file or directory$")
"""The classic builder's word for a cached layer that went, with the last image on it, while a build stood on it."""

GROUP_GONE = re.compile(r"unable to convert uid/gid chown string to host mapping: can't find gid for group ")
"""`COPY --chown=nobody` means the user's own group, and to the classic builder one of that name. So BuildKit is asked
where there is none."""

LOOK_SEC = 0.3
QUIET_LOOKS = 5


class Images:
    """The images of one engine.

    `host` labels what its builds leave, and must not be shared by two of these at one time. `trust` and `proxies`:
    what its RUN steps get. `disk_gb`: see `image_gc.Collector`. `pull_waits_sec`: see `PULL_WAITS_SEC`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        host: str | None = None,
        build_slots: int = 2,
        trust: Trust | None = None,
        proxies: Proxies | None = None,
        disk_gb: float | None = None,
        pull_waits_sec: Sequence[float] = PULL_WAITS_SEC,
    ) -> None:
        self.engine = engine
        self.host = host or f"images-{uuid.uuid4().hex[:12]}"
        self.trust = trust
        self.proxies = proxies or Proxies()
        self.collector = Collector(engine, disk_gb=disk_gb, is_held=self._is_needed)
        self.builds = 0
        self.building = 0
        self._pulls = Pulls(engine, self.collector.make_room, pull_waits_sec)
        self._flights: Flights[BuiltImage] = Flights()
        self._slots = asyncio.Semaphore(build_slots)
        self._clearing = asyncio.Lock()
        self._held: Counter[str] = Counter()
        self._digests: dict[Path, tuple[str, str]] = {}
        self._platform = ""
        self._buildkit: Api | None = None

    async def ensure(self, environment: Environment, *, task: str) -> BuiltImage:
        """The environment's image. Raises `BuildError`, and `SandboxError` where the engine itself fails."""
        if environment.context is None:
            return await self._pulls.fetched(environment.docker_image or "")
        await self._look()
        reference = await self._reference(environment, environment.context)
        make = partial(self._environment, environment, reference, task)
        image, first = await self._flights.join(reference, make)
        return image if first else replace(image, built=False, cached=True, build_seconds=0.0)

    def hold(self, image_id: str) -> None:
        """Keep an image from being removed for room, until `let_go` is called as often."""
        self._held[image_id] += 1

    def let_go(self, image_id: str) -> None:
        """See `hold`."""
        self._held[image_id] -= 1
        if self._held[image_id] <= 0:
            del self._held[image_id]

    async def close(self) -> None:
        """End the builds and pulls that are under way, and remove what unfinished ones left."""
        await self._flights.close()
        await self._pulls.flights.close()
        await remove_dangling_images(self.engine, self.host)

    def _is_needed(self, name: str) -> bool:
        return name in self._held or name in self._flights or name in self._pulls.flights

    # environments

    async def _reference(self, environment: Environment, root: Path) -> str:
        digest = await _in_thread(self._context_digest, root, environment.dockerfile)
        args = sorted(environment.build_args.items())
        options = [LOWERING_VERSION, digest, environment.dockerfile, args, environment.target]
        options += [self._buildkit is not None, None if self.trust is None else self.trust.digest]
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
        present = await inspect(self.engine, reference)
        if present is not None and await touch(self.engine, present, reference):
            return described(present, reference)
        assert environment.context is not None
        file = f"{environment.context.name}/{environment.dockerfile}"
        raw = await _in_thread((environment.context / environment.dockerfile).read_bytes)
        dockerfile = parse(raw.decode("utf-8", "surrogateescape"), file=file)
        if environment.target is not None:
            dockerfile = until(dockerfile, environment.target)
        args = self._args(environment)
        bases: dict[str, BaseConfig] = {}
        held = []
        try:
            for base in base_images(dockerfile, build_args=args, platform=self._platform):
                image = await self._pulls.fetched(base)
                self.hold(image.id)
                held.append(image.id)
                bases[base] = _base_config(await inspect(self.engine, base) or {})
            async with self._slots:
                await self.collector.keep_within_budget()
                try:
                    return await self._built(environment, dockerfile, bases, reference, task)
                except BuildError as error:
                    made_room = error.error_class == "disk_full" and await self.collector.make_room()
                    needs_buildkit = (
                        self._buildkit is not None and GROUP_GONE.search(error.message) is not None
                    )
                    if not (made_room or needs_buildkit or LAYER_GONE.search(error.message)):
                        raise
                return await self._built(
                    environment, dockerfile, bases, reference, task, buildkit=needs_buildkit
                )
        finally:
            for image_id in held:
                self.let_go(image_id)

    async def _built(
        self,
        environment: Environment,
        dockerfile: Dockerfile,
        bases: Mapping[str, BaseConfig],
        reference: str,
        task: str,
        *,
        buildkit: bool = False,
    ) -> BuiltImage:
        started = time.monotonic()
        with tempfile.TemporaryFile() as tar:
            lowered = await _in_thread(self._write_context, tar, environment, dockerfile, bases)
            build = Build(
                reference,
                f"build the image of task {task}",
                self._args(environment),
                file=dockerfile.file,
                steps=lowered.steps,
                buildkit=buildkit or lowered.buildkit,
            )
            if dockerfile.syntax is not None:
                build.say(f"# syntax={dockerfile.syntax} is not fetched: its features are built in")
            async with self._clearing:
                self.building += 1
            self.builds += 1
            try:
                image_id = await self._run(build, tar, environment.build_timeout_sec)
            finally:
                self.building -= 1
                async with self._clearing:
                    await self._clear(after=build)
        image = described(await inspect(self.engine, image_id) or {}, reference)
        seconds = time.monotonic() - started
        return replace(image, built=True, cached=False, build_seconds=seconds, log_tail=build.log_tail)

    def _args(self, environment: Environment) -> dict[str, str]:
        """Proxies are no part of an image's digest: no image keeps them."""
        return {**self.proxies.variables(), **environment.build_args}

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
    ) -> Lowered:
        assert environment.context is not None
        context = Context.read(environment.context, environment.dockerfile)
        lowered = lower(
            dockerfile,
            context,
            bases=bases,
            build_args=self._args(environment),
            platform=self._platform,
            labels={BUILD_LABEL: self.host},
            buildkit=self._buildkit,
            trust=self.trust,
        )
        write_tar(tar, context, lowered.dockerfile.encode("utf-8", "surrogateescape"), lowered.files)
        tar.seek(0)
        return lowered

    async def _run(self, build: Build, tar: IO[bytes], timeout_sec: float) -> str:
        timer = asyncio.get_running_loop().call_later(timeout_sec, build.end)
        try:
            return await followed(
                self.engine, build.doing, build, lambda api: build.run(api, tar, timeout_sec)
            )
        except BuildError as error:
            if not build.ended:
                raise
            at = f", at {build.place}" if build.place else ""
            said = f"could not {build.doing}: it was not done after {timeout_sec:g} s (build_timeout_sec){at}"
            evidence = Evidence(said, said_by="rollcage", seconds=timeout_sec, log_tail=build.log_tail)
            raise BuildError("image_build", said, evidence) from error
        finally:
            timer.cancel()

    # the engine

    async def _look(self) -> None:
        """Ask the engine, once, what it is."""
        if not self._platform:
            version = await self.engine.call("ask the engine's version", lambda api: api.version())
            self._platform = f"{version.get('Os', 'linux')}/{version.get('Arch', 'amd64')}"
            self._buildkit = offered(version)


async def _in_thread(read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run what reads a task's files. Raises `BuildError`: `task_malformed` where they cannot be read, `disk_full`
    where there is no room to pack them."""
    try:
        return await asyncio.to_thread(read, *args, **kwargs)
    except OSError as error:
        error_class = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "task_malformed"
        evidence = Evidence(f"the build context cannot be read: {error}", said_by="task files")
        raise BuildError(error_class, evidence.message, evidence) from error


def _base_config(inspected: Mapping[str, Any]) -> BaseConfig:
    config, env = image_config(inspected)
    return BaseConfig(env, tuple(config.get("Shell") or ()), tuple(config.get("OnBuild") or ()))
