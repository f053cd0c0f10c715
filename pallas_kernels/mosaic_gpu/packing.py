"""Queries as the GPU kernels read them, and their answers in the order of the step's tokens.

A kernel reads the queries of a KV head as rows: the tokens of the first head of the group, then those of the next.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.spec import AttnShape, BatchMeta
from pallas_kernels.worklist import TileList


def count_query_rows(group_size: int, max_queries: int) -> int:
    """R: rows of a KV head's queries. A power of two, so that a product's rows hold whole heads; 8 at least, which is
    what swizzled shared memory is copied by."""
    return max(8, 1 << (group_size * max_queries - 1).bit_length())


def pack_queries(q: jax.Array, batch: BatchMeta, max_queries: int, width: int) -> jax.Array:
    """[T, N, H] -> [S, K, R, width]: row r of a KV head is query r % Qp of its row, of query head r // Qp in the group.

    R is `count_query_rows`. Rows without a query are copies of some other, or 0.
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
    padding = count_query_rows(group_size, max_queries) - group_size * max_queries
    return jnp.pad(found, ((0, 0), (0, 0), (0, padding), (0, width - head_dim)))


def unpack_queries(found: jax.Array, batch: BatchMeta, shape: tuple[int, ...], max_queries: int) -> jax.Array:
    """The reverse of `pack_queries`: [S, K, R, width] -> [T, N, H]; other tokens get something finite.

    R may be G * Qp: then nothing is copied if T = S and Qp = 1.
    """
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


def count_tile_tokens(shape: AttnShape, num_rows: int) -> int:
    """Queries in a tile of `num_rows` rows: a power of two, so that a kernel finds a row's query without dividing."""
    return 1 << ((num_rows // shape.group_size).bit_length() - 1)


def pack_tiles(q: jax.Array, tiles: TileList, shape: AttnShape, num_rows: int, width: int) -> jax.Array:
    """[T, N, H] -> [n, K, num_rows, width]: row r is query r % tile_tokens of a tile, of query head r // tile_tokens.

    Rows without a query are copies of some other, or 0.
    """
    num_tiles, tile_tokens = tiles.rows.shape[0], tiles.tile_tokens
    num_kv_heads, group_size, head_dim = shape.spec.num_kv_heads, shape.group_size, q.shape[-1]
    tokens = tiles.starts[:, None] + jnp.arange(tile_tokens, dtype=jnp.int32)  # [n, B]
    found = q.at[tokens].get(mode="clip").reshape(num_tiles, tile_tokens, num_kv_heads, group_size, head_dim)
    found = found.transpose(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, group_size * tile_tokens, head_dim)
    return jnp.pad(found, ((0, 0), (0, 0), (0, num_rows - found.shape[2]), (0, width - head_dim)))


def unpack_tiles(found: jax.Array, tiles: TileList, shape: tuple[int, ...]) -> jax.Array:
    """The reverse of `pack_tiles`: [n, K, num_rows, width] -> [T, N, H]; 0 for tokens in no tile.

    It gathers as many answers as the step has tokens, however long the list is.
    """
    num_tokens, num_heads, head_dim = shape
    num_tiles, num_kv_heads = found.shape[:2]
    group_size, tile_tokens = num_heads // num_kv_heads, tiles.tile_tokens
    index = jnp.arange(tile_tokens, dtype=jnp.int32)
    tokens = jnp.where(index < tiles.counts[:, None], tiles.starts[:, None] + index, num_tokens)  # [n, B]
    # Where each token's answer is: the number of its tile times tile_tokens plus its place there; -1 for none.
    places = jnp.arange(num_tiles * tile_tokens, dtype=jnp.int32)
    places = jnp.full((num_tokens,), -1, jnp.int32).at[tokens.reshape(-1)].set(places, mode="drop")

    found = found[:, :, : group_size * tile_tokens, :head_dim]
    found = found.reshape(num_tiles, num_kv_heads, group_size, tile_tokens, head_dim).transpose(0, 3, 1, 2, 4)
    found = found.reshape(num_tiles * tile_tokens, num_heads, head_dim)
    return jnp.where((places >= 0)[:, None, None], found.at[jnp.maximum(places, 0)].get(mode="clip"), 0)
