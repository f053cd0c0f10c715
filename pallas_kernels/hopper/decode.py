"""Paged attention of rows with few queries on Hopper: bound by memory, one block per (unit, KV head).

The G * Qp query rows of a KV head fill part of the 64 rows of a wgmma. The rest is wasted, which costs nothing in a
kernel bound by memory. `mosaic_gpu/splits.py` cuts rows into units and `combine.py` joins them. The body is in
`decode_kernel.py` and `decode_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.decode_kernel import DecodeKernel
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.shapes import compute_dtype, is_narrow, round_up, stored_width
from pallas_kernels.mosaic_gpu.splits import QUERY_ROWS, SplitList
from pallas_kernels.platform import traced_core_count
from pallas_kernels.spec import AttnLayer, AttnParams, AttnShape, BatchMeta

_BLOCK_RESERVE = 1024 + 1024  # bytes: the SM's own per block, and room for barriers
_MAX_STAGES = 6
_WIDE = 128


@dataclass(frozen=True)
class DecodeConfig:
    """Tuning of the decode kernel."""

    tile_tokens: int = 64  # keys per step of the softmax
    stages: int = 3  # tiles of keys, and of values, in flight
    ctas_per_sm: int = 2
    num_sms: int = 132
    min_split_tokens: int = 128  # the shortest unit, unless its row is shorter
    unit_cost: int = 3  # estimated cost of a unit in tiles, beyond its own
    fp8_scores: bool = False  # with 8-bit pages, keys are multiplied as they are, with queries as two 8-bit parts

    def __post_init__(self) -> None:
        if self.tile_tokens not in (64, 128):
            raise ValueError(f"DecodeConfig.tile_tokens must be 64 or 128, got {self.tile_tokens}")
        if self.stages < 2:
            raise ValueError(f"DecodeConfig.stages must be at least 2, got {self.stages}")
        if self.ctas_per_sm not in (1, 2):
            raise ValueError(f"DecodeConfig.ctas_per_sm must be 1 or 2, got {self.ctas_per_sm}")
        for name, least in (("num_sms", 1), ("min_split_tokens", 1), ("unit_cost", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"DecodeConfig.{name} must be at least {least}, got {getattr(self, name)}")


def default_config(shape: AttnShape) -> DecodeConfig:
    """Two blocks per SM, so that one computes while the other waits, if each then has three stages; else one block."""
    for ctas_per_sm, wanted in ((2, 3), (1, 2)):
        room = min(wgmma.MAX_SMEM_BYTES, wgmma.SM_SMEM_BYTES // ctas_per_sm - _BLOCK_RESERVE)
        fitting = [stages for stages in range(2, _MAX_STAGES + 1) if count_smem_bytes(shape, stages) <= room]
        if fitting and fitting[-1] >= wanted:
            return DecodeConfig(stages=fitting[-1], ctas_per_sm=ctas_per_sm, num_sms=traced_core_count())
    raise ValueError(f"no ring of two tiles of {shape.spec} fits the shared memory of a block")


def check_scores(config: DecodeConfig, shape: AttnShape) -> None:
    """ValueError for `fp8_scores` with pages that have no keys of 8 bits beside their values."""
    if config.fp8_scores and (shape.spec.is_latent or not is_narrow(shape)):
        pages = "latents" if shape.spec.is_latent else shape.spec.dtype
        raise ValueError(f"DecodeConfig.fp8_scores is for keys of 8 bits, these pages hold {pages}: use False")


def fit_units(config: DecodeConfig, shape: AttnShape) -> DecodeConfig:
    """The configuration for the shape's kind of units. The blocks of a fixed list go from unit to unit, for which heads
    of 128 have too few registers with two blocks per SM: there a block takes the rings of both."""
    if not shape.fixed_splits or config.ctas_per_sm == 1 or stored_width(shape) < _WIDE:
        return config
    return replace(config, ctas_per_sm=1, stages=2 * config.stages)


def count_smem_bytes(shape: AttnShape, stages: int) -> int:
    """Shared memory of a block's tiles, which have 64 tokens by default."""
    config = DecodeConfig(stages=stages)
    body = _make_body(shape, config, AttnParams(1.0), num_rows=8, max_queries=1, has_k_scale=False, interpret=False)
    return compat.smem_bytes(*body.list_tiles().values())


