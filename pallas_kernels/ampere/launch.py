"""One launch of the kernel, over units of either kind."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ampere import compat as ampere
from pallas_kernels.ampere.config import TileConfig
from pallas_kernels.ampere.device import copies_by_tma
from pallas_kernels.ampere.kernel import AttentionKernel
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.shapes import compute_dtype, is_narrow, round_up, stored_width
from pallas_kernels.spec import AttnLayer, AttnParams, AttnShape, BatchMeta


def count_smem_bytes(shape: AttnShape, tile_tokens: int, stages: int) -> int:
    """Shared memory of a block's tiles."""
    tiling = {
        "tile_tokens": tile_tokens,
        "stages": stages,
        "num_rows": 8,
        "max_queries": 1,
        "num_blocks": None,
    }
    body = _make_body(shape, AttnParams(1.0), has_k_scale=False, interpret=False, **tiling)
    return compat.smem_bytes(*body.list_tiles().values())


def attend_units(
    q: jax.Array,  # [P, K, R, width] of the compute dtype, R query rows of a KV head: a multiple of 8, at most 64
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, width]
    batch: BatchMeta,
    layer: AttnLayer,
    units: jax.Array,  # [W, UNIT_COLUMNS] i32
    config: TileConfig,
    *,
    max_queries: int,
    num_blocks: int | None = None,  # SplitList's
) -> tuple[jax.Array, jax.Array]:
    """Attention of every unit's keys alone.

    Query row r of a KV head is query r % max_queries of its unit, of query head r // max_queries in the group. Returns
    outputs [W, C, width] of the compute dtype (f32 in a fixed list), normalised, and the base-2 logarithms [W, C] f32
    of the sums of their weights, very negative for a query that sees none of the unit's keys. Row h * R + r of the C
    rows is KV head h's row r; C is a multiple of 64. Slots without a unit, and rows without a query, are not written.
    """
    num_kv_heads, num_rows, width = q.shape[1:]
    tiling = {"tile_tokens": config.tile_tokens, "stages": config.stages}
    tiling |= {"num_rows": num_rows, "max_queries": max_queries, "num_blocks": num_blocks}
    k_scale = layer.heads.k_scale
    body = _make_body(batch.shape, layer.params, has_k_scale=k_scale is not None, interpret=batch.interpret, **tiling)
    num_units, columns = units.shape[0], round_up(num_kv_heads * num_rows, ampere.TILE_ROWS)
    run = compat.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_units, columns, width), body.partial_dtype),
            jax.ShapeDtypeStruct((num_units, num_kv_heads, ampere.TILE_ROWS), jnp.float32),
        ),
        grid=(num_blocks or num_units, num_kv_heads),  # the last axis varies fastest: heads of a unit share pages
        grid_names=("unit", "head"),
        scratch_types=body.make_scratch(),
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(batch.interpret),
    )
    if body.is_narrow:
        kv_pages = jax.lax.bitcast_convert_type(kv_pages, ampere.NARROW)
    offset = jnp.asarray(layer.page_offset, jnp.int32).reshape(1)
    extra = [] if k_scale is None else [k_scale]
    outputs, logs = run(q, kv_pages, batch.page_table, units, offset, *extra)
    logs = logs[:, :, :num_rows].reshape(num_units, -1)
    return outputs, jnp.pad(logs, ((0, 0), (0, columns - logs.shape[1])))


def _make_body(
    shape: AttnShape, params: AttnParams, *, has_k_scale: bool, interpret: bool, **tiling: int | None
) -> AttentionKernel:
    dtype = compute_dtype(shape)
    return AttentionKernel(
        params=params,
        width=stored_width(shape),
        page_size=shape.spec.page_size,
        dtype=dtype,
        page_dtype=jnp.dtype(ampere.NARROW) if is_narrow(shape) else dtype,
        has_k_scale=has_k_scale,
        interpret=interpret,
        by_tma=interpret or copies_by_tma(),
        **tiling,
    )
