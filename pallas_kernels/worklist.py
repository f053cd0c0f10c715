"""Work lists: the batch cut into tiles of queries, once per step, shared by all layers.

A tile is a run of consecutive new tokens of one row. Lists have a static length, the worst case of the bucket, and used
tiles come first: a loop with a traced bound never sees the unused ones. In the order "longest" the longest context
comes first, so neighbours have nearly equal work and a loop over groups of tiles wastes little. In the order "row"
tiles follow the text, for kernels that write a tile's keys before the next tile reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

_STATIC = {"static": True}
LONGEST, BY_ROW = "longest", "row"


@dataclass(frozen=True)
class StepRows:
    """The rows of one step, from which every list is made."""

    query_start_loc: jax.Array  # [S + 1] i32
    query_lens: jax.Array  # [S] i32, new tokens; 0 for padding rows
    seq_lens: jax.Array  # [S] i32, including the new tokens; 0 for padding rows
    distribution: jax.Array  # [3] i32, cumulative ends of (one-token, chunk, mixed) rows
    num_tokens: int  # T
    max_query_len: int | None  # most new tokens of any row; None if unknown
    max_len: int  # tokens that a row of the page table holds
    reach: int | None = 0  # keys behind its own that a query sees; None: all `seq_lens` keys of its row

    @property
    def is_decode(self) -> bool:
        """Whether no row has more than one new token."""
        return self.max_query_len == 1

    @property
    def max_rows(self) -> int:
        """The most rows that can have a new token in a step of the bucket."""
        return min(self.query_lens.shape[0], self.num_tokens)

    def lens_between(self, begin: int | jax.Array, end: int | jax.Array) -> jax.Array:
        """`query_lens` of the rows in [begin, end), 0 for all others: [S]."""
        index = jnp.arange(self.query_lens.shape[0])
        return jnp.where((index >= begin) & (index < end), self.query_lens, 0)

    def tokens_between(self, begin: int | jax.Array, end: int | jax.Array) -> jax.Array:
        """Which of the step's tokens are of the rows in [begin, end): [T] bool. Padding tokens are of none."""
        tokens = jnp.arange(self.num_tokens)
        return (tokens >= self.query_start_loc[begin]) & (tokens < self.query_start_loc[end])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileList:
    """Tiles of at most `tile_tokens` queries. They are attended in groups of `group`, of which n is a multiple."""

    rows: jax.Array  # [n] i32, the row of the tile
    starts: jax.Array  # [n] i32, index of its first query among the step's tokens
    counts: jax.Array  # [n] i32, queries in it; 0 for an unused tile
    # [n] i32, the last key that its first query sees, were the row without end: where the query is in the row's text,
    # plus its reach.
    positions: jax.Array
    lengths: jax.Array  # [n] i32, keys of the row
    num_groups: jax.Array  # [] i32, groups with a used tile
    tile_tokens: int = field(metadata=_STATIC)
    group: int = field(metadata=_STATIC)
    step: int = field(metadata=_STATIC, default=1)  # from the last key of a query to the next's; 0: all see the same

    @property
    def ends(self) -> jax.Array:
        """[n] i32, one past the last key that a query of the tile sees."""
        return jnp.minimum(self.positions + (self.counts if self.step else 1), self.lengths)

    @property
    def query_positions(self) -> jax.Array:
        """[n, tile_tokens] i32, the last key that each query sees, were the row without end."""
        return self.positions[:, None] + self.step * jnp.arange(self.tile_tokens, dtype=jnp.int32)


def list_token_tiles(rows: StepRows, query_lens: jax.Array, *, group: int) -> TileList:
    """One tile per row with a query; `query_lens` [S] is 0 for rows to leave out, else 1."""
    ids = jnp.arange(query_lens.shape[0], dtype=jnp.int32)
    columns = (ids, rows.query_start_loc[:-1], query_lens, rows.seq_lens - 1 + (rows.reach or 0), rows.seq_lens)
    return _finish(columns, tile_tokens=1, group=group, order=LONGEST)


def list_chunk_tiles(
    rows: StepRows, query_lens: jax.Array, *, tile_tokens: int, unit: int = 1, group: int = 1, order: str = LONGEST
) -> TileList:
    """Rows of any `query_lens` [S] cut every `tile_tokens` queries; 0 leaves a row out.

    All tiles of a row but its first begin at a multiple of `unit` among the step's tokens; its first ends where it
    would if it began at the multiple before. So a row of q tokens has at most 1 + (q + unit - 2) // tile_tokens tiles,
    and for each but the first at least tile_tokens - (unit - 2) tokens, or tile_tokens if unit is 1.
    """
    num_rows, num_tokens = query_lens.shape[0], rows.num_tokens
    max_rows = min(num_rows, num_tokens)
    spare = max(unit - 2, 0)
    num_tiles = max_rows + min((num_tokens + max_rows * spare) // tile_tokens, num_tokens // (tile_tokens - spare))
    skips = rows.query_start_loc[:-1] % unit  # [S], tokens of the row's first tile before its first query
    taken = jnp.where(query_lens > 0, query_lens + skips, 0)
    ends = jnp.cumsum((taken + tile_tokens - 1) // tile_tokens)  # [S], tiles up to and including the row's
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    ids = jnp.sum(ends[None, :] <= tiles[:, None], axis=1, dtype=jnp.int32)
    used = ids < num_rows
    ids = jnp.minimum(ids, num_rows - 1)
    before = jnp.where(ids > 0, ends[ids - 1], 0)  # tiles of earlier rows
    stop = (tiles - before + 1) * tile_tokens - skips[ids]  # queries of the row up to the end of the tile
    done = jnp.maximum(stop - tile_tokens, 0)  # and in its earlier tiles
    columns = (
        ids,
        rows.query_start_loc[ids] + done,
        jnp.where(used, jnp.minimum(query_lens[ids], stop) - done, 0),
        rows.seq_lens[ids] - (1 if rows.reach is None else query_lens[ids] - done - rows.reach),
        rows.seq_lens[ids],
    )
    step = 0 if rows.reach is None else 1
    return _finish(columns, tile_tokens=tile_tokens, group=group, order=order, step=step)


def _finish(columns: tuple[jax.Array, ...], *, tile_tokens: int, group: int, order: str, step: int = 1) -> TileList:
    """Pads (rows, starts, counts, positions, lengths) to whole groups and sorts them, unused tiles last."""
    group = min(group, columns[0].shape[0])
    padding = -columns[0].shape[0] % group
    padded = [jnp.pad(column.astype(jnp.int32), (0, padding)) for column in columns]
    _, _, counts, positions, _ = padded
    rank = -(positions + counts) if order == LONGEST else 0
    ranks = jnp.argsort(jnp.where(counts > 0, rank, 1), stable=True)
    num_groups = (jnp.sum(counts > 0, dtype=jnp.int32) + group - 1) // group
    return TileList(*(column[ranks] for column in padded), num_groups, tile_tokens, group, step)
