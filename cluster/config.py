"""What a job's YAML may say, and the reading of it.

`load_job` takes a file, options of the command line, or both, and gives a `JobConfig` whose paths are absolute
and whose names all exist. Every key is known or refused, with the nearest known name; every problem is found in
one go, each with its place and remedy. `job_schema` is the same as JSON schema.
"""

from __future__ import annotations

import glob
import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rollcage.cluster.config_source import (
    ConfigError,
    Source,
    Where,
    nearest,
    parse_override,
    read_yaml,
    resolve_paths,
    shown,
)
from rollcage.rollout.agents.base import known_agents, load_agent
from rollcage.rollout.outcome import BY_NAME, Domain, Quarantine
from rollcage.rollout.policies.base import Sampling

__all__ = [
    "AgentConfig",
    "ConfigError",
    "JobConfig",
    "PolicyConfig",
    "RayConfig",
    "SamplingConfig",
    "SandboxConfig",
    "ScriptedPolicyConfig",
    "VllmPolicyConfig",
    "job_schema",
    "load_job",
]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,62}$")]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]
Factor = Annotated[float, Field(gt=0)]

PATHS = (
    ("tasks", "*"),
    ("output",),
    ("policies", "*", "file"),
    ("policies", "*", "model", "?"),
    ("agents", "*", "options", "*", "?"),
    ("policy", "?"),
)
"""Settings that are paths; see `resolve_paths`."""

HARBOR_NAMES = {
    "datasets": "tasks",
    "jobs_dir": "output",
    "job_name": "name",
    "n_attempts": "samples",
    "n_concurrent": "concurrency",
    "n_concurrent_trials": "concurrency",
    "timeout_multiplier": "agent_timeout_multiplier",
}
"""What Harbor calls a setting, and what it is called here."""


class Settings(BaseModel):
    """Unknown keys are refused and values are not guessed at: `true` is no number, `"4"` is none either."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SamplingConfig(Settings):
    """How tokens are drawn, in vLLM's terms."""

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1, description="-1: all tokens.")
    max_tokens: Count = Field(1024, description="Sampled tokens of one answer, at most.")
    stop: list[str] = Field([], description="Texts that end an answer.")
    seed: int | None = Field(None, description="None: each rollout's own, from the job's seed.")
    extra: dict[str, Any] = Field({}, description="Further fields of the engine's sampling parameters.")

    def sampling(self) -> Sampling:
        """As agents and policies take it."""
        return Sampling(**{**self.model_dump(), "stop": tuple(self.stop)})


class VllmPolicyConfig(Settings):
    """A model served by vLLM in Ray actors."""

    kind: Literal["vllm"]
    model: str = Field(description="A Hugging Face id, a directory, or `smollm2`.")
    replicas: Count = 1
    num_cpus: float = Field(0.0, ge=0, description="What Ray sets aside for each replica.")
    num_gpus: float = Field(0.0, ge=0, description="0: the model runs on the CPU.")
    threads: Count | None = Field(
        None, description="OpenMP threads of a replica without a GPU; None: all cores."
    )
    engine_args: dict[str, Any] = Field({}, description="vLLM's AsyncEngineArgs, by name.")
    template_kwargs: dict[str, Any] = Field({}, description="Variables of the model's chat template.")
    request_timeout_sec: Seconds = 600.0
    sampling: SamplingConfig = SamplingConfig()


class ScriptedPolicyConfig(Settings):
    """Answers from a file, for tests and demos."""

    kind: Literal["scripted"]
    file: str = Field(description="YAML of answers by task.")
    sampling: SamplingConfig = SamplingConfig()


PolicyConfig = Annotated[VllmPolicyConfig | ScriptedPolicyConfig, Field(discriminator="kind")]


class AgentConfig(Settings):
    """One agent of the job; a bare name stands for `{name: ...}`."""

    name: str = Field(min_length=1, description="An agent's name, or module:Class.")
    label: Name | None = Field(None, description="What records call it; needed where a name is used twice.")
    options: dict[str, Any] = Field({}, description="The agent's own: limits, prompts.")
    policy: str | None = Field(None, description="None: the job's only policy, where the agent needs one.")
    samples: Count | None = Field(None, description="None: the job's.")

    @property
    def called(self) -> str:
        """The label, else the name; of a `module:Class` the class."""
        return self.label or self.name.rpartition(":")[2]


class NetworkConfig(Settings):
    """The networks that sandboxes with internet share."""

    cidr: str | None = Field(None, description="Addresses for them; None: the engine's own pools.")
    leases_per_bridge: int = Field(900, ge=1, le=1000, description="A Linux bridge has 1,023 ports.")

    @field_validator("cidr")
    @classmethod
    def _is_cidr(cls, cidr: str | None) -> str | None:
        if cidr is not None:
            ipaddress.IPv4Network(cidr)
        return cidr


