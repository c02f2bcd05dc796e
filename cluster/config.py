"""What a job's YAML may say, and the reading of it.

`load_job` takes a file, options of the command line, or both, and gives a `JobConfig` whose paths are absolute
and whose names all exist. Every key is known or refused, with the nearest known name; problems are told all at
once, each with its place and remedy: first those of single settings, and where there are none those between
them. `job_schema` is the same as JSON schema.
"""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollcage.cluster.config_explained import explained
from rollcage.cluster.config_model import (
    AgentConfig,
    JobConfig,
    NetworkConfig,
    RayConfig,
    SandboxConfig,
    StreamConfig,
)
from rollcage.cluster.config_policies import (
    PolicyConfig,
    SamplingConfig,
    ScriptedPolicyConfig,
    VllmPolicyConfig,
)
from rollcage.cluster.config_policy_checks import policy_problems
from rollcage.cluster.config_source import (
    ConfigError,
    Source,
    Where,
    line_of,
    nearest,
    parse_override,
    read_yaml,
    resolve_paths,
    shown,
)
from rollcage.rollout.agents.base import known_agents, load_agent
from rollcage.rollout.agents.options import BadOption
from rollcage.rollout.outcome import BY_NAME, Domain, Quarantine

__all__ = [
    "AgentConfig",
    "ConfigError",
    "JobConfig",
    "NetworkConfig",
    "PolicyConfig",
    "RayConfig",
    "SamplingConfig",
    "SandboxConfig",
    "ScriptedPolicyConfig",
    "VllmPolicyConfig",
    "job_schema",
    "load_job",
    "read_job",
]

PATHS = (
    ("tasks", "*"),
    ("output",),
    ("journal",),
    ("policies", "*", "file"),
    ("policies", "*", "run"),
    ("policies", "*", "tokenizer", "?"),
    ("policies", "*", "lora", "path"),
    ("policies", "*", "model", "?"),
    ("policies", "*", "engine_args", "tokenizer", "?"),
    ("agents", "*", "options", "*", "?"),
    ("policy", "?"),
)
"""Settings that are paths; see `resolve_paths`."""


