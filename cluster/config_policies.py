"""The settings of a job's policies, as pydantic models."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rollcage.rollout.policies.base import Sampling
from rollcage.rollout.policies.prices import Prices, known_prices

Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]


def _url(text: str) -> str:
    if not re.match(r"https?://[^/\s]", text):
        raise ValueError("must be a URL that begins with http:// or https://")
    return text


def _header_name(text: str) -> str:
    if not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", text):
        raise ValueError("must be a name that HTTP takes: letters, digits and -")
    return text


def _header_value(text: str) -> str:
    if not re.fullmatch(r"([!-~]([ \t!-~]*[!-~])?)?", text):
        raise ValueError("must be one line of ASCII without space around it")
    return text


Url = Annotated[str, AfterValidator(_url)]
HeaderName = Annotated[str, AfterValidator(_header_name)]
HeaderValue = Annotated[str, AfterValidator(_header_value)]
"""What HTTP can carry: RFC 9110, 5.1 and 5.5."""


class Settings(BaseModel):
    """Unknown keys are refused and values are not guessed at: `true` is no number, `"4"` is none either."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SamplingConfig(Settings):
    """How tokens are drawn, in vLLM's terms."""

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1, description="-1: all tokens.")
    max_tokens: Count = Field(default=1024, description="Sampled tokens of one answer, at most.")
    stop: list[str] = Field(default=[], description="Texts that end an answer.")
    seed: int | None = Field(
        default=None, description="What each rollout's own seed is made from; None: the job's seed."
    )
    extra: dict[str, Any] = Field(
        default={}, description="Further fields of the engine's sampling parameters."
    )

    def sampling(self) -> Sampling:
        """As agents and policies take it."""
        return Sampling(**{**self.model_dump(), "stop": tuple(self.stop)})


class LoraConfig(Settings):
    """A LoRA adapter that the policy answers with."""

    name: str = Field(min_length=1)
    path: str = Field(description="The adapter's directory.")


class VllmPolicyConfig(Settings):
    """A model served by vLLM in Ray actors."""

    kind: Literal["vllm"]
    model: str = Field(description="A Hugging Face id, a directory, or `smollm2`.")
    replicas: Count = 1
    num_cpus: float = Field(default=0.0, ge=0, description="What Ray sets aside for each replica.")
    num_gpus: float = Field(
        default=0.0,
        ge=0,
        description="GPUs of each worker of a replica, a fraction too; 0: the model runs on the CPU. A replica has "
        "tensor_parallel_size x pipeline_parallel_size workers.",
    )
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    placement: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = Field(
        default="PACK", description="Ray's strategy for the workers of one replica."
    )
    threads: Count | None = Field(
        default=None, description="OpenMP threads of a replica without a GPU; None: half of the CPUs."
    )
    engine_args: dict[str, Any] = Field(default={}, description="vLLM's AsyncEngineArgs, by name.")
    template_kwargs: dict[str, Any] = Field(default={}, description="Variables of the model's chat template.")
    tool_parser: str | None = Field(default=None, description="One of vLLM's tool parsers: hermes, ...")
    reasoning_parser: str | None = Field(
        default=None, description="One of vLLM's reasoning parsers: qwen3, ..."
    )
    lora: LoraConfig | None = None
    version: int = Field(default=0, ge=0, description="Of the weights that the job begins with.")
    on_update: Literal["finish", "continue"] = Field(
        default="finish",
        description="What turns in flight do when weights are replaced: finish on the old ones first, or go on with "
        "the new ones.",
    )
    max_staleness: int | None = Field(
        default=None,
        ge=0,
        description="Versions that a rollout's first turn may be behind; None: any number.",
    )
    stale: Literal["drop", "finish"] = Field(
        default="drop",
        description="What becomes of a rollout past it: tried again with the new weights, or finished.",
    )
    health_sec: Seconds = Field(
        default=30.0, description="How often each replica must prove that it generates a token."
    )
    retry_sec: Seconds = Field(
        default=600.0,
        description="How long a turn whose replica died waits for another one before its attempt ends.",
    )
    request_timeout_sec: Seconds = 600.0
    sampling: SamplingConfig = SamplingConfig()


