"""Queries of chunks as the kernel reads them, and its answers in the order of the step's tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.decode import round_up
from pallas_kernels.spec import AttnShape
from pallas_kernels.worklist import TileList


def pack_tiles(q: jax.Array, tiles: TileList, shape: AttnShape, width: int) -> jax.Array:
    """[T, N, H] -> [n, K, R, width]: row r is query r % tile_tokens of a tile, of query head r // tile_tokens.

    R is G * tile_tokens rounded up to a multiple of 8. What is no query is a copy of some other, or 0.
    """
    num_tiles, tile_tokens = tiles.rows.shape[0], tiles.tile_tokens
    num_kv_heads, group_size, head_dim = shape.spec.num_kv_heads, shape.group_size, q.shape[-1]
    tokens = tiles.starts[:, None] + jnp.arange(tile_tokens, dtype=jnp.int32)  # [n, B]
    found = q.at[tokens].get(mode="clip").reshape(num_tiles, tile_tokens, num_kv_heads, group_size, head_dim)
    found = found.transpose(0, 2, 3, 1, 4).reshape(num_tiles, num_kv_heads, group_size * tile_tokens, head_dim)
    padding = round_up(found.shape[2], 8) - found.shape[2]
    return jnp.pad(found, ((0, 0), (0, 0), (0, padding), (0, width - head_dim)))


def unpack_tiles(found: jax.Array, tiles: TileList, shape: tuple[int, ...]) -> jax.Array:
    """The reverse, [n, K, R, >= H] -> [T, N, H] of `shape`: 0 for tokens in no tile."""
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
