"""COPY and ADD for the classic builder: heredocs and modes become files beside the context.

Sources are taken below the context's own folder in the tar (`context.FILES_DIR`), so that whatever
lowering adds is never copied with them. A source that the context lacks is found here, before a build.
"""

from __future__ import annotations

import posixpath
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollcage.rollout.sandbox.context import FILES_DIR, INLINE_DIR, Context, InlineFile, has_wildcards
from rollcage.rollout.sandbox.dockerfile import (
    Dockerfile,
    DockerfileError,
    Heredoc,
    Instruction,
    heredoc_name,
    place,
)
from rollcage.rollout.sandbox.modes import SETID, Chmod
from rollcage.rollout.sandbox.mounts import COPY_CHMOD_API, ENGINES, REMOTES_API, Api
from rollcage.rollout.sandbox.picks import with_parents, without
from rollcage.rollout.sandbox.stages import Plan, expanded
from rollcage.rollout.sandbox.words import WordError, array, expand_body, literal

FLAGS = {
    "COPY": frozenset({"chown", "chmod", "from", "link", "parents", "exclude"}),
    "ADD": frozenset({"chown", "chmod", "link", "exclude", "checksum", "keep-git-dir", "unpack"}),
}
REMOTE_FLAGS = frozenset({"--checksum", "--keep-git-dir", "--unpack"})


