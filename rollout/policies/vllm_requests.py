"""One request to a vLLM engine: its parameters in vLLM's terms, and vLLM's errors in ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rollcage.rollout.outcome import PolicyError
from rollcage.rollout.policies.base import Sampling, Structure
from rollcage.rollout.policies.faults import policy_fault


def sampling_params(sampling: Sampling, structure: Structure | None = None) -> Any:
    """vLLM's own, for one final output with the log-probability of each sampled token. The stop string stays
    in the text, as its tokens stay in the ids. Text is made only where a stop string must be found in it. Raises
    `PolicyError` (`policy_refused`) for a parameter of `sampling.extra` that there is none of, or of another type."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    parameters = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        "seed": sampling.seed,
        "logprobs": 0,
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "include_stop_str_in_output": True,
        "detokenize": bool(sampling.stop),
        "structured_outputs": None if structure is None else _structured(structure),
        **sampling.extra,
    }
    try:
        return SamplingParams(**parameters)
    except TypeError as error:
        raise policy_fault(error, f"sample with {sorted(sampling.extra)}", status=400) from error


def require_structure(structure: Structure, llm: Any) -> None:
    """Raise `ValueError` for a structure that the engine's backend refuses, before it is part of a request, of which
    vLLM would not say what it refuses."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMClientError

    try:
        SamplingParams(max_tokens=1, structured_outputs=_structured(structure)).verify(
            llm.model_config, None, llm.vllm_config.structured_outputs_config, llm.get_tokenizer()
        )
    except (VLLMClientError, ValueError) as error:
        form = "grammar" if structure.json_schema is None else "JSON schema"
        raise ValueError(f"vLLM cannot hold an answer to this {form}: {error}") from error


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Raise what vLLM raises inside as `PolicyError`. `doing` completes "could not ..."."""
    from vllm.exceptions import GracefulHTTPError, VLLMError
    from vllm.v1.engine.exceptions import EngineDeadError

    try:
        yield
    except EngineDeadError as error:
        fault = policy_fault(error, doing)
        raise PolicyError("policy_unavailable", "vLLM's engine is dead", fault.evidence) from error
    except GracefulHTTPError as error:  # refused by vLLM's own admission: asked to come again later
        raise policy_fault(error, doing, status=429) from error
    except VLLMError as error:
        raise policy_fault(_cause(error), doing, status=_status(error)) from error
    except (ValueError, TimeoutError) as error:
        raise policy_fault(error, doing) from error


def _structured(structure: Structure) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if structure.json_schema is not None:
        return StructuredOutputsParams(json=dict(structure.json_schema))
    return StructuredOutputsParams(grammar=structure.grammar)


def _status(error: BaseException) -> int:
    """The HTTP status that vLLM's server gives to this error of its engine."""
    from vllm.exceptions import VLLMClientError

    return 400 if isinstance(_cause(error), VLLMClientError | ValueError) else 500


def _cause(error: BaseException) -> BaseException:
    """What is behind vLLM's `EngineGenerateError`, which says nothing itself."""
    return error if str(error) or error.__cause__ is None else error.__cause__
