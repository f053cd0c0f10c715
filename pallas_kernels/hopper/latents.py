"""Attention of latents on Hopper: one kernel for all rows, over blocks of 64 query rows.

All heads share the one row that pages hold for a token, so a block takes up to 64 heads of a query, or fewer heads of
several. Rows with few queries are split along their keys and joined by `combine.py`; the others are cut into tiles of
queries, each over all its keys. A mixed step launches the kernel once for each kind.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.combine import HopperCombine
from pallas_kernels.hopper.decode import DecodeConfig
from pallas_kernels.hopper.latent_kernel import NUM_COMPUTE, LatentKernel
from pallas_kernels.mosaic_gpu import compat, shapes
from pallas_kernels.mosaic_gpu.attend import attend_plan
from pallas_kernels.mosaic_gpu.shapes import compute_dtype, round_up
from pallas_kernels.mosaic_gpu.splits import QUERY_ROWS
from pallas_kernels.mosaic_gpu.units import UnitPlan, plan_units
from pallas_kernels.platform import traced_core_count
from pallas_kernels.spec import AttnLayer, AttnParams, AttnShape, BatchMeta
from pallas_kernels.worklist import StepRows

_STAGES = 2  # tiles in flight: more do not fit beside the queries
_VALUE_STEP = NUM_COMPUTE * compat.SWIZZLE_BYTES // 2  # columns of 16 bits that two warpgroups share in whole swizzles


def find_obstacle(shape: AttnShape) -> str | None:
    """Why the kernel cannot do a shape of latents, in words for users."""
    spec = shape.spec
    if (obstacle := shapes.find_page_obstacle(shape)) is not None:
        return obstacle
    if spec.num_kv_heads != 1:
        return f"a token has one latent for all heads of a device, these are {spec.num_kv_heads}"
    if spec.layout != "plain" or spec.head_dim % 64 or spec.out_dim % _VALUE_STEP:
        found = f"these are {spec.head_dim} and {spec.out_dim}"
        return f"its latents are multiples of 64 and their values of {_VALUE_STEP}, {found}"
    if shape.num_heads % _count_blocks(shape):
        return f"it takes heads in blocks of at most {QUERY_ROWS}, and {shape.num_heads} have no equal ones"
    if _count_smem_bytes(shape) > wgmma.MAX_SMEM_BYTES:
        return f"two tiles of latents of {spec.head_dim} do not fit the shared memory of a block"
    return None


def default_config(shape: AttnShape) -> DecodeConfig:
    """One block per SM: a tile of latents takes a third of its shared memory."""
    return DecodeConfig(stages=_STAGES, ctas_per_sm=1, num_sms=traced_core_count())


def plan_work(rows: StepRows, shape: AttnShape, config: DecodeConfig) -> UnitPlan:
    """Splits of the rows with few queries, tiles of the others."""
    return plan_units(rows, _block_heads(shape), config, tuning=config, chunk_tile_tokens=config.tile_tokens)


def attend(q: jax.Array, kv_pages: jax.Array, batch: BatchMeta, layer: AttnLayer) -> jax.Array:
    """Attention [T, N, V] in q's dtype over pages that already hold this step's rows."""
    work: UnitPlan = batch.work
    blocks = replace(batch, shape=_block_heads(batch.shape))

    def launch_few(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        few = work.few
        return _attend_units(packed, kv_pages, blocks, layer, work.few_units, few.max_queries, few.num_blocks)

    def launch_chunks(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _attend_units(packed, kv_pages, blocks, layer, work.chunk_units, work.chunks.tile_tokens)

    return attend_plan(q, kv_pages.shape[-1], blocks, (launch_few, launch_chunks), HopperCombine, layer.heads)


def _attend_units(
    q: jax.Array,  # [P, B, R, width] of the compute dtype, R rows of a block of heads: a multiple of 8 up to 64
    kv_pages: jax.Array,  # [num_pages, 1, page_size, width]
    batch: BatchMeta,
    layer: AttnLayer,
    units: jax.Array,  # [W, UNIT_COLUMNS] i32
    max_queries: int,
    grid_blocks: int | None = None,  # SplitList.num_blocks
) -> tuple[jax.Array, jax.Array]:
    """Attention of every unit's keys alone, as of `decode.attend_units`: outputs [W, C, V], logarithms [W, C]."""
    num_blocks, num_rows = q.shape[1:3]
    k_scale = layer.heads.k_scale
    body = _make_body(
        batch.shape,
        batch.work.config,
        layer.params,
        num_rows=num_rows,
        max_queries=max_queries,
        has_k_scale=k_scale is not None,
        grid_blocks=grid_blocks,
        interpret=batch.interpret,
    )
    num_slots, columns = units.shape[0], round_up(num_blocks * num_rows, QUERY_ROWS)
    run = compat.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((num_slots, columns, body.value_width), body.partial_dtype),
            jax.ShapeDtypeStruct((num_slots, columns), jnp.float32),
        ),
        grid=(grid_blocks or num_slots, num_blocks),
        grid_names=("unit", "head"),
        num_threads=NUM_COMPUTE + 1,
        thread_name="warpgroup",
        scratch_types=body.make_scratch(),
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(batch.interpret),
    )
    offset = jnp.asarray(layer.page_offset, jnp.int32).reshape(1)
    return run(q, kv_pages, batch.page_table, units, offset, *([] if k_scale is None else [k_scale]))


def _make_body(
    shape: AttnShape,
    config: DecodeConfig,
    params: AttnParams,
    *,
    num_rows: int,
    max_queries: int,
    has_k_scale: bool,
    grid_blocks: int | None = None,
    interpret: bool,
) -> LatentKernel:
    return LatentKernel(
        params=params,
        num_rows=num_rows,
        width=shape.spec.head_dim,
        page_size=shape.spec.page_size,
        max_queries=max_queries,
        dtype=compute_dtype(shape),
        page_dtype=jnp.dtype(shape.spec.dtype),
        has_k_scale=has_k_scale,
        tile_tokens=config.tile_tokens,
        stages=config.stages,
        fp8_scores=False,
        ctas_per_sm=config.ctas_per_sm,
        num_blocks=grid_blocks,
        interpret=interpret,
        value_width=shape.spec.out_dim,
    )


def _count_smem_bytes(shape: AttnShape) -> int:
    """Shared memory of a block, with room for its barriers."""
    config = DecodeConfig(stages=_STAGES)
    body = _make_body(shape, config, AttnParams(1.0), num_rows=8, max_queries=1, has_k_scale=False, interpret=False)
    return compat.smem_bytes(*body.list_tiles().values()) + 1024


def _count_blocks(shape: AttnShape) -> int:
    """Blocks of at most 64 heads."""
    return -(-shape.num_heads // QUERY_ROWS)


def _block_heads(shape: AttnShape) -> AttnShape:
    """The shape with a KV head for each block of query heads: they read the same rows."""
    return replace(shape, spec=replace(shape.spec, num_kv_heads=_count_blocks(shape)))
