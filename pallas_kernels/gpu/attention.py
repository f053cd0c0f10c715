"""The implementation for Hopper GPUs: Pallas kernels on Mosaic GPU.

Rows with few queries (G * Qp <= 64) go to the decode kernel and its combine, the others to the prefill kernel; a mixed
step launches both. The step's keys and values are written before.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import combine, decode, prefill
from pallas_kernels.gpu.decode import DecodeConfig
from pallas_kernels.gpu.decode_memory import QUERY_ROWS
from pallas_kernels.gpu.key_tiles import LOG2_E
from pallas_kernels.gpu.splits import SplitList, plan_splits
from pallas_kernels.gpu.update import write_tokens
from pallas_kernels.layout import pool_shape, read_format, update_kv_pages
from pallas_kernels.spec import AttnParams, AttnShape, BatchMeta, HeadParams
from pallas_kernels.tune import tune
from pallas_kernels.worklist import StepRows, TileList

_WIDTHS = (64, 128, 256)  # of stored heads
_MAX_GROUP_SIZE = 16
_MIN_PAGE_SIZE = 16  # a TMA copy of fewer rows would cost more than it brings
VERSIONS = {"gpu_decode": decode.VERSION, "gpu_prefill": prefill.VERSION}  # of the kernels that tables are for
_STATIC = {"static": True}


@dataclass(frozen=True)
class GpuConfig:
    """Tuning of both kernels, and who writes keys and values: XLA's "scatter", or our "kernel"."""

    decode: DecodeConfig
    prefill: prefill.PrefillConfig
    write: str = "scatter"

    def __post_init__(self) -> None:
        if self.write not in ("scatter", "kernel"):
            raise ValueError(f"GpuConfig.write must be 'scatter' or 'kernel', got {self.write!r}")


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class GpuWork:
    """Every query of the step is in one of the two; None where a step has none of that kind."""

    decode: SplitList | None
    chunks: TileList | None
    config: GpuConfig = field(metadata=_STATIC)


def choose_layout(head_dim: int) -> str:
    """Heads of 64, 128 or 256 as they are, others padded."""
    return "plain" if head_dim in _WIDTHS else "padded"


def find_obstacle(shape: AttnShape) -> str | None:
    """Why the kernels cannot do a shape, in words for users."""
    spec, obstacle = shape.spec, None
    width = pool_shape(spec, 1)[-1]
    if shape.dtype not in ("bfloat16", "float16"):
        obstacle = f"its queries are bfloat16 or float16, these are {shape.dtype}"
    elif spec.dtype not in (shape.dtype, "float8_e4m3fn"):
        obstacle = f"with {shape.dtype} queries its pages are {shape.dtype} or float8_e4m3fn, these are {spec.dtype}"
    elif spec.layout == "paired":
        obstacle = "its pages are 'plain' or 'padded', these are 'paired'"
    elif width not in _WIDTHS:
        works = "layout 'padded' would do" if spec.head_dim < _WIDTHS[-1] else "larger heads do not fit"
        obstacle = f"its pages store heads as 64, 128 or 256 elements, these as {width}: {works}"
    elif shape.group_size > _MAX_GROUP_SIZE:
        obstacle = f"it takes at most {_MAX_GROUP_SIZE} query heads per KV head, these are {shape.group_size}"
    elif spec.page_size < _MIN_PAGE_SIZE or spec.page_size & (spec.page_size - 1):
        obstacle = f"its page_size is a power of two from {_MIN_PAGE_SIZE}, this is {spec.page_size}"
    return obstacle


def default_config(shape: AttnShape) -> GpuConfig:
    """By formula from the shape."""
    return GpuConfig(decode.default_config(shape), prefill.default_config(shape))


def find_config(shape: AttnShape, rows: StepRows) -> GpuConfig:
    """By the device's table, else by formula."""
    formula = default_config(shape)
    return replace(
        formula,
        decode=tune("gpu_decode", decode.VERSION, formula.decode, shape, rows),
        prefill=tune("gpu_prefill", prefill.VERSION, formula.prefill, shape, rows),
    )


def plan_work(rows: StepRows, shape: AttnShape, *, config: GpuConfig | None = None) -> GpuWork:
    """Splits for the rows of few queries, tiles for the others."""
    config = config or find_config(shape, rows)
    longest = rows.max_query_len
    if longest is not None and decode.fits(longest, shape.group_size):
        units = plan_splits(rows, rows.query_lens, shape, config.decode, max_query_len=longest)
        return GpuWork(units, None, config)
    num_single, num_rows = rows.distribution[0], rows.query_lens.shape[0]
    singles = rows.lens_between(0, num_single)
    units = plan_splits(rows, singles, shape, config.decode, max_query_len=1)
    chunks = prefill.plan_tiles(rows, rows.lens_between(num_single, num_rows), shape, config.prefill)
    return GpuWork(units, chunks, config)


