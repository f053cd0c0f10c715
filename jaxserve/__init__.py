"""jaxserve: a batched inference engine for language models in JAX, for NVIDIA GPUs, TPUs and CPUs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.engine.async_engine import AsyncLLM
    from jaxserve.engine.beam import BeamSearchParams
    from jaxserve.engine.llm import LLM
    from jaxserve.logits_processor import LogitsProcessor
    from jaxserve.request import CompletionOutput, RequestOutput
    from jaxserve.sampling_params import OutputKind, SamplingParams
    from jaxserve.structured_params import StructuredOutputsParams

__version__ = "0.1.0"

# Public names load on first use: importing jaxserve must not import jax.
_HOMES = {
    "LLM": "jaxserve.engine.llm",
    "AsyncLLM": "jaxserve.engine.async_engine",
    "BeamSearchParams": "jaxserve.engine.beam",
    "LogitsProcessor": "jaxserve.logits_processor",
    "SamplingParams": "jaxserve.sampling_params",
    "OutputKind": "jaxserve.sampling_params",
    "RequestOutput": "jaxserve.request",
    "CompletionOutput": "jaxserve.request",
    "StructuredOutputsParams": "jaxserve.structured_params",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "LogitsProcessor",
    "OutputKind",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
