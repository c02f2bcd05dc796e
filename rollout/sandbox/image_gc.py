"""Makes room on an engine's disk: of our images, those that were used least recently go first.

Ours are images that we built (`rollcage/env`, with our label) and that we pulled (`pulls.py`), and only where they
have no name of anybody else's. Never removed: what a container uses, what others are built on, what this process
holds or is making, and what any process used within `GRACE_SEC`.

When an image was last used the engine itself remembers: using one means to tag it again (`pulls.touch`). So all
processes and hosts that share an engine know the same, and two that collect at once choose the same images.

Layers that images share are counted once: an image takes what it has beyond the image it was built on, which the
engine's list of images says (of those that BuildKit built, the layers do).
"""

from __future__ import annotations

import asyncio
import heapq
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from docker.errors import APIError, NotFound

from rollcage.rollout.sandbox.engine import Engine, is_local
from rollcage.rollout.sandbox.pulls import PULLED, REMOVAL_SEC, known, last_used, record_of
from rollcage.rollout.sandbox.reaper import BUILD_LABEL, REPOSITORY

GIB = 1 << 30

GRACE_SEC = 600.0
"""Another process may be about to start a sandbox of what it used so recently. So a budget that is smaller than what
a job uses within this time is overrun."""

URGENT_GRACE_SEC = 120.0
"""The same when the disk is full already."""

FREE_SHARE, FREE_BYTES = 0.1, 20 * GIB
"""Without a budget, images go while less than a tenth of the engine's disk is free, and less than so much."""

ROOM_BYTES = 2 * GIB
"""What is made free, if it can be, after a build or a pull that found the disk full."""


@dataclass
class Stored:
    """One image of the engine's. `size` in bytes, with all its layers; `parent` is the id of the one below, or
    empty. `ours`: it has names, and all of them are ours."""

    id: str
    parent: str
    size: int
    tags: tuple[str, ...] = ()
    ours: bool = False
    digests: tuple[str, ...] = ()


@dataclass
class Forest:
    """Images on images. `used` are ids that must stay."""

    images: dict[str, Stored]
    used: set[str]
    children: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, images: Iterable[Stored], used: Iterable[str]) -> Forest:
        forest = cls({image.id: image for image in images}, set(used))
        for image in forest.images.values():
            if image.parent in forest.images:
                forest.children.setdefault(image.parent, set()).add(image.id)
        return forest

    def own_bytes(self, image_id: str) -> int:
        """What an image takes beyond the one below it."""
        image = self.images[image_id]
        below = self.images.get(image.parent)
        return max(0, image.size - (below.size if below is not None else 0))

    def our_bytes(self) -> int:
        """What would be free if all of ours were gone."""
        shared: set[str] = set()
        for image in self.images.values():
            if (image.tags and not image.ours) or not (image.tags or self.children.get(image.id)):
                at: Stored | None = image
                while at is not None and at.id not in shared:
                    shared.add(at.id)
                    at = self.images.get(at.parent)
        return sum(self.own_bytes(one) for one in self.images if one not in shared)

    def can_go(self, image_id: str) -> bool:
        image = self.images[image_id]
        return image.ours and image_id not in self.used and not self.children.get(image_id)

    def remove(self, image_id: str) -> tuple[int, str]:
        """Take an image away, and those without a name that it alone stood on, as the engine does. Returns the
        bytes that are free now, and the first image below that stays, or an empty string."""
        freed = 0
        while True:
            freed += self.own_bytes(image_id)
            parent = self.images.pop(image_id).parent
            siblings = self.children.get(parent, set())
            siblings.discard(image_id)
            below = self.images.get(parent)
            if below is None:
                return freed, ""
            if siblings or below.tags or parent in self.used:
                return freed, parent
            image_id = parent


def oldest_first(
    forest: Forest, last_use: Callable[[str], float], goal: int, *, before: float
) -> list[Stored]:
    """Which images go so that `goal` bytes are free, or as many as can be: the least recently used first, and none
    that was used after `before` (Unix seconds). Takes them out of the forest."""
    waiting = [(last_use(one), one) for one in forest.images if forest.can_go(one)]
    heapq.heapify(waiting)
    chosen: list[Stored] = []
    while waiting and goal > 0:
        used_at, image_id = heapq.heappop(waiting)
        if used_at > before:
            break
        chosen.append(forest.images[image_id])
        freed, below = forest.remove(image_id)
        goal -= freed
        if below and forest.can_go(below):
            heapq.heappush(waiting, (last_use(below), below))
    return chosen