def load_job(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> JobConfig:
    """`read_job`, without where its settings come from."""
    return read_job(path, overrides, options)[0]


def read_job(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> tuple[JobConfig, Source]:
    """The job of a YAML file, changed by `options` and then by `overrides` (`a.b=c`).

    Without a file, `options` are all there is: `{"tasks": [...], "agents": ["oracle"], "samples": 4}`. In both,
    `agent` stands for a list of one, and `policy` for the policy of all agents that name none: the name of one
    of `policies`, a script (`*.yaml`), or else a model for vLLM. Options that are None are left out, and mappings
    (`{"ray": {"address": ...}}`) add to the file's.
    An override goes through lists by place, label or name: `agents.bash.samples=2`. Beside the job comes the place of
    each of its settings, for what is found wrong with one later.

    Raises `ConfigError` with all problems.
    """
    source = Source() if path is None else read_yaml(Path(path))
    if path is not None:
        base = Path(path).absolute().parent
        _long_form(source)
        source.data = resolve_paths(source.data, (), base, PATHS)
    here = Path.cwd()
    for where, value in _flat(options or {}):
        if where[0] in ("agent", "agents"):
            source.data.pop("agents", None)
        source.put(where, value, "--agent" if where[0] == "agents" else f"--{where[-1]}")
    _long_form(source)
    source.data = resolve_paths(source.data, (), here, PATHS)
    for text in overrides:
        where, value = parse_override(text)
        source.put(where, value, f"--set {text}")
        _long_form(source)
        source.data = resolve_paths(source.data, (), here, PATHS)
    _name_policy(source)
    if path is not None and "name" not in source.data:
        stem = "".join(char if char.isalnum() or char in "._-" else "-" for char in Path(path).stem)
        source.data["name"] = stem.lstrip("._-")[:63] or "job"
    return _checked(source), source


def changed_job(job: JobConfig, overrides: Sequence[str], options: Mapping[str, Any], file: str) -> JobConfig:
    """A job that was recorded in `file`, changed by `options` and `overrides` as `load_job` does it; an option that is
    None is left out. Raises `ConfigError` with all problems."""
    source = Source(job.model_dump(mode="json"), {(): file})
    here = Path.cwd()
    for name, value in options.items():
        if value is not None:
            source.put((name,), value, f"--{name}")
    for text in overrides:
        source.put(*parse_override(text), f"--set {text}")
        _long_form(source)
    source.data = resolve_paths(source.data, (), here, PATHS)
    _name_policy(source)
    return _checked(source)


def _checked(source: Source) -> JobConfig:
    """The job that these settings make. Raises `ConfigError` with all problems."""
    try:
        config = JobConfig.model_validate(source.data)
    except ValidationError as error:
        raise ConfigError(sorted(dict.fromkeys(explained(error, source)), key=line_of)) from error
    problems = [source.problem(*problem) for problem in _cross_check(config)]
    if problems:
        raise ConfigError(problems)
    return config


def _flat(options: Mapping[str, Any]) -> Iterator[tuple[Where, Any]]:
    """Each option that is given, and the way to it; a mapping is gone through, so that it adds to the file's."""
    for key, value in options.items():
        if isinstance(value, Mapping):
            yield from (((key, *where), inner) for where, inner in _flat(value))
        elif value is not None:
            yield (key,), str(value) if isinstance(value, Path) else value


def job_schema() -> dict[str, Any]:
    """JSON schema of a job's YAML, short forms included."""
    schema = JobConfig.model_json_schema()
    definitions, properties = schema["$defs"], schema["properties"]
    definitions["Agent"] = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/AgentConfig"}]}
    properties["agents"]["items"] = {"$ref": "#/$defs/Agent"}
    properties["agent"] = {"$ref": "#/$defs/Agent", "description": "Stands for `agents` with one item."}
    properties["policy"] = {
        "type": "string",
        "description": "Of all agents that name none: one of `policies`, a script (*.yaml), or a model for vLLM.",
    }
    described = {"description": properties["tasks"].pop("description")}
    properties["tasks"] = {"anyOf": [{"type": "string"}, properties["tasks"]], **described}
    schema["required"] = ["tasks"]
    schema["oneOf"] = [{"required": ["agents"]}, {"required": ["agent"]}]
    return schema


# Short forms


def _long_form(source: Source) -> None:
    """Bring `tasks: x`, `agent: x` and bare agent names into the form that the models have."""
    data = source.data
    if isinstance(data.get("tasks"), str):
        data["tasks"] = [data["tasks"]]
    if "agent" in data and "agents" not in data:
        data["agents"] = [data.pop("agent")]
        for where, origin in list(source.origins.items()):
            if where[:1] == ("agent",):
                source.origins["agents", 0, *where[1:]] = origin
        source.origins["agents",] = source.place(("agent",))
    if isinstance(data.get("agents"), str):
        data["agents"] = [data["agents"]]
    if isinstance(data.get("agents"), list):
        data["agents"] = [{"name": item} if isinstance(item, str) else item for item in data["agents"]]


def _name_policy(source: Source) -> None:
    """Give `policy` to the agents that name none, and make it where it is no name but a script or a model."""
    spec = source.data.pop("policy", None)
    if not isinstance(spec, str):
        if spec is not None:
            raise ConfigError(
                [source.problem(("policy",), f"must be a name, not {shown(spec)}", "see policies")]
            )
        return
    policies = source.data.setdefault("policies", {})
    if not isinstance(policies, dict):
        return
    name = spec
    if spec not in policies:
        stem = Path(spec).stem if spec.endswith((".yaml", ".yml")) else Path(spec).name
        name = (
            "".join(char if char.isalnum() or char in "._-" else "-" for char in stem).strip("._-")
            or "policy"
        )
        scripted = spec.endswith((".yaml", ".yml"))
        policies[name] = {"kind": "scripted", "file": spec} if scripted else {"kind": "vllm", "model": spec}
        source.origins["policies", name] = source.place(("policy",))
    agents = source.data.get("agents")
    if isinstance(agents, list):
        source.data["agents"] = [
            agent | {"policy": name} if isinstance(agent, dict) and agent.get("policy") is None else agent
            for agent in agents
        ]


# What is wrong


def _cross_check(config: JobConfig) -> Iterator[tuple[Where, str, str]]:
    """What no single value shows: names that lead nowhere, things that are there twice, files that are not."""
    for place, tasks in enumerate(config.tasks):
        if not Path(tasks).exists() and next(glob.iglob(tasks, recursive=True), None) is None:
            yield (
                ("tasks", place),
                f"there is no {tasks}",
                "paths start at the job file's folder, and on the command line where you are",
            )
        if tasks in config.tasks[:place]:
            yield ("tasks", place), f"{tasks} is there twice", "keep one; `samples` asks for more rollouts"
    labels = Counter(agent.called for agent in config.agents)
    for place, agent in enumerate(config.agents):
        if labels[agent.called] > 1:
            remedy = "give each a `label` of its own"
            yield ("agents", place), f"{labels[agent.called]} agents are called {agent.called!r}", remedy
        yield from _check_agent(config, agent, ("agents", place))
    yield from policy_problems(config)
    if config.journal is not None and "://" not in (config.output or ""):
        yield ("journal",), "is for a run at a URI", "leave it out: a run on this machine holds its own"
    if config.mode != "stream" and config.stream != StreamConfig():
        yield (
            ("stream",),
            "says how a stream draws, and this job is none",
            "add `mode: stream`, or leave it out",
        )
    for error_class in config.retries:
        row = BY_NAME.get(error_class)
        where = ("retries", error_class)
        if row is None:
            yield where, "no error class is called so", nearest(error_class, _retried())
        elif error_class not in _retried():
            remedy = f"leave it out: {row.meaning}"
            yield where, f"{row.domain} errors of this class are never tried again", remedy


def _check_agent(config: JobConfig, agent: AgentConfig, where: Where) -> Iterator[tuple[Where, str, str]]:
    try:
        loaded = load_agent(agent.name, agent.options)
    except BadOption as error:
        option = (error.option,) if error.option in agent.options else ()
        remedy = "see docs/agents.md" if agent.name in known_agents() else "see what its __init__ takes"
        yield (*where, "options", *option), str(error), remedy
        return
    except (ValueError, OSError, ImportError, AttributeError) as error:
        if ":" not in agent.name and agent.name not in known_agents():
            yield (*where, "name"), f"no agent is called {agent.name!r}", nearest(agent.name, known_agents())
        else:
            yield (*where, "name"), str(error), "see docs/agents.md, and README.md for agents of your own"
        return
    if agent.policy is not None and agent.policy not in config.policies:
        remedy = nearest(agent.policy, config.policies) if config.policies else "describe it under `policies`"
        yield (*where, "policy"), f"no policy is called {agent.policy!r}", remedy
    elif loaded.needs_policy and agent.policy is None and len(config.policies) != 1:
        which = (
            f"`policy:` one of {', '.join(config.policies)}" if config.policies else "`policies` and `policy`"
        )
        yield where, f"agent {agent.called!r} needs a policy and names none", f"say which: {which}"
    elif getattr(loaded, "calls_tools", False):
        name = agent.policy or next(iter(config.policies))
        policy = config.policies[name]
        if isinstance(policy, VllmPolicyConfig) and policy.tool_parser is None:
            said = f"agent {agent.called!r} calls tools, and nothing tells the policy's calls from its text"
            remedy = "set its tool_parser (hermes, ...), or the agent's `structured: true`"
            yield ("policies", name), said, remedy


def _retried() -> list[str]:
    """The error classes that a job may give another number of retries."""
    return [
        row.name
        for row in BY_NAME.values()
        if row.domain is not Domain.AGENT
        and row.quarantine is not Quarantine.AT_ONCE
        and row.name != "cancelled"
    ]