class SandboxConfig(Settings):
    """Sandboxes. `cpus`, `memory_mb`, `storage_mb` stand in where a task sets none."""

    docker_host: str | None = Field(
        None, description="The engine's address; None: DOCKER_HOST or the socket."
    )
    build_slots: Count = Field(2, description="Image builds at once on a host.")
    pids: Count = 1024
    cpus: float | None = Field(None, gt=0)
    memory_mb: Count | None = Field(None, description="MiB.")
    storage_mb: Count | None = Field(None, description="MiB.")
    deadline_sec: Seconds = Field(6 * 3600.0, description="A sandbox ends by itself so long after its start.")
    runtime: str | None = Field(None, description="An OCI runtime that the engine has: runsc, kata.")
    network: NetworkConfig = NetworkConfig()


class RayConfig(Settings):
    """Ray. Without an address it is started on this machine and ended with the job."""

    address: str | None = None
    num_cpus: Count | None = None


class JobConfig(Settings):
    """A job: every task by every agent, `samples` times."""

    name: Name = "job"
    tasks: list[str] = Field(min_length=1, description="Task directories, directories of them, or globs.")
    agents: list[AgentConfig] = Field(min_length=1)
    policies: dict[Name, PolicyConfig] = {}
    samples: Count = Field(1, description="Rollouts of each task and agent: a group.")
    seed: int = 0
    concurrency: Count = Field(8, description="Rollouts at once.")
    pass_threshold: float = Field(1.0, description="A primary reward of at least so much has passed.")
    reward_key: str | None = Field(None, description="The primary reward of a reward.json with several keys.")
    skip_unready: bool = Field(False, description="Leave out tasks whose variables are not set.")
    output: str | None = Field(None, description="The run directory; None: runs/<name>-<time>.")
    agent_timeout_sec: Seconds | None = Field(None, description="In the place of every task's own.")
    agent_timeout_multiplier: Factor = 1.0
    verifier_timeout_multiplier: Factor = 1.0
    retries: dict[str, Annotated[int, Field(ge=0, le=100)]] = Field(
        {}, description="Retries by error class, in the place of the outcome table's."
    )
    max_quarantined_tasks: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Stop the job when more tasks than this are quarantined."
    )
    sandbox: SandboxConfig = SandboxConfig()
    ray: RayConfig = RayConfig()

    def policy_of(self, agent: AgentConfig) -> str | None:
        """The policy that the agent works with: its own, or the job's only one; None where it needs none."""
        if not load_agent(agent.name, agent.options).needs_policy:
            return None
        return agent.policy or (next(iter(self.policies)) if len(self.policies) == 1 else None)

    def used_policies(self) -> dict[str, VllmPolicyConfig | ScriptedPolicyConfig]:
        """The policies that some agent works with: only they need to be started."""
        used = {self.policy_of(agent) for agent in self.agents}
        return {name: policy for name, policy in self.policies.items() if name in used}


def load_job(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
) -> JobConfig:
    """The job of a YAML file, changed by `options` and then by `overrides` (`a.b=c`).

    Without a file, `options` are all there is: `{"tasks": [...], "agents": ["oracle"], "samples": 4}`. In both,
    `agent` stands for a list of one, and `policy` for the policy of all agents that name none: the name of one
    of `policies`, a script (`*.yaml`), or else a model for vLLM. Options that are None are left out.
    An override goes through lists by place, label or name: `agents.bash.samples=2`.

    Raises `ConfigError` with all problems.
    """
    source = Source() if path is None else read_yaml(Path(path))
    if path is not None:
        base = Path(path).absolute().parent
        _long_form(source)
        source.data = resolve_paths(source.data, (), base, PATHS)
    here = Path.cwd()
    for key, value in (options or {}).items():
        if value is not None:
            if key in ("agent", "agents"):
                source.data.pop("agents", None)
            source.put((key,), value, f"--{key.rstrip('s') if key == 'agents' else key}")
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
    try:
        config = JobConfig.model_validate(source.data)
    except ValidationError as error:
        raise ConfigError(list(dict.fromkeys(_explain(error, source)))) from error
    problems = [source.problem(*problem) for problem in _cross_check(config)]
    if problems:
        raise ConfigError(problems)
    return config


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
    properties["tasks"] = {"anyOf": [{"type": "string"}, properties["tasks"]]}
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
    for place, agent in enumerate(agents if isinstance(agents, list) else []):
        if isinstance(agent, dict) and agent.get("policy") is None:
            agents[place] = agent | {"policy": name}


# What is wrong


