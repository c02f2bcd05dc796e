"""An `AnthropicPolicy` from its settings. The key is read where the job is started, and goes to the hosts inside the
policy: into no file, and into no variable there."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

from rollcage.cluster.asked import Say, answer_of, remedy
from rollcage.cluster.config_policies import AnthropicPolicyConfig
from rollcage.cluster.errors import CouldNotRun
from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.anthropic import AnthropicPolicy
from rollcage.rollout.policies.anthropic_client import API_URL, START_SEC, Endpoint, check
from rollcage.rollout.policies.api_keys import api_key
from rollcage.rollout.policies.budget import LocalBudget


def checked_policy(
    name: str, settings: AnthropicPolicyConfig, say: Say = lambda _line: None
) -> AnthropicPolicy:
    """The policy, of a server that takes its key and knows its model. Blocks until it has said so; `say` is told where
    that takes longer. Raises as `anthropic_policy`, and `CouldNotRun` where no server is there."""
    policy = anthropic_policy(name, settings)
    url = policy.endpoint.base_url or API_URL
    try:
        answer_of(check(policy.endpoint), url, within_sec=min(policy.endpoint.retry_sec, START_SEC), say=say)
    except PolicyError as error:
        said = f"policies.{name}: {url}: {error}{remedy(error)}"
        raise CouldNotRun(said).about("policies", name, "base_url") from error
    except ValueError as error:
        raise ValueError(f"{url}: {_refusal(error, settings)}") from error
    return policy


def anthropic_policy(
    name: str, settings: AnthropicPolicyConfig, environ: Mapping[str, str] | None = None
) -> AnthropicPolicy:
    """The policy, with a budget of this process's own. Raises `ValueError` where the key that it needs is not
    set, or cannot be one."""
    environ = os.environ if environ is None else environ
    base_url = settings.base_url or environ.get("ANTHROPIC_BASE_URL") or None
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise ValueError(f"{base_url} (of ANTHROPIC_BASE_URL) is no URL: it begins with http:// or https://")
    key = api_key(settings.api_key_env, environ)
    if key is None and not _is_loopback(base_url):
        raise ValueError(
            f"the variable {settings.api_key_env} is not set: export it with the key of "
            f"{base_url or 'the Anthropic API'}, or name another with api_key_env"
        )
    return AnthropicPolicy(
        Endpoint(
            settings.model,
            base_url=base_url,
            api_key=key,
            key_from=settings.api_key_env,
            extra_body=settings.extra_body,
            max_connections=settings.max_connections,
            retry_sec=settings.retry_sec,
            request_timeout_sec=settings.request_timeout_sec,
        ),
        name=name,
        thinking=settings.thinking,
        cache=settings.cache,
        prices=None if settings.prices is None else settings.prices.prices(),
        budget=None if settings.budget_usd is None else LocalBudget(settings.budget_usd),
    )


def _refusal(error: ValueError, settings: AnthropicPolicyConfig) -> str:
    """What `check` found that the user must change, and with which setting."""
    fault = error.__cause__
    if isinstance(fault, PolicyError) and fault.evidence.status == 404:
        return f"the server has no model {settings.model!r}: correct `model`, or `base_url` (which is without /v1)"
    return str(error)


def _is_loopback(url: str | None) -> bool:
    host = urlsplit(url or "").hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
