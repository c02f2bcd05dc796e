"""The steps of a task: a task without `[[steps]]` is one step, at its root."""

from __future__ import annotations

import os
import unicodedata
from dataclasses import dataclass, replace
from pathlib import Path

from rollcage.rollout.task_compose import with_context
from rollcage.rollout.task_config import (
    read_artifacts,
    read_environment,
    read_healthcheck,
    read_min_reward,
    read_network,
    read_verifier,
    read_verifier_mode,
    unsupported,
)
from rollcage.rollout.task_files import (
    SOLVE_SCRIPT,
    check_links,
    check_tests,
    has_own_image,
    read_instruction,
)
from rollcage.rollout.task_model import Environment, NetworkPolicy, Problem, Step, Verifier
from rollcage.rollout.task_toml import LONGEST_SEC, Table

MAIN_STEP = "main"


@dataclass(frozen=True)
class _Own:
    """A verifier's own environment as task.toml has it, and the tests directory that may hold its Dockerfile."""

    environment: Environment | None
    directory: Path


@dataclass(frozen=True)
class _TaskWide:
    """What the steps inherit."""

    root: Path
    environment: Environment
    agent_timeout_sec: float | None
    agent_user: str | int | None
    agent_network: NetworkPolicy | None
    verifier: Verifier
    verifier_mode: str
    verifier_own: _Own
    problems: list[Problem]


def read_steps(
    table: Table, root: Path, environment: Environment, problems: list[Problem]
) -> tuple[tuple[Step, ...], NetworkPolicy]:
    """The steps, and the network of the sandbox that they share.

    A sandbox has one network for its life. Where agent and verifier override the environment's, they must agree
    (in the mode, and in the hosts of an allowlist), else the task is unsupported.
    """
    agent, verifier = table.table("agent"), table.table("verifier")
    own = read_environment(verifier.table("environment")) if "environment" in verifier else None
    shared = _TaskWide(
        root=root,
        environment=environment,
        agent_timeout_sec=agent.number("timeout_sec", None, above=0, most=LONGEST_SEC),
        agent_user=agent.user(),
        agent_network=read_network(agent),
        verifier=read_verifier(verifier),
        verifier_mode=read_verifier_mode(verifier, "shared"),
        verifier_own=_Own(own, root / "tests"),
        problems=problems,
    )
    tables = table.tables("steps")
    if not tables:
        found = [_main_step(shared)]
    else:
        found = [step for entry in tables if (step := _named_step(entry, shared)) is not None]
        _check_names(tables)
    return tuple(step for step, _ in found), _one_network(
        table, environment, [policies for _, policies in found]
    )


_Policies = set[NetworkPolicy]


def _main_step(shared: _TaskWide) -> tuple[Step, _Policies]:
    root, problems = shared.root, shared.problems
    solution = root / "solution"
    verifier = _with_network(
        _with_sandbox(shared.verifier, shared.verifier_mode, [shared.verifier_own], shared)
    )
    if not verifier.tests_in_image:
        check_tests(root / "tests", None, problems)
    _check_trajectory(root, problems)
    for directory in (root / "tests", solution):
        check_links(root, directory, problems)
    step = Step(
        name=MAIN_STEP,
        instruction=read_instruction(root / "instruction.md", problems),
        tests=root / "tests",
        solution=solution if (solution / SOLVE_SCRIPT).is_file() else None,
        agent_timeout_sec=shared.agent_timeout_sec,
        agent_user=shared.agent_user,
        verifier=verifier,
    )
    return step, _policies(shared.agent_network, verifier, shared)


def _named_step(table: Table, shared: _TaskWide) -> tuple[Step, _Policies] | None:
    name = table.text("name")
    if name is None or not _is_one_folder(name):
        shown = "is missing" if name is None else f'must be the name of one directory, not "{name}"'
        table.problem("name", shown, "write the name of a directory in steps/")
        return None
    root, problems = shared.root, shared.problems
    folder = root / "steps" / name
    if not folder.is_dir():
        table.problem(
            "name", f'is "{name}", and there is no {folder}', "make the directory, or correct the name"
        )
        return None
    agent, checks = table.table("agent"), table.table("verifier")
    own = read_environment(checks.table("environment")) if "environment" in checks else None
    candidates = [_Own(own, folder / "tests"), shared.verifier_own]
    mode = read_verifier_mode(checks, shared.verifier_mode)
    verifier = _with_network(_with_sandbox(read_verifier(checks, shared.verifier), mode, candidates, shared))
    own_tests, all_tests = folder / "tests", root / "tests"
    if not verifier.tests_in_image:
        check_tests(own_tests, all_tests, problems)
    _check_trajectory(folder, problems)
    for directory in (folder, all_tests, root / "solution"):
        check_links(root, directory, problems)
    user = agent.user()
    step = Step(
        name=name,
        instruction=read_instruction(folder / "instruction.md", problems),
        tests=own_tests if own_tests.is_dir() else all_tests,
        shared_tests=all_tests if own_tests.is_dir() and all_tests.is_dir() else None,
        solution=_step_solution(folder, root),
        agent_timeout_sec=agent.number("timeout_sec", shared.agent_timeout_sec, above=0, most=LONGEST_SEC),
        agent_user=shared.agent_user if user is None else user,
        verifier=verifier,
        workdir=folder / "workdir" if (folder / "workdir").is_dir() else None,
        min_reward=read_min_reward(table),
        healthcheck=read_healthcheck(table),
        artifacts=read_artifacts(table),
    )
    return step, _policies(read_network(agent) or shared.agent_network, verifier, shared)


