"""Dockerfiles for any builder: what new frontends alone can read, said as the classic builder can read it too.

The result means what BuildKit would make of the original:

- `RUN <<EOF` becomes `RUN [shell, body]`, with the shell that holds at that place. With an interpreter line
  the body is written to a file in /dev, which no layer keeps, and started. `RUN cat <<EOF > /f` is given to
  the shell with its body.
- `COPY <<EOF /f` becomes a file beside the context with mode 0644, expanded here where its delimiter is not
  quoted.
- `COPY --chmod`, `--parents` and `--exclude` of files in the context become a copy of a tree with those files and
  modes. `--link` is left out: it makes a build faster and nothing else. So are cache mounts where there is no BuildKit.
- Stages that the last one does not need are left out, and so are their base images.
- `ARG TARGETARCH` and its like get their values.

What only BuildKit can do (`RUN --mount`, `COPY --from --chmod`) stays as it is for an engine that offers it, and the
result says so; all else is lowered for it too, because its built-in frontend may be an old one. What cannot be had is
refused as `unsupported`, by name and line. The rules are those of https://docs.docker.com/reference/dockerfile/ and
of the frontend in https://github.com/moby/buildkit.

`# syntax=` names a frontend to be fetched from a registry. It is not: the features of Docker's frontends are here.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from rollcage.rollout.sandbox.context import Context, InlineFile
from rollcage.rollout.sandbox.copies import Copies
from rollcage.rollout.sandbox.dockerfile import (
    Dockerfile,
    DockerfileError,
    Heredoc,
    Instruction,
    Stage,
    arg_values,
    heredoc_name,
    key_values,
    parse,
)
from rollcage.rollout.sandbox.mounts import Api, RunFlags
from rollcage.rollout.sandbox.stages import Plan, add_args, expanded, platform_args
from rollcage.rollout.sandbox.trust import Trust
from rollcage.rollout.sandbox.words import CLASSIC_LACKS, array, on_lines, quoted

LOWERING_VERSION = 2
"""Part of an image's digest: raise it when the same Dockerfile is lowered to something else."""

DEFAULT_SHELL = ("/bin/sh", "-c")
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

COUNTED = frozenset({"RUN", "COPY", "ADD", "WORKDIR"})
"""Instructions that BuildKit counts when it shows `[stage 2/5]`, beside a FROM that names an image."""

ARGUMENT_CHARS = 30_000
"""Linux takes 128 KiB in one argument; a character is 4 bytes at most."""

START_SCRIPT = """\
__f=/dev/pipes/$1 __n=$2 __tmp=
shift 2
mkdir -p /dev/pipes 2>/dev/null && [ -w /dev/pipes ] || __tmp=1 __f=$(mktemp) || exit
while [ "$__n" -gt 0 ]; do printf %s "$1"; shift; __n=$((__n - 1)); done > "$__f" || exit
chmod 755 "$__f" || exit
if [ "$__tmp" ]; then exec 9< "$__f"; rm "$__f"; __f=/proc/self/fd/9; fi
exec "$@" "$__f"
"""
"""Runs a body with an interpreter line as `/dev/pipes/NAME`, where BuildKit would mount it. Arguments: NAME, how
many pieces the body has, the pieces, the shell. /dev is a tmpfs while a step runs, so no layer keeps the file; a
user who may not write there gets an open file that has no name any more."""