def attend_units(
    q: jax.Array,  # [S, K, R, width] of the compute dtype, R query rows of a KV head: a power of two from 8 to 64
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, width]
    batch: BatchMeta,  # W unit slots in its work
    layer: AttnLayer,
) -> tuple[jax.Array, jax.Array]:
    """Attention of every unit's keys alone.

    Query row r of a KV head is query r % Qp of its row, of query head r // Qp in the group. Returns outputs
    [W, C, width] of the compute dtype (f32 in a fixed list), normalised, and the base-2 logarithms [W, C] f32 of the
    sums of their weights, very negative for a query that sees none of the unit's keys. Row h * R + r of the C rows is
    KV head h's row r; C is a multiple of 64. Slots without a unit, and rows without a KV head, are not written.
    """
    work: SplitList = batch.work.decode
    num_kv_heads, num_rows, width = q.shape[1:]
    k_scale = layer.heads.k_scale
    body = _make_body(
        batch.shape,
        batch.work.config.decode,
        layer.params,
        num_rows=num_rows,
        max_queries=work.max_queries,
        has_k_scale=k_scale is not None,
        num_blocks=work.num_blocks,
        interpret=batch.interpret,
    )
    num_slots, columns = work.units.shape[0], round_up(num_kv_heads * num_rows, QUERY_ROWS)
    run = compat.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_slots, columns, width), body.partial_dtype),
            jax.ShapeDtypeStruct((num_slots, columns), jnp.float32),
        ),
        grid=(work.num_blocks or num_slots, num_kv_heads),  # the last axis varies fastest: heads of a unit share pages
        grid_names=("unit", "head"),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=body.make_scratch(),
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(batch.interpret),
    )
    offset = jnp.asarray(layer.page_offset, jnp.int32).reshape(1)
    extra = [] if k_scale is None else [k_scale]
    if body.fp8_scores:
        # Rows without a query are copies of another row's, which the scale must not depend on.
        is_query = jnp.arange(num_rows) % work.max_queries < jnp.diff(batch.query_start_loc)[:, None]  # [S, R]
        q, scales = split_queries(jnp.where(is_query[:, None, :, None], q, 0), kv_pages.dtype)
        extra.insert(0, scales)
    return run(q, kv_pages, batch.page_table, work.units, offset, *extra)


def split_queries(q: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """q [S, K, R, H] as sums of two parts [S, K, 2, R, H] of 8 bits, and their scales [S, K] f32: a part alone is
    off by 3 % of itself, the second one says by what."""
    wide = q.astype(jnp.float32)
    largest = float(jnp.finfo(dtype).max)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=(2, 3)), 1e-30) / largest
    wide = wide / scales[..., None, None]
    first = jnp.clip(wide, -largest, largest).astype(dtype)
    second = (wide - first.astype(jnp.float32)).astype(dtype)
    return jnp.stack([first, second], axis=2), scales


def _make_body(
    shape: AttnShape,
    config: DecodeConfig,
    params: AttnParams,
    *,
    num_rows: int,
    max_queries: int,
    has_k_scale: bool,
    num_blocks: int | None = None,
    interpret: bool,
) -> DecodeKernel:
    return DecodeKernel(
        params=params,
        num_rows=num_rows,
        width=stored_width(shape),
        page_size=shape.spec.page_size,
        max_queries=max_queries,
        dtype=compute_dtype(shape),
        page_dtype=jnp.dtype(shape.spec.dtype),
        has_k_scale=has_k_scale,
        tile_tokens=config.tile_tokens,
        stages=config.stages,
        ctas_per_sm=config.ctas_per_sm,
        fp8_scores=config.fp8_scores,
        num_blocks=num_blocks,
        interpret=interpret,
    )