def _step_solution(folder: Path, root: Path) -> Path | None:
    """The step's own solution; the task's where the step has no such directory."""
    directory = folder / "solution"
    if not directory.exists():
        directory = root / "solution"
    return directory if (directory / SOLVE_SCRIPT).is_file() else None


def _with_sandbox(verifier: Verifier, mode: str, candidates: list[_Own], shared: _TaskWide) -> Verifier:
    """The verifier with the environment of its own sandbox, where it has one.

    What the sandbox is made of comes from the first candidate that says it, by `docker_image` or by a Dockerfile
    in its tests; its other settings from the first that has any. Where none says it, it is the task's image
    once more, fresh.
    """
    if mode != "separate":
        return replace(verifier, environment=None)
    settings = next((own.environment for own in candidates if own.environment), shared.environment)
    for own in candidates:
        if own.environment is not None and own.environment.docker_image:
            image = replace(settings, docker_image=own.environment.docker_image, context=None, compose=None)
            return replace(verifier, environment=image, tests_in_image=True)
        if has_own_image(own.directory):
            plain = replace(settings, docker_image=None, compose=None)
            image = with_context(plain, own.directory, shared.problems)
            return replace(verifier, environment=image, tests_in_image=True)
    task = shared.environment
    image = replace(settings, docker_image=task.docker_image, context=task.context, compose=task.compose)
    return replace(verifier, environment=image)


def _with_network(verifier: Verifier) -> Verifier:
    """A verifier's own sandbox has the network that `[verifier]` says, where it says one."""
    if verifier.environment is None or verifier.network_mode is None:
        return verifier
    environment = replace(
        verifier.environment, network_mode=verifier.network_mode, allowed_hosts=verifier.allowed_hosts
    )
    return replace(verifier, environment=environment)


def _policies(agent_network: NetworkPolicy | None, verifier: Verifier, shared: _TaskWide) -> _Policies:
    """The networks of all that runs in the agent's sandbox."""
    baseline = _network_of(shared.environment)
    policies = {agent_network or baseline}
    if verifier.environment is None:
        mode = verifier.network_mode
        policies.add(baseline if mode is None else NetworkPolicy(mode, verifier.allowed_hosts))
    return policies


def _network_of(environment: Environment) -> NetworkPolicy:
    return NetworkPolicy(environment.network_mode, environment.allowed_hosts)


def _one_network(table: Table, environment: Environment, steps: list[_Policies]) -> NetworkPolicy:
    policies = set().union(*steps) if steps else set()
    if len(policies) > 1:
        key = "agent" if "network_mode" in table.table("agent") else "verifier"
        unsupported(
            table.table(key),
            "network_mode" if "network_mode" in table.table(key) else None,
            "changes the network of a running sandbox (agent and verifier run with different modes or hosts)",
            "write the same for [agent] and [verifier], or give the verifier its own environment",
        )
    return policies.pop() if len(policies) == 1 else _network_of(environment)


def _check_trajectory(directory: Path, problems: list[Problem]) -> None:
    file = directory / "trajectory.json"
    if os.path.lexists(file):
        message, remedy = "gives the agent a conversation to go on with", "not done yet: take the file away"
        problems.append(Problem(str(file), None, message, remedy, "unsupported"))


def _check_names(tables: list[Table]) -> None:
    seen: set[str] = set()
    for table in tables:
        name = unicodedata.normalize("NFC", str(table.values.get("name"))).casefold()
        if name in seen:
            table.problem("name", "is there twice", "give each step a name of its own, apart from case")
        seen.add(name)


def _is_one_folder(name: str) -> bool:
    return name not in {".", ".."} and "/" not in name and "\\" not in name and len(name.encode()) <= 255
