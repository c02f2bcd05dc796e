"""The policies of a job that need no actor of their own: those of a file, and clients of servers that run already."""

from __future__ import annotations

from rollcage.cluster.asked import Say
from rollcage.cluster.config import JobConfig, PolicyConfig, ScriptedPolicyConfig, VllmPolicyConfig
from rollcage.cluster.config_policies import AnthropicPolicyConfig, OpenAIPolicyConfig, RecordedPolicyConfig
from rollcage.cluster.errors import CouldNotRun, InputError
from rollcage.rollout.policies.base import Policy


def asked_policies(config: JobConfig, say: Say) -> dict[str, Policy]:
    """`client_policies`, and say which servers are asked. Raises as they do."""
    for name, policy in config.used_policies().items():
        if isinstance(policy, OpenAIPolicyConfig | AnthropicPolicyConfig):
            say(f"asking the server of policy {name}: {policy.base_url or policy.model}")
    return client_policies(config, say)


def client_policies(config: JobConfig, say: Say = lambda _line: None) -> dict[str, Policy]:
    """The policies that need no actor: those of a file, and clients of servers that run already. `say` is told where
    a server lets wait."""
    return {
        name: client_policy(name, policy, say)
        for name, policy in config.used_policies().items()
        if not isinstance(policy, VllmPolicyConfig)
    }


def client_policy(name: str, policy: PolicyConfig, say: Say = lambda _line: None) -> Policy:
    """A policy that can be pickled to each host. Raises `InputError`, and `CouldNotRun` where its server fails."""
    try:
        if isinstance(policy, ScriptedPolicyConfig):
            from rollcage.rollout.policies.scripted import ScriptedPolicy

            return ScriptedPolicy(policy.file, name=name)
        if isinstance(policy, OpenAIPolicyConfig):
            from rollcage.cluster.openai_policy import served_policy

            return served_policy(name, policy, policy.tokenizer and model_path(policy.tokenizer), say)
        if isinstance(policy, AnthropicPolicyConfig):
            from rollcage.cluster.anthropic_policy import checked_policy

            return checked_policy(name, policy, say)
        if isinstance(policy, RecordedPolicyConfig):
            from rollcage.rollout.policies.recorded import RecordedPolicy

            tokenizer = policy.tokenizer and model_path(policy.tokenizer)
            return RecordedPolicy(
                policy.run, agent=policy.agent, name=name, tokenizer=tokenizer, draw=policy.draw
            )
    except (ValueError, OSError) as error:
        raise InputError(f"policies.{name}: {error}").about("policies", name) from error
    raise InputError(f"policies.{name}: this kind is not there yet: {policy.kind}")


def model_path(model: str) -> str:
    """What vLLM is to load: `smollm2` is made from its wheel and cached; anything else is a name or a path.

    Raises `CouldNotRun` where the wheel cannot be had.
    """
    from rollcage.rollout.policies.smollm2 import ModelUnavailable, prepare

    if model != "smollm2":
        return model
    try:
        return str(prepare())
    except ModelUnavailable as error:
        raise CouldNotRun(str(error)) from error
