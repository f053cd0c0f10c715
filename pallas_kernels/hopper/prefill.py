"""Attention of chunks of queries on Hopper: prompts, pieces of them behind a cached prefix, and long drafts.

Queries are cut into tiles of at most 128 rows, one row per query and head of the group. A block of `prefill_kernel.py`
attends one tile with one KV head, over all the keys that the tile sees or, where tiles are few, over a part of them
(`prefill_plan.py`). It reads queries and writes answers where they lie among the step's tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.prefill_join import join_tiles
from pallas_kernels.hopper.prefill_kernel import build_kernel
from pallas_kernels.hopper.prefill_plan import ChunkUnits, PrefillConfig, count_read_tokens, count_tile_tokens
from pallas_kernels.hopper.prefill_static import NUM_COMPUTE, TILE_ROWS, Static, count_bytes, list_scratch
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.key_tiles import LOG2_E
from pallas_kernels.mosaic_gpu.shapes import is_narrow, stored_width
from pallas_kernels.platform import traced_core_count
from pallas_kernels.spec import AttnLayer, AttnShape, BatchMeta

NUM_THREADS = NUM_COMPUTE + 1
BARRIER_BYTES = 1024  # more than the barriers take


def default_config(shape: AttnShape) -> PrefillConfig:
    """The longest ring that fits, with tiles that leave room for a warpgroup's accumulators in registers."""
    width = stored_width(shape)
    keys = 128 if width <= 128 else 64
    if is_narrow(shape):
        ring = {"stages": 2, "raw_stages": 1 if width == 256 else 2}
    else:
        ring = {"stages": {64: 4, 128: 3, 192: 3, 256: 2}[width]}
        if width == 192:  # with a window and splits, they would spill
            ring["registers"] = (232, 40)
    return PrefillConfig(keys=keys, **ring, num_sms=traced_core_count())


def attend_chunks(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, stored H]
    batch: BatchMeta,
    chunks: ChunkUnits,
    config: PrefillConfig,
    layer: AttnLayer,
) -> jax.Array:
    """Attention [T, N, H] in q's dtype of the queries in `chunks`, over pages that hold their keys. Other tokens have
    whatever the memory held."""
    heads = layer.heads
    static = _fix_static(q, kv_pages, batch, chunks, config, layer)
    num_tokens, _, head_dim = q.shape
    missing = count_read_tokens(num_tokens, batch.shape) - num_tokens
    queries = jnp.pad(q.astype(static.dtype), ((0, missing), (0, 0), (0, static.width - head_dim)))
    operands = [
        queries,
        kv_pages,
        batch.page_table,
        jnp.asarray(layer.page_offset, jnp.int32).reshape(1),
        chunks.units,
        _scale_scores(layer, batch.shape),
    ]
    if heads.sinks is not None:
        operands.append(_spread_sinks(heads.sinks, batch.shape))
    out_type = [jax.ShapeDtypeStruct(queries.shape, queries.dtype)]
    if static.splits:
        partial = (chunks.num_slots, batch.shape.spec.num_kv_heads * TILE_ROWS, static.width)
        out_type += [jax.ShapeDtypeStruct(partial, jnp.float32), jax.ShapeDtypeStruct(partial[:2], jnp.float32)]
    # The last axis of the grid varies fastest. Tiles come longest first, and all heads of a tile take equally long. So
    # blocks start in the order of their length, and those that run together read neighbouring pages of few rows.
    found, *partials = compat.kernel(
        build_kernel(static),
        out_type=tuple(out_type),
        scratch_types=list_scratch(static),
        grid=(chunks.units.shape[0], static.num_kv_heads) if static.num_blocks is None else (static.num_blocks,),
        grid_names=("tile", "head") if static.num_blocks is None else ("block",),
        num_threads=NUM_THREADS,
        thread_name="warpgroup",
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(batch.interpret),
    )(*operands)
    if chunks.joins is not None:
        found = join_tiles(static, found, *partials, chunks.joins)
    found = found[:num_tokens, :, :head_dim]
    if heads.v_scale is not None:
        found = found.astype(jnp.float32) * jnp.repeat(heads.v_scale, batch.shape.group_size)[:, None]
    return found.astype(q.dtype)


def _fix_static(
    q: jax.Array,
    kv_pages: jax.Array,
    batch: BatchMeta,
    chunks: ChunkUnits,
    config: PrefillConfig,
    layer: AttnLayer,
) -> Static:
    splits, num_kv_heads = chunks.joins is not None, batch.shape.spec.num_kv_heads
    num_blocks = None
    if config.persistent and not splits:
        num_blocks = min(config.num_sms, chunks.units.shape[0] * num_kv_heads)
    page_size, width = kv_pages.shape[2:]
    shape, params, narrow = batch.shape, layer.params, is_narrow(batch.shape)
    static = Static(
        tile_tokens=count_tile_tokens(shape),
        group_size=shape.group_size,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        width=width,
        keys=config.keys,
        stages=config.stages,
        raw_stages=max(config.raw_stages, 1) if narrow else 0,
        registers=config.registers,
        dtype="float16" if narrow else q.dtype.name,  # the only 16-bit type that 8 bits convert to
        page_dtype=kv_pages.dtype.name,
        window=params.window,
        softcap=params.softcap,
        has_sinks=layer.heads.sinks is not None,
        splits=splits,
        num_blocks=num_blocks,
        interpret=batch.interpret,
        causal=batch.shape.causal,
    )
    _check(static)
    return static


def _check(static: Static) -> None:
    """ValueError for a configuration that does not fit the shape."""
    if static.keys % static.box or static.page_size % static.box:
        raise ValueError(
            f"PrefillConfig.keys must be a multiple or a divisor of page_size {static.page_size}, got {static.keys}"
        )
    size = count_bytes(static) + BARRIER_BYTES
    if size > wgmma.MAX_SMEM_BYTES:
        raise ValueError(
            f"PrefillConfig takes {size} bytes of shared memory, a block has {wgmma.MAX_SMEM_BYTES}: use fewer stages "
            "or keys"
        )


def _scale_scores(layer: AttnLayer, shape: AttnShape) -> jax.Array:
    """[K] f32, the factor that brings raw scores to base 2, or to the argument of tanh if scores are capped."""
    params, heads = layer.params, layer.heads
    scale = params.scale * LOG2_E if params.softcap is None else params.scale / params.softcap
    scales = jnp.full((shape.spec.num_kv_heads,), scale, jnp.float32)
    return scales if heads.k_scale is None else scales * heads.k_scale.astype(jnp.float32)


def _spread_sinks(sinks: jax.Array, shape: AttnShape) -> jax.Array:
    """[N] -> [K, TILE_ROWS] f32 in base 2, in the order of a tile's rows; padding rows have 0."""
    spread = jnp.repeat(sinks.astype(jnp.float32) * LOG2_E, count_tile_tokens(shape))
    spread = spread.reshape(shape.spec.num_kv_heads, -1)
    return jnp.pad(spread, ((0, 0), (0, TILE_ROWS - spread.shape[1])))
