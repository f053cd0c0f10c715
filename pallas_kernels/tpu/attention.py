"""The TPU implementation: attention with a fused update of the pages, for v5e and later.

One kernel attends one-token rows, another all other rows. Both take operands by KV head and in whole tiles: this module
packs them and unpacks the results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.layout import LANES, fill_lanes, join_heads, pad_row
from pallas_kernels.platform import traced_core_count
from pallas_kernels.spec import AttnLayer, AttnParams, AttnShape, BatchMeta, HeadParams, KVSpec
from pallas_kernels.tpu.config import (
    TABLE_LIMIT,
    TpuConfig,
    compute_dtype,
    count_sublanes,
    default_config,
    find_overflow,
    pad_group,
    split_heads,
)
from pallas_kernels.tpu.decode import attend_rows
from pallas_kernels.tpu.prefill import attend_tiles
from pallas_kernels.tpu.softmax import LOG2E, find_factor
from pallas_kernels.tpu.tiles import TilePlan, plan_tiles
from pallas_kernels.tune import tune
from pallas_kernels.worklist import StepRows

_LARGEST_GROUP, _LARGEST_LATENT_GROUP = 32, 64
_QUERY_DTYPES = ("bfloat16", "float32")
_PAGE_DTYPES = ("bfloat16", "float32", "float8_e4m3fn")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TpuWork:
    """The tiles of the rows that are not one-token rows; None in a decode bucket."""

    tiles: TilePlan | None
    config: TpuConfig = field(metadata={"static": True})


def choose_layout(spec: KVSpec) -> str:
    """The layout whose rows fill the lanes."""
    return fill_lanes(spec)


def find_obstacle(shape: AttnShape) -> str | None:
    """Why the kernels cannot do a shape, in words for users."""
    spec, sublanes = shape.spec, count_sublanes(shape.spec.dtype)
    largest = _LARGEST_LATENT_GROUP if spec.is_latent else _LARGEST_GROUP
    if not shape.causal:
        obstacle = "its kernels have causal masks only"
    elif shape.dtype not in _QUERY_DTYPES:
        obstacle = f"queries are {shape.dtype}, the kernels take {' and '.join(_QUERY_DTYPES)}"
    elif spec.dtype not in _PAGE_DTYPES:
        obstacle = f"pages are {spec.dtype}, the kernels take {', '.join(_PAGE_DTYPES)}"
    elif spec.layout != choose_layout(spec):
        obstacle = f"heads of {spec.head_dim} need the layout {choose_layout(spec)!r}, got {spec.layout!r}"
    elif spec.page_size % sublanes:
        obstacle = f"page_size of {spec.dtype} pages must be a multiple of {sublanes}, got {spec.page_size}"
    elif shape.group_size > largest:
        obstacle = f"at most {largest} query heads may share a KV head, got {shape.group_size}"
    else:
        obstacle = find_overflow(shape)
    return obstacle


def find_table_obstacle(num_rows: int, table_width: int) -> str | None:
    """Why the kernels cannot have a page table of this size, in words for users."""
    if num_rows * table_width * 4 <= TABLE_LIMIT:
        return None
    return (
        f"a page table of {num_rows:,} rows of {table_width:,} pages is too large for the scalar memory of a TPU, "
        f"which takes {TABLE_LIMIT // 4 // table_width:,} rows of that width or {TABLE_LIMIT // 4 // num_rows:,} pages "
        "in so many rows: lower max_num_seqs or max_model_len, or raise page_size"
    )


def find_config(shape: AttnShape, rows: StepRows) -> TpuConfig:
    """The configuration of the device's table, else by formula."""
    part, num_cores = split_heads(shape, traced_core_count())
    formula = default_config(part, max_query_len=rows.max_query_len)
    return TpuConfig(
        tune("tpu_decode", formula.decode, shape, rows),
        tune("tpu_prefill", formula.chunk, shape, rows),
        num_cores,
    )


def plan_work(rows: StepRows, shape: AttnShape, *, config: TpuConfig | None = None) -> TpuWork:
    """Tiles of the rows that are not one-token rows."""
    config = config or find_config(shape, rows)
    return TpuWork(None if rows.is_decode else plan_tiles(rows, config.chunk.tile_tokens), config)


