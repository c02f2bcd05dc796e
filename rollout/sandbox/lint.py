"""What is wrong with a Dockerfile and its context, as far as no engine is needed to see it.

`rollcage tasks check` asks here. Whatever is found, a build would refuse as well, with the same words.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from rollcage.rollout.outcome import BuildError
from rollcage.rollout.sandbox.context import Context
from rollcage.rollout.sandbox.dockerfile import Dockerfile, DockerfileError, parse
from rollcage.rollout.sandbox.lowering import problems
from rollcage.rollout.sandbox.mounts import COPY_CHMOD_API
from rollcage.rollout.sandbox.stages import sources, until
from rollcage.rollout.task_model import Problem

ENGINE_API = COPY_CHMOD_API
"""The oldest engine that is thought of: 20.10."""


def dockerfile_problems(
    context: Path, dockerfile: str = "Dockerfile", target: str | None = None
) -> list[Problem]:
    """The problems of `context / dockerfile`, in order of their lines. None where there is no such file, or nothing
    in it: that is for those to say who know whether there must be one. Raises `OSError` where files cannot be
    read."""
    file = context / dockerfile
    text = file.read_bytes().decode("utf-8", "surrogateescape") if file.is_file() else ""
    if not text.strip():
        return []
    try:
        parsed = parse(text, file=str(file))
        if target is not None:
            parsed = until(parsed, target)
        found = problems(parsed, Context.read(context, dockerfile), buildkit=ENGINE_API)
    except DockerfileError as error:
        return [_problem(error)]
    except BuildError as error:
        return [Problem(str(context), None, error.message, "correct it", error.error_class)]
    found += _misspelt_stages(parsed, {(error.line, error.column) for error in found})
    return [_problem(error) for error in sorted(found, key=lambda error: (error.line, error.column))]


def _problem(error: DockerfileError) -> Problem:
    return Problem(error.file, error.line, error.problem, error.remedy, error.error_class)


def _misspelt_stages(dockerfile: Dockerfile, known: set[tuple[int, int]]) -> list[DockerfileError]:
    """`--from` names that are no stage, and look like one: the builder would ask a registry for them."""
    names = [stage.name for stage in dockerfile.stages if stage.name]
    found = []
    for stage in dockerfile.stages:
        for at in stage.instructions:
            for source in sources(at):
                close = get_close_matches(source.lower(), names, n=1, cutoff=0.75)
                if close and source.lower() not in names and not set(source) & set("/:@"):
                    error = dockerfile.error(
                        at, f"no stage is called {source!r}", f"{close[0]!r} is meant?", token=source
                    )
                    if (error.line, error.column) not in known:
                        found.append(error)
    return found
