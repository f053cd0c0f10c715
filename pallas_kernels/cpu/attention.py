"""Paged attention on CPUs by the library of this room, which reads keys and values where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import library
from pallas_kernels.spec import AttnLayer, AttnShape, BatchMeta, KVSpec
from pallas_kernels.worklist import StepRows, TileList, list_chunk_tiles, list_token_tiles

DTYPES = ("float32", "bfloat16")
LANES = 16
TILE_QUERIES = 64  # of all heads that share a KV head, at the least; more would not stay in the first cache
MAX_TILE_TOKENS = 64

_STATIC = {"static": True}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CpuWork:
    """All queries of the step, each in one tile: first those of one-token rows, then those of chunks."""

    tiles: jax.Array  # [5, n] i32: row, first query, number of queries (0: unused), last key of the first, end of keys
    num_singles: int = field(metadata=_STATIC)
    tile_tokens: int = field(metadata=_STATIC)  # of a chunk's tile


def choose_layout(spec: KVSpec) -> str:
    """See `pallas_kernels.backends`, as for the functions below."""
    del spec
    return "plain"


def find_obstacle(shape: AttnShape) -> str | None:
    spec = shape.spec
    if (obstacle := library.find_obstacle()) is not None:
        return obstacle
    if spec.dtype not in DTYPES or shape.dtype not in DTYPES:
        return f"the CPU kernel is for {' and '.join(DTYPES)}, not for {shape.dtype} over pages of {spec.dtype}"
    if spec.layout != "plain":
        return f"the CPU kernel reads plain pages, not {spec.layout} ones"
    if spec.head_dim % LANES or spec.out_dim % LANES:
        return f"the CPU kernel needs heads of a multiple of {LANES} numbers, not of {spec.head_dim}"
    return None


def uses_tiles(spec: KVSpec, dtype: str) -> bool:
    """Whether chunks of queries in `dtype` are multiplied in the processor's tiles: where heads and pages fill them."""
    fits = spec.head_dim % 32 == 0 and spec.out_dim % LANES == 0 and spec.page_size % LANES == 0
    return fits and spec.dtype == dtype == "bfloat16" and library.has_tiles()


def plan_work(rows: StepRows, shape: AttnShape, *, config: None = None) -> CpuWork:
    """Nothing is tuned."""
    del config
    if rows.is_decode:
        return _plan(list_token_tiles(rows, rows.query_lens, group=1))
    num_single = rows.distribution[0]
    singles = list_token_tiles(rows, rows.lens_between(0, num_single), group=1)
    lens = rows.lens_between(num_single, rows.query_lens.shape[0])
    wanted = min(-(-TILE_QUERIES // shape.group_size), MAX_TILE_TOKENS, rows.num_tokens)
    return _plan(singles, list_chunk_tiles(rows, lens, tile_tokens=wanted))


def _plan(singles: TileList, chunks: TileList | None = None) -> CpuWork:
    lists = [singles] if chunks is None else [singles, chunks]
    columns = [jnp.stack([each.rows, each.starts, each.counts, each.positions, each.ends]) for each in lists]
    return CpuWork(jnp.concatenate(columns, axis=1), singles.rows.shape[0], lists[-1].tile_tokens)


def attend_with_update(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array | None,  # [T, K, H]; None for latents
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> tuple[jax.Array, jax.Array]:
    """Attention [T, N, V] in q's dtype, and the pool."""
    spec, params, heads = batch.shape.spec, layer.params, layer.heads
    v_scale = heads.values_scale(spec)
    if heads.k_scale is not None:
        k, q = _scale(k, 1 / heads.k_scale), _scale(q, heads.k_scale)
    if v is not None and v_scale is not None:
        v = _scale(v, 1 / v_scale)
    k, v = (q if part is None else part.astype(q.dtype) for part in (k, v))
    results = (
        jax.ShapeDtypeStruct((*q.shape[:2], spec.out_dim), q.dtype),
        jax.ShapeDtypeStruct(kv_pages.shape, kv_pages.dtype),
    )
    call = jax.ffi.ffi_call(library.target_name(library.ATTENTION), results, input_output_aliases={3: 1})
    work, shape = batch.work, batch.shape
    numbers = (shape.span or 0, spec.out_dim, work.num_singles, work.tile_tokens, shape.reach is not None)
    numbers = (*numbers, uses_tiles(spec, q.dtype.name))
    out, kv_pages = call(
        q,
        k,
        v,
        kv_pages,
        batch.page_table,
        jnp.stack([batch.write_pages, batch.write_offsets]),
        work.tiles,
        jnp.stack([jnp.asarray(layer.page_offset, jnp.int32), *map(jnp.int32, numbers)]),
        jnp.array([params.scale, params.softcap or 0], jnp.float32),
        jnp.zeros(0, jnp.float32) if heads.sinks is None else heads.sinks.astype(jnp.float32),
        jnp.zeros(0, jnp.int32) if batch.last_keys is None else batch.last_keys,
    )
    return (out if v_scale is None else _scale(out, v_scale)), kv_pages


def store(
    k: jax.Array,  # [T, K, H]
    v: jax.Array | None,  # [T, K, H]; None for latents
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> jax.Array:
    """The pool with the step's keys and values: the same call with nothing to attend, so any queries will do."""
    nothing = replace(batch.work, tiles=jnp.zeros((5, 0), jnp.int32), num_singles=0)
    return attend_with_update(k, k, v, kv_pages, replace(batch, work=nothing), layer)[1]


def _scale(values: jax.Array, scales: jax.Array) -> jax.Array:
    """[T, n, H] times the scales [K] of the KV heads that they belong to, in its dtype."""
    by_head = jnp.repeat(scales, values.shape[1] // scales.shape[0])
    return (values * by_head[:, None]).astype(values.dtype)