def attend_with_update(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array | None,  # [T, K, H]; None for latents
    kv_pages: jax.Array,
    batch: BatchMeta,
    layer: AttnLayer,
) -> tuple[jax.Array, jax.Array]:
    """Attention [T, N, V] in q's dtype and the pool with the step's keys and values, in place where it is donated.

    The null page is not written. Unused slots next to a written one may change.
    """
    params, heads = layer.params, layer.heads
    new = join_heads(k, v, batch.shape.spec, heads)  # [T, rows of a page, width]
    num_tokens, num_heads, head_dim = q.shape
    num_rows, table_width = batch.page_table.shape
    obstacle = find_table_obstacle(num_rows, table_width)
    if obstacle is not None:
        raise ValueError(obstacle)
    shape, work, width = batch.shape, batch.work, kv_pages.shape[-1]
    paired = shape.spec.layout == "paired"
    num_kv_heads, group = shape.spec.num_kv_heads, shape.group_size
    options = {
        "params": params,
        "joined": paired or shape.spec.is_latent,
        "out_width": width if paired else pad_row(shape.spec.out_dim),
        "out_dtype": q.dtype,
        "num_cores": work.config.num_cores,
        "interpret": batch.interpret,
    }
    factors = _make_factors(shape.spec, params, heads)
    page_offset = jnp.asarray(layer.page_offset, jnp.int32)
    # [T, K, G, width]: zeros in padding lanes, and in the lanes of paired values, add nothing to a product.
    grouped = q.reshape(num_tokens, num_kv_heads, group, head_dim).astype(compute_dtype(shape))
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, width - head_dim)))

    num_single = jnp.minimum(batch.distribution[0], min(num_rows, num_tokens))
    by_rows = work.config.decode.rows_per_step
    # One-token rows come first: row r has token r.
    spread = partial(_fit_first, size=-(-min(num_rows, num_tokens) // by_rows) * by_rows)
    out, kv_pages = attend_rows(
        jnp.pad(spread(grouped), ((0, 0), (0, 0), (0, pad_group(shape) - group), (0, 0))),
        spread(new),
        kv_pages,
        spread(batch.seq_lens),
        spread(batch.page_table).reshape(-1),
        num_single,
        page_offset,
        factors,
        _spread_sinks(heads, num_kv_heads, pad_group(shape)),
        config=work.config.decode,
        **options,
    )
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    out = jnp.where((tokens < num_single)[:, None, None, None], _fit_first(out[:, :, :group], num_tokens), 0)
    if work.tiles is not None:
        padding = -num_tokens % work.tiles.tile_tokens
        found, kv_pages = attend_tiles(
            jnp.pad(grouped.transpose(1, 2, 0, 3), ((0, 0), (0, 0), (0, padding), (0, 0))),
            jnp.pad(new.swapaxes(0, 1), ((0, 0), (0, padding), (0, 0))),
            kv_pages,
            work.tiles,
            batch.page_table.reshape(-1),
            page_offset,
            factors,
            None if heads.sinks is None else heads.sinks.astype(jnp.float32) * LOG2E,
            table_width=table_width,
            config=work.config.chunk,
            **options,
        )
        is_tiled = (tokens >= num_single) & (tokens < batch.query_start_loc[-1])
        out = jnp.where(is_tiled[:, None, None, None], found[:, :, :num_tokens].transpose(2, 0, 1, 3), out)
    values = out[..., width - head_dim :] if paired else out[..., : shape.spec.out_dim]
    return values.reshape(num_tokens, num_heads, shape.spec.out_dim), kv_pages


def store(
    k: jax.Array,  # [T, K, H]
    v: jax.Array | None,  # [T, K, H]; None for latents
    kv_pages: jax.Array,
    batch: BatchMeta,
    layer: AttnLayer,
) -> jax.Array:
    """The pool with the step's keys and values. The kernels write while they attend, so queries of zeros do."""
    q = jnp.zeros((k.shape[0], batch.shape.num_heads, k.shape[2]), batch.shape.dtype)
    return attend_with_update(q, k, v, kv_pages, batch, layer)[1]


def _make_factors(spec: KVSpec, params: AttnParams, heads: HeadParams) -> jax.Array:
    """[2, K] f32: factors of the scores, then of the outputs."""
    scores = jnp.full((spec.num_kv_heads,), find_factor(params.scale, params.softcap), jnp.float32)
    outputs, values_scale = jnp.ones((spec.num_kv_heads,), jnp.float32), heads.values_scale(spec)
    scores = scores if heads.k_scale is None else scores * heads.k_scale
    return jnp.stack([scores, outputs if values_scale is None else outputs * values_scale])


def _fit_first(array: jax.Array, size: int) -> jax.Array:
    """The first `size` rows of an array, padded with zeros."""
    array = array[:size]
    return jnp.pad(array, ((0, size - array.shape[0]), *[(0, 0)] * (array.ndim - 1)))


def _spread_sinks(heads: HeadParams, num_kv_heads: int, group: int) -> jax.Array | None:
    """[N] -> [K, group, 128] in base 2."""
    if heads.sinks is None:
        return None
    sinks = heads.sinks.astype(jnp.float32).reshape(num_kv_heads, -1) * LOG2E
    sinks = jnp.pad(sinks, ((0, 0), (0, group - sinks.shape[1])))
    return jnp.broadcast_to(sinks[:, :, None], (num_kv_heads, group, LANES))
