"""The page layout, known here only: a pool is [num_pages, 2K, page_size, H].

Within a page, row 2h holds the keys of KV head h and row 2h + 1 its values, tokens contiguous; so a page is opaque
bytes to whoever moves it, and tensor parallelism cuts axis 1 into pairs. Page 0 of every layer is the null page: the
target of padding. Layers share a pool [L * num_pages, ...]; `page_offset` is a layer's first page there.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.spec import BatchMeta, KVSpec


def pool_shape(spec: KVSpec, num_pages: int) -> tuple[int, int, int, int]:
    """Shape of an array of `num_pages` pages."""
    return (num_pages, 2 * spec.num_kv_heads, spec.page_size, spec.head_dim)


def page_bytes(spec: KVSpec) -> int:
    """Bytes of one page of one layer, K and V."""
    return 2 * spec.num_kv_heads * spec.page_size * spec.head_dim * jnp.dtype(spec.dtype).itemsize


def update_kv_pages(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    *,
    page_offset: int | jax.Array = 0,
) -> jax.Array:
    """Writes the step's keys and values, cast to the pool's dtype; in place when the pool is donated.

    Padding tokens write to the null page.
    """
    num_tokens, num_kv_heads, head_dim = k.shape
    heads = 2 * num_kv_heads
    pairs = jnp.stack([k, v], axis=2).reshape(num_tokens, heads, head_dim).astype(kv_pages.dtype)
    pages = (batch.write_pages + page_offset)[:, None]
    slots = kv_pages.at[pages, jnp.arange(heads, dtype=jnp.int32)[None, :], batch.write_offsets[:, None]]
    return slots.set(pairs, mode="drop", wrap_negative_indices=False)


def gather_heads(kv_pages: jax.Array, page_ids: jax.Array, *, flat: bool) -> tuple[jax.Array, jax.Array]:
    """Keys and values of C pages for each of W tiles, `page_ids` [W, C]: two arrays [W, K, C * page_size, H].

    `flat` copies each head's part of a page as one run and keeps the reshape behind it out of that loop: on CPU a
    loop over H alone is unrolled into scalar moves, at half the speed. Elsewhere merging tiled axes could copy the
    pool.
    """
    _, heads, page_size, head_dim = kv_pages.shape
    num_tiles, num_block_pages = page_ids.shape
    rows = page_ids[:, None, :] * heads + jnp.arange(0, heads, 2, dtype=jnp.int32)[:, None]  # [W, K, C]
    head_rows = kv_pages.reshape((-1, page_size * head_dim) if flat else (-1, page_size, head_dim))
    found = [head_rows.at[row].get(mode="clip", wrap_negative_indices=False) for row in (rows, rows + 1)]
    if flat:
        found = jax.lax.optimization_barrier(found)
    k, v = (run.reshape(num_tiles, heads // 2, num_block_pages * page_size, head_dim) for run in found)
    return k, v


def gather_logical(
    kv_pages: jax.Array, page_ids: np.ndarray, length: int, spec: KVSpec, *, page_offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of one row's first `length` tokens, on the host: two arrays [length, K, H] in the pool's dtype.

    For tests and tools: the only way to look into a pool that holds for every layout. `page_ids` [M] is the row's
    line of the page table.
    """
    if kv_pages.shape[1:] != pool_shape(spec, 0)[1:]:
        raise ValueError(f"kv_pages of shape {kv_pages.shape} do not fit {spec}")
    pages = np.asarray(kv_pages[np.asarray(page_ids) + page_offset])  # [M, 2K, page_size, H]
    tokens = pages.transpose(0, 2, 1, 3).reshape(-1, pages.shape[1], spec.head_dim)
    if length > tokens.shape[0]:
        raise ValueError(f"length {length} is more than the {tokens.shape[0]} tokens of {len(page_ids)} pages")
    return tokens[:length, 0::2], tokens[:length, 1::2]