def _cross_check(config: JobConfig) -> Iterator[tuple[Where, str, str]]:
    """What no single value shows: names that lead nowhere, things that are there twice, files that are not."""
    for place, tasks in enumerate(config.tasks):
        found = (
            glob.iglob(tasks, recursive=True)
            if glob.has_magic(tasks)
            else iter(glob.glob(glob.escape(tasks)))
        )
        if next(iter(found), None) is None:
            yield ("tasks", place), f"there is no {tasks}", "paths start at the file's own folder"
        if tasks in config.tasks[:place]:
            yield ("tasks", place), f"{tasks} is there twice", "keep one; `samples` asks for more rollouts"
    labels = Counter(agent.called for agent in config.agents)
    for place, agent in enumerate(config.agents):
        if labels[agent.called] > 1:
            remedy = "give each a `label` of its own"
            yield ("agents", place), f"{labels[agent.called]} agents are called {agent.called!r}", remedy
        yield from _check_agent(config, agent, ("agents", place))
    for name, policy in config.policies.items():
        if isinstance(policy, ScriptedPolicyConfig) and not Path(policy.file).is_file():
            yield ("policies", name, "file"), f"there is no file {policy.file}", "write the answers there"
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
        needs_policy = load_agent(agent.name, agent.options).needs_policy
    except (ValueError, OSError, ImportError, AttributeError) as error:
        if ":" not in agent.name and agent.name not in known_agents():
            yield (*where, "name"), f"no agent is called {agent.name!r}", nearest(agent.name, known_agents())
        else:
            yield (*where, "options"), str(error), "see the agent's own documentation"
        return
    if agent.policy is not None and agent.policy not in config.policies:
        remedy = nearest(agent.policy, config.policies) if config.policies else "describe it under `policies`"
        yield (*where, "policy"), f"no policy is called {agent.policy!r}", remedy
    elif needs_policy and agent.policy is None and len(config.policies) != 1:
        which = (
            f"`policy:` one of {', '.join(config.policies)}" if config.policies else "`policies` and `policy`"
        )
        yield where, f"agent {agent.called!r} needs a policy and names none", f"say which: {which}"


def _retried() -> list[str]:
    """The error classes that a job may give another number of retries."""
    return [
        row.name
        for row in BY_NAME.values()
        if row.domain is not Domain.AGENT
        and row.quarantine is not Quarantine.AT_ONCE
        and row.name != "cancelled"
    ]


def _explain(error: ValidationError, source: Source) -> Iterator[str]:
    """pydantic's findings, in the terms of the file."""
    for found in error.errors():
        loc: Where = found["loc"]
        # In a way through a union of models pydantic names the member that was chosen.
        where = (*loc[:2], *loc[3:]) if loc[:1] == ("policies",) and len(loc) > 2 else loc
        value, kind = found["input"], found["type"]
        if kind == "extra_forbidden":
            model = _model_at(JobConfig, loc[:-1])
            yield source.problem(where, "there is no such setting", _remedy(str(loc[-1]), model))
        elif kind == "missing":
            remedy = "name the tasks" if loc == ("tasks",) else f"add `{loc[-1]}`"
            yield source.problem(where, "is required and not there", remedy)
        elif kind == "union_tag_not_found":
            yield source.problem(where, "does not say its kind", "add `kind: vllm` or `kind: scripted`")
        elif kind == "union_tag_invalid":
            remedy = nearest(str(value.get("kind")), ("vllm", "scripted"))
            yield source.problem((*where, "kind"), f"there is no kind {shown(value.get('kind'))}", remedy)
        elif kind == "too_short":
            yield source.problem(where, "is empty", "name at least one")
        elif kind == "string_pattern_mismatch":
            remedy = "letters, digits and . _ @ -, at most 63"
            yield source.problem(
                where[:-1] if where[-1:] == ("[key]",) else where, f"cannot be a name: {shown(value)}", remedy
            )
        else:
            said = found["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            yield source.problem(where, f"{said}, not {shown(value)}", "see `rollcage config schema`")


def _remedy(key: str, model: type[BaseModel]) -> str:
    """Where an unknown key may belong: a setting of another name here, or of this name elsewhere."""
    if (ours := HARBOR_NAMES.get(key)) in model.model_fields:
        return f"here it is called {ours!r}"
    elsewhere = {
        "the job itself": JobConfig,
        "`sandbox`": SandboxConfig,
        "`sandbox.network`": NetworkConfig,
        "`sampling` of a policy": SamplingConfig,
        "an agent": AgentConfig,
        "a policy": VllmPolicyConfig,
        "`ray`": RayConfig,
    }
    for place, other in elsewhere.items():
        if key in other.model_fields:
            return f"it is a setting of {place}"
    return nearest(key, model.model_fields)


def _model_at(annotation: Any, loc: Where) -> type[BaseModel]:
    """The model that the settings at `loc` are checked against."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return _model_at(annotation.model_fields[str(loc[0])].annotation, loc[1:]) if loc else annotation
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return _model_at(members[1], loc[1:])
    if origin is list:
        return _model_at(members[0], loc[1:])
    if origin is UnionType and loc:
        chosen = [member for member in members if loc[0] in get_args(member.model_fields["kind"].annotation)]
        return _model_at(chosen[0], loc[1:])
    return _model_at(members[0], loc)
