"""The blocks that the decode kernel attends to, in their order, and the copies of their pages, which run ahead.

A group is as many neighbours as may be attended together. First comes a block with all pages of its short rows, if it
has any, then the blocks of each long row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.tpu.pages import PageBlocks, Ref, Scalar, divide

# Places in `RowBlocks.state`. The first four describe the next block to copy.
_ROW, _PART, _INDEX, _IS_SHORT, _ATTENDED, _NEXT_LONG = range(6)


def count_state(together: int) -> int:
    """Numbers that `RowBlocks` keeps for groups of `together` rows."""
    return _NEXT_LONG + together + 1


@dataclass(frozen=True)
class RowBlocks:
    """The blocks of the rows [0, num_rows)."""

    blocks: PageBlocks
    seq_lens: Ref  # [R] i32, SMEM; R a multiple of `together`
    num_rows: Scalar
    state: Ref  # [count_state(together)] i32, SMEM
    window: int | None
    together: int  # rows of a group
    share: int  # pages of a block for each of a group's short rows

    def find_span(self, row: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """First key that the row sees, the page it is in, and the number of pages from there on."""
        length, page_size = self.seq_lens[row], self.blocks.page_size
        begin = 0 if self.window is None else jnp.maximum(length - self.window, 0)
        first = divide(begin, page_size)
        return begin, first, divide(length + page_size - 1, page_size) - first

    def is_short(self, row: Scalar) -> jax.Array:
        """Whether a row exists and is attended with others."""
        return (row < self.num_rows) & (self.find_span(row)[2] <= self.share)

    def list_short(self, first: Scalar) -> list[jax.Array]:
        """`is_short` of the rows of a group."""
        return [self.is_short(first + lane) for lane in range(self.together)]

    def begin(self) -> None:
        """Starts the copies of as many blocks as may run ahead."""
        for place in (_ROW, _PART, _INDEX, _ATTENDED):
            self.state[place] = 0
        self._begin_group(0)
        for _ in range(self.blocks.buffers.shape[0] - 1):
            self._fetch()

    def advance(self) -> Scalar:
        """Goes on to the next block: starts the copies of another one, and returns the buffer of this one."""
        self._fetch()
        index = self.state[_ATTENDED]
        self.state[_ATTENDED] = index + 1
        return lax.rem(index, self.blocks.buffers.shape[0])

    def _begin_group(self, first: Scalar) -> None:
        """Keeps whether a group has short rows, and for each of its lanes, and behind the last, the next lane from
        there on whose row is not short."""
        flags, following = self.list_short(first), self.together
        self.state[_IS_SHORT] = functools.reduce(jnp.logical_or, flags).astype(jnp.int32)
        self.state[_NEXT_LONG + self.together] = self.together
        for lane in reversed(range(self.together)):
            following = jnp.where(flags[lane], following, lane)
            self.state[_NEXT_LONG + lane] = following

    def _go_on(self, first: Scalar, lane: Scalar) -> None:
        """To the next long row of the group that begins at `first`, or else to the next group."""
        row = first + self.state[_NEXT_LONG + lane]
        self.state[_ROW], self.state[_PART], self.state[_IS_SHORT] = row, 0, 0
        pl.when((row == first + self.together) & (row < self.num_rows))(lambda: self._begin_group(row))

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
            self._go_on(row, 0)

        def fetch_part() -> None:
            _, first, count = self.find_span(row)
            part, block_pages = self.state[_PART], self.blocks.block_pages
            done = part * block_pages
            self.blocks.start(slot, row, first + done, jnp.minimum(count - done, block_pages))
            self.state[_PART] = part + 1
            group = divide(row, self.together) * self.together
            pl.when(done + block_pages >= count)(lambda: self._go_on(group, row + 1 - group))

        @pl.when(row < self.num_rows)
        def _fetch() -> None:
            is_short = self.state[_IS_SHORT] == 1
            pl.when(is_short)(fetch_short)
            pl.when(jnp.logical_not(is_short))(fetch_part)
            self.state[_INDEX] = index + 1
