"""Engines for the stages: a preset's shape with random weights, and only the programs that a stage runs."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from device_stages.items import Context, NotHereError
from jaxserve import LLM
from jaxserve.presets import load_preset
from jaxserve.tools.bench.batch_sizes import SweepSizes, find_misfit
from jaxserve.tools.bench.limits import ModelCosts, measure_limits
from jaxserve.tools.bench.setup import Bench

PRESET, TINY_PRESET = "llama-3.1-8b", "llama-30m"
TINY_LAYERS = 2
MEMORY_SHARE = 0.9  # of the device's memory, for weights and pages together
RESERVE = 6 * 10**9  # bytes for temporaries, code and command buffers


@dataclass(frozen=True)
class Load:
    """The points that one engine is measured at: (rows, tokens of a row), the most important first."""

    layers: int
    points: tuple[tuple[int, int], ...]
    num_steps: int = 20  # of a run; a point has three
    budget: int = 2048  # tokens of a step with prompts

    @property
    def sizes(self) -> SweepSizes:
        batches, contexts = (tuple(sorted(set(values))) for values in zip(*self.points, strict=True))
        return SweepSizes(batches, contexts, self.num_steps)


def make_engine(context: Context, layers: int, **options: Any) -> LLM:
    """Builds an engine with random weights. Fewer layers show the same faults sooner."""
    name, layers = (TINY_PRESET, TINY_LAYERS) if context.tiny else (PRESET, layers)
    preset = load_preset(name)
    assert preset is not None
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    if context.impl and not context.tiny:  # a tiny engine is not interpreted
        defaults["attention_impl"] = context.impl
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({**preset, "num_hidden_layers": layers}))
        return LLM(folder, **defaults | options)


def open_bench(context: Context, load: Load, **options: Any) -> Bench:
    """Builds an engine whose programs are those of a load's points, all compiled, with pages for the largest."""
    sizes = load.sizes
    fitting = sizes.engine_options({"max_num_batched_tokens": load.budget}) | {"max_num_batched_tokens": load.budget}
    paddings = {"precompile_bs_paddings": sizes.batches, "precompile_token_paddings": (load.budget,)}
    if jax.default_backend() != "tpu":  # elsewhere decode steps have two rows at least
        paddings["precompile_bs_paddings"] = tuple(sorted({max(2, batch) for batch in sizes.batches}))
    memory = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" in memory:
        params = 2 * 10**9 + 450 * 10**6 * load.layers  # bytes of the preset in 16 bits, rounded up
        fitting["kv_cache_memory_bytes"] = int(MEMORY_SHARE * memory["bytes_limit"] - params - RESERVE)
    llm = make_engine(context, load.layers, compile="all", **fitting | paddings | options)
    return Bench(llm, measure_limits(llm.ready.shapes.model.dtype), ModelCosts.of(llm), PRESET)


def require_fit(bench: Bench, sizes: SweepSizes, batch: int, context: int) -> None:
    """Raises NotHereError if the device has too little memory for a point."""
    reason = find_misfit(bench, sizes, batch, context)
    if reason is not None:
        raise NotHereError(reason)
