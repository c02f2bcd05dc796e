"""What a service of a docker-compose.yaml takes from files: build contexts, env files, mounts, secrets, configs.

Only what lies in the folder of the file itself is taken, never another path of this machine. A bind mount
becomes a copy, so that no rollout sees what another one wrote: the task's own files stay as they are.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Mapping
from pathlib import Path

from rollcage.rollout.compose_model import MAIN, Mount
from rollcage.rollout.compose_targets import check_target, check_tmpfs
from rollcage.rollout.compose_variables import Lookup, VariableError, interpolate
from rollcage.rollout.compose_yaml import Place

HOST_LOGS = "/.harbor-logs/"
"""What Harbor's `HOST_*_PATH` variables begin with here: folders that main and the services share."""

_SHARED_LOGS = ("agent", "artifacts")
_REMEDY = "put it into the folder of the docker-compose.yaml"
_LINE = re.compile(r"(?:export\s+)?([a-zA-Z_][\w.-]*)\s*(=?)\s*(.*)")


def build_context(root: Path, context: Place | None, build: Place) -> Path | None:
    """The folder of a build: that of the file, where it says none."""
    text = (context.text() or ".") if context is not None else "."
    if re.match(r"[a-z+]+://|git@|github\.com/", text):
        build.unsupported(f"is built from {text}", "put its files into the task")
        return root
    return inside(root, text, context or build)


def inside(root: Path, text: str, place: Place) -> Path | None:
    """The path, where it stays in the folder of the file, whatever links lie on the way; else None, and a
    problem."""
    if text.startswith("~"):
        place.unsupported(f"({text}) is a path of the host", _REMEDY)
        return None
    path = Path(os.path.normpath(root / text))
    try:
        stays = path.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):
        place.problem(f"({text}) is a link that leads back to itself", "remove it")
        return None
    if not stays or not path.is_relative_to(root):
        outside = "a path of the host" if text.startswith("/") else f"outside of {root.name}/"
        place.unsupported(f"({text}) is {outside}", _REMEDY)
        return None
    return path


def env_file(root: Path, place: Place) -> dict[str, str | None]:
    """The variables of the `env_file`s, the later ones winning."""
    pairs: dict[str, str | None] = {}
    entries = [place] if place.is_text else list(place.items())
    for entry in entries:
        named = entry.get("path") if entry.is_table else entry
        required = entry.get("required")
        text = named.text() if named is not None else None
        path = inside(root, text, entry) if text else None
        if path is None:
            continue
        if path.is_file():
            pairs.update(_env_lines(path, entry))
        elif required is None or required.flag():
            entry.problem(f"({text}) is not there", "write it, or correct the path")
    return pairs


def _env_lines(path: Path, place: Place) -> dict[str, str | None]:
    """https://docs.docker.com/compose/how-tos/environment-variables/variable-interpolation/#env-file-syntax"""
    try:
        return parse_env(path.read_text("utf-8-sig"), place)
    except UnicodeDecodeError:
        place.problem(f"({path.name}) is not UTF-8", "save it as UTF-8")
    except VariableError as error:
        place.problem(f"({path.name}): {error}", "put the value into single quotes")
    return {}


def parse_env(text: str, place: Place) -> dict[str, str | None]:
    """`NAME=value` lines: in single quotes as they stand, else with variables replaced. Raises `VariableError`."""
    pairs: dict[str, str | None] = {}
    for line in text.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None:
            continue  # a comment, or nothing
        name, equals, value = match.groups()
        if not equals:
            pairs[name] = None
        elif value[:1] == "'" and (end := value.find("'", 1)) > 0:
            pairs[name] = value[1:end]
        elif value[:1] == '"' and (quoted := re.match(r'"((?:\\.|[^"\\])*)"', value)):
            plain = re.sub(
                r"\\(.)", lambda at: {"n": "\n", "t": "\t", "r": "\r"}.get(at[1], at[1]), quoted[1]
            )
            pairs[name] = _filled(plain, pairs, place)
        else:
            pairs[name] = _filled(re.sub(r"\s+#.*", "", value).strip(), pairs, place)
    return pairs


def _filled(text: str, pairs: Mapping[str, str | None], place: Place) -> str:
    """The text with its variables replaced; the lines above count before anything else."""
    lookup = place.document.lookup
    above = {name: value for name, value in pairs.items() if value is not None}
    own = Lookup({**lookup.values, **above})
    filled = interpolate(text, own)
    lookup.asked |= own.asked - above.keys()
    lookup.missing |= own.missing
    return filled


