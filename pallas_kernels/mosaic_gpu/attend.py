"""From the step's queries to packed rows, through a kernel, and back to the order of the step's tokens."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu.combine import Combine, combine_units
from pallas_kernels.mosaic_gpu.heads import apply_heads, spread_rows, spread_sinks
from pallas_kernels.mosaic_gpu.packing import pack_queries, pack_tiles, unpack_queries, unpack_tiles
from pallas_kernels.mosaic_gpu.shapes import compute_dtype, round_up
from pallas_kernels.mosaic_gpu.splits import SplitList
from pallas_kernels.mosaic_gpu.units import UnitPlan
from pallas_kernels.spec import BatchMeta, HeadParams

# From packed queries [P, K, R, width] to outputs [W, C, V] and the base-2 logarithms [W, C] f32 of the sums of their
# weights. Row h * R + r of the C rows is KV head h's row r.
type Launch = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def attend_few(
    q: jax.Array,  # [T, N, H]
    width: int,  # elements of a stored head
    batch: BatchMeta,
    few: SplitList,
    launch: Launch,
    combine: type[Combine],
    heads: HeadParams,
) -> jax.Array:
    """Attention [T, N, V] in q's dtype of the rows in `few`, something finite for other tokens."""
    shape = batch.shape
    packed = pack_queries(q, batch, few.max_queries, width).astype(compute_dtype(shape))
    outputs, logs = launch(packed)
    num_kv_heads, num_rows = packed.shape[1:3]
    body = combine(num_kv_heads, num_rows, shape.group_size * few.max_queries, jnp.dtype(q.dtype), batch.interpret)
    sinks, scale = heads.sinks, heads.values_scale(shape.spec)
    if sinks is not None:
        sinks = spread_sinks(sinks, num_kv_heads, num_rows, few.max_queries)
    if scale is not None:  # blocks of heads share a latent's
        scale = spread_rows(jnp.repeat(scale, num_kv_heads // scale.shape[0]), num_rows)
    found = combine_units(body, outputs, logs, few, sinks, scale)
    return unpack_queries(found, batch, (*q.shape[:2], shape.spec.out_dim), few.max_queries)


def attend_plan(
    q: jax.Array,  # [T, N, H]
    width: int,
    batch: BatchMeta,  # with a UnitPlan
    launches: tuple[Launch, Launch],  # of the rows with few queries, and of chunks
    combine: type[Combine],
    heads: HeadParams,
) -> jax.Array:
    """Attention [T, N, V] in q's dtype of all rows of a step."""
    work: UnitPlan = batch.work
    shape, (launch_few, launch_chunks) = batch.shape, launches
    few = attend_few(q, width, batch, work.few, launch_few, combine, heads)
    if work.chunks is None:
        return few
    tiles = work.chunks
    num_rows = round_up(shape.group_size * tiles.tile_tokens, 8)
    packed = pack_tiles(q.astype(compute_dtype(shape)), tiles, shape, num_rows, width)
    outputs, logs = launch_chunks(packed)
    by_head, used = (*packed.shape[:3], -1), packed.shape[1] * num_rows
    found = unpack_tiles(outputs[:, :used].reshape(by_head), tiles, (*q.shape[:2], shape.spec.out_dim))
    logs = unpack_tiles(logs[:, :used].reshape(by_head), tiles, (*q.shape[:2], 1))
    chunks = apply_heads(found, logs, heads.sinks, heads.values_scale(shape.spec)).astype(q.dtype)
    return jnp.where((batch.token_rows < batch.distribution[0])[:, None, None], few, chunks)
