"""Which stages of a Dockerfile are built, and on which images.

BuildKit builds the last stage and what it needs; the classic builder would build them all. Names and
numbers in FROM and `COPY --from` are resolved as the builder would, with the ARGs before the first FROM.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollcage.rollout.sandbox.dockerfile import Dockerfile, Instruction, arg_values
from rollcage.rollout.sandbox.words import WordError, expand

SAME_OPTION = {"src": "source", "dst": "target", "destination": "target", "ro": "readonly", "rw": "readwrite"}
"""Options of `--mount` that have two names."""


def platform_args(platform: str) -> dict[str, str]:
    """The ARGs that BuildKit knows by itself, for a build on and for `platform` ("linux/amd64")."""
    system, _, rest = platform.partition("/")
    arch, _, variant = rest.partition("/")
    values = {"PLATFORM": platform, "OS": system, "ARCH": arch, "VARIANT": variant}
    return {side + key: value for side in ("BUILD", "TARGET") for key, value in values.items()}


def base_images(
    dockerfile: Dockerfile, *, build_args: Mapping[str, str] | None = None, platform: str = "linux/amd64"
) -> tuple[str, ...]:
    """References of the images that a build needs: those of FROM, of `COPY --from` and of mounts, in order, once
    each. Stages that the last one does not need ask for none. Raises `DockerfileError`."""
    plan = Plan.of(dockerfile, build_args or {}, platform)
    found: dict[str, None] = {}
    for index in plan.needed:
        if plan.base_stage[index] is None and plan.bases[index] != "scratch":
            found[plan.bases[index]] = None
        for at in dockerfile.stages[index].instructions:
            for source in sources(at):
                if source != "scratch" and plan.stage_of(source, index, at) is None:
                    found[source] = None
    return tuple(found)


@dataclass(frozen=True)
class Plan:
    """Which stages are built, on what. All lists go by stage index."""

    dockerfile: Dockerfile
    build_args: Mapping[str, str]
    platform: str
    global_env: Mapping[str, str]
    bases: list[str]
    base_stage: list[int | None]
    needed: list[int]

    @classmethod
    def of(cls, dockerfile: Dockerfile, build_args: Mapping[str, str], platform: str) -> Plan:
        env = platform_args(platform)
        for at in dockerfile.global_args:
            add_args(dockerfile, at, env, build_args, {})
        bases: list[str] = []
        for stage in dockerfile.stages:
            bases.append(expanded(dockerfile, stage.start, stage.base, env))
            if not bases[-1]:
                raise dockerfile.error(
                    stage.start,
                    f"FROM {stage.base} names no image",
                    "give its ARG a default before the first FROM",
                    token=stage.base,
                )
            if "$" in stage.base and re.search(r"[:/@]$|:@|//", bases[-1]):
                raise dockerfile.error(
                    stage.start,
                    f"FROM {stage.base} comes out as {bases[-1]!r}",
                    "give its ARG a default before the first FROM",
                    token=stage.base,
                )
        names = [stage.name for stage in dockerfile.stages]
        base_stage = [
            next((at for at in reversed(range(index)) if names[at] == base.lower()), None)
            for index, base in enumerate(bases)
        ]
        plan = cls(dockerfile, build_args, platform, env, bases, base_stage, [])
        waiting = [len(bases) - 1]
        while waiting:
            index = waiting.pop()
            if index not in plan.needed:
                plan.needed.append(index)
                waiting += plan._needs(index)
        plan.needed.sort()
        return plan

    def stage_of(self, source: str, index: int, at: Instruction) -> int | None:
        """The stage that `--from=source` means in stage `index`; None for an image."""
        names = [stage.name for stage in self.dockerfile.stages]
        if source.lower() in names:
            found = max(i for i, name in enumerate(names) if name == source.lower())
            earlier = [i for i in range(index) if names[i] == source.lower()]
            found = earlier[-1] if earlier else found
        elif source.isdecimal():
            found = int(source)
        else:
            return None
        if found >= index:
            raise self.dockerfile.error(
                at,
                f"--from={source} names no earlier stage",
                "move that stage up, or name an image",
                token=source,
            )
        return found

    def _needs(self, index: int) -> list[int]:
        found = [self.base_stage[index]]
        for at in self.dockerfile.stages[index].instructions:
            found += [self.stage_of(source, index, at) for source in sources(at)]
        return [stage for stage in found if stage is not None]


def until(dockerfile: Dockerfile, target: str) -> Dockerfile:
    """The Dockerfile up to the stage of this name or number, which is then the one that is built. Raises
    `DockerfileError`."""
    names = [stage.name for stage in dockerfile.stages]
    if target.lower() in names:
        found = len(names) - 1 - names[::-1].index(target.lower())
    elif target.isdecimal() and int(target) < len(names):
        found = int(target)
    else:
        raise dockerfile.error_at(
            1, 1, f"there is no stage {target!r} to build", "name one: FROM ... AS name"
        )
    return replace(dockerfile, stages=dockerfile.stages[: found + 1])


def sources(at: Instruction) -> list[str]:
    """The stages and images that an instruction takes files from, as written."""
    if at.keyword == "COPY":
        origin = at.flag("from")
        return [] if origin is None else [origin]
    flags = [flag.removeprefix("--mount=") for flag in at.flags if flag.startswith("--mount=")]
    mounts = [mount_options(flag) for flag in flags] if at.keyword == "RUN" else []
    return [origin for mount in mounts if (origin := mount.get("from"))]


def mount_options(value: str) -> dict[str, str | None]:
    """The options of one `RUN --mount`, by their full names, as written; None for one without a value."""
    options: dict[str, str | None] = {}
    for text in next(csv.reader([value]), []):
        key, sign, found = text.partition("=")
        name = key.strip().lower()
        options[SAME_OPTION.get(name, name)] = found if sign else None
    return options


def expanded(dockerfile: Dockerfile, at: Instruction, text: str, env: Mapping[str, str]) -> str:
    """One word of an instruction, expanded. Raises `DockerfileError`."""
    try:
        return expand(text, env, escape=dockerfile.escape)
    except WordError as error:
        raise dockerfile.error(
            at, f"{text}: {error}", "correct the quotes or the variable", token=text
        ) from None


def add_args(
    dockerfile: Dockerfile,
    at: Instruction,
    env: dict[str, str],
    build_args: Mapping[str, str],
    inherited: Mapping[str, str],
    args: dict[str, str] | None = None,
) -> None:
    """Set what an ARG sets: the build's own value, else its default, else the one from before the first FROM."""
    for key, default in arg_values(at, dockerfile.escape):
        value = build_args.get(key)
        if value is None and default is not None:
            value = expanded(dockerfile, at, default, env)
        if value is None:
            value = inherited.get(key)
        if value is not None:
            env[key] = value
            if args is not None:
                args[key] = value
