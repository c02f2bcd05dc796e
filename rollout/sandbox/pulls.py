"""Images of others: base images and ready ones, fetched once however many wait, with patience for their registry.

An image that was not there before is tagged `rollcage/pulled:<digest of its reference>` beside its own name: so that
it is known, to every process that uses the engine, as one that may be removed for room (`image_gc.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from docker.auth import get_config_header, resolve_repository_name
from docker.errors import APIError, ImageNotFound
from docker.utils import parse_repository_tag

from rollcage.rollout.outcome import BuildError, Evidence
from rollcage.rollout.sandbox.base import Origin
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.faults import pull_fault
from rollcage.rollout.sandbox.flights import Flights
from rollcage.rollout.sandbox.streams import STREAM_ERRORS, Stream, followed

PULL_WAITS_SEC = (2.0, 8.0)
"""Waits between tries of one pull. More patience is the scheduler's: it has other work to do meanwhile."""

SILENT_SEC = 600.0
"""A pull of which the engine says nothing for so long goes no further: it tells of every few hundred kilobytes, but of
nothing while it waits for a registry that has stopped sending, for which it has no limit itself, or checks a layer."""

REMOVAL_SEC = 5.0
"""As long as an image that is being removed, by another process too, may still be there, or half there."""

PULLED = "rollcage/pulled"

TOUCH_SEC = 60.0
"""The engine notes when an image was last tagged; this is our note of its last use, exact to so much."""


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
    origin: Origin | None = None
    """Set where it is a saved state (`states.py`)."""


class Pulls:
    """The images of others on one engine. `make_room` is called when the disk is full, and says whether it made
    any."""

    def __init__(
        self,
        engine: Engine,
        make_room: Callable[[], Any],
        waits_sec: Sequence[float] = PULL_WAITS_SEC,
        silent_sec: float = SILENT_SEC,
    ) -> None:
        self.engine = engine
        self.flights: Flights[BuiltImage] = Flights()
        self._make_room = make_room
        self._waits_sec = tuple(waits_sec)
        self._silent_sec = silent_sec
        self._closed_until: dict[str, tuple[float, BuildError]] = {}

    async def fetched(self, reference: str) -> BuiltImage:
        """The image of this name, pulled where the engine has none. Raises `BuildError`, `SandboxError`."""
        image, first = await self.flights.join(familiar(reference), lambda: self._pull(reference))
        return image if first else replace(image, cached=True)

    async def _pull(self, reference: str) -> BuiltImage:
        if (present := await inspect(self.engine, reference)) is not None:
            record = record_of(reference)
            if record not in (present.get("RepoTags") or ()) or await touch(self.engine, present, record):
                return described(present, reference)
        until, refusal = self._closed_until.get(reference, (0.0, None))
        if refusal is not None and (wait := until - time.monotonic()) > 0:
            again = copy(refusal)
            again.retry_after_sec = wait
            raise again
        waits = iter(self._waits_sec)
        may_make_room = True
        while True:
            try:
                pull = Pull(reference, self._silent_sec)
                await followed(self.engine, f"pull {reference}", pull, pull.run)
                break
            except BuildError as error:
                if error.error_class == "disk_full" and may_make_room and await self._make_room():
                    may_make_room = False
                    continue
                if error.retry_after_sec is not None:
                    self._closed_until[reference] = (time.monotonic() + error.retry_after_sec, error)
                pause = next(waits, None)
                if pause is None or error.error_class != "image_pull" or error.retry_after_sec is not None:
                    raise
                await asyncio.sleep(pause)
        present = await inspect(self.engine, reference)
        if present is None:
            said = f"{reference} was pulled and the engine does not have it"
            raise BuildError("image_pull", said, Evidence(said, said_by="engine"))
        await touch(self.engine, present, record_of(reference))
        return replace(described(present, reference), cached=False)


def record_of(reference: str) -> str:
    """The tag that says of this reference's image that we pulled it."""
    return f"{PULLED}:{hashlib.sha256(familiar(reference).encode()).hexdigest()}"


