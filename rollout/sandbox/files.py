"""Files in and out of a sandbox, as tar streams of the engine, and small ones over an idle plain link.

The engine unpacks and packs inside the container's own root, so that no path of a sandbox reaches the host's
files. What comes out was made by an agent: nothing of it is followed, and nothing leaves the target.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any

from pathspec import GitIgnoreSpec

from rollcage.rollout.outcome import SandboxError
from rollcage.rollout.sandbox.engine import Engine
from rollcage.rollout.sandbox.link import Link
from rollcage.rollout.sandbox.threads import in_thread

SPOOL_BYTES = 8 << 20
"""A tar on its way in is kept in memory up to this size, then in a temporary file."""

SYMLINK_MODE = 1 << 27
"""The bit of a symbolic link in Go's `os.FileMode`, which the engine's stat of a path has."""

PLAIN_BYTES = 1 << 16
"""A shell's builtin reads a file like this byte by byte, at some MB a second."""

_PLAIN_READ = """rc_read() {
local LC_ALL=C
[ -h "$1" ] && return 2
[ -e "$1" ] || return 1
[ -f "$1" ] || return 3
exec 6<"$1" || return 4
IFS= read -r -u 6 -d '' -n %d rc_data && return 4
printf %%s "$rc_data"
}
rc_read %s"""
_NONE, _LINK, _SPECIAL = 1, 2, 3


class TryArchive:
    """`read_plain` could not tell: the file is large, or holds a NUL."""


async def upload(
    engine: Engine,
    container_id: str,
    source: Path,
    target: str,
    *,
    mode: int | None = None,
    exclude: Sequence[str] = (),
) -> None:
    """Put the file or tree `source` at the absolute path `target`; see `Sandbox.upload`.

    Raises `ValueError` for a relative target, `OSError` where `source` cannot be read, `SandboxError`.
    """
    where = _absolute(target)
    with tempfile.SpooledTemporaryFile(SPOOL_BYTES) as spool:
        await in_thread(_pack, spool, source, where, mode, exclude)
        await _put(engine, container_id, spool)


async def write(
    engine: Engine, container_id: str, contents: Mapping[str, bytes], *, mode: int = 0o644
) -> None:
    """Write files by absolute path in one call; see `Sandbox.write`."""
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, data in contents.items():
            entry = tarfile.TarInfo(str(_absolute(path).relative_to("/")))
            entry.size, entry.mode = len(data), mode
            tar.addfile(entry, io.BytesIO(data))
    spool.seek(0)
    await _put(engine, container_id, spool)


async def read_plain(link: Link, path: str, max_bytes: int) -> bytes | TryArchive | None:
    """`Sandbox.read` over a plain link whose supervisor is bash. The caller has the link's lock."""
    if "\n" in path:
        return TryArchive()
    where = str(_absolute(path))
    most = min(max_bytes, PLAIN_BYTES)
    word = "'" + where.replace("'", "'\\''") + "'"
    command = await link.ask(_PLAIN_READ % (most + 1, word), output_bytes=4 * PLAIN_BYTES)
    if command.exit_code == 0 and command.stdout is not None:
        return command.stdout.bytes()
    if command.exit_code == _NONE:
        return None
    if command.exit_code in (_LINK, _SPECIAL):
        raise ValueError(
            _refusal(where, "a symbolic link" if command.exit_code == _LINK else "no regular file")
        )
    return TryArchive()


async def read(engine: Engine, container_id: str, path: str, max_bytes: int) -> bytes | None:
    """`Sandbox.read` by the engine, which tells the kind of file before its bytes."""
    where = str(_absolute(path))

    def get(api: Any) -> bytes | str:
        stream, about = api.get_archive(container_id, where)
        with _Stream(stream) as packed:
            # Not by `linkTarget`, which podman gives for every file.
            if about["mode"] & SYMLINK_MODE:
                return "a symbolic link"
            with tarfile.open(fileobj=packed, mode="r|") as tar:
                entry = tar.next()
                if entry is None or not entry.isreg():
                    return "no regular file"
                if entry.size > max_bytes:
                    return f"{entry.size} bytes long, more than {max_bytes}"
                content = tar.extractfile(entry)
                return content.read() if content is not None else b""

    try:
        found = await engine.call("read a file of a container", get)
    except SandboxError as error:
        if error.evidence.status == 404 and await _exists(engine, container_id):
            return None
        raise
    if isinstance(found, str):
        raise ValueError(_refusal(where, found))
    return found


