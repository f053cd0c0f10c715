"""Cuts the rows of a grouped product into tiles, each of one group."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """Tiles in the order of their rows. Behind the last one, entries repeat it."""

    groups: jax.Array  # [max_tiles] i32
    starts: jax.Array  # [max_tiles] i32, the tile's first row
    count: jax.Array  # [] i32


def count_most_tiles(num_rows: int, num_groups: int, rows: int) -> int:
    """The most tiles of `rows` rows that any sizes of `num_groups` groups give."""
    return min(num_rows, num_rows // rows + num_groups)


def list_tiles(sizes: jax.Array, num_rows: int, rows: int) -> Tiles:
    """The tiles of groups of `sizes` rows, `num_rows` at most in all; the last tile of a group may be short."""
    per_group = -(-sizes // rows)
    ends = jnp.cumsum(per_group)
    indices = jnp.arange(max(1, count_most_tiles(num_rows, sizes.shape[0], rows)), dtype=jnp.int32)
    indices = jnp.minimum(indices, jnp.maximum(ends[-1] - 1, 0))
    groups = jnp.sum(ends[None, :] <= indices[:, None], axis=1, dtype=jnp.int32)
    groups = jnp.minimum(groups, sizes.shape[0] - 1)
    first_rows = jnp.cumsum(sizes) - sizes
    starts = first_rows[groups] + (indices - (ends - per_group)[groups]) * rows
    return Tiles(groups, starts.astype(jnp.int32), ends[-1].astype(jnp.int32))


def choose_rows(num_rows: int, num_groups: int, *, least: int = 8, most: int = 128) -> int:
    """The rows of a tile: a power of two near those of a group, if all groups have as many."""
    return min(most, max(least, 1 << max(0, -(-num_rows // num_groups) - 1).bit_length()))
