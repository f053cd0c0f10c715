"""Copies of pages between the pool in HBM and buffers in VMEM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

Ref = Any  # Pallas has no public type for what a kernel gets
Scalar = int | jax.Array
UNROLL = 8


def repeat(count: Scalar, act: Callable[[Scalar], None], *, unroll: int | None = None) -> None:
    """Calls `act` for 0..count - 1, `unroll` (UNROLL) per turn of the loop: a branch costs more than a copy's start."""
    unroll = unroll or UNROLL

    def act_on_group(group: jax.Array, carry: int) -> int:
        for index in range(unroll):
            act(group * unroll + index)
        return carry

    def act_on_one(index: jax.Array, carry: int) -> int:
        act(index)
        return carry

    # With `divide`, whose shift bounds the count, the compiler takes 70 s for the chunk kernel in place of 4 (v6e).
    whole = count // unroll if isinstance(count, int) else lax.div(count, unroll)
    if not isinstance(count, int) or whole:
        lax.fori_loop(0, whole, act_on_group, 0)
    if not isinstance(count, int) or count % unroll:
        lax.fori_loop(whole * unroll, count, act_on_one, 0)


def divide(value: Scalar, by: int) -> Scalar:
    """value // by, of a value that is not negative: then a power of two needs one instruction and not six."""
    if isinstance(value, int):
        return value // by
    return lax.shift_right_logical(value, by.bit_length() - 1) if by & (by - 1) == 0 else lax.div(value, by)


def wait_copy(copy: Any) -> None:
    """Waits for an asynchronous copy. All waits of the kernels go through here, so that tests can leave one out."""
    copy.wait()


@dataclass(frozen=True)
class PageBlocks:
    """Blocks of consecutive pages of a row, on their way into a ring of buffers."""

    pool: Ref  # [num_pages, rows of a page, page_size, width], HBM
    table: Ref  # [S * M] i32, SMEM
    table_width: int  # M
    page_offset: Scalar
    buffers: Ref  # [num_buffers, rows of a page, block tokens, width], VMEM
    arrived: Ref  # [num_buffers] semaphores

    @property
    def page_size(self) -> int:
        return self.pool.shape[2]

    @property
    def block_pages(self) -> int:
        return self.buffers.shape[2] // self.page_size

    def find_page(self, row: Scalar, index: Scalar) -> Scalar:
        """Id in the pool of a row's page."""
        return self.table[row * self.table_width + index] + self.page_offset

    def _copy_page(self, slot: Scalar, page: Scalar, index: Scalar) -> Any:
        begin = pl.multiple_of(index * self.page_size, self.page_size)
        place = self.buffers.at[slot, :, pl.ds(begin, self.page_size), :]
        return pltpu.make_async_copy(self.pool.at[page], place, self.arrived.at[slot])

    def start(
        self,
        slot: Scalar,
        row: Scalar,
        first_page: Scalar,
        count: Scalar,
        *,
        place: Scalar = 0,
        unroll: int | None = None,
    ) -> None:
        """Starts copying `count` pages of a row to the pages of a buffer from `place` on."""

        def start_page(index: Scalar) -> None:
            self._copy_page(slot, self.find_page(row, first_page + index), place + index).start()

        repeat(count, start_page, unroll=unroll)

    def wait(self, slot: Scalar, count: Scalar) -> None:
        """Waits for `count` pages."""

        @pl.when(count == self.block_pages)
        def _wait_for_all() -> None:
            whole = self.buffers.at[slot]
            wait_copy(pltpu.make_async_copy(whole, whole, self.arrived.at[slot]))

        @pl.when(count < self.block_pages)
        def _wait_for_each() -> None:
            repeat(count, lambda index: wait_copy(self._copy_page(slot, 0, index)))

    def clean(self, slot: Scalar, begin: Scalar, end: Scalar, count: Scalar, *, joined: bool) -> None:
        """Zeroes a buffer's values outside of its tokens [begin, end), up to `count` pages; `begin` is in the first.

        An unused slot may hold NaN, which a weight of 0 would not remove. Its key needs no cleaning: the score is
        replaced. `joined` rows hold keys and values.
        """
        rows = range(self.buffers.shape[1]) if joined else range(1, self.buffers.shape[1], 2)

        def clean_page(index: Scalar) -> None:
            first = pl.multiple_of(index * self.page_size, self.page_size)
            tokens = first + lax.broadcasted_iota(jnp.int32, (self.page_size, self.buffers.shape[3]), 0)
            is_held = (tokens >= begin) & (tokens < end)

            def clean_row(index: Scalar) -> None:
                place = (slot, rows.start + index * rows.step, pl.ds(first, self.page_size), slice(None))
                held = self.buffers[place]
                self.buffers[place] = jnp.where(is_held, held, jnp.zeros_like(held))

            repeat(len(rows), clean_row)

        @pl.when(begin > 0)
        def _clean_first() -> None:
            clean_page(0)

        def clean_next(index: jax.Array, carry: int) -> int:
            clean_page(index)
            return carry

        lax.fori_loop(end // self.page_size, count, clean_next, 0)