class OpenAIPolicyConfig(Settings):
    """A model behind a server that speaks OpenAI's chat or completions API: vLLM, SGLang, any other."""

    kind: Literal["openai"]
    base_url: Url = Field(description="Such as http://server:8000/v1.")
    model: str = Field(min_length=1, description="As the server calls it.")
    api_key_env: str = Field(
        default="OPENAI_API_KEY",
        description="The variable that holds the key, on each host; unset: none is sent.",
    )
    tokens: Literal["required", "auto", "none"] = Field(
        default="auto",
        description="Exact token ids and log-probabilities: refuse a server that gives none, take them where they are "
        "given, or ask for none.",
    )
    tokenizer: str | None = Field(
        default=None,
        description="A directory or Hugging Face id. With it, prompts are sent as token ids to the completions API, so "
        "that nothing sampled is tokenized again; without, as messages to the chat API.",
    )
    template_kwargs: dict[str, Any] = Field(default={}, description="Variables of the model's chat template.")
    headers: dict[HeaderName, HeaderValue] = Field(
        default={}, description="Sent with each request; {session} is the attempt's id."
    )
    extra_body: dict[str, Any] = Field(default={}, description="Further fields of each request.")
    max_model_len: Count | None = Field(default=None, description="None: as the server says.")
    version: int = Field(default=0, ge=0)
    max_connections: Count = 1000
    retry_sec: Seconds = Field(
        default=300.0, description="How long one turn is tried again for 429, 5xx and lost connections."
    )
    request_timeout_sec: Seconds = 600.0
    sampling: SamplingConfig = SamplingConfig()


class PricesConfig(Settings):
    """US dollars for a million tokens."""

    input: float = Field(ge=0)
    output: float = Field(ge=0)
    cache_write: float | None = Field(default=None, ge=0, description="None: 1.25 times input.")
    cache_read: float | None = Field(default=None, ge=0, description="None: 0.1 times input.")

    def prices(self) -> Prices:
        """As the policy takes them."""
        return Prices(self.input, self.output, self.cache_write, self.cache_read)


class AnthropicPolicyConfig(Settings):
    """Claude, or a server that speaks Anthropic's Messages API."""

    kind: Literal["anthropic"]
    model: str = Field(min_length=1)
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
        description="Once the answers have cost this, none begins: the job takes no more rollouts and ends. It may "
        "cost more by what is under way then.",
    )
    extra_body: dict[str, Any] = Field(default={}, description="Further fields of each request.")
    max_connections: Count = 1000
    retry_sec: Seconds = 600.0
    request_timeout_sec: Seconds = 600.0
    sampling: SamplingConfig = SamplingConfig()

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


class ScriptedPolicyConfig(Settings):
    """Answers from a file, for tests and demos."""

    kind: Literal["scripted"]
    file: str = Field(description="YAML of answers by task.")
    sampling: SamplingConfig = SamplingConfig()


class RecordedPolicyConfig(Settings):
    """The answers of another run, in their order: no model is asked."""

    kind: Literal["recorded"]
    run: str = Field(description="The run directory, as each host reaches it.")
    agent: str | None = Field(
        default=None, description="The label of the agent whose answers these are; None: the run's only one."
    )
    draw: int = Field(default=0, ge=0, description="Which draw of the tasks, of a run that drew them several times.")
    tokenizer: str | None = Field(
        default=None,
        description="A directory or Hugging Face id: what the recorded policy counted tokens with, for agents that "
        "count them.",
    )
    sampling: SamplingConfig = SamplingConfig()


PolicyConfig = Annotated[
    VllmPolicyConfig
    | OpenAIPolicyConfig
    | AnthropicPolicyConfig
    | ScriptedPolicyConfig
    | RecordedPolicyConfig,
    Field(discriminator="kind"),
]
"""A policy, of any kind."""

KINDS = ("vllm", "openai", "anthropic", "scripted", "recorded")
