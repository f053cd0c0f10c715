"""The implementation for Hopper GPUs: Pallas kernels on Mosaic GPU.

The step's keys and values are written first. Rows with few queries (G * Qp <= 64) go to the decode kernel and its
combine, all others to the prefill kernel. A mixed step launches both. Latents have their own kernel (`latents.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import decode, latents, prefill, prefill_plan
from pallas_kernels.hopper.combine import HopperCombine
from pallas_kernels.hopper.decode import DecodeConfig
from pallas_kernels.hopper.update import write_tokens
from pallas_kernels.layout import update_kv_pages
from pallas_kernels.mosaic_gpu import shapes
from pallas_kernels.mosaic_gpu.attend import attend_few
from pallas_kernels.mosaic_gpu.shapes import choose_layout
from pallas_kernels.mosaic_gpu.splits import SplitList, fits, plan_splits
from pallas_kernels.mosaic_gpu.units import UnitPlan
from pallas_kernels.spec import AttnLayer, AttnShape, BatchMeta
from pallas_kernels.tune import tune
from pallas_kernels.worklist import StepRows, TileList

_STATIC = {"static": True}

__all__ = ["attend_with_update", "choose_layout", "default_config", "find_obstacle", "plan_work", "store"]


@dataclass(frozen=True)
class HopperConfig:
    """Tuning of both kernels, and how keys and values are written: by XLA's "scatter" or by our "kernel"."""

    decode: DecodeConfig
    prefill: prefill_plan.PrefillConfig
    write: str = "scatter"

    def __post_init__(self) -> None:
        if self.write not in ("scatter", "kernel"):
            raise ValueError(f"HopperConfig.write must be 'scatter' or 'kernel', got {self.write!r}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HopperWork:
    """Every query of the step is in one of the two lists."""

    decode: SplitList
    chunks: TileList | None  # None if the bucket has none
    chunk_units: prefill_plan.ChunkUnits | None  # `chunks` as the kernel reads it
    is_chunk: jax.Array | None  # [T] bool, tokens whose query is in `chunks`
    config: HopperConfig = field(metadata=_STATIC)


def find_obstacle(shape: AttnShape) -> str | None:
    """Why the kernels cannot do a shape, in words for users."""
    return latents.find_obstacle(shape) if shape.spec.is_latent else shapes.find_obstacle(shape)


def default_config(shape: AttnShape) -> HopperConfig:
    """The configuration by formula."""
    if shape.spec.is_latent:
        return HopperConfig(latents.default_config(shape), prefill_plan.PrefillConfig())
    return HopperConfig(decode.default_config(shape), prefill.default_config(shape))


def find_config(shape: AttnShape, rows: StepRows) -> HopperConfig:
    """The configuration of the device's table, else by formula."""
    formula = default_config(shape)
    return replace(
        formula,
        decode=tune("gpu_decode", formula.decode, shape, rows),
        prefill=tune("gpu_prefill", formula.prefill, shape, rows),
    )


def plan_work(rows: StepRows, shape: AttnShape, *, config: HopperConfig | None = None) -> HopperWork | UnitPlan:
    """Splits of the rows with few queries, tiles of the others."""
    if config is not None:
        decode.check_scores(config.decode, shape)
    if shape.spec.is_latent:
        return latents.plan_work(rows, shape, (config or default_config(shape)).decode)
    config = config or find_config(shape, rows)
    config = replace(config, decode=decode.fit_units(config.decode, shape))
    longest = rows.max_query_len
    if longest is not None and fits(longest, shape.group_size):
        units = plan_splits(rows, rows.query_lens, shape, config.decode, max_query_len=longest)
        return HopperWork(units, None, None, None, config)
    num_single, num_rows = rows.distribution[0], rows.query_lens.shape[0]
    singles = rows.lens_between(0, num_single)
    units = plan_splits(rows, singles, shape, config.decode, max_query_len=1)
    chunks = prefill_plan.plan_tiles(rows, rows.lens_between(num_single, num_rows), shape)
    chunk_units = prefill_plan.list_units(chunks, rows, shape, config.prefill)
    return HopperWork(units, chunks, chunk_units, rows.tokens_between(num_single, num_rows), config)


def attend_with_update(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array | None,  # [T, K, H]; None for latents
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> tuple[jax.Array, jax.Array]:
    """Attention [T, N, V] in q's dtype and the pool with the step's keys and values, in place where it is donated."""
    kv_pages = store(k, v, kv_pages, batch, layer)
    if batch.shape.spec.is_latent:
        return latents.attend(q, kv_pages, batch, layer), kv_pages
    work: HopperWork = batch.work

    def launch(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        return decode.attend_units(packed, kv_pages, batch, layer)

    out = attend_few(q, kv_pages.shape[-1], batch, work.decode, launch, HopperCombine, layer.heads)
    if work.chunks is not None:
        many = prefill.attend_chunks(q, kv_pages, batch, work.chunk_units, work.config.prefill, layer)
        out = jnp.where(work.is_chunk[:, None, None], many, out)
    return out, kv_pages


def store(
    k: jax.Array,  # [T, K, H]
    v: jax.Array | None,  # [T, K, H]; None for latents
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> jax.Array:
    """The pool with the step's keys and values, in place where it is donated."""
    by_kernel = not batch.shape.spec.is_latent and batch.work.config.write == "kernel"
    return (write_tokens if by_kernel else update_kv_pages)(k, v, kv_pages, batch, layer)
