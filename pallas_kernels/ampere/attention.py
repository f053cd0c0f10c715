"""The implementation for Ampere and Ada GPUs: one Pallas kernel on Mosaic GPU, with mma.sync and cp.async.

The step's keys and values are written first. Rows with few queries (G * Qp <= 64) are cut into runs of their keys,
which a second kernel joins. All other rows are cut into tiles of 64 query rows, each over all its keys. A mixed step
launches the kernel once for each kind.
"""

from __future__ import annotations

import jax

from pallas_kernels.ampere import plan
from pallas_kernels.ampere.combine import AmpereCombine
from pallas_kernels.ampere.config import AmpereConfig
from pallas_kernels.ampere.launch import attend_units
from pallas_kernels.ampere.plan import default_config
from pallas_kernels.layout import update_kv_pages
from pallas_kernels.mosaic_gpu.attend import attend_plan
from pallas_kernels.mosaic_gpu.shapes import choose_layout, find_obstacle
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
    kv_pages = update_kv_pages(k, v, kv_pages, batch, layer)
    work: UnitPlan = batch.work

    def launch_few(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        sizes = {"max_queries": work.few.max_queries, "num_blocks": work.few.num_blocks}
        return attend_units(packed, kv_pages, batch, layer, work.few_units, work.config.decode, **sizes)

    def launch_chunks(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        sizes = {"max_queries": work.chunks.tile_tokens}
        return attend_units(packed, kv_pages, batch, layer, work.chunk_units, work.config.prefill, **sizes)

    launches = launch_few, launch_chunks
    return attend_plan(q, kv_pages.shape[-1], batch, launches, AmpereCombine, layer.heads), kv_pages
