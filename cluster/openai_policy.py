"""A policy on a server of OpenAI's API, from its settings: asked for one token before anything else is begun."""

from __future__ import annotations

from rollcage.cluster.asked import Say, answer_of, remedy
from rollcage.cluster.config_policies import OpenAIPolicyConfig
from rollcage.cluster.errors import CouldNotRun
from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Policy
from rollcage.rollout.policies.openai import openai_policy
from rollcage.rollout.policies.openai_probe import START_SEC
from rollcage.rollout.policies.openai_wire import ServerSettings


def served_policy(
    name: str, policy: OpenAIPolicyConfig, tokenizer: str | None, say: Say = lambda _line: None
) -> Policy:
    """`tokenizer` is the directory or name that the settings' own stands for. Blocks until the server has answered;
    `say` is told where that takes longer. Raises `ValueError` for what the user must change, and `CouldNotRun` where
    the server fails."""
    given = policy.model_dump(exclude={"kind", "sampling"})
    settings = ServerSettings(**{**given, "tokenizer": tokenizer})
    asking = openai_policy(settings, name=name)
    try:
        return answer_of(asking, policy.base_url, within_sec=min(policy.retry_sec, START_SEC), say=say)
    except PolicyError as error:
        said = f"policies.{name}: {settings.base_url}: {error}{remedy(error)}"
        raise CouldNotRun(said).about("policies", name, "base_url") from error