class Collector:
    """Keeps our images on one engine within `disk_gb` (GiB; None: see `FREE_SHARE`). `is_held` says of a tag or an
    id whether this process needs it now."""

    def __init__(
        self,
        engine: Engine,
        *,
        disk_gb: float | None = None,
        is_held: Callable[[str], bool] = lambda _: False,
        grace_sec: float = GRACE_SEC,
        urgent_grace_sec: float = URGENT_GRACE_SEC,
    ) -> None:
        self.engine = engine
        self.disk_gb = disk_gb
        self.removed = 0
        self._is_held = is_held
        self._grace_sec = grace_sec
        self._urgent_grace_sec = urgent_grace_sec
        self._lock = asyncio.Lock()
        self._root: Path | None = None
        self._layers: dict[str, tuple[str, ...]] = {}

    async def keep_within_budget(self) -> int:
        """Before a build: remove what is over the budget. Returns how many images went. Raises `SandboxError`."""
        async with self._lock:
            if self.disk_gb is None:
                goal = await self._lacking()
                return await self._collect(await self._forest(), goal, self._grace_sec) if goal > 0 else 0
            forest = await self._forest()
            goal = forest.our_bytes() - int(self.disk_gb * GIB)
            return await self._collect(forest, goal, self._grace_sec) if goal > 0 else 0

    async def make_room(self) -> bool:
        """The disk is full: remove what can be spared. Says whether anything was. Raises `SandboxError`."""
        async with self._lock:
            goal = max(ROOM_BYTES, await self._lacking())
            return await self._collect(await self._forest(), goal, self._urgent_grace_sec) > 0

    async def _lacking(self) -> int:
        """Bytes that must become free on the engine's disk; 0 where it cannot be seen from here."""
        if self._root is None:
            info = await self.engine.call("ask the engine about itself", lambda api: api.info())
            self._root = Path(info.get("DockerRootDir") or "/var/lib/docker")
        if not is_local(self.engine) or not self._root.is_dir():
            return 0
        disk = shutil.disk_usage(self._root)
        return int(min(disk.total * FREE_SHARE, FREE_BYTES)) - disk.free

    async def _forest(self) -> Forest:
        return await self.engine.call("list images", self._read)

    def _read(self, api: Any) -> Forest:
        listed = api.images(all=True)
        used = {container.get("ImageID", "") for container in api.containers(all=True)}
        stored = []
        for image in listed:
            tags = tuple(tag for tag in image.get("RepoTags") or () if tag != "<none>:<none>")
            held = any(map(self._is_held, (image["Id"], *tags)))
            if held:
                used.add(image["Id"])
            parent = image.get("ParentId") or ""
            digests = tuple(name for name in image.get("RepoDigests") or () if "<none>" not in name)
            ours = _is_ours(image, tags)
            stored.append(Stored(image["Id"], parent, int(image["Size"]), tags, ours, digests))
        self._find_parents(api, stored)
        return Forest.of(stored, used)

    def _find_parents(self, api: Any, stored: list[Stored]) -> None:
        """The images that ours without a parent stand on, by their layers."""
        rootless = [image for image in stored if not image.parent]
        if not any(image.ours for image in rootless):
            return
        for image in rootless:
            if image.id not in self._layers and (found := known(api, image.id)) is not None:
                self._layers[image.id] = tuple((found.get("RootFS") or {}).get("Layers") or ())
        by_layers = {self._layers[image.id]: image.id for image in rootless if self._layers.get(image.id)}
        for image in rootless:
            layers = self._layers.get(image.id, ())
            prefixes = (by_layers.get(layers[:end]) for end in range(len(layers) - 1, 0, -1))
            image.parent = next((found for found in prefixes if found and found != image.id), "")

    async def _collect(self, forest: Forest, goal: int, grace_sec: float) -> int:
        last_use = await self.engine.call("look up images", lambda api: _last_uses(api, forest))
        chosen = oldest_first(
            forest, lambda one: last_use.get(one, 0.0), goal, before=time.time() - grace_sec
        )
        removed = 0
        for image in chosen:
            if not any(map(self._is_held, (image.id, *image.tags))):
                removed += await self.engine.call("remove an image", partial(_remove, image=image))
        self.removed += removed
        return removed


def _is_ours(image: Mapping[str, Any], tags: tuple[str, ...]) -> bool:
    built = BUILD_LABEL in (image.get("Labels") or {})
    records = {tag for tag in tags if tag.startswith(f"{PULLED}:")}
    return bool(tags) and all(
        tag in records or record_of(tag) in records or (built and tag.startswith(f"{REPOSITORY}:"))
        for tag in tags
    )


def _last_uses(api: Any, forest: Forest) -> dict[str, float]:
    found = {}
    for image in forest.images.values():
        if image.ours and image.id not in forest.used and (inspected := known(api, image.id)) is not None:
            found[image.id] = last_used(inspected)
    return found


def _remove(api: Any, image: Stored) -> int:
    """1 where the image is gone; 0 where it was already, or is in use."""
    # The record goes last but for digests: an image that keeps it is still known as one that may go.
    for name in (*sorted(image.tags, key=lambda tag: tag.startswith(f"{PULLED}:")), *image.digests):
        try:
            api.remove_image(name)
        except NotFound:
            continue
        except APIError as error:
            if error.status_code in (403, 409):
                return 0
            if not _goes(api, image.id):
                raise  # and else it is what an engine answers to one of two that remove an image at a time
    return 1 if known(api, image.id) is None else 0


def _goes(api: Any, image_id: str) -> bool:
    """Whether the image is gone within `REMOVAL_SEC`."""
    until = time.monotonic() + REMOVAL_SEC
    while known(api, image_id) is not None:
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