@dataclass(frozen=True)
class BaseConfig:
    """What an image brings that decides how a Dockerfile on top of it reads."""

    env: Mapping[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = ()
    onbuild: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One instruction of a lowered Dockerfile: the one in the author's that it comes from, its stage's name as
    BuildKit shows it, and its number among those that BuildKit counts there (None: it does not)."""

    origin: Instruction
    keyword: str
    stage: str
    number: int | None


@dataclass(frozen=True)
class Lowered:
    """A Dockerfile for the engine's builder, and the files that it needs beside the context. `steps` are its
    instructions in order. `buildkit`: only BuildKit can build it."""

    dockerfile: str
    files: tuple[InlineFile, ...]
    steps: tuple[Step, ...] = ()
    buildkit: bool = False


def lower(
    dockerfile: Dockerfile,
    context: Context,
    *,
    bases: Mapping[str, BaseConfig] | None = None,
    build_args: Mapping[str, str] | None = None,
    platform: str = "linux/amd64",
    labels: Mapping[str, str] | None = None,
    buildkit: Api | None = None,
    trust: Trust | None = None,
) -> Lowered:
    """Lower a Dockerfile over `context`.

    `bases` has the configuration of each of `stages.base_images`; one that is missing counts as empty.
    `labels` are set at the head of every stage, so that all images and containers of the build carry them.
    `buildkit`: the API version of an engine that offers it. `trust`: what RUN steps are to trust.
    Raises `DockerfileError`: `dockerfile_parse`, `unsupported`, or `image_build` for a source that the
    context lacks.
    """
    plan = Plan.of(dockerfile, build_args or {}, platform)
    work = _Lowering.of(plan, context, bases, labels, buildkit, trust)
    head = [] if dockerfile.escape == "\\" else [f"# escape={dockerfile.escape}"]
    for at in dockerfile.global_args:
        work.put(at, [at.verbatim])
    for index in plan.needed:
        work.stage(index)
    files = (*work.copies.files, *(trust.files if trust else ()))
    return Lowered(
        "\n".join([*head, *work.lines]) + "\n", files, tuple(work.steps), work.copies.needs_buildkit
    )


def problems(
    dockerfile: Dockerfile, context: Context, *, buildkit: Api | None = None
) -> list[DockerfileError]:
    """All that `lower` would refuse, as far as it can be told without the base images: a source whose path holds a
    variable that they may set is not looked for."""
    try:
        plan = Plan.of(dockerfile, {}, "linux/amd64")
    except DockerfileError as error:
        return [error]
    work = _Lowering.of(plan, context, None, None, buildkit, None)
    work.errors = []
    for index in plan.needed:
        work.stage(index)
    return work.errors


@dataclass
class _State:
    """What holds at one place of a stage. `args` are the ARGs among `env`. `trusting`: it has `Trust.files`."""

    env: dict[str, str]
    shell: tuple[str, ...]
    args: dict[str, str] = field(default_factory=dict)
    trusting: bool = False


@dataclass
class _Lowering:
    """Lowers stage after stage into `lines`, and says in `steps` what each is. `ends` holds how each stage ended, for
    those based on it. With `errors`, what is wrong is put there, and the rest is looked at all the same."""

    plan: Plan
    copies: Copies
    flags: RunFlags
    bases: dict[str, BaseConfig]
    labels: dict[str, str]
    trust: Trust | None = None
    errors: list[DockerfileError] | None = None
    lines: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ends: dict[int, _State] = field(default_factory=dict)
    index: int = 0
    counted: int = 0
    state: _State = field(default_factory=lambda: _State({}, ()))

    @classmethod
    def of(
        cls,
        plan: Plan,
        context: Context,
        bases: Mapping[str, BaseConfig] | None,
        labels: Mapping[str, str] | None,
        buildkit: Api | None,
        trust: Trust | None,
    ) -> _Lowering:
        copies, flags = Copies(plan, context, buildkit), RunFlags(plan, context, buildkit)
        return cls(plan, copies, flags, dict(bases or {}), dict(labels or {}), trust)

    @property
    def dockerfile(self) -> Dockerfile:
        return self.plan.dockerfile

    @property
    def escape(self) -> str:
        return self.plan.dockerfile.escape

    def put(self, origin: Instruction, lines: Sequence[str]) -> None:
        """Add instructions that take the place of `origin`."""
        for line in lines:
            keyword = line.split(maxsplit=1)[0].upper()
            self.counted += keyword in COUNTED
            number = self.counted if keyword in COUNTED else None
            self.lines.append(line)
            self.steps.append(Step(origin, keyword, self._shown_name(), number))

    def _shown_name(self) -> str:
        name = self.dockerfile.stages[self.index].name
        return name or f"stage-{self.plan.needed.index(self.index)}"

    def stage(self, index: int) -> None:
        stage = self.dockerfile.stages[index]
        base = self.plan.base_stage[index]
        self.index, self.counted = index, int(base is None and self.plan.bases[index] != "scratch")
        name = f" AS {stage.name}" if stage.name else ""
        self.put(stage.start, [f"FROM {self._platform(stage)}{self.plan.bases[index]}{name}"])
        if base is None:
            config = self.bases.get(self.plan.bases[index], BaseConfig())
            self.state = _State({"PATH": DEFAULT_PATH, **config.env}, config.shell or DEFAULT_SHELL)
            if self.labels:
                pairs = (f"{key}={quoted(value, self.escape)}" for key, value in self.labels.items())
                self.put(stage.start, ["LABEL " + " ".join(pairs)])
            self._onbuild(stage, config.onbuild)
        else:
            before = self.ends[base]
            self.state = _State(dict(before.env), before.shell, dict(before.args), before.trusting)
            lines = [f"ARG {key}={quoted(value, self.escape)}" for key, value in before.args.items()]
            self.put(stage.start, lines)
        if self.trust is not None and any(at.keyword == "RUN" for at in stage.instructions):
            self.put(stage.start, self.trust.instructions(self.escape, with_files=not self.state.trusting))
            self.state.trusting = True
        for at in stage.instructions:
            try:
                if self.errors is None or not self._depends_on_base(at):
                    self.put(at, self._instruction(at))
            except DockerfileError as error:
                if self.errors is None:
                    raise
                self.errors.append(error)
        self.ends[index] = self.state

    def _depends_on_base(self, at: Instruction) -> bool:
        names = re.findall(r"\$\{?(\w+)", " ".join(at.words)) if at.keyword in ("COPY", "ADD") else []
        return any(name not in self.state.env for name in names)

    def _platform(self, stage: Stage) -> str:
        if stage.platform is None:
            return ""
        platform = expanded(self.dockerfile, stage.start, stage.platform, self.plan.global_env)
        return "" if platform == self.plan.platform else f"--platform={platform} "

    def _onbuild(self, stage: Stage, triggers: Sequence[str]) -> None:
        """The base image's triggers, which run before the stage's first instruction."""
        for trigger in triggers:
            at = parse(f"FROM scratch\n{trigger}").stages[0].instructions[0]
            if at.keyword in ("COPY", "ADD") and at.flag("from") is None:
                raise self.dockerfile.unsupported(
                    stage.start,
                    f"the base image {self.plan.bases[self.index]} has ONBUILD {trigger}",
                    "use a base image without ONBUILD and copy the files yourself",
                )
            self._instruction(replace(at, line=stage.start.line))

    def _instruction(self, at: Instruction) -> list[str]:
        """The instructions that take this one's place."""
        if at.keyword not in ("RUN", "CMD", "ENTRYPOINT", "SHELL", "ONBUILD", "HEALTHCHECK"):
            self._refuse_new_substitutions(at)
        match at.keyword:
            case "RUN":
                return [self._run(at)]
            case "COPY" | "ADD":
                return self.copies.lower(at, self.index, self.state.env)
            case "ARG":
                return self._arg(at)
            case "ONBUILD" if at.trigger is not None and at.heredocs:
                if at.trigger.keyword != "RUN":
                    raise self.dockerfile.unsupported(
                        at, f"ONBUILD {at.trigger.keyword} with a heredoc", "copy a file instead"
                    )
                return ["ONBUILD " + self._run(at.trigger)]
            case "HEALTHCHECK" if at.flag("start-interval") is not None:
                flags = [flag for flag in at.flags if not flag.startswith("--start-interval")]
                return [" ".join(["HEALTHCHECK", *flags, at.rest])]
            case "ENV":
                pairs = [(key, self._expanded(at, value)) for key, value in key_values(at, self.escape)]
                self.state.env.update(pairs)
            case "USER" | "WORKDIR" | "STOPSIGNAL":
                self._expanded(at, at.rest)
            case "SHELL":
                self.state.shell = at.json or ()
        return [at.verbatim]

    def _arg(self, at: Instruction) -> list[str]:
        state = self.state
        add_args(self.dockerfile, at, state.env, self.plan.build_args, self.plan.global_env, state.args)
        names = arg_values(at, self.escape)
        if not any(default is None and key in platform_args("") for key, default in names):
            return [at.verbatim]
        return [
            f"ARG {key}" + (f"={quoted(state.args[key], self.escape)}" if key in state.args else "")
            for key, _ in names
        ]

    def _run(self, at: Instruction) -> str:
        flags = self.flags.lower(at, self.index, self.state.env)
        self.copies.needs_buildkit |= bool(flags)
        if at.heredocs:
            return " ".join(["RUN", *flags, array(self._heredoc_command(at), self.escape)])
        if not at.flags:
            return at.verbatim
        return on_lines(" ".join(["RUN", *flags, at.rest]), self.escape)

    def _heredoc_command(self, at: Instruction) -> list[str]:
        """What BuildKit would start for a RUN with heredocs."""
        for heredoc in at.heredocs:
            self._refuse_what_a_shell_cannot_read(heredoc)
        if heredoc_name(at.rest) is None:
            bodies = "".join(f"\n{heredoc.body}{heredoc.name}" for heredoc in at.heredocs)
            return [*self.state.shell, at.rest + bodies]
        script = at.heredocs[0].content
        if not script.startswith("#!"):
            return [*self.state.shell, script]
        pieces = [script[start : start + ARGUMENT_CHARS] for start in range(0, len(script), ARGUMENT_CHARS)]
        name = posixpath.basename(at.heredocs[0].name)
        return ["/bin/sh", "-c", START_SCRIPT, "sh", name, str(len(pieces)), *pieces, *self.state.shell]

    def _refuse_what_a_shell_cannot_read(self, heredoc: Heredoc) -> None:
        for bad, said, remedy in (
            (
                "\r\n",
                "ends in CR LF, and to a shell the CR is part of a word",
                "save the file with LF line ends",
            ),
            ("\0", "has a NUL byte", "take it out"),
            ("[\ud800-\udfff]", "is not UTF-8", "save the file as UTF-8"),
        ):
            if found := re.search(bad, heredoc.body):
                line = heredoc.line + heredoc.body.count("\n", 0, found.start())
                column = found.start() - heredoc.body.rfind("\n", 0, found.start())
                raise self.dockerfile.error_at(line, column, f"this line of a RUN heredoc {said}", remedy)

    def _refuse_new_substitutions(self, at: Instruction) -> None:
        if lacks := CLASSIC_LACKS.search(at.rest):
            raise self.dockerfile.unsupported(
                at, f"the substitution {lacks[0]}...}} needs BuildKit", "compute it in a RUN step", lacks[0]
            )

    def _expanded(self, at: Instruction, text: str) -> str:
        return expanded(self.dockerfile, at, text, self.state.env)