def familiar(reference: str) -> str:
    """A reference as the engine lists it: without Docker Hub's own name, with a tag or a digest alone."""
    name = re.sub(r"^(?:(?:index\.)?docker\.io/)?(?:library/(?=[^/]+$))?", "", reference)
    base, sign, digest = name.partition("@")
    if sign:
        return re.sub(r":[^:/]+$", "", base) + sign + digest
    return name if re.search(r":[^:/]+$", name) else name + ":latest"


async def inspect(engine: Engine, reference: str) -> dict[str, Any] | None:
    """What the engine knows of an image; None where it has none of this name."""
    return await engine.call(f"look up the image {reference}", lambda api: known(api, reference))


def known(api: Any, reference: str) -> dict[str, Any] | None:
    """The same, in a thread. An image that somebody is removing is there without its layers for a moment, of which the
    engine makes an error: it is asked again, for `REMOVAL_SEC`."""
    until = time.monotonic() + REMOVAL_SEC
    while True:
        try:
            found: dict[str, Any] = api.inspect_image(reference)
        except ImageNotFound:
            return None
        except APIError as error:
            if "layer does not exist" not in str(error.explanation) or time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return found


async def touch(engine: Engine, inspected: Mapping[str, Any], tag: str) -> bool:
    """Note that an image is in use now, by tagging it (again) with `tag`. False where it was removed in this moment:
    whoever needs it makes it again."""
    if time.time() - last_used(inspected) < TOUCH_SEC and tag in (inspected.get("RepoTags") or ()):
        return True
    repository, _, name = tag.rpartition(":")

    def put(api: Any) -> bool:
        try:
            api.tag(inspected["Id"], repository, name)
        except ImageNotFound:
            return False
        return True

    return await engine.call(f"tag an image {tag}", put)


def last_used(inspected: Mapping[str, Any]) -> float:
    """Unix seconds at which an image was last tagged; where the engine does not say, at which it was made."""
    tagged = str((inspected.get("Metadata") or {}).get("LastTagTime") or "")
    for text in (tagged, str(inspected.get("Created") or "")):
        # Nanoseconds are more than Python reads; the year 1 means never.
        text = re.sub(r"(\.\d{6})\d+", r"\1", text)
        if text and not text.startswith("0001"):
            return datetime.fromisoformat(text).timestamp()
    return 0.0


def described(inspected: Mapping[str, Any], reference: str) -> BuiltImage:
    """The image as sandboxes need it."""
    config, env = image_config(inspected)
    return BuiltImage(
        id=str(inspected.get("Id", reference)),
        reference=reference,
        user=config.get("User") or "",
        workdir=config.get("WorkingDir") or "",
        env=env,
    )


def image_config(inspected: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[str, str]]:
    """(configuration, environment) of an image."""
    config = inspected.get("Config") or {}
    pairs = (entry.partition("=") for entry in config.get("Env") or [])
    return config, {key: value for key, _, value in pairs}


class Pull(Stream):
    """A pull under way. docker-py's own cannot be ended, and waits for ever."""

    def __init__(self, reference: str, silent_sec: float) -> None:
        super().__init__()
        self.reference = reference
        self._silent_sec = silent_sec

    def run(self, api: Any) -> None:
        """Wait for the image. Raises `BuildError`."""
        repository, tag = parse_repository_tag(self.reference)
        try:
            header = get_config_header(api, resolve_repository_name(repository)[0])
            messages = self.post(
                api,
                "/images/create",
                silent_sec=self._silent_sec,
                params={"fromImage": repository, "tag": tag or "latest"},
                headers={"X-Registry-Auth": header} if header else {},
            )
            for message in messages:
                if "error" in message or "errorDetail" in message:
                    raise pull_fault(message, self.reference)
        except STREAM_ERRORS as error:
            raise pull_fault(error, self.reference) from error