def read_mounts(
    service: Place, name: str, root: Path, declared: dict[str, dict[str, Place]]
) -> tuple[list[Mount], dict[str, str]]:
    """The mounts of a service, and its `tmpfs` by path."""
    mounts: list[Mount] = []
    tmpfs: dict[str, str] = {}
    if (found := service.get("tmpfs")) is not None:
        for entry in [found] if found.is_text else found.items():
            if text := entry.text():
                path, _, options = text.partition(":")
                tmpfs[path] = options
                check_target(entry, name, path)
                check_tmpfs(entry, options)
    if (found := service.get("volumes")) is not None:
        for entry in found.items():
            reader = _long if entry.is_table else _short
            had, had_tmpfs = len(mounts), set(tmpfs)
            reader(entry, name, root, declared["volumes"], mounts, tmpfs)
            for mount in mounts[had:]:
                if not _is_log_folder(mount):
                    check_target(entry, name, mount.target, copied=mount.source is not None)
            for target in tmpfs.keys() - had_tmpfs:
                check_target(entry, name, target)
    for kind, folder in (("secrets", "/run/secrets/"), ("configs", "/")):
        if (found := service.get(kind)) is not None:
            for entry in found.items():
                if (file := _file(entry, root, declared[kind], folder)) is not None:
                    check_target(entry, name, file.target, copied=True)
                    mounts.append(file)
    return mounts, tmpfs


def _is_log_folder(mount: Mount) -> bool:
    """Whether it is one of Harbor's, at its own place."""
    volume = mount.volume or ""
    return volume.startswith(HOST_LOGS) and mount.target == f"/logs/{volume.removeprefix(HOST_LOGS)}"


def _short(
    entry: Place, name: str, root: Path, volumes: dict[str, Place], mounts: list[Mount], tmpfs: dict[str, str]
) -> None:
    parts = (entry.text() or "").split(":")
    if parts == [""]:
        return
    if len(parts) == 1:
        mounts.append(Mount(posixpath.normpath(parts[0])))
        return
    source, target, options = parts[0], parts[1], ",".join(parts[2:]).split(",")
    read_only = "ro" in options
    if source.startswith((".", "/", "~")):
        _bind(entry, name, root, source, target, read_only, mounts)
    else:
        _volume(entry, source, target, read_only, volumes, mounts)


def _long(
    entry: Place, name: str, root: Path, volumes: dict[str, Place], mounts: list[Mount], tmpfs: dict[str, str]
) -> None:
    def said(key: str) -> str:
        place = entry.get(key)
        return (place.text() or "") if place is not None else ""

    kind, source, target = said("type") or "volume", said("source"), said("target")
    read_only = (flag := entry.get("read_only")) is not None and flag.flag()
    if not target:
        entry.problem("has no target", "write where it is mounted")
    elif kind == "tmpfs":
        options = entry.get("tmpfs")
        size = options.get("size") if options is not None else None
        mib = size.mebibytes() if size is not None else None
        tmpfs[target] = f"size={mib}m" if mib else ""
    elif kind == "bind":
        _bind(entry, name, root, source, target, read_only, mounts)
    elif kind == "volume":
        options = entry.get("volume")
        if options is not None and options.get("subpath") is not None:
            entry.unsupported("mounts a part of a volume", "mount the whole of it")
        if source:
            _volume(entry, source, target, read_only, volumes, mounts)
        else:
            mounts.append(Mount(posixpath.normpath(target)))
    else:
        entry.unsupported(f"is a mount of type {kind}", "use a volume, or files of the task")


def _volume(
    entry: Place, source: str, target: str, read_only: bool, volumes: dict[str, Place], mounts: list[Mount]
) -> None:
    if source not in volumes:
        entry.problem(f"names the volume {source}, which is not declared", f"write {source} under volumes")
    mounts.append(Mount(posixpath.normpath(target), volume=source, read_only=read_only))


def _bind(
    entry: Place, name: str, root: Path, source: str, target: str, read_only: bool, mounts: list[Mount]
) -> None:
    target = posixpath.normpath(target)
    if source.startswith(HOST_LOGS):
        logs = source.removeprefix(HOST_LOGS).strip("/")
        if name == MAIN and (target == f"/logs/{logs}" or logs not in _SHARED_LOGS):
            return  # every sandbox has them
        if logs not in _SHARED_LOGS:
            entry.unsupported(f"gives {name} the verifier's logs", "only the verifier may write the reward")
        mounts.append(Mount(target, volume=f"{HOST_LOGS}{logs}", read_only=read_only))
        return
    if re.match(r"/(var/)?run/docker\.sock", source):
        entry.unsupported("gives the container the engine (docker.sock)", "no sandbox may have it")
        return
    path = inside(root, source, entry)
    if path is None:
        return
    # As the engine has it: what is not there is an empty folder.
    mounts.append(Mount(target, source=path if path.exists() else None, read_only=read_only))


def _file(entry: Place, root: Path, declared: dict[str, Place], folder: str) -> Mount | None:
    """A secret or a config: a file of the task, or a text in the file itself."""
    name_place = entry.get("source") if entry.is_table else entry
    target_place = entry.get("target") if entry.is_table else None
    name = (name_place.text() or "") if name_place is not None else ""
    if name not in declared:
        entry.problem(f"names {name}, which is not declared", f"write {name} at the file's end")
        return None
    target = (target_place.text() or name) if target_place is not None else name
    target = posixpath.join(folder, target)
    what = declared[name]
    if (content := what.get("content")) is not None:
        return Mount(target, content=content.text() or "", read_only=True)
    if (file := what.get("file")) is None:
        what.unsupported("is no file of the task", "write file: and a path")
        return None
    path = inside(root, file.text() or "", file)
    if path is not None and not path.is_file():
        file.problem("is not there", "write the file, or correct the path")
        return None
    return Mount(target, source=path, read_only=True) if path is not None else None