async def download(engine: Engine, container_id: str, path: str, target: Path, max_bytes: int) -> bool:
    """Copy the file or tree at `path` to `target`; see `Sandbox.download`.

    Modes are kept without set-id bits; owners are not. Symbolic links are kept where they stay inside the tree.
    Raises `ValueError` for an entry that does not, for devices and the like, and past `max_bytes`; nothing is
    left at `target` then.
    """
    where = str(_absolute(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".download-") as scratch:
        top = Path(scratch) / "tree"

        def get(api: Any) -> str | None:
            stream, _ = api.get_archive(container_id, where)
            with _Stream(stream) as packed, tarfile.open(fileobj=packed, mode="r|") as tar:
                return _unpack(tar, top, max_bytes)

        try:
            refused = await engine.call("copy files out of a container", get)
        except SandboxError as error:
            if error.evidence.status == 404 and await _exists(engine, container_id):
                return False
            raise
        if refused is not None:
            raise ValueError(_refusal(where, refused))
        if top.is_dir() and not top.is_symlink():
            await in_thread(partial(shutil.copytree, top, target, symlinks=True, dirs_exist_ok=True))
        else:
            os.replace(top, target)
    return True


def _tree(source: Path, where: PurePosixPath, exclude: GitIgnoreSpec) -> Iterator[tuple[Path, str]]:
    """Each file of `source` and its name in the tar. The tree's own top is left out, because the engine would
    give an existing directory (`/tmp`, say) the mode of ours; but for an empty tree it is all there is."""
    base = str(where.relative_to("/"))
    if source.is_symlink() or not source.is_dir():
        yield source, base
        return
    empty = True
    for folder, folders, names in os.walk(source):
        inside = Path(folder).relative_to(source)
        kept = []
        for name in sorted(folders):
            path = Path(folder, name)
            ignored = exclude.match_file(f"{(inside / name).as_posix()}{'' if path.is_symlink() else '/'}")
            if not ignored:
                yield path, f"{base}/{(inside / name).as_posix()}"
                empty = False
                kept.append(name)
        folders[:] = kept
        for name in sorted(names):
            if not exclude.match_file((inside / name).as_posix()):
                yield Path(folder, name), f"{base}/{(inside / name).as_posix()}"
                empty = False
    if empty:
        yield source, base


def _pack(
    spool: IO[bytes], source: Path, where: PurePosixPath, mode: int | None, exclude: Sequence[str]
) -> None:
    with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path, name in _tree(source, where, GitIgnoreSpec.from_lines(exclude)):
            _add(tar, path, name, mode)
    spool.seek(0)


def _add(tar: tarfile.TarFile, path: Path, name: str, mode: int | None) -> None:
    found = path.lstat()
    entry = tarfile.TarInfo(name)
    entry.mode, entry.mtime = stat.S_IMODE(found.st_mode), int(found.st_mtime)
    if stat.S_ISLNK(found.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(path)
        tar.addfile(entry)
    elif stat.S_ISDIR(found.st_mode):
        entry.type = tarfile.DIRTYPE
        tar.addfile(entry)
    elif stat.S_ISREG(found.st_mode):
        entry.mode = entry.mode if mode is None else mode
        with path.open("rb") as content:
            entry.size = os.fstat(content.fileno()).st_size
            tar.addfile(entry, content)


async def _put(engine: Engine, container_id: str, packed: IO[bytes]) -> None:
    await engine.call("put files into a container", lambda api: api.put_archive(container_id, "/", packed))


def _unpack(tar: tarfile.TarFile, top: Path, max_bytes: int) -> str | None:
    """Unpack below `top`; the reason why not, where an entry is refused. Links come last, so that no file is
    ever written through one."""
    links: list[tuple[Path, str]] = []
    modes: list[tuple[Path, int]] = []
    left = max_bytes
    for entry in tar:
        # The engine's names begin with the last part of the path that was asked for.
        parts = PurePosixPath(entry.name).parts
        if not parts or parts[0] == "/" or ".." in parts:
            return f"an entry with the name {entry.name!r}"
        path = top.joinpath(*parts[1:])
        if entry.isdir():
            path.mkdir(parents=True, exist_ok=True)
            modes.append((path, entry.mode & 0o777))
        elif entry.isreg():
            left -= entry.size
            if left < 0:
                return f"more than {max_bytes} bytes"
            path.parent.mkdir(parents=True, exist_ok=True)
            content = tar.extractfile(entry)
            with path.open("wb") as file:
                if content is not None:
                    shutil.copyfileobj(content, file)
            path.chmod(entry.mode & 0o777)
        elif entry.issym():
            if not _stays(entry.linkname, len(parts) - 2):
                return f"a link {entry.name!r} to {entry.linkname!r}"
            links.append((path, entry.linkname))
        elif entry.islnk():
            other = PurePosixPath(entry.linkname).parts
            original = top.joinpath(*other[1:])
            if not other or ".." in other or other[0] != parts[0] or not original.is_file():
                return f"a hard link {entry.name!r} to {entry.linkname!r}"
            path.parent.mkdir(parents=True, exist_ok=True)
            os.link(original, path)
        else:
            return f"a special file {entry.name!r}"
    for path, link in links:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(link)
    for path, mode in reversed(modes):
        path.chmod(mode | stat.S_IRWXU)
    return None


def _stays(link: str, depth: int) -> bool:
    """Whether a link `depth` directories below the tree's top stays inside, whatever its names are links to:
    it goes up first, by real directories, and never again."""
    parts = PurePosixPath(link).parts
    ups = next((at for at, part in enumerate(parts) if part != ".."), len(parts))
    return bool(parts) and parts[0] != "/" and ups <= depth and ".." not in parts[ups:]


async def _exists(engine: Engine, container_id: str) -> bool:
    """The engine says 404 for a file as for a container: raises `SandboxError` if it is the container."""
    await engine.call("inspect a container", lambda api: api.inspect_container(container_id))
    return True


def _absolute(path: str) -> PurePosixPath:
    where = PurePosixPath(path)
    if not where.is_absolute() or ".." in where.parts or "\0" in path or len(where.parts) < 2:
        raise ValueError(f"{path!r} is not an absolute path in a sandbox")
    return where


def _refusal(path: str, reason: str) -> str:
    return f"{path} is refused: {reason}"


class _Stream(io.RawIOBase):
    """The engine's chunks as a file. Closing it drops the connection, so that the rest is not sent."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._source = chunks
        self._left = b""

    def readable(self) -> bool:
        """Always."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with what has come."""
        while not self._left:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = chunk
        size = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size

    def close(self) -> None:
        """Let go of the connection."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()
        super().close()
