"""The blocks that the decode kernel attends to, in their order, and the copies of their pages, which run ahead.

A group is as many neighbours as may be attended together. First comes a block with all pages of its short rows, if it
has any, then the blocks of each long row.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.pages import PageBlocks, Ref, Scalar, divide

NUM_STATES = 5
_ROW, _PART, _INDEX, _IS_SHORT, _ATTENDED = range(NUM_STATES)  # all but the last describe the next block to copy


def plan_groups(
    seq_lens: jax.Array,  # [R] i32
    num_rows: jax.Array,  # [] i32
    *,
    page_size: int,
    window: int | None,
    together: int,  # rows of a group, which divide R
    share: int,  # the most pages of a short row
) -> jax.Array:
    """[R + R / together] i32: for each row the first one of its group from there on that is not short, or the next
    group; then for each group whether it has short rows. Rows that do not exist are not short.

    It is the same for all layers, so XLA computes it once in a step.
    """
    rows = jnp.arange(seq_lens.shape[0], dtype=jnp.int32)
    is_short = (rows < num_rows) & (_find_span(seq_lens, page_size, window)[2] <= share)
    groups = (-1, together)
    ends = rows - rows % together + together
    following = lax.cummin(jnp.where(is_short, ends, rows).reshape(groups), axis=1, reverse=True)
    return jnp.concatenate([following.reshape(-1), is_short.reshape(groups).any(axis=1).astype(jnp.int32)])


def _find_span(length: jax.Array, page_size: int, window: int | None) -> tuple[Scalar, Scalar, Scalar]:
    begin = 0 if window is None else jnp.maximum(length - window, 0)
    first = divide(begin, page_size)
    return begin, first, divide(length + page_size - 1, page_size) - first


@dataclass(frozen=True)
class RowBlocks:
    """The blocks of the rows [0, num_rows)."""

    blocks: PageBlocks
    seq_lens: Ref  # [R] i32, SMEM
    num_rows: Scalar
    groups: Ref  # of `plan_groups`, SMEM
    state: Ref  # [NUM_STATES] i32, SMEM
    window: int | None
    together: int  # rows of a group
    share: int  # pages of a block for each of a group's short rows

    def find_span(self, row: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """First key that the row sees, the page it is in, and the number of pages from there on."""
        return _find_span(self.seq_lens[row], self.blocks.page_size, self.window)

    def is_short(self, row: Scalar) -> jax.Array:
        """Whether a row exists and is attended with others."""
        return self.groups[row] != row

    def has_short(self, first: Scalar) -> jax.Array:
        """Whether the group that begins with a row has short ones."""
        return self.groups[self.seq_lens.shape[0] + divide(first, self.together)] == 1

    def find_long(self, row: Scalar) -> Scalar:
        """The first row of the group from `row` on that is not short, or the next group's first."""
        return self.groups[row]

    def begin(self) -> None:
        """Starts the copies of as many blocks as may run ahead."""
        for place in (_ROW, _PART, _INDEX, _ATTENDED):
            self.state[place] = 0
        self.state[_IS_SHORT] = self.has_short(0).astype(jnp.int32)
        for _ in range(self.blocks.buffers.shape[0] - 1):
            self._fetch()

    def advance(self) -> Scalar:
        """Goes on to the next block: starts the copies of another one, and returns the buffer of this one."""
        self._fetch()
        index = self.state[_ATTENDED]
        self.state[_ATTENDED] = index + 1
        return lax.rem(index, self.blocks.buffers.shape[0])

    def _go_on(self, row: Scalar, end: Scalar) -> None:
        """To the next long row of a group from `row` on, or else to the next group, which begins at `end`."""
        last = self.seq_lens.shape[0] - 1
        following = jnp.where(row < end, self.find_long(jnp.minimum(row, last)), end)
        self.state[_ROW], self.state[_PART] = following, 0
        is_short = (following == end) & self.has_short(jnp.minimum(end, last))
        self.state[_IS_SHORT] = is_short.astype(jnp.int32)

    def _fetch(self) -> None:
        """Starts the copies of the next block, if there is one."""
        row, index = self.state[_ROW], self.state[_INDEX]
        slot = lax.rem(index, self.blocks.buffers.shape[0])

        def fetch_short() -> None:
            def fetch_row(lane: jax.Array, carry: int) -> int:
                @pl.when(self.is_short(row + lane))
                def _fetch() -> None:
                    _, first, count = self.find_span(row + lane)
                    self.blocks.start(slot, row + lane, first, count, place=lane * self.share, unroll=2)

                return carry

            lax.fori_loop(0, self.together, fetch_row, 0)
            self._go_on(row, row + self.together)

        def fetch_part() -> None:
            _, first, count = self.find_span(row)
            part, block_pages = self.state[_PART], self.blocks.block_pages
            done = part * block_pages
            self.blocks.start(slot, row, first + done, jnp.minimum(count - done, block_pages))
            self.state[_PART] = part + 1
            end = divide(row, self.together) * self.together + self.together
            pl.when(done + block_pages >= count)(lambda: self._go_on(row + 1, end))

        @pl.when(row < self.num_rows)
        def _fetch() -> None:
            is_short = self.state[_IS_SHORT] == 1
            pl.when(is_short)(fetch_short)
            pl.when(jnp.logical_not(is_short))(fetch_part)
            self.state[_INDEX] = index + 1
