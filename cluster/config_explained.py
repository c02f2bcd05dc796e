"""What pydantic finds wrong with a job's settings, told in the terms of its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rollcage.cluster.config_model import (
    AgentConfig,
    JobConfig,
    NetworkConfig,
    ProxiesConfig,
    RayConfig,
    SandboxConfig,
    StreamConfig,
)
from rollcage.cluster.config_policies import KINDS, SamplingConfig, VllmPolicyConfig
from rollcage.cluster.config_source import Source, Where, nearest, shown

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


def explained(error: ValidationError, source: Source) -> Iterator[str]:
    """What pydantic has found wrong with a job, in the terms of its file: a line for each problem."""
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
            yield source.problem(where, "does not say its kind", "add `kind:` one of " + ", ".join(KINDS))
        elif kind == "union_tag_invalid":
            remedy = nearest(str(value.get("kind")), KINDS)
            yield source.problem((*where, "kind"), f"there is no kind {shown(value.get('kind'))}", remedy)
        elif kind == "too_short":
            yield source.problem(where, "is empty", "name at least one")
        elif kind == "string_pattern_mismatch":
            remedy = "letters, digits and . _ @ -, at most 63"
            yield source.problem(_without_key(where), f"cannot be a name: {shown(value)}", remedy)
        else:
            said = found["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            told = said if isinstance(value, Mapping) else f"{said}, not {shown(value)}"
            yield source.problem(_without_key(where), told, "see `rollcage config schema`")


def _without_key(where: Where) -> Where:
    """The way to a mapping's entry, where it is the key that is wrong."""
    return where[:-1] if where[-1:] == ("[key]",) else where


def _remedy(key: str, model: type[BaseModel]) -> str:
    """Where an unknown key may belong: a setting of another name here, or of this name elsewhere."""
    if (ours := HARBOR_NAMES.get(key)) in model.model_fields:
        return f"here it is called {ours!r}"
    elsewhere: dict[str, type[BaseModel]] = {
        "the job itself": JobConfig,
        "`sandbox`": SandboxConfig,
        "`sandbox.network`": NetworkConfig,
        "`sandbox.proxies`": ProxiesConfig,
        "`sampling` of a policy": SamplingConfig,
        "an agent": AgentConfig,
        "a policy": VllmPolicyConfig,
        "`ray`": RayConfig,
        "`stream`": StreamConfig,
    }
    for place, other in elsewhere.items():
        if key in other.model_fields:
            return f"it is a setting of {place}"
    return nearest(key, model.model_fields)


def _model_at(annotation: Any, loc: Where) -> type[BaseModel]:
    """The model that the settings at `loc` are checked against."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not loc:
            return annotation
        return _model_at(annotation.model_fields[str(loc[0])].annotation, loc[1:])
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is dict:
        return _model_at(members[1], loc[1:])
    if origin is list:
        return _model_at(members[0], loc[1:])
    if origin is UnionType and loc:
        chosen = [member for member in members if loc[0] in get_args(member.model_fields["kind"].annotation)]
        return _model_at(chosen[0], loc[1:])
    return _model_at(members[0], loc)