def attend_with_update(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    *,
    params: AttnParams,
    heads: HeadParams,
    page_offset: int | jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention [T, N, H] in q's dtype and the pool with the step's keys and values, in place where it is donated."""
    if batch.work.config.write == "kernel":
        kv_pages = write_tokens(k, v, kv_pages, batch, heads=heads, page_offset=page_offset, interpret=interpret)
    else:
        kv_pages = update_kv_pages(k, v, kv_pages, batch, heads=heads, page_offset=page_offset)
    options = {"params": params, "heads": heads, "page_offset": page_offset, "interpret": interpret}
    return attend(q, kv_pages, batch, **options), kv_pages


def attend(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    *,
    params: AttnParams,
    heads: HeadParams,
    page_offset: int | jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Attention [T, N, H] in q's dtype over pages that already hold this step's keys and values."""
    work: GpuWork = batch.work
    options = {"params": params, "heads": heads, "page_offset": page_offset, "interpret": interpret}
    few = _attend_few(q, kv_pages, batch, **options)
    if work.chunks is None:
        return few
    many = prefill.attend_chunks(q, kv_pages, batch, work.chunks, work.config.prefill, **options)
    return jnp.where((batch.token_rows < batch.distribution[0])[:, None, None], few, many)


def _attend_few(
    q: jax.Array,
    kv_pages: jax.Array,
    batch: BatchMeta,
    *,
    params: AttnParams,
    heads: HeadParams,
    page_offset: int | jax.Array,
    interpret: bool,
) -> jax.Array:
    """The rows of `batch.work.decode`: [T, N, H]; other tokens get something finite."""
    work = batch.work.decode
    dtype = decode.compute_dtype(batch.shape)
    width = read_format(kv_pages.shape, q.shape[2]).width
    packed = pack_queries(q, batch, work.max_queries, width).astype(dtype)
    outputs, logs = decode.attend_units(
        packed,
        kv_pages,
        batch.page_table,
        work,
        batch.shape,
        batch.work.config.decode,
        params=params,
        k_scale=heads.k_scale,
        page_offset=page_offset,
        interpret=interpret,
    )
    num_kv_heads, num_rows = packed.shape[1:3]
    found = combine.combine_units(
        outputs,
        logs,
        work.row_first_unit,
        work.row_num_units,
        sinks=None if heads.sinks is None else _spread_sinks(heads.sinks, num_kv_heads, num_rows, work.max_queries),
        v_scale=None if heads.v_scale is None else _pad_columns(jnp.repeat(heads.v_scale, num_rows)),
        dtype=q.dtype,
        interpret=interpret,
    )
    found = found[:, : num_kv_heads * num_rows].reshape(found.shape[0], num_kv_heads, num_rows, width)
    return unpack_queries(found, batch, q.shape, work.max_queries)


def pack_queries(q: jax.Array, batch: BatchMeta, max_queries: int, width: int) -> jax.Array:
    """[T, N, H] -> [S, K, R, width]: row r of a KV head is query r % Qp of its row, of query head r // Qp in the group.

    R is G * Qp rounded up to a multiple of 8. What is no query is a copy of some other, or 0.
    """
    num_kv_heads, group_size = batch.shape.spec.num_kv_heads, batch.shape.group_size
    num_tokens, _, head_dim = q.shape
    num_rows = batch.seq_lens.shape[0]
    if max_queries == 1 and num_tokens >= num_rows:  # rows of one token come first: the token of row s is token s
        found = q[:num_rows]
    else:
        tokens = batch.query_start_loc[:-1, None] + jnp.arange(max_queries, dtype=jnp.int32)
        found = q.at[tokens].get(mode="clip")
    found = found.reshape(num_rows, max_queries, num_kv_heads, group_size, head_dim).transpose(0, 2, 3, 1, 4)
    found = found.reshape(num_rows, num_kv_heads, group_size * max_queries, head_dim)
    padding = decode.round_up(group_size * max_queries, 8) - group_size * max_queries
    return jnp.pad(found, ((0, 0), (0, 0), (0, padding), (0, width - head_dim)))


def unpack_queries(found: jax.Array, batch: BatchMeta, shape: tuple[int, ...], max_queries: int) -> jax.Array:
    """The reverse of `pack_queries`: [S, K, R, width] -> [T, N, H]."""
    num_tokens, num_heads, head_dim = shape
    num_rows, num_kv_heads = found.shape[:2]
    group_size = num_heads // num_kv_heads
    found = found[:, :, : group_size * max_queries, :head_dim]
    found = found.reshape(num_rows, num_kv_heads, group_size, max_queries, head_dim).transpose(0, 3, 1, 2, 4)
    found = found.reshape(num_rows, max_queries, num_heads, head_dim)
    if max_queries == 1:
        found = found[:num_tokens, 0]
        return jnp.pad(found, ((0, num_tokens - found.shape[0]), (0, 0), (0, 0)))
    index = jnp.arange(num_tokens, dtype=jnp.int32) - batch.query_start_loc[batch.token_rows]
    return found.at[batch.token_rows, jnp.clip(index, 0, max_queries - 1)].get(mode="clip")


def _spread_sinks(sinks: jax.Array, num_kv_heads: int, num_rows: int, max_queries: int) -> jax.Array:
    """[N] -> [C] in base 2, as the rows of a unit."""
    by_row = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, -1), max_queries, axis=1) * LOG2_E
    return _pad_columns(jnp.pad(by_row, ((0, 0), (0, num_rows - by_row.shape[1]))).reshape(-1))


def _pad_columns(columns: jax.Array) -> jax.Array:
    return jnp.pad(columns.astype(jnp.float32), (0, -columns.shape[0] % QUERY_ROWS))
