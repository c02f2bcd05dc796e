"""The settings of a policy of kind `anthropic`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from rollcage.cluster.config_settings import (
    ANSWER,
    CONNECTIONS,
    KIND,
    SAMPLING,
    Count,
    SamplingConfig,
    Seconds,
    Settings,
    Url,
)
from rollcage.rollout.policies.prices import Prices, known_prices


class PricesConfig(Settings):
    """US dollars for a million tokens."""

    input: float = Field(ge=0, description="Of prompts.")
    output: float = Field(ge=0, description="Of answers, thinking included.")
    cache_write: float | None = Field(default=None, ge=0, description="None: 1.25 times input.")
    cache_read: float | None = Field(default=None, ge=0, description="None: 0.1 times input.")

    def prices(self) -> Prices:
        """As the policy takes them."""
        return Prices(self.input, self.output, self.cache_write, self.cache_read)


class AnthropicPolicyConfig(Settings):
    """Claude, or a server that speaks Anthropic's Messages API."""

    kind: Literal["anthropic"] = Field(description=KIND)
    model: str = Field(min_length=1, description="As the API calls it.")
    base_url: Url | None = Field(
        default=None, description="Without /v1. None: ANTHROPIC_BASE_URL, or Anthropic's own."
    )
    api_key_env: str = Field(
        default="ANTHROPIC_API_KEY",
        description="The variable that holds the key, where the job is started; a server on this machine needs none.",
    )
    thinking: dict[str, Any] | None = Field(
        default=None,
        description="The API's `thinking`: {type: adaptive, display: summarized}; {type: enabled, budget_tokens: 4096} "
        "for models before Claude 4.7.",
    )
    cache: bool = Field(default=True, description="Mark prompts for caching.")
    prices: PricesConfig | None = Field(default=None, description="None: those that are known of the model.")
    budget_usd: float | None = Field(
        default=None,
        gt=0,
        description="Once the answers have cost this, none begins: the job takes no more rollouts, those that run end "
        "as cancelled, ungraded. It may cost more by what is under way then.",
    )
    extra_body: dict[str, Any] = Field(default={}, description="Further fields of each request.")
    max_connections: Count = Field(default=1000, description=CONNECTIONS)
    retry_sec: Seconds = Field(
        default=600.0, description="How long one turn is tried again for 429, 529, 5xx and lost connections."
    )
    request_timeout_sec: Seconds = Field(default=600.0, description=ANSWER)
    sampling: SamplingConfig = Field(default=SamplingConfig(), description=SAMPLING)

    @model_validator(mode="after")
    def _no_version_twice(self) -> AnthropicPolicyConfig:
        if self.base_url is not None and self.base_url.rstrip("/").endswith("/v1"):
            raise ValueError("leave /v1 out of base_url: it is asked for behind it")
        return self

    @model_validator(mode="after")
    def _no_seed(self) -> AnthropicPolicyConfig:
        if self.sampling.seed is not None:
            raise ValueError("the Messages API has no seed: leave sampling.seed out")
        return self

    @model_validator(mode="after")
    def _no_fields_twice(self) -> AnthropicPolicyConfig:
        taken = {"model", "messages", "system", "tools", "max_tokens", "stream", "thinking"}
        if twice := sorted(taken & {*self.extra_body, *self.sampling.extra}):
            raise ValueError(
                f"extra_body cannot set {', '.join(twice)}: a setting of its own, or the agent, does"
            )
        return self

    @model_validator(mode="after")
    def _thinking_fits(self) -> AnthropicPolicyConfig:
        thinking, most = self.thinking, self.sampling.max_tokens
        if thinking is None:
            return self
        if not isinstance(thinking.get("type"), str):
            raise ValueError(
                "thinking has no type: write `type: adaptive`, or `type: enabled` and `budget_tokens`"
            )
        budget = thinking.get("budget_tokens")
        if thinking["type"] == "enabled" and (type(budget) is not int or budget < 1024):
            raise ValueError("thinking of type enabled needs budget_tokens, a number of at least 1024")
        if budget is not None and type(budget) is not int:
            raise ValueError("thinking.budget_tokens is a number of tokens, or left out")
        if budget is not None and budget >= most:
            raise ValueError(
                f"thinking.budget_tokens ({budget}) leaves no room in sampling.max_tokens ({most}), which counts the "
                "thinking too: raise sampling.max_tokens"
            )
        return self

    @model_validator(mode="after")
    def _claude_takes_sampling(self) -> AnthropicPolicyConfig:
        """Another server may take more: only Claude's own rules are known."""
        drawn = self.sampling
        if "claude" not in self.model:
            return self
        if drawn.temperature > 1:
            raise ValueError("Claude takes no sampling.temperature above 1")
        if drawn.temperature != 1 and drawn.top_p != 1:
            raise ValueError("Claude takes sampling.temperature or sampling.top_p, not both: leave one out")
        if self.thinking is None or self.thinking["type"] == "disabled":
            return self
        if drawn.temperature != 1 or drawn.top_k != -1 or drawn.top_p < 0.95:
            raise ValueError(
                "Claude thinks only at its own sampling: leave sampling.temperature and sampling.top_k out, and top_p "
                "above 0.95, or leave thinking out"
            )
        return self

    @model_validator(mode="after")
    def _budget_is_counted(self) -> AnthropicPolicyConfig:
        if self.budget_usd is not None and self.prices is None and known_prices(self.model) is None:
            raise ValueError(
                f"budget_usd cannot be counted: the prices of {self.model} are not known; set `prices: {{input: ..., "
                "output: ...}`, in US dollars for a million tokens"
            )
        asked = {**self.extra_body, **self.sampling.extra}
        dear = asked.get("speed", "standard") != "standard" or "inference_geo" in asked
        if self.budget_usd is not None and self.prices is None and dear:
            raise ValueError(
                "budget_usd cannot be counted: list prices are those of standard speed without inference_geo; set "
                "`prices`"
            )
        return self
