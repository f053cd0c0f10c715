"""Tiles of keys as all GPU kernels see them: where their pages are, and which keys a query sees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.spec import AttnParams

MASKED = -1e30  # finite, so that a query without keys stays finite
LOG2_E = math.log2(math.e)
COUNT = 7  # column of a fixed list's units: the number of all units, beside the columns of splits.py and units.py

Ids = tuple[jax.Array, ...]


class Span(Protocol):
    """The keys that the queries of a block see; scalars."""

    @property
    def row(self) -> jax.Array:
        """The line of the page table."""

    @property
    def first_tile(self) -> jax.Array:
        """The first of the row's tiles that the block reads."""

    @property
    def length(self) -> jax.Array:
        """Tokens up to and including the last query's."""

    @property
    def begin(self) -> jax.Array:
        """Position of the first query."""


@dataclass(frozen=True)
class KeyTiles:
    """The static parameters of a kernel whose blocks read their row's keys tile by tile.

    Row r of a tile's scores is query r % max_queries of the block's span; `start` is the position of its first key.
    """

    params: AttnParams
    num_rows: int  # R
    width: int  # elements of a stored head
    page_size: int
    max_queries: int  # Qp
    dtype: jnp.dtype  # queries', weights' and outputs'
    page_dtype: jnp.dtype
    has_k_scale: bool
    tile_tokens: int
    stages: int
    num_blocks: int | None  # of SplitList: blocks that share a fixed list of units; None: a block attends one unit
    interpret: bool

    @property
    def partial_dtype(self) -> jnp.dtype:
        """The dtype of a unit's answers."""
        return self.dtype if self.num_blocks is None else jnp.dtype(jnp.float32)

    def fit_partials(self, columns: int) -> int:
        """Columns of answers that fit the memory of so many columns of queries."""
        return columns * jnp.dtype(self.dtype).itemsize // self.partial_dtype.itemsize

    def count_rounds(self, units: jax.Ref, slot: jax.Array) -> jax.Array:
        """How many units of a fixed list a block attends: those in `slot`, slot + num_blocks, and so on."""
        assert self.num_blocks is not None
        return lax.div(units[0, COUNT] - slot + (self.num_blocks - 1), self.num_blocks)

    @property
    def is_narrow(self) -> bool:
        """Whether pages have 8 bits and are widened after they arrive."""
        return self.page_dtype != self.dtype

    @property
    def box(self) -> int:
        """Tokens of one copy: a page, or as much of one as a tile takes."""
        return min(self.page_size, self.tile_tokens)

    def find_pages(self, index: jax.Array, span: Span, table: jax.Ref, offset: jax.Array, num_pages: int) -> Ids:
        """The pages of a tile. Past the row's last page they are that one again, and masked."""
        start = (span.first_tile + index) * self.tile_tokens
        last = lax.div(span.length - 1, self.page_size)
        columns = [lax.div(start + box, self.page_size) for box in range(0, self.tile_tokens, self.box)]
        found = [table[span.row, jnp.minimum(column, last)] for column in columns]
        return tuple(jnp.clip(page + offset, 0, num_pages - 1) for page in found)

    def scale_scores(self, scores: jax.Array, factor: float | jax.Array) -> jax.Array:
        """Raw scores to base 2, through the soft cap."""
        if self.params.softcap is None:
            return scores * (factor * LOG2_E)
        return jnp.tanh(scores * (factor / self.params.softcap)) * (self.params.softcap * LOG2_E)

    def finish_scores(self, scores: jax.Array, factor: float | jax.Array, start: jax.Array, span: Span) -> jax.Array:
        """Raw scores to base 2, those of keys that a query does not see to MASKED."""
        scores = self.scale_scores(scores, factor)
        mask = partial(self.mask, start, span)
        if (
            self.params.softcap is not None
        ):  # a branch and the soft cap would together need more registers than there are
            return mask(scores)
        return lax.cond(self.is_edge(start, span), mask, lambda scores: scores, scores)

    def is_edge(self, start: jax.Array, span: Span) -> jax.Array:
        """Whether some query does not see all of the tile."""
        edge = start + self.tile_tokens > span.begin + 1
        if self.params.window is not None:
            edge |= start < span.length - self.params.window
        return edge

    def mask(self, start: jax.Array, span: Span, scores: jax.Array) -> jax.Array:
        """Scores of keys that a query does not see become MASKED."""
        keys = compat.iota(scores.shape, 1)
        last = span.length - 1 - start  # seen by the last query, in keys of the tile
        if self.max_queries > 1:
            queries = compat.iota(scores.shape, 0) & (self.max_queries - 1)
            last = jnp.minimum(queries + (span.begin - start), last)
        seen = keys <= last
        if self.params.window is not None:
            seen &= keys > last - self.params.window
        return jnp.where(seen, scores, MASKED)

    def holds_strangers(self, start: jax.Array, span: Span) -> jax.Array:
        """Whether the tile has slots that no query sees: they may hold NaN."""
        strange = start + self.tile_tokens > span.length
        if self.params.window is not None:
            strange |= start <= span.begin - self.params.window
        return strange

    def is_held(self, keys: jax.Array, start: jax.Array, span: Span) -> jax.Array:
        """Whether some query sees a key, given its number in the tile. A weight of 0 does not remove a value of NaN."""
        held = keys < span.length - start
        if self.params.window is not None:
            held &= keys > span.begin - start - self.params.window
        return held
