"""What can be seen of a policy's settings before anything is started: files and directories that are not there, and
names that the installed vLLM does not have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rollcage.cluster.config_model import JobConfig
from rollcage.cluster.config_policies import (
    OpenAIPolicyConfig,
    RecordedPolicyConfig,
    ScriptedPolicyConfig,
    VllmPolicyConfig,
)
from rollcage.cluster.config_source import Where, nearest
from rollcage.rollout.policies.vllm_names import engine_arguments, reasoning_parsers, tool_parsers
from rollcage.rollout.policies.vllm_weights import adapter_rank

Problem = tuple[Where, str, str]
"""The setting, what is wrong with it, and the remedy."""

CONFIGS = ("config.json", "params.json")
"""One of these is in a model's directory: Hugging Face's, Mistral's own."""


def policy_problems(config: JobConfig) -> Iterator[Problem]:
    """Of all policies: files that are named and not there. Of those that an agent works with: the rest, too. Where the
    job joins a cluster, directories of models are not looked for: they are needed on the nodes of the replicas."""
    used = _used(config)
    for name, policy in config.policies.items():
        where = ("policies", name)
        if isinstance(policy, ScriptedPolicyConfig):
            if not Path(policy.file).is_file():
                yield (*where, "file"), f"there is no file {policy.file}", "write the answers there"
            continue
        elsewhere = isinstance(policy, RecordedPolicyConfig) and "://" in policy.run
        if isinstance(policy, RecordedPolicyConfig) and not (elsewhere or Path(policy.run).is_dir()):
            yield (*where, "run"), f"there is no run {policy.run}", "name a run directory"
        if name not in used:
            continue
        if isinstance(policy, OpenAIPolicyConfig | RecordedPolicyConfig):
            yield from _tokenizer((*where, "tokenizer"), policy.tokenizer)
        if isinstance(policy, VllmPolicyConfig):
            yield from _names(where, policy)
            if config.ray.address is None:
                yield from _directories(where, policy)


def _used(config: JobConfig) -> frozenset[str]:
    """Names of policies; none where an agent cannot be made, which is told of the agent."""
    try:
        return frozenset(config.used_policies())
    except (ValueError, OSError, ImportError, AttributeError):
        return frozenset()


def _names(where: Where, policy: VllmPolicyConfig) -> Iterator[Problem]:
    for setting, name, known in (
        ("tool_parser", policy.tool_parser, tool_parsers()),
        ("reasoning_parser", policy.reasoning_parser, reasoning_parsers()),
    ):
        if name is not None and known is not None and name not in known:
            word = setting.removesuffix("_parser")
            yield (*where, setting), f"vLLM has no {word} parser {name!r}", nearest(name, known)
    arguments = engine_arguments() if policy.engine_args else None
    if arguments is None:
        return
    for name in policy.engine_args:
        if name not in arguments:
            remedy = nearest(name, arguments, "they are the fields of vLLM's AsyncEngineArgs")
            yield (*where, "engine_args", name), "vLLM has no such engine argument", remedy


def _directories(where: Where, policy: VllmPolicyConfig) -> Iterator[Problem]:
    model, is_path = policy.model, Path(policy.model).is_absolute()
    if is_path and not Path(model).exists():
        remedy = "name a model's directory, or its Hugging Face id"
        yield (*where, "model"), f"there is no directory {model}", remedy
    elif not is_path and model.count("/") > 1 and "://" not in model and not Path(model).exists():
        said = f"{model} is no directory here, and no Hugging Face id has two slashes"
        yield (*where, "model"), said, "relative paths start at the job file's folder"
    elif Path(model).is_dir() and not _is_model(Path(model)) and "hf_config_path" not in policy.engine_args:
        said = f"{model} holds no config.json: it is no model's directory"
        yield (*where, "model"), said, "name the directory that holds config.json and the weights"
    tokenizer = policy.engine_args.get("tokenizer")
    yield from _tokenizer(
        (*where, "engine_args", "tokenizer"), tokenizer if isinstance(tokenizer, str) else None
    )
    if policy.lora is not None:
        try:
            adapter_rank(Path(policy.lora.path))
        except ValueError as error:
            there = Path(policy.lora.path).is_dir()
            said = str(error) if there else f"there is no directory {policy.lora.path}"
            yield (*where, "lora", "path"), said, "name a LoRA adapter's directory"


def _is_model(directory: Path) -> bool:
    return any((directory / name).is_file() for name in CONFIGS)


def _tokenizer(where: Where, name: str | None) -> Iterator[Problem]:
    if name is not None and Path(name).is_absolute() and not Path(name).exists():
        remedy = "name a tokenizer's directory, or a Hugging Face id"
        yield where, f"there is no directory {name}", remedy
