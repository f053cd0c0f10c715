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
    groups = _find_groups(ends, indices)
    first_rows = jnp.cumsum(sizes) - sizes
    starts = first_rows[groups] + (indices - (ends - per_group)[groups]) * rows
    return Tiles(groups, starts.astype(jnp.int32), ends[-1].astype(jnp.int32))


class Visits(NamedTuple):
    """Tiles on a grid of rows, each with the groups that have rows in it, one after the other."""

    groups: jax.Array  # [max_visits] i32
    tiles: jax.Array  # [max_visits] i32
    starts: jax.Array  # [max_visits] i32, the group's first row
    ends: jax.Array  # [max_visits] i32, the row behind its last
    count: jax.Array  # [] i32; behind the last visit, entries repeat it


def list_visits(sizes: jax.Array, num_rows: int, rows: int) -> Visits:
    """The visits of tiles of `rows` rows by groups of `sizes` rows, `num_rows` at most in all."""
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first_tiles = starts // rows
    per_group = jnp.where(sizes > 0, (ends - 1) // rows - first_tiles + 1, 0)
    visit_ends = jnp.cumsum(per_group)
    most = max(1, min(num_rows, -(-num_rows // rows) + sizes.shape[0] - 1))
    indices = jnp.minimum(jnp.arange(most, dtype=jnp.int32), jnp.maximum(visit_ends[-1] - 1, 0))
    groups = _find_groups(visit_ends, indices)
    tiles = first_tiles[groups] + indices - (visit_ends - per_group)[groups]
    fields = groups, tiles, starts[groups], ends[groups], visit_ends[-1]
    return Visits(*(field.astype(jnp.int32) for field in fields))


class Spans(NamedTuple):
    """Tiles of one group each, which begin at aligned rows. Behind the last one, entries repeat it."""

    groups: jax.Array  # [max_tiles] i32
    origins: jax.Array  # [max_tiles] i32, the tile's first row
    starts: jax.Array  # [max_tiles] i32, the first row that is the group's
    ends: jax.Array  # [max_tiles] i32, the row behind the last one
    count: jax.Array  # [] i32


def list_spans(sizes: jax.Array, num_rows: int, rows: int, alignment: int) -> Spans:
    """The tiles of `rows` rows for groups of `sizes` rows, `num_rows` at most in all: the first tile of a group begins
    at the last multiple of `alignment` before it, and no tile ends behind the next multiple after all rows, if that is
    not before the end of the first."""
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    origins = starts // alignment * alignment
    per_group = jnp.where(sizes > 0, (ends - origins + rows - 1) // rows, 0)
    tile_ends = jnp.cumsum(per_group)
    used = min(sizes.shape[0], num_rows)
    most = max(1, min(num_rows, used + (num_rows + used * (alignment - 1)) // rows))
    indices = jnp.minimum(jnp.arange(most, dtype=jnp.int32), jnp.maximum(tile_ends[-1] - 1, 0))
    groups = _find_groups(tile_ends, indices)
    firsts = origins[groups] + (indices - (tile_ends - per_group)[groups]) * rows
    last = max(0, -(-num_rows // alignment) * alignment - rows)
    fields = (
        groups,
        jnp.minimum(firsts, last),
        jnp.maximum(starts[groups], firsts),
        jnp.minimum(ends[groups], firsts + rows),
        tile_ends[-1],
    )
    return Spans(*(field.astype(jnp.int32) for field in fields))


def _find_groups(ends: jax.Array, indices: jax.Array) -> jax.Array:
    """The group of each entry, where group g's entries end at `ends[g]`."""
    groups = jnp.sum(ends[None, :] <= indices[:, None], axis=1, dtype=jnp.int32)
    return jnp.minimum(groups, ends.shape[0] - 1)


def choose_rows(num_rows: int, num_groups: int, *, least: int = 8, most: int = 128) -> int:
    """The rows of a tile: a power of two near those of a group, if all groups have as many."""
    return min(most, max(least, 1 << max(0, -(-num_rows // num_groups) - 1).bit_length()))
