"""What a container's processes changed of their image's files, and the image's files put back.

The engine's own list (`docker diff`) walks the whole image: 0.13 s for 10,000 files. Where this process can
read the container's overlay upper directory (it is root on the engine's machine), that directory alone is
walked instead, in milliseconds. Volumes are not part of either.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from docker.errors import NotFound

from rollcage.rollout.sandbox.base import Change, ChangeKind
from rollcage.rollout.sandbox.engine import Engine

_KINDS: tuple[ChangeKind, ChangeKind, ChangeKind] = ("modified", "added", "deleted")
_OPAQUE = "trusted.overlay.opaque"


async def changes(engine: Engine, container_id: str) -> list[Change]:
    """Everything that differs from the container's image. Raises `SandboxError`."""
    inspected = await engine.call("inspect a container", lambda api: api.inspect_container(container_id))
    driver = inspected.get("GraphDriver") or {}
    data = driver.get("Data") or {}
    upper = data.get("UpperDir")
    if driver.get("Name") == "overlay2" and upper and _readable(upper):
        lowers = data["LowerDir"].split(":")
        if all(_readable(lower) for lower in lowers):
            return await asyncio.to_thread(
                lambda: list(_walk(Path(upper), [Path(lower) for lower in lowers]))
            )
    listed = await engine.call("list a container's changes", lambda api: api.diff(container_id))
    parents = {posixpath.dirname(entry["Path"]) for entry in listed or []}
    return [
        Change(entry["Path"], _KINDS[entry["Kind"]]) for entry in listed or [] if entry["Path"] not in parents
    ]


def since(earlier: Sequence[Change], later: Sequence[Change]) -> list[Change]:
    """What differs from an image, where `earlier` had been changed of it before `later` was."""
    found = {change.path: change for change in earlier}
    for change in later:
        before = found.get(change.path)
        if before is None or change.kind == "deleted":
            found[change.path] = change
        elif before.kind == "deleted":
            found[change.path] = Change(change.path, "modified")
    was_added = {change.path for change in earlier if change.kind == "added"}
    return [one for one in found.values() if one.kind != "deleted" or one.path not in was_added]


async def restore(engine: Engine, container_id: str, image: str, paths: Sequence[str]) -> None:
    """Put these files and directories of the image back into the container, over whatever is there.

    What the image does not have is left alone. Raises `SandboxError`.
    """
    await engine.call("restore files of the image", lambda api: _restore(api, container_id, image, paths))


def _restore(api: Any, container_id: str, image: str, paths: Sequence[str]) -> None:
    labels = api.inspect_container(container_id)["Config"].get("Labels") or {}
    pristine = api.create_container(image, ["true"], labels=labels, network_disabled=True)["Id"]
    try:
        for path in paths:
            try:
                chunks, _ = api.get_archive(pristine, path)
            except NotFound:
                continue
            archive = b"".join(chunks)
            api.put_archive(container_id, posixpath.dirname(path), archive)
    finally:
        api.remove_container(pristine, force=True, v=True)


def _readable(directory: str) -> bool:
    return os.access(directory, os.R_OK | os.X_OK) and Path(directory).is_dir()


def _walk(upper: Path, lowers: Sequence[Path]) -> Iterator[Change]:
    """The overlay's upper directory as changes. `lowers` are the image's layers, the topmost first.
    https://docs.kernel.org/filesystems/overlayfs.html#whiteouts-and-opaque-directories"""
    for folder, folders, files in os.walk(upper):
        below = Path(folder).relative_to(upper)
        for name in files:
            mode = os.lstat(Path(folder, name))
            known = _lstat_below(lowers, below / name) is not None
            if stat.S_ISCHR(mode.st_mode) and mode.st_rdev == 0:
                if known:
                    yield Change(f"/{below / name}", "deleted")
            else:
                yield Change(f"/{below / name}", "modified" if known else "added")
        for name in folders:
            path = below / name
            known_as = _lstat_below(lowers, path)
            if os.path.islink(upper / path) or (known_as is not None and not stat.S_ISDIR(known_as.st_mode)):
                yield Change(f"/{path}", "added" if known_as is None else "modified")
            elif known_as is None:
                yield Change(f"/{path}", "added")
            elif _is_opaque(upper / path):
                for gone in sorted(_names_below(lowers, path)):
                    if not os.path.lexists(upper / path / gone):
                        yield Change(f"/{path / gone}", "deleted")


def _lstat_below(lowers: Sequence[Path], path: Path) -> os.stat_result | None:
    """What the image has at `path`, None for nothing: the topmost layer that says anything decides."""
    for lower in lowers:
        place = lower
        for part in path.parts:
            place = place / part
            try:
                found = os.lstat(place)
            except (FileNotFoundError, NotADirectoryError):
                break
            if stat.S_ISCHR(found.st_mode) and found.st_rdev == 0:
                return None
            if place != lower / path and not stat.S_ISDIR(found.st_mode):
                return None
            if place == lower / path:
                return found
            if _is_opaque(place) and not os.path.lexists(lower / path):
                return None
    return None


def _names_below(lowers: Sequence[Path], directory: Path) -> set[str]:
    names = {
        name for lower in lowers if (lower / directory).is_dir() for name in os.listdir(lower / directory)
    }
    return {name for name in names if _lstat_below(lowers, directory / name) is not None}


def _is_opaque(directory: Path) -> bool:
    try:
        return os.getxattr(directory, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False
