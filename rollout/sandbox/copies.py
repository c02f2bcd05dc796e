"""COPY and ADD for the classic builder: heredocs and modes become files beside the context.

Sources are taken below the context's own folder in the tar (`context.FILES_DIR`), so that whatever
lowering adds is never copied with them. A source that the context lacks is found here, before a build.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollcage.rollout.sandbox.context import FILES_DIR, INLINE_DIR, Context, InlineFile, has_wildcards
from rollcage.rollout.sandbox.dockerfile import (
    Dockerfile,
    DockerfileError,
    Heredoc,
    Instruction,
    heredoc_name,
    place,
)
from rollcage.rollout.sandbox.stages import Plan, expanded
from rollcage.rollout.sandbox.words import WordError, array, expand_body, literal

FLAGS = {
    "COPY": frozenset({"chown", "chmod", "from", "link", "parents", "exclude"}),
    "ADD": frozenset({"chown", "chmod", "link", "exclude", "checksum", "keep-git-dir", "unpack"}),
}


@dataclass
class Copies:
    """Lowers the COPYs and ADDs of one Dockerfile; `files` are those that the tar must hold besides."""

    plan: Plan
    context: Context
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
        for name in ("parents", "exclude", "checksum", "keep-git-dir", "unpack"):
            if at.flag(name) not in (None, "false"):
                raise self.dockerfile.unsupported(
                    at, f"{at.keyword} --{name} needs BuildKit", "list what you copy without it", "--" + name
                )
        flags = [flag for flag in at.flags if flag.startswith(("--chown", "--from"))]
        *sources, target = at.words
        if heredoc_name(target) is not None:
            raise self.dockerfile.error(
                at,
                f"{at.keyword} cannot take a heredoc as its destination",
                "write the path last",
                token=target,
            )
        mode = self._mode(at, env)
        plain = [source for source in sources if heredoc_name(source) is None]
        if (origin := at.flag("from")) is not None and plain:
            return self._from_elsewhere(at, origin, stage, flags, mode)
        result = []
        paths = [path for source in plain for path in self._source(at, source, mode, env)]
        if paths:
            result.append(" ".join([at.keyword, *flags, self._array([*paths, target])]))
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

    def _from_elsewhere(
        self, at: Instruction, origin: str, stage: int, flags: list[str], mode: int | None
    ) -> list[str]:
        if mode is not None or at.heredocs:
            raise self.dockerfile.unsupported(
                at,
                f"COPY --from with {'--chmod' if mode is not None else 'a heredoc'} needs BuildKit",
                "copy first, and change it in a step of its own",
                "--chmod",
            )
        source = self.plan.stage_of(origin, stage, at)
        if source is not None and origin.isdecimal():
            number = f"--from={self.plan.needed.index(source)}"
            flags = [number if flag.startswith("--from") else flag for flag in flags]
        elif len(flags) == len(at.flags):
            return [at.verbatim]
        return [" ".join(["COPY", *flags, self._array(at.words)])]

    def _mode(self, at: Instruction, env: Mapping[str, str]) -> int | None:
        raw = at.flag("chmod")
        if raw is None:
            return None
        text = expanded(self.dockerfile, at, raw, env)
        if re.fullmatch(r"0*[0-7]{1,4}", text):
            mode = int(text, 8)
            if mode & 0o6000:  # the classic builder's chown takes these bits away
                raise self.dockerfile.unsupported(
                    at, f"--chmod={text} needs BuildKit", "RUN chmod after it", "--chmod"
                )
            return mode
        if re.fullmatch(r"[0-9]+", text):
            raise self.dockerfile.error(
                at, f"--chmod={text} is no octal mode", "use 0 to 07777", token="--chmod"
            )
        raise self.dockerfile.unsupported(
            at, f"--chmod={text} needs BuildKit", "write the mode in octal", "--chmod"
        )

    def _source(self, at: Instruction, raw: str, mode: int | None, env: Mapping[str, str]) -> list[str]:
        """Where one source stands in the tar: words of the lowered instruction."""
        word = expanded(self.dockerfile, at, raw, env)
        if at.keyword == "ADD" and re.match(r"https?://(?!.*\.git(?:#|$))", word):
            if mode is not None:
                raise self.dockerfile.unsupported(
                    at, "ADD --chmod of a URL needs BuildKit", "RUN chmod after it", "--chmod"
                )
            return [raw]
        if re.match(r"https?://|git@|git://|ssh://", word):
            raise self.dockerfile.unsupported(
                at, f"{at.keyword} cannot fetch {word} without BuildKit", "fetch it in a RUN step", raw
            )
        path = posixpath.normpath("/" + word).lstrip("/")
        try:
            found = self.context.find(path)
        except ValueError as error:
            raise self.dockerfile.error(at, str(error), "correct the brackets", token=raw) from None
        if not found:
            if has_wildcards(path):
                return []  # BuildKit copies nothing where a pattern matches nothing
            raise self._missing(at, raw, path)
        if mode is None:
            return [literal(posixpath.join(FILES_DIR, path), self.dockerfile.escape)]
        if at.keyword == "ADD" and any(re.search(r"\.(tar|tgz|tbz2?|txz)\b", entry) for entry in found):
            raise self.dockerfile.unsupported(
                at, "ADD --chmod of an archive needs BuildKit", "unpack it in a RUN step", raw
            )
        copies = [self._with_mode(entry, mode) for entry in found]
        return [literal(re.sub(r"([*?\[\\])", r"\\\1", copy), self.dockerfile.escape) for copy in copies]

    def _missing(self, at: Instruction, raw: str, path: str) -> DockerfileError:
        line, column = place(at, raw)
        hidden = any(entry == path or entry.startswith(path + "/") for entry in self.context.ignored)
        remedy = "it is left out by .dockerignore" if hidden else "add the file, or correct the path"
        said = f"{at.keyword} source {raw} is not in the build context"
        return DockerfileError("image_build", self.dockerfile.file, line, column, said, remedy)

    def _with_mode(self, entry: str, mode: int) -> str:
        """A copy of a context file or folder in which all that is no link has this mode. Returns its path."""
        root = self.context.root.resolve()
        real = (root / entry).resolve()
        path = posixpath.join(self._new_folder(), posixpath.basename(entry) or "all")
        if not real.is_dir():
            self.files.append(InlineFile(path, mode, source=real))
            return path
        self.files.append(InlineFile(path, mode))
        start = real.relative_to(root).as_posix().removeprefix(".")
        for below in self.context.under(start):
            name = posixpath.join(path, posixpath.relpath(below, start or "."))
            self.files.append(InlineFile(name, mode, source=root / below))
        return path

    def _heredoc_file(
        self, at: Instruction, heredoc: Heredoc, mode: int | None, env: Mapping[str, str]
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
        self.files.append(InlineFile(path, 0o644 if mode is None else mode, body=body))
        return path

    def _new_folder(self) -> str:
        self.folders += 1
        return f"{INLINE_DIR}/{self.folders}"

    def _array(self, words: list[str]) -> str:
        return array(words, self.dockerfile.escape)
