"""The page layout, which only this module knows: a pool is [num_pages, 2K, page_size, H].

Within a page, row 2h holds the keys of KV head h and row 2h + 1 its values, tokens contiguous. So a page can be moved
as opaque bytes, and tensor parallelism splits axis 1 between pairs of rows. Page 0 of every layer is the null page,
where padding is written. Layers share a pool [L * num_pages, ...]; `page_offset` is a layer's first page in it.

That is the "plain" layout. Kernels want heads that fill their tiles. "padded" rounds H up to a multiple of 128 with
zeros. "paired", for H = 64 on TPUs, puts keys and values of a head side by side: [num_pages, K, page_size, 128].
`read_format` tells the three apart by shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.spec import PAIRED_HEAD_DIM, AttnLayer, BatchMeta, HeadParams, KVSpec

LANES = 128  # of a TPU: rows in its memory are multiples of this


@dataclass(frozen=True)
class PageFormat:
    """How a pool keeps its heads."""

    num_kv_heads: int  # K
    head_dim: int  # H
    width: int  # elements of a stored row: H, H padded, or a pair
    paired: bool


def pad_row(size: int) -> int:
    """The numbers that a row of `size` numbers takes in a TPU's memory."""
    return -(-size // LANES) * LANES


def pads_little(size: int) -> bool:
    """Whether a row grows by at most a sixteenth there.

    Stacks of such rows should lie there row by row: a kernel reads them so.
    """
    return 16 * (pad_row(size) - size) <= size


def pool_shape(spec: KVSpec, num_pages: int) -> tuple[int, int, int, int]:
    """Shape of an array of `num_pages` pages."""
    if spec.layout == "paired":
        return (num_pages, spec.num_kv_heads, spec.page_size, 2 * spec.head_dim)
    width = spec.head_dim if spec.layout == "plain" else pad_row(spec.head_dim)
    return (num_pages, 2 * spec.num_kv_heads, spec.page_size, width)


def page_bytes(spec: KVSpec) -> int:
    """Bytes of one page of one layer, keys and values."""
    _, heads, page_size, width = pool_shape(spec, 1)
    return heads * page_size * width * jnp.dtype(spec.dtype).itemsize


def read_format(shape: tuple[int, ...], head_dim: int) -> PageFormat:
    """The format of a pool of this shape for heads of `head_dim`; ValueError if there is none."""
    _, heads, _, width = shape
    if head_dim == PAIRED_HEAD_DIM and width == 2 * head_dim:
        return PageFormat(heads, head_dim, width, paired=True)
    if heads % 2 or (width != head_dim and width != -(-head_dim // LANES) * LANES):
        raise ValueError(
            f"kv_pages {shape} hold no heads of {head_dim}: wanted [num_pages, 2K, page_size, {head_dim} or padded]"
        )
    return PageFormat(heads // 2, head_dim, width, paired=False)


def saturate(values: jax.Array, dtype: jnp.dtype, scale: jax.Array | None = None) -> jax.Array:
    """[..., K, H] / scale [K] in a page's dtype; 8-bit floats saturate: a plain cast would give NaN."""
    if scale is not None:
        values = values.astype(jnp.float32) / scale[:, None]
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        values = jnp.clip(values, -largest, largest)
    return values.astype(dtype)


def join_heads(
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array,
    heads: HeadParams,
) -> jax.Array:
    """New keys and values, [T, K, H] each, as the pool keeps tokens: [T, rows of a page, width] in its dtype."""
    form = read_format(kv_pages.shape, k.shape[-1])
    k = saturate(k, kv_pages.dtype, heads.k_scale)
    v = saturate(v, kv_pages.dtype, heads.v_scale)
    if form.paired:
        return jnp.concatenate([k, v], axis=-1)
    pairs = jnp.stack([k, v], axis=2).reshape(k.shape[0], 2 * form.num_kv_heads, form.head_dim)
    return jnp.pad(pairs, ((0, 0), (0, 0), (0, form.width - form.head_dim)))


def update_kv_pages(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> jax.Array:
    """Writes the step's keys and values, cast to the pool's dtype; in place when the pool is donated.

    Padding tokens write to the null page.
    """
    tokens = join_heads(k, v, kv_pages, layer.heads)
    pages = (batch.write_pages + layer.page_offset)[:, None]
    rows = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    slots = kv_pages.at[pages, rows, batch.write_offsets[:, None]]
    return slots.set(tokens, mode="drop", wrap_negative_indices=False)


def gather_heads(kv_pages: jax.Array, page_ids: jax.Array, head_dim: int, *, flat: bool) -> tuple[jax.Array, jax.Array]:
    """Keys and values of C pages for each of W tiles, `page_ids` [W, C]: two arrays [W, K, C * page_size, H].

    `flat` copies each head's part of a page as one run, and keeps the reshape that follows out of that loop. On a CPU a
    loop over H alone is unrolled into scalar moves, at half the speed. On other devices, merging tiled axes could copy
    the pool.
    """
    form = read_format(kv_pages.shape, head_dim)
    page_rows, page_size, width = kv_pages.shape[1:]
    num_tiles, num_block_pages = page_ids.shape
    firsts = jnp.arange(0, page_rows, 1 if form.paired else 2, dtype=jnp.int32)
    rows = page_ids[:, None, :] * page_rows + firsts[:, None]  # [W, K, C]
    head_rows = kv_pages.reshape((-1, page_size * width) if flat else (-1, page_size, width))
    wanted = (rows,) if form.paired else (rows, rows + 1)
    found = [head_rows.at[row].get(mode="clip", wrap_negative_indices=False) for row in wanted]
    if flat:
        found = jax.lax.optimization_barrier(found)
    found = [run.reshape(num_tiles, form.num_kv_heads, num_block_pages * page_size, width) for run in found]
    if form.paired:
        return found[0][..., :head_dim], found[0][..., head_dim:]
    return found[0][..., :head_dim], found[1][..., :head_dim]


def gather_logical(
    kv_pages: jax.Array, page_ids: np.ndarray, length: int, spec: KVSpec, *, page_offset: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of one row's first `length` tokens, on the host: two arrays [length, K, H] in the pool's dtype.

    For tests and the self-test: it reads a pool of any layout. `page_ids` [M] is the row's line of the page table.
    Scaled heads come as they are stored.
    """
    if kv_pages.shape[1:] != pool_shape(spec, 0)[1:]:
        raise ValueError(f"kv_pages of shape {kv_pages.shape} do not fit {spec}")
    pages = np.asarray(kv_pages[np.asarray(page_ids) + page_offset])  # [M, 2K, page_size, H]
    tokens = pages.transpose(0, 2, 1, 3).reshape(-1, *pages.shape[1::2])
    if length > tokens.shape[0]:
        raise ValueError(f"length {length} is more than the {tokens.shape[0]} tokens of {len(page_ids)} pages")
    if spec.layout == "paired":
        return tokens[:length, :, : spec.head_dim], tokens[:length, :, spec.head_dim :]
    return tokens[:length, 0::2, : spec.head_dim], tokens[:length, 1::2, : spec.head_dim]