@dataclass
class Copies:
    """Lowers the COPYs and ADDs of one Dockerfile; `files` are those that the tar must hold besides.

    `buildkit` None: the engine offers none. `needs_buildkit`: a lowered instruction has a flag that only BuildKit
    knows.
    """

    plan: Plan
    context: Context
    buildkit: Api | None = None
    needs_buildkit: bool = False
    files: list[InlineFile] = field(default_factory=list)
    folders: int = 0

    @property
    def dockerfile(self) -> Dockerfile:
        return self.plan.dockerfile

    def lower(self, at: Instruction, stage: int, env: Mapping[str, str]) -> list[str]:
        """The instructions that take this one's place, in stage number `stage` where `env` holds."""
        for flag in at.flags:
            if flag.removeprefix("--").partition("=")[0] not in FLAGS[at.keyword]:
                raise self.dockerfile.error(
                    at, f"{at.keyword} has no flag {flag}", "take it out", token=flag.split("=")[0]
                )
        flags = [flag for flag in at.flags if flag.startswith("--chown")]
        *sources, target = at.words
        if heredoc_name(target) is not None:
            raise self.dockerfile.error(
                at,
                f"{at.keyword} cannot take a heredoc as its destination",
                "write the path last",
                token=target,
            )
        mode = self._mode(at, env)
        if mode is not None and mode.octal is not None and mode.octal & SETID:
            # The classic builder's chown takes these bits away, and so does the chmod of an old BuildKit.
            said = f"--chmod={at.flag('chmod')} sets an id, which builders may leave out"
            raise self.dockerfile.unsupported(at, said, "RUN chmod after it", "--chmod")
        plain = [source for source in sources if heredoc_name(source) is None]
        result = []
        if (origin := at.flag("from")) is not None:
            result += self._from_elsewhere(at, origin, stage, flags, mode, [*plain, target]) if plain else []
        elif REMOTE_FLAGS & {flag.partition("=")[0] for flag in at.flags}:
            return self._remote(at, flags, mode)
        elif at.flag("parents") not in (None, "false") or at.flag("exclude") is not None:
            result += self._picked(at, plain, target, flags, mode, env)
        else:
            paths = [path for source in plain for path in self._source(at, source, mode, env)]
            result += [" ".join([at.keyword, *flags, self._array([*paths, target])])] if paths else []
        heredocs = {heredoc.name: heredoc for heredoc in at.heredocs}
        for source in sources:
            if (found := heredoc_name(source)) is not None:
                if found[0] not in heredocs:
                    raise self.dockerfile.error(
                        at, f"{source} has no body", "give each heredoc a name without spaces", token=source
                    )
                path = self._heredoc_file(at, heredocs[found[0]], mode, env)
                result.append(" ".join(["COPY", *flags, self._array([path, target])]))
        return result

    def _native(self, at: Instruction, flag: str, remedy: str, *, least: Api = COPY_CHMOD_API) -> str:
        """A flag that is left to BuildKit. Raises `DockerfileError` (`unsupported`) where there is none."""
        name = flag.partition("=")[0]
        if self.buildkit is None or self.buildkit < least:
            later = "" if self.buildkit is None else f" of Engine {ENGINES[least]} or later"
            raise self.dockerfile.unsupported(at, f"{at.keyword} {flag} needs BuildKit{later}", remedy, name)
        self.needs_buildkit = True
        return flag

    def _from_elsewhere(
        self, at: Instruction, origin: str, stage: int, flags: list[str], mode: Chmod | None, words: list[str]
    ) -> list[str]:
        for name in ("parents", "exclude"):
            if at.flag(name) not in (None, "false"):
                said = f"COPY --from with --{name} needs a newer Dockerfile frontend"
                raise self.dockerfile.unsupported(at, said, "list what you copy without it", "--" + name)
        if mode is not None and mode.octal is None:
            said = f"COPY --from with --chmod={mode.letters} needs a newer Dockerfile frontend"
            raise self.dockerfile.unsupported(at, said, "write the mode in octal", "--chmod")
        if mode is not None:
            remedy = "copy first, and chmod in a step of its own"
            flags = [*flags, self._native(at, f"--chmod={mode.octal:04o}", remedy)]
        source = self.plan.stage_of(origin, stage, at)
        number = source is not None and origin.isdecimal()
        if (
            not number
            and not at.heredocs
            and all(flag.startswith(("--chown", "--from")) for flag in at.flags)
        ):
            return [at.verbatim]
        if source is not None and number:
            origin = str(self.plan.needed.index(source))
        return [" ".join(["COPY", f"--from={origin}", *flags, self._array(words)])]

    def _remote(self, at: Instruction, flags: list[str], mode: Chmod | None) -> list[str]:
        """An ADD whose flags only BuildKit knows: of what comes from elsewhere, with a checksum."""
        remedy = "fetch it in a RUN step"
        for flag in at.flags:
            if flag.partition("=")[0] in REMOTE_FLAGS:
                if flag.startswith("--unpack"):
                    said = f"ADD {flag} needs a newer Dockerfile frontend"
                    raise self.dockerfile.unsupported(at, said, remedy, "--unpack")
                flags = [*flags, self._native(at, flag, remedy, least=REMOTES_API)]
        if mode is not None:
            flags = [*flags, f"--chmod={at.flag('chmod')}"]
        return [" ".join(["ADD", *flags, self._array(at.words)])]

    def _picked(
        self,
        at: Instruction,
        sources: list[str],
        target: str,
        flags: list[str],
        mode: Chmod | None,
        env: Mapping[str, str],
    ) -> list[str]:
        """COPY with --parents or --exclude: a tree beside the context that holds what is left, copied whole."""
        excludes = [flag.partition("=")[2] for flag in at.flags if flag.startswith("--exclude=")]
        excludes = [expanded(self.dockerfile, at, text, env) for text in excludes]
        parents = at.flag("parents") not in (None, "false")
        paths = []
        for raw in sources:
            word = expanded(self.dockerfile, at, raw, env)
            try:
                if parents:
                    picked = with_parents(self.context, word, excludes)
                    if picked is None:
                        raise self._missing(at, raw, posixpath.normpath("/" + word).lstrip("/"))
                    trees = [(picked, False)]
                    target = target.rstrip("/") + "/"
                else:
                    trees = [
                        (without(self.context, entry, excludes), (self.context.root / entry).is_file())
                        for entry in self._found(at, raw, word)
                    ]
            except ValueError as error:
                raise self.dockerfile.error(at, str(error), "correct the pattern") from None
            for tree, is_file in trees:
                folder = self._new_folder()
                self.files.append(InlineFile(folder, None))
                self.files += [
                    self._file(at, posixpath.join(folder, path), self.context.root / entry, mode)
                    for path, entry in tree.items()
                ]
                if tree:
                    paths.append(self._exactly(posixpath.join(folder, *tree) if is_file else folder))
        if at.keyword == "ADD" and any(_is_archive(file.path) for file in self.files):
            raise self.dockerfile.unsupported(
                at, "ADD --exclude beside an archive", "COPY it and unpack it in a RUN step", "--exclude"
            )
        return [" ".join(["COPY", *flags, self._array([*paths, target])])] if paths else []

    def _mode(self, at: Instruction, env: Mapping[str, str]) -> Chmod | None:
        raw = at.flag("chmod")
        if raw is None:
            return None
        try:
            return Chmod.parse(expanded(self.dockerfile, at, raw, env))
        except ValueError as error:
            raise self.dockerfile.error(at, f"--chmod: {error}", "use 0 to 07777", token="--chmod") from None

    def _source(self, at: Instruction, raw: str, mode: Chmod | None, env: Mapping[str, str]) -> list[str]:
        """Where one source stands in the tar: words of the lowered instruction."""
        word = expanded(self.dockerfile, at, raw, env)
        if at.keyword == "ADD" and re.match(r"https?://(?!.*\.git(?:#|$))", word):
            if mode is not None:
                raise self.dockerfile.unsupported(
                    at, "ADD --chmod of a URL needs BuildKit", "RUN chmod after it", "--chmod"
                )
            return [raw]
        if re.match(r"https?://|git@|git://|ssh://", word):
            remedy = "fetch it in a RUN step"
            if at.keyword == "ADD" and self.buildkit is not None and self.buildkit >= REMOTES_API:
                self.needs_buildkit = True
                return [raw]
            raise self.dockerfile.unsupported(at, f"{at.keyword} cannot fetch {word} here", remedy, raw)
        found = self._found(at, raw, word)
        if not found:
            return []  # BuildKit copies nothing where a pattern matches nothing
        path = posixpath.normpath("/" + word).lstrip("/")
        if mode is None:
            return [literal(posixpath.join(FILES_DIR, path), self.dockerfile.escape)]
        if at.keyword == "ADD" and any(_is_archive(entry) for entry in found):
            raise self.dockerfile.unsupported(
                at, "ADD --chmod of an archive needs BuildKit", "unpack it in a RUN step", raw
            )
        return [self._exactly(self._with_mode(at, entry, mode)) for entry in found]

    def _found(self, at: Instruction, raw: str, word: str) -> list[str]:
        """The entries of the context that a source names; none only where it is a pattern."""
        path = posixpath.normpath("/" + word).lstrip("/")
        try:
            found = self.context.find(path)
        except ValueError as error:
            raise self.dockerfile.error(at, str(error), "correct the brackets", token=raw) from None
        if not found and not has_wildcards(path):
            raise self._missing(at, raw, path)
        return found

    def _missing(self, at: Instruction, raw: str, path: str) -> DockerfileError:
        line, column = place(at, raw)
        hidden = any(entry == path or entry.startswith(path + "/") for entry in self.context.ignored)
        remedy = "it is left out by .dockerignore" if hidden else "add the file, or correct the path"
        said = f"{at.keyword} source {raw} is not in the build context"
        return DockerfileError("image_build", self.dockerfile.file, line, column, said, remedy)

    def _with_mode(self, at: Instruction, entry: str, mode: Chmod) -> str:
        """A copy of a context file or folder in which all that is no link has this mode. Returns its path."""
        root = self.context.root.resolve()
        real = (root / entry).resolve()
        path = posixpath.join(self._new_folder(), posixpath.basename(entry) or "all")
        self.files.append(self._file(at, path, real, mode))
        if real.is_dir():
            start = real.relative_to(root).as_posix().removeprefix(".")
            for below in self.context.under(start):
                name = posixpath.join(path, posixpath.relpath(below, start or "."))
                self.files.append(self._file(at, name, root / below, mode))
        return path

    def _file(self, at: Instruction, path: str, source: Path, mode: Chmod | None) -> InlineFile:
        """A file or folder of the context, at another path in the tar and with what `mode` makes of its own."""
        if mode is None:
            return InlineFile(path, None, source=source)
        is_folder = source.is_dir() and not source.is_symlink()
        made = mode.of(stat.S_IMODE(source.lstat().st_mode), is_folder=is_folder)
        if made & SETID and not source.is_symlink():
            remedy = "RUN chmod after it"
            raise self.dockerfile.unsupported(at, f"--chmod={mode.letters} sets an id", remedy, "--chmod")
        return InlineFile(path, made, source=source)

    def _heredoc_file(
        self, at: Instruction, heredoc: Heredoc, mode: Chmod | None, env: Mapping[str, str]
    ) -> str:
        if not re.fullmatch(r"[\w@%+=:,.-]+", heredoc.name) or heredoc.name in (".", ".."):
            raise self.dockerfile.unsupported(
                at, f"a heredoc named {heredoc.name!r}", "use letters, digits, - _ and .", heredoc.name
            )
        try:
            content = heredoc.content if heredoc.quoted else expand_body(heredoc.content, env)
        except WordError as error:
            raise self.dockerfile.error_at(
                heredoc.line,
                1,
                f"in this heredoc, {error}",
                f"quote the delimiter (<<'{heredoc.name}') to keep the text as it is",
            ) from None
        path = posixpath.join(self._new_folder(), heredoc.name)
        body = content.encode("utf-8", "surrogateescape")
        made = 0o644 if mode is None else mode.of(0o644, is_folder=False)
        self.files.append(InlineFile(path, made, body=body))
        return path

    def _exactly(self, path: str) -> str:
        """A word for this path in the tar, whatever characters it has."""
        return literal(re.sub(r"([*?\[\\])", r"\\\1", path), self.dockerfile.escape)

    def _new_folder(self) -> str:
        self.folders += 1
        return f"{INLINE_DIR}/{self.folders}"

    def _array(self, words: list[str]) -> str:
        return array(words, self.dockerfile.escape)


def _is_archive(path: str) -> bool:
    return re.search(r"\.(tar|tgz|tbz2?|txz)\b", path) is not None
