"""Work lists: the batch cut into tiles of queries, once per step, shared by all layers.

A tile is a run of consecutive new tokens of one row. Lists have a static length (the worst case of the bucket), the
used tiles first, longest context first: neighbours then have nearly equal work, so a loop over groups of tiles wastes
little, and a loop with a traced bound never sees the unused ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp

_STATIC = {"static": True}


@partial(jax.tree_util.register_dataclass)
@dataclass(frozen=True)
class TileList:
    """Tiles of at most `tile_tokens` queries; `group` of them are worked on together and n is a multiple of it."""

    rows: jax.Array  # [n] i32, whose pages the tile reads
    starts: jax.Array  # [n] i32, index of its first query among the step's tokens
    counts: jax.Array  # [n] i32, queries in it; 0 for an unused tile
    positions: jax.Array  # [n] i32, position of its first query in the row's text
    num_groups: jax.Array  # [] i32, groups with a used tile
    tile_tokens: int = field(metadata=_STATIC)
    group: int = field(metadata=_STATIC)


def list_token_tiles(query_start_loc: jax.Array, query_lens: jax.Array, seq_lens: jax.Array, *, group: int) -> TileList:
    """One tile per row with a query; `query_lens` [S] is 0 for rows to leave out, else 1."""
    rows = jnp.arange(query_lens.shape[0], dtype=jnp.int32)
    return _sort_tiles(rows, query_start_loc[:-1], query_lens, seq_lens - 1, tile_tokens=1, group=group)


def list_chunk_tiles(
    query_start_loc: jax.Array,
    query_lens: jax.Array,
    seq_lens: jax.Array,
    *,
    num_tokens: int,
    tile_tokens: int,
    group: int,
) -> TileList:
    """Rows of any `query_lens` [S] cut every `tile_tokens` queries.

    n non-empty rows need at most num_tokens // tile_tokens + n tiles, because a row of q tokens needs
    (q - 1) // tile_tokens + 1 of them.
    """
    num_rows = query_lens.shape[0]
    num_tiles = num_tokens // tile_tokens + min(num_rows, num_tokens)
    ends = jnp.cumsum((query_lens + tile_tokens - 1) // tile_tokens)  # [S], tiles up to and with the row
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    rows = jnp.sum(ends[None, :] <= tiles[:, None], axis=1, dtype=jnp.int32)
    used = rows < num_rows
    rows = jnp.minimum(rows, num_rows - 1)
    before = jnp.where(rows > 0, ends[rows - 1], 0)  # tiles of earlier rows
    done = (tiles - before) * tile_tokens  # queries of the row in its earlier tiles
    return _sort_tiles(
        rows,
        query_start_loc[rows] + done,
        jnp.where(used, jnp.clip(query_lens[rows] - done, 0, tile_tokens), 0),
        seq_lens[rows] - query_lens[rows] + done,
        tile_tokens=tile_tokens,
        group=group,
    )


def _sort_tiles(
    rows: jax.Array, starts: jax.Array, counts: jax.Array, positions: jax.Array, *, tile_tokens: int, group: int
) -> TileList:
    group = min(group, rows.shape[0])
    padding = -rows.shape[0] % group
    columns = [jnp.pad(column.astype(jnp.int32), (0, padding)) for column in (rows, starts, counts, positions)]
    _, _, counts, positions = columns
    order = jnp.argsort(jnp.where(counts > 0, -(positions + counts), 1))
    num_groups = (jnp.sum(counts > 0, dtype=jnp.int32) + group - 1) // group
    rows, starts, counts, positions = (column[order] for column in columns)
    return TileList(rows, starts, counts, positions, num_groups, tile_tokens, group)
