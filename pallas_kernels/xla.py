"""The portable implementation: plain XLA, any device, any head size, any number of query heads per KV head.

Online softmax (Milakov and Gimelshein, 2018; FlashAttention's recurrence) over blocks of pages, for groups of tiles
of queries (`worklist.py`). Nothing of the size of a context is ever materialised.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layout import gather_heads
from pallas_kernels.spec import AttnParams, BatchMeta
from pallas_kernels.worklist import TileList

# Keys per step of the online softmax. One-token rows are bound by memory and want few, long steps; a chunk's tile has
# work enough in each, and short prompts then skip more.
TOKEN_BLOCK, CHUNK_BLOCK = 128, 64
MASKED = -1e30  # finite, so that a row without keys stays finite


def attend(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    *,
    params: AttnParams,
    page_offset: int | jax.Array,
) -> jax.Array:
    """Attention [T, N, H] in q's dtype over pages that already hold this step's keys and values."""
    out = _fill(q, q.shape, 0, q.dtype)
    for tiles in batch.tiles:
        num_groups = tiles.rows.shape[0] // tiles.group

        def run_group(index: jax.Array | int, out: jax.Array, tiles: TileList = tiles) -> jax.Array:
            group = _slice_group(tiles, index)
            tokens = group.starts[:, None] + jnp.arange(tiles.tile_tokens, dtype=jnp.int32)  # [W, B]
            found = _attend_group(
                q.at[tokens].get(mode="clip"), kv_pages, batch, group, params, page_offset=page_offset
            )
            is_query = jnp.arange(tiles.tile_tokens) < group.counts[:, None]
            return out.at[jnp.where(is_query, tokens, q.shape[0])].set(found.astype(out.dtype), mode="drop")

        out = lax.fori_loop(0, tiles.num_groups if batch.bounded else num_groups, run_group, out)
    return out


def _slice_group(tiles: TileList, index: jax.Array | int) -> TileList:
    columns = (
        lax.dynamic_slice_in_dim(column, index * tiles.group, tiles.group)
        for column in (tiles.rows, tiles.starts, tiles.counts, tiles.positions)
    )
    return TileList(*columns, tiles.num_groups, tiles.tile_tokens, tiles.group)


def _attend_group(
    q: jax.Array,  # [W, B, N, H]
    kv_pages: jax.Array,
    batch: BatchMeta,
    group: TileList,  # W tiles of B queries
    params: AttnParams,
    *,
    page_offset: int | jax.Array,
) -> jax.Array:
    """Attention of W tiles [W, B, N, H], each over its own keys, block by block from the first block that it sees."""
    width, tile_tokens, num_heads, head_dim = q.shape
    _, heads, page_size, _ = kv_pages.shape
    num_kv_heads = heads // 2
    group_size = num_heads // num_kv_heads
    block_pages = max(1, (TOKEN_BLOCK if tile_tokens == 1 else CHUNK_BLOCK) // page_size)
    block_tokens = block_pages * page_size
    dtype = jnp.promote_types(q.dtype, kv_pages.dtype)

    # Queries of a KV head side by side: [W, K, B * G, H].
    q = q.reshape(width, tile_tokens, num_kv_heads, group_size, head_dim).swapaxes(1, 2)
    q = q.reshape(width, num_kv_heads, tile_tokens * group_size, head_dim).astype(dtype)
    table = batch.page_table[group.rows]  # [W, M]
    ends = jnp.where(group.counts > 0, group.positions + group.counts, 0)  # [W], one past the last key seen
    begins = jnp.zeros_like(ends) if params.window is None else jnp.maximum(group.positions - params.window + 1, 0)
    blocks = begins // block_tokens  # [W], first block of each tile
    num_blocks = jnp.max((ends + block_tokens - 1) // block_tokens - blocks)
    query_positions = group.positions[:, None] + jnp.arange(tile_tokens, dtype=jnp.int32)  # [W, B]

    def run_block(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, mixed = carry
        columns = (blocks + index)[:, None] * block_pages + jnp.arange(block_pages, dtype=jnp.int32)  # [W, C]
        page_ids = jnp.take_along_axis(table, columns, axis=1, mode="clip") + page_offset
        k, v = gather_heads(kv_pages, page_ids, flat=batch.bounded)
        key_positions = columns[:, :1] * page_size + jnp.arange(block_tokens, dtype=jnp.int32)  # [W, E]
        is_key = (key_positions >= begins[:, None]) & (key_positions < ends[:, None])
        v = jnp.where(is_key[:, None, :, None], v, 0)  # a stale slot may hold NaN, which a weight of 0 does not remove
        scores = jnp.einsum("wkqh,wkeh->wkqe", q, k.astype(dtype), preferred_element_type=jnp.float32) * params.scale
        if params.softcap is not None:
            scores = params.softcap * jnp.tanh(scores / params.softcap)
        seen = is_key[:, None] & (key_positions[:, None] <= query_positions[:, :, None])  # [W, B, E]
        if params.window is not None:
            seen &= key_positions[:, None] > query_positions[:, :, None] - params.window
        seen = jnp.repeat(seen, group_size, axis=1)[:, None]  # [W, 1, B * G, E]
        scores = jnp.where(seen, scores, MASKED)

        new_largest = jnp.maximum(largest, jnp.max(scores, axis=-1))
        weights = jnp.exp(scores - new_largest[..., None])
        shrink = jnp.exp(largest - new_largest)
        total = total * shrink + jnp.sum(weights, axis=-1)
        added = jnp.einsum(
            "wkqe,wkeh->wkqh", weights.astype(dtype), v.astype(dtype), preferred_element_type=jnp.float32
        )
        return new_largest, total, mixed * shrink[..., None] + added

    shape = q.shape[:-1]
    carry = (_fill(q, shape, MASKED), _fill(q, shape, 0), _fill(q, q.shape, 0))
    limit = -(-table.shape[1] // block_pages)
    if params.window is not None:  # a tile's keys span window + B - 1 tokens, anywhere in a block
        limit = min(limit, (params.window + tile_tokens - 2) // block_tokens + 2)
    _, total, mixed = lax.fori_loop(0, num_blocks if batch.bounded else limit, run_block, carry)
    out = mixed / jnp.maximum(total, 1e-30)[..., None]
    out = out.reshape(width, num_kv_heads, tile_tokens, group_size, head_dim).swapaxes(1, 2)
    return out.reshape(width, tile_tokens, num_heads, head_dim)


def _fill(like: jax.Array, shape: tuple[int, ...], value: float, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """A constant that counts as varying over the mesh axes `like` varies over, as loop carries in shard_map must."""
    nothing = jnp.where(False, like.reshape(-1)[0], 0).astype(dtype)  # folded away
    return jnp.full(shape, value, dtype) + nothing
