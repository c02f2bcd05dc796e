"""The settings of a job's policies, as pydantic models."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field

from rollcage.cluster.config_anthropic import AnthropicPolicyConfig, PricesConfig
from rollcage.cluster.config_settings import (
    ANSWER,
    CONNECTIONS,
    KIND,
    SAMPLING,
    Count,
    HeaderName,
    HeaderValue,
    SamplingConfig,
    Seconds,
    Settings,
    Url,
)

__all__ = [
    "KINDS",
    "AnthropicPolicyConfig",
    "LoraConfig",
    "OpenAIPolicyConfig",
    "PolicyConfig",
    "PricesConfig",
    "RecordedPolicyConfig",
    "SamplingConfig",
    "ScriptedPolicyConfig",
    "VllmPolicyConfig",
]


class LoraConfig(Settings):
    """A LoRA adapter that the policy answers with."""

    name: str = Field(min_length=1, description="What vLLM calls it.")
    path: str = Field(description="The adapter's directory.")


class VllmPolicyConfig(Settings):
    """A model served by vLLM in Ray actors."""

    kind: Literal["vllm"] = Field(description=KIND)
    model: str = Field(description="A Hugging Face id, a directory, or `smollm2`.")
    replicas: Count = Field(
        default=1,
        description="Engines that serve it, each in an actor of its own; rollouts are spread over them.",
    )
    num_cpus: float = Field(default=0.0, ge=0, description="What Ray sets aside for each replica.")
    num_gpus: float = Field(
        default=0.0,
        ge=0,
        description="GPUs of each worker of a replica, a fraction too; 0: the model runs on the CPU. A replica has "
        "tensor_parallel_size x pipeline_parallel_size workers.",
    )
    tensor_parallel_size: Count = Field(
        default=1, description="Workers that each layer of a replica is split over."
    )
    pipeline_parallel_size: Count = Field(
        default=1, description="Groups of such workers, each with some of the layers, one behind the other."
    )
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
    lora: LoraConfig | None = Field(
        default=None, description="An adapter that every answer is made with; None: the model as it is."
    )
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
    request_timeout_sec: Seconds = Field(
        default=600.0, description="How long an engine may take for one answer, its queue included."
    )
    sampling: SamplingConfig = Field(default=SamplingConfig(), description=SAMPLING)

    def setting_of(self, said: str) -> tuple[str, ...]:
        """Which of these settings an engine that did not start is about: the first of its own arguments, or of what
        else may be wrong with it, that it names, as vLLM's command line does or its Python; else the model."""
        words = set(re.findall(r"\w+", said.replace("-", "_").replace("__", " ")))
        for key in self.engine_args:
            if key in words:
                return ("engine_args", key)
        given = (key for key in ("tool_parser", "reasoning_parser", "lora") if getattr(self, key) is not None)
        return (next((key for key in given if key in words), "model"),)


class OpenAIPolicyConfig(Settings):
    """A model behind a server that speaks OpenAI's chat or completions API: vLLM, SGLang, any other."""

    kind: Literal["openai"] = Field(description=KIND)
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
    version: int = Field(default=0, ge=0, description="Of the server's weights, for the record.")
    max_connections: Count = Field(default=1000, description=CONNECTIONS)
    retry_sec: Seconds = Field(
        default=300.0, description="How long one turn is tried again for 429, 5xx and lost connections."
    )
    request_timeout_sec: Seconds = Field(default=600.0, description=ANSWER)
    sampling: SamplingConfig = Field(default=SamplingConfig(), description=SAMPLING)


class ScriptedPolicyConfig(Settings):
    """Answers from a file, for tests and demos."""

    kind: Literal["scripted"] = Field(description=KIND)
    file: str = Field(description="YAML of answers by task.")
    sampling: SamplingConfig = Field(default=SamplingConfig(), description=SAMPLING)


class RecordedPolicyConfig(Settings):
    """The answers of another run, in their order: no model is asked."""

    kind: Literal["recorded"] = Field(description=KIND)
    run: str = Field(description="The run directory, as each host reaches it.")
    agent: str | None = Field(
        default=None, description="The label of the agent whose answers these are; None: the run's only one."
    )
    draw: int = Field(
        default=0, ge=0, description="Which draw of the tasks, of a run that drew them several times."
    )
    tokenizer: str | None = Field(
        default=None,
        description="A directory or Hugging Face id: what the recorded policy counted tokens with, for agents that "
        "count them.",
    )
    sampling: SamplingConfig = Field(default=SamplingConfig(), description=SAMPLING)


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
