"""A task's environment with its files: the build context, or the services of a docker-compose.yaml."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rollcage.rollout.compose import MAIN, image_environment, read_compose
from rollcage.rollout.outcome import TaskError
from rollcage.rollout.task_files import check_build_context, check_links, compose_file
from rollcage.rollout.task_model import Environment, Problem
from rollcage.rollout.task_toml import Table


def with_context(environment: Environment, directory: Path, problems: list[Problem]) -> Environment:
    """The environment with what `directory` says that it is made of: a Dockerfile, several services, or nothing
    where task.toml names an image."""
    file = compose_file(directory)
    if environment.docker_image is None:
        environment = replace(environment, context=directory)
    if file is None:
        if environment.docker_image is None:
            check_build_context(directory, environment.dockerfile, problems)
        return environment
    compose = read_compose(file, environment, problems)
    if compose is None:
        return environment
    environment = replace(environment, compose=compose)
    check_links(directory, directory, problems)
    try:
        services = compose.services({name: "" for name, _ in compose.missing({})})
    except TaskError:
        return environment  # what is made of variables is looked at when they are known
    for service in services.values():
        image = image_environment(service, environment)
        if image.context is not None:
            check_build_context(image.context, image.dockerfile, problems)
    return environment


def check_services(root: Table, environment: Environment) -> None:
    """Artifacts and `collect` commands must name a service that there is."""
    known = {MAIN}
    if environment.compose is not None:
        known |= environment.compose.names()
    for table in (root, *root.tables("steps")):
        entries = table.values.get("artifacts")
        for index, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict):
                _check_service(Table(entry, (*table.path, "artifacts", index), table.document), known)
        for hook in table.table("verifier").tables("collect"):
            _check_service(hook, known)


def _check_service(entry: Table, known: set[str]) -> None:
    name = entry.text("service", MAIN)
    if name is not None and name.strip() not in known:
        entry.problem(
            "service",
            f'is "{name}", and the task has no such service',
            f"write one of {', '.join(sorted(known))}, or a service in environment/docker-compose.yaml",
        )
