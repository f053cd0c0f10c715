"""The implementation for Ampere and Ada GPUs: one Pallas kernel on Mosaic GPU, with mma.sync and cp.async.

The step's keys and values are written first. Rows with few queries (G * Qp <= 64) are cut into runs of their keys,
which a second kernel joins. All other rows are cut into tiles of 64 query rows, each over all its keys. A mixed step
launches the kernel once for each kind.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ampere import plan
from pallas_kernels.ampere.combine import combine_units
from pallas_kernels.ampere.compat import TILE_ROWS
from pallas_kernels.ampere.config import AmpereConfig
from pallas_kernels.ampere.launch import attend_units
from pallas_kernels.ampere.plan import default_config
from pallas_kernels.layout import update_kv_pages
from pallas_kernels.mosaic_gpu.packing import apply_heads, pack_queries, pack_tiles, unpack_queries, unpack_tiles
from pallas_kernels.mosaic_gpu.shapes import choose_layout, compute_dtype, find_obstacle, round_up
from pallas_kernels.mosaic_gpu.units import UnitPlan
from pallas_kernels.spec import AttnLayer, AttnShape, BatchMeta
from pallas_kernels.worklist import StepRows

__all__ = ["attend_with_update", "choose_layout", "default_config", "find_obstacle", "plan_work"]


def plan_work(rows: StepRows, shape: AttnShape, *, config: AmpereConfig | None = None) -> UnitPlan:
    """Splits of the rows with few queries, tiles of the others."""
    return plan.plan_work(rows, shape, config or plan.find_config(shape, rows))


def attend_with_update(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> tuple[jax.Array, jax.Array]:
    """Attention [T, N, H] in q's dtype and the pool with the step's keys and values, in place where it is donated."""
    work: UnitPlan = batch.work
    kv_pages = update_kv_pages(k, v, kv_pages, batch, layer)
    found, logs = _attend_few(q, kv_pages, batch, layer)
    if work.chunks is not None:
        is_few = (batch.token_rows < batch.distribution[0])[:, None, None]
        chunks = _attend_chunks(q, kv_pages, batch, layer)
        found, logs = jnp.where(is_few, found, chunks[0]), jnp.where(is_few, logs, chunks[1])
    return apply_heads(found, logs, layer.heads.sinks, layer.heads.v_scale).astype(q.dtype), kv_pages


def _attend_few(q: jax.Array, kv_pages: jax.Array, batch: BatchMeta, layer: AttnLayer) -> tuple[jax.Array, jax.Array]:
    """Attention [T, N, H] and logs [T, N, 1] of the rows in `batch.work.few`, something finite for other tokens."""
    work, few = batch.work, batch.work.few
    width = kv_pages.shape[-1]
    packed = pack_queries(q, batch, few.max_queries, width).astype(compute_dtype(batch.shape))
    num_kv_heads, num_rows = packed.shape[1:3]
    sizes = {"max_queries": few.max_queries, "num_blocks": few.num_blocks}
    outputs, logs = attend_units(packed, kv_pages, batch, layer, work.few_units, work.config.decode, **sizes)
    logs = logs[:, :, :num_rows].reshape(logs.shape[0], -1)
    logs = jnp.pad(logs, ((0, 0), (0, -logs.shape[1] % TILE_ROWS)))
    outputs, logs = combine_units(outputs, logs, few.row_first_unit, few.row_num_units, interpret=batch.interpret)
    by_head = (outputs.shape[0], num_kv_heads, num_rows, -1)
    used = num_kv_heads * num_rows
    found = unpack_queries(outputs[:, :used].reshape(by_head), batch, q.shape, few.max_queries)
    logs = unpack_queries(logs[:, :used].reshape(by_head), batch, (*q.shape[:2], 1), few.max_queries)
    return found, logs


def _attend_chunks(
    q: jax.Array, kv_pages: jax.Array, batch: BatchMeta, layer: AttnLayer
) -> tuple[jax.Array, jax.Array]:
    """Attention [T, N, H] and logs [T, N, 1] of the rows in `batch.work.chunks`, 0 for other tokens."""
    work, tiles = batch.work, batch.work.chunks
    width = kv_pages.shape[-1]
    num_rows = round_up(batch.shape.group_size * tiles.tile_tokens, 8)
    packed = pack_tiles(q.astype(compute_dtype(batch.shape)), tiles, batch.shape, num_rows, width)
    outputs, logs = attend_units(
        packed, kv_pages, batch, layer, work.chunk_units, work.config.prefill, max_queries=tiles.tile_tokens
    )
    outputs = outputs[:, : packed.shape[1] * packed.shape[2]].reshape(packed.shape)
    logs = logs[:, :, : packed.shape[2], None]
    return unpack_tiles(outputs, tiles, q.shape), unpack_tiles(logs, tiles, (*q.shape[:2], 1))
