"""The page layout, which only this module knows: a pool is [num_pages, 2K, page_size, H].

Within a page, row 2h holds the keys of KV head h and row 2h + 1 its values, tokens contiguous. So a page can be moved
as opaque bytes, and tensor parallelism splits axis 1 between pairs of rows. Page 0 of every layer is the null page,
where padding is written. Layers share a pool [L * num_pages, ...]; `page_offset` is a layer's first page in it.

That is the "plain" layout. Kernels want heads that fill their tiles. "padded" rounds H up to a multiple of 128 with
zeros. "paired", for H = 64 on TPUs, puts keys and values of a head side by side: [num_pages, K, page_size, 128].

A latent has one row per head: [num_pages, K, page_size, H], "plain" or "padded".
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.platform import traced_platform
from pallas_kernels.spec import PAIRED_HEAD_DIM, AttnLayer, BatchMeta, HeadParams, KVSpec

LANES = 128  # of a TPU: rows in its memory are multiples of this


def count_bits(dtype: jnp.dtype | str) -> int:
    """The bits of a number in memory: numpy gives int4 a byte, devices half of one."""
    dtype = jnp.dtype(dtype)
    return (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits


def pad_row(size: int) -> int:
    """The numbers that a row of `size` numbers takes in a TPU's memory."""
    return -(-size // LANES) * LANES


def pads_little(size: int) -> bool:
    """Whether a row grows by at most a sixteenth there.

    Stacks of such rows should lie there row by row: a kernel reads them so.
    """
    return 16 * (pad_row(size) - size) <= size


def fill_lanes(spec: KVSpec) -> str:
    """The layout whose rows are as long as a TPU's memory has them. Of another, XLA copies the pool there."""
    if spec.head_dim == PAIRED_HEAD_DIM and not spec.is_latent:
        return "paired"
    return "padded" if spec.head_dim % LANES else "plain"


def pool_shape(spec: KVSpec, num_pages: int) -> tuple[int, int, int, int]:
    """Shape of an array of `num_pages` pages."""
    if spec.layout == "paired":
        return (num_pages, spec.num_kv_heads, spec.page_size, 2 * spec.head_dim)
    width = spec.head_dim if spec.layout == "plain" else pad_row(spec.head_dim)
    return (num_pages, spec.num_kv_heads * (1 if spec.is_latent else 2), spec.page_size, width)


def page_bytes(spec: KVSpec) -> int:
    """Bytes of one page of one layer."""
    _, heads, page_size, width = pool_shape(spec, 1)
    return heads * page_size * width * jnp.dtype(spec.dtype).itemsize


def saturate(values: jax.Array, dtype: jnp.dtype, scale: jax.Array | None = None) -> jax.Array:
    """[..., K, H] / scale [K] in a page's dtype; 8-bit floats saturate: a plain cast would give NaN."""
    if scale is not None:
        values = values.astype(jnp.float32) / scale[:, None]
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        values = jnp.clip(values, -largest, largest)
    return values.astype(dtype)


def join_heads(k: jax.Array, v: jax.Array | None, spec: KVSpec, heads: HeadParams) -> jax.Array:
    """New keys and values, [T, K, H] each, as the pool keeps tokens: [T, rows of a page, width] in its dtype."""
    rows = saturate(k, spec.dtype, heads.k_scale)
    _, page_rows, _, width = pool_shape(spec, 0)
    if v is not None:
        v = saturate(v, spec.dtype, heads.v_scale)
        if spec.layout == "paired":
            return jnp.concatenate([rows, v], axis=-1)
        rows = jnp.stack([rows, v], axis=2).reshape(k.shape[0], page_rows, spec.head_dim)
    return jnp.pad(rows, ((0, 0), (0, 0), (0, width - spec.head_dim)))


def update_kv_pages(
    k: jax.Array,  # [T, K, H]
    v: jax.Array | None,  # [T, K, H]; None for latents
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> jax.Array:
    """Writes the step's keys and values, cast to the pool's dtype; in place when the pool is donated.

    Padding tokens write to the null page.
    """
    tokens = join_heads(k, v, batch.shape.spec, layer.heads)
    pages = (batch.write_pages + layer.page_offset)[:, None]
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    slots = kv_pages.at[pages, rows, batch.write_offsets[:, None]]
    return slots.set(tokens, mode="drop", wrap_negative_indices=False)


def read_tokens(
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
    dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns what `update_kv_pages` has written of the step: keys and values [T, K, H], of latents keys alone."""
    spec, heads = batch.shape.spec, layer.heads
    rows = kv_pages[batch.write_pages + layer.page_offset, :, batch.write_offsets]  # [T, rows of a page, width]
    rows_per_head = rows.shape[1] // spec.num_kv_heads
    k, v = _take_keys_values(rows[:, ::rows_per_head], rows[:, rows_per_head - 1 :: rows_per_head], spec)

    def restore(stored: jax.Array, scale: jax.Array | None) -> jax.Array:
        wide = stored.astype(jnp.float32)
        return (wide if scale is None else wide * scale[:, None]).astype(dtype)

    return restore(k, heads.k_scale), None if spec.is_latent else restore(v, heads.v_scale)


def gather_heads(kv_pages: jax.Array, page_ids: jax.Array, spec: KVSpec) -> tuple[jax.Array, jax.Array]:
    """Keys [W, K, C * page_size, H] and values [W, K, C * page_size, V] of C pages for each of W tiles, `page_ids`
    [W, C].

    A CPU copies each head's part of a page as one run, and keeps the reshape that follows out of that loop: a loop over
    H alone is unrolled into scalar moves, at half the speed. On other devices, merging tiled axes could copy the pool.
    """
    flat = traced_platform() == "cpu"
    page_rows, page_size, width = kv_pages.shape[1:]
    num_tiles, num_block_pages = page_ids.shape
    rows_per_head = page_rows // spec.num_kv_heads
    firsts = jnp.arange(0, page_rows, rows_per_head, dtype=jnp.int32)
    rows = page_ids[:, None, :] * page_rows + firsts[:, None]  # [W, K, C]
    head_rows = kv_pages.reshape((-1, page_size * width) if flat else (-1, page_size, width))
    wanted = tuple(rows + index for index in range(rows_per_head))
    found = [head_rows.at[row].get(mode="clip", wrap_negative_indices=False) for row in wanted]
    if flat:
        found = jax.lax.optimization_barrier(found)
    found = [run.reshape(num_tiles, spec.num_kv_heads, num_block_pages * page_size, width) for run in found]
    return _take_keys_values(found[0], found[-1], spec)


def _take_keys_values[A: (jax.Array, np.ndarray)](first: A, last: A, spec: KVSpec) -> tuple[A, A]:
    """Keys and values of the first and the last row [..., width] that a head has in a page."""
    begin = spec.head_dim if spec.layout == "paired" else 0
    return first[..., : spec.head_dim], last[..., begin : begin + spec.out_dim]


def gather_logical(
    kv_pages: jax.Array | np.ndarray, page_ids: np.ndarray, length: int, spec: KVSpec, *, page_offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Keys [length, K, H] and values [length, K, V] of one row's first `length` tokens, on the host.

    They have the dtype of the pool; scaled heads come as they are stored. For tests and the self-test: it reads any
    layout. `page_ids` [M] is the row's line of the page table.
    """
    if kv_pages.shape[1:] != pool_shape(spec, 0)[1:]:
        raise ValueError(f"kv_pages of shape {kv_pages.shape} do not fit {spec}")
    pages = np.asarray(kv_pages[np.asarray(page_ids) + page_offset])  # [M, 2K, page_size, H]
    tokens = pages.transpose(0, 2, 1, 3).reshape(-1, *pages.shape[1::2])
    if length > tokens.shape[0]:
        raise ValueError(f"length {length} is more than the {tokens.shape[0]} tokens of {len(page_ids)} pages")
    rows_per_head = pages.shape[1] // spec.num_kv_heads
    tokens = tokens[:length]
    return _take_keys_values(tokens[:, ::rows_per_head], tokens[:, rows_per_head - 1 :: rows_per_head], spec)
