"""Variables of the host that a task asks for, `${VAR}` and `${VAR:-default}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from rollcage.rollout.compose import Compose
from rollcage.rollout.outcome import TaskError
from rollcage.rollout.task_model import Task

SECRET_CHARACTERS = 8
"""Ports, flags and numbers are shorter, and would be found in every text."""
SECRET_REST = 4
"""Of a value that was cut, what is still worth hiding."""

_REFERENCE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def resolve_env(mapping: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """The mapping with references replaced by what `environ` says.

    As in Harbor, a reference is the whole of a value: `${VAR}`, or `${VAR:-default}`, whose default is taken
    where VAR is not set (an empty one is set). Any other value stays as it is, `$` and all.
    Raises `TaskError` (`unsupported`) that names the variables that are not set and have no default.
    """
    missing = _missing(mapping, environ)
    if missing:
        names = ", ".join(sorted(set(missing.values())))
        raise TaskError("unsupported", f"the task needs variables that are not set: {names}")
    return {key: _resolved(value, environ) for key, value in mapping.items()}


def missing_env(task: Task, environ: Mapping[str, str], *, solution: bool = True) -> list[tuple[str, str]]:
    """Each (variable, where) that the task needs, that has no default and that `environ` does not set.

    `where` names the table of task.toml, and the key; or the line of a docker-compose.yaml.
    `solution=False` leaves `[solution].env` out: only the
    oracle runs the solution.
    """
    missing = [
        (variable, f"{table}.{key}")
        for table, mapping in _tables(task, solution=solution)
        for key, variable in _missing(mapping, environ).items()
    ]
    return missing + [pair for compose in _composes(task) for pair in compose.missing(environ)]


def referenced_env(task: Task) -> set[str]:
    """The variables that the task may take from a host, with and without a default."""
    named = {name for compose in _composes(task) for name in compose.referenced()}
    return named | {
        reference[1]
        for _, mapping in _tables(task, solution=True)
        for value in mapping.values()
        if (reference := _REFERENCE.fullmatch(value))
    }


def redactor(task: Task, environ: Mapping[str, str]) -> Callable[[str], str]:
    """A function that puts `${VAR}` where a text holds the value of a variable that the task takes from the host, for
    what is kept of a verifier's output and of errors. Values shorter than `SECRET_CHARACTERS` are no secrets.

    """
    return hide_values({name: environ[name] for name in referenced_env(task) if name in environ})


def hide_values(environ: Mapping[str, str]) -> Callable[[str], str]:
    """The same, for all variables of `environ`. Values are found in upper and lower case alike.

    A text that was cut may begin within a value: its rest goes, too.
    """
    found = {
        value: f"${{{name}}}"
        for name, given in sorted(environ.items())
        if len(value := given.strip()) >= SECRET_CHARACTERS
    }
    if not found:
        return lambda text: text
    longest_first = sorted(found, key=len, reverse=True)
    names = [found[value] for value in longest_first]
    anywhere = re.compile("|".join(f"({re.escape(value)})" for value in longest_first), re.IGNORECASE)

    def redact(text: str) -> str:
        for value in longest_first:
            head, whole = text[: len(value)].lower(), value.lower()
            rests = (whole[start:] for start in range(1, len(whole) - SECRET_REST + 1))
            if head != whole and (rest := next(filter(head.startswith, rests), None)):
                text = found[value] + text[len(rest) :]
        return anywhere.sub(lambda match: names[(match.lastindex or 0) - 1], text)

    return redact


def _composes(task: Task) -> list[Compose]:
    """The compose files of the task, its verifiers' own among them, each once."""
    environments = [task.environment, *(step.verifier.environment for step in task.steps)]
    found = {one.compose.file: one.compose for one in environments if one is not None and one.compose}
    return list(found.values())


def _tables(task: Task, *, solution: bool) -> list[tuple[str, Mapping[str, str]]]:
    """The tables of variables, by what they are called in task.toml."""
    tables: list[tuple[str, Mapping[str, str]]] = [("[environment].env", task.environment.env)]
    for step in task.steps:
        place = "[verifier" if len(task.steps) == 1 else f"[steps.{step.name}.verifier"
        tables.append((f"{place}].env", step.verifier.env))
        own = step.verifier.environment
        if own is not None and own.env != task.environment.env:
            tables.append((f"{place}.environment].env", own.env))
    if solution:
        tables.append(("[solution].env", task.solution_env))
    return tables


def _missing(mapping: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Key to variable, for the references that cannot be resolved."""
    found: dict[str, str] = {}
    for key, value in mapping.items():
        reference = _REFERENCE.fullmatch(value)
        if reference and reference[2] is None and reference[1] not in environ:
            found[key] = reference[1]
    return found


def _resolved(value: str, environ: Mapping[str, str]) -> str:
    reference = _REFERENCE.fullmatch(value)
    if reference is None:
        return value
    return environ.get(reference[1], reference[2] or "")
