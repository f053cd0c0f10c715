"""jaxserve: a batched inference engine for language models in JAX, for NVIDIA GPUs, TPUs and CPUs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jaxserve.vllm_names import find_no_object, refuse_modules

if TYPE_CHECKING:
    from jaxserve.engine.async_engine import AsyncLLM, AsyncLLMEngine
    from jaxserve.engine.beam import BeamSearchParams
    from jaxserve.engine.llm import LLM
    from jaxserve.engine.metrics import Counter, Gauge, Metric, Vector
    from jaxserve.engine_args import AsyncEngineArgs, EngineArgs
    from jaxserve.logits_processor import LogitsProcessor
    from jaxserve.lora_options import LoRARequest
    from jaxserve.pooling_params import PoolingParams
    from jaxserve.request import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        PoolingOutput,
        RequestOutput,
        ScoringOutput,
        TextPrompt,
        TokensPrompt,
    )
    from jaxserve.sampling_params import OutputKind, RequestOutputKind, SamplingParams
    from jaxserve.structured_params import StructuredOutputsParams

__version__ = "0.1.0"

# Public names load on first use: importing jaxserve must not import jax.
_HOMES = {
    "LLM": "jaxserve.engine.llm",
    "AsyncLLM": "jaxserve.engine.async_engine",
    "AsyncLLMEngine": "jaxserve.engine.async_engine",
    "AsyncEngineArgs": "jaxserve.engine_args",
    "EngineArgs": "jaxserve.engine_args",
    "BeamSearchParams": "jaxserve.engine.beam",
    "LogitsProcessor": "jaxserve.logits_processor",
    "SamplingParams": "jaxserve.sampling_params",
    "LoRARequest": "jaxserve.lora_options",
    "OutputKind": "jaxserve.sampling_params",
    "RequestOutputKind": "jaxserve.sampling_params",
    "RequestOutput": "jaxserve.request",
    "CompletionOutput": "jaxserve.request",
    "EmbeddingOutput": "jaxserve.request",
    "ClassificationOutput": "jaxserve.request",
    "ScoringOutput": "jaxserve.request",
    "PoolingOutput": "jaxserve.request",
    "PoolingParams": "jaxserve.pooling_params",
    "TextPrompt": "jaxserve.request",
    "TokensPrompt": "jaxserve.request",
    "Metric": "jaxserve.engine.metrics",
    "Counter": "jaxserve.engine.metrics",
    "Gauge": "jaxserve.engine.metrics",
    "Vector": "jaxserve.engine.metrics",
    "StructuredOutputsParams": "jaxserve.structured_params",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "CompletionOutput",
    "Counter",
    "EmbeddingOutput",
    "EngineArgs",
    "Gauge",
    "LoRARequest",
    "LogitsProcessor",
    "Metric",
    "OutputKind",
    "PoolingOutput",
    "PoolingParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise find_no_object(__name__, name)
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]


refuse_modules()
