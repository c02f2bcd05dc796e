"""The protocol of an agent, what it is given, and how one is found by name.

An agent is named by an entry point of the group `rollcage.agents` or as `module:Class`. It is made once for
each attempt with the job's options as keyword arguments, and run once for each step of the task.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any, Protocol

from rollcage.rollout.agents.options import BadOption, NoSuchOption, check_options, option_named
from rollcage.rollout.clock import AgentClock
from rollcage.rollout.policies.base import PolicySession, Sampling
from rollcage.rollout.sandbox.base import Sandbox, Shell
from rollcage.rollout.task import Step, Task
from rollcage.rollout.trajectory import Trajectory

GROUP = "rollcage.agents"

_USER_ERRORS = (
    ArithmeticError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError, SyntaxError,
    TypeError, ValueError,
)  # fmt: skip
"""What the code of a user's agent may raise while it is imported or made."""


@dataclass
class AgentContext:
    """What an agent gets for one step.

    `shell` is the agent's one shell, as the task's user in the task's workdir, kept over the steps.
    `session` is None for agents that have no policy. What the agent appends to `trajectory` is kept however
    the attempt ends. `clock` is the agent's own time: requests to the policy are made with it held, and their
    generation is charged. `environ` resolves `${VAR}` in the task's tables. `sample` counts the task's
    rollouts from 0. `emit` shows a line to whoever watches (`rollcage try`).
    """

    task: Task
    step: Step
    sandbox: Sandbox
    shell: Shell
    session: PolicySession | None
    sampling: Sampling
    trajectory: Trajectory
    clock: AgentClock
    environ: Mapping[str, str] = field(default_factory=dict)
    sample: int = 0
    emit: Callable[[str], None] = field(default=lambda _line: None)


class Agent(Protocol):
    """Decides. `needs_policy` says whether `AgentContext.session` must be there."""

    name: str
    needs_policy: bool

    async def run(self, context: AgentContext) -> None:
        """Work on one step until done. Raises `AgentStopped` at a limit of its own; lets `PolicyError` and
        `SandboxError` through. The rollout enforces the clock."""
        ...


def load_agent(name: str, options: Mapping[str, Any] | None = None) -> Agent:
    """Make the agent called `name`, or found at `module:Class`.

    Raises `ValueError` with the known names where there is none, and where it is no agent; `BadOption` where it does
    not take the options.
    """
    factory, given = _find(name), dict(options or {})
    try:
        check_options(factory, given)
        agent: Agent = factory(**given)
    except NoSuchOption as error:
        raise BadOption(f"agent {name!r} does not take these options: {error}", error.option) from error
    except BadOption as error:
        raise BadOption(f"agent {name!r} does not take this value: {error}", error.option) from error
    except (TypeError, ValueError) as error:
        option = option_named(given, str(error))
        what = "what it is given" if option is None else "this value"
        raise BadOption(f"agent {name!r} does not take {what}: {error}", option) from error
    except _USER_ERRORS as error:
        raise ValueError(f"agent {name!r} cannot be made: {type(error).__name__}: {error}") from error
    if not hasattr(agent, "needs_policy") or not inspect.iscoroutinefunction(getattr(agent, "run", None)):
        raise ValueError(f"{name!r} is no agent: it needs `needs_policy = True or False` and `async def run`")
    return agent


def known_agents() -> list[str]:
    """Names that `load_agent` finds by entry point."""
    return sorted({point.name for point in _installed()})


@cache
def _installed() -> EntryPoints:
    """Looked for once in a process: that reads a file of every distribution, which would take longer than the rest of
    what is done for a rollout before its sandbox starts."""
    return entry_points(group=GROUP)


def _find(name: str) -> Any:
    for point in _installed():
        if point.name == name:
            return point.load()
    if ":" not in name:
        known = ", ".join(known_agents())
        raise ValueError(f"no agent is called {name!r}; known: {known}; or name your own as module:Class")
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except _USER_ERRORS as error:
        said = f"{type(error).__name__}: {error}"
        where = "a module is looked for in the working directory and among what is installed"
        raise ValueError(f"agent {name!r} cannot be imported: {said} ({where})") from error
