"""A bench of the demo model with few programs, on a device whose rates are given."""

from __future__ import annotations

from typing import Any

from jaxserve import LLM
from jaxserve.tools.bench.limits import DeviceLimits, ModelCosts
from jaxserve.tools.bench.setup import Bench
from tests.programs import PROGRAMS

LIMITS = DeviceLimits("test", 1e9, 1e10)


def make_bench(**options: Any) -> Bench:
    """Returns the bench; `options` are the engine's."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}
    llm = LLM(**sizes, compilation_cache_dir=str(PROGRAMS), show_progress=False, **options)
    return Bench(llm, LIMITS, ModelCosts.of(llm))
