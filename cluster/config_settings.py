"""What the models of a job's settings are made of."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from rollcage.rollout.policies.base import Sampling

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


KIND = (
    "What the policy is: vllm, openai, anthropic, scripted or recorded; it decides which settings there are."
)
SAMPLING = "How tokens are drawn."
CONNECTIONS = "Requests to the server at once, from each host."
ANSWER = "How long the server may take for one whole answer."
"""Descriptions that several kinds share."""


class Settings(BaseModel):
    """Unknown keys are refused and values are not guessed at: `true` is no number, `"4"` is none either."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class SamplingConfig(Settings):
    """How tokens are drawn, in vLLM's terms."""

    temperature: float = Field(default=1.0, ge=0, description="0: always the likeliest token.")
    top_p: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Of the likeliest tokens, as many as have this probability together.",
    )
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
