"""The memory warpgroup of the prefill kernel, which walks a tile's keys and fills the ring by TMA, page by page."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.prefill_place import Place
from pallas_kernels.hopper.prefill_static import FIRST, PIECE, ROW, Operands, Scratch, Span, Static, find_span
from pallas_kernels.mosaic_gpu import compat

KEYS, VALUES = 0, 1


class _Loader(NamedTuple):
    """The memory warpgroup at work on a unit. Key tiles are counted in steps, from the unit's first."""

    static: Static
    operands: Operands
    buffers: Scratch
    span: Span
    tile: jax.Array
    head: jax.Array
    row: jax.Array
    used: jax.Array  # slots of the ring that held key tiles of earlier units; all, if it is more than there are

    def find_pages(self, step: jax.Array) -> list[jax.Array]:
        """Pool indices of a key tile's pages. Past the row's tokens they may be any pages: those keys are masked."""
        static, table, block = self.static, self.operands.page_table, self.span.first + step
        if static.page_size > static.keys:
            indices = [lax.div(block * static.keys, static.page_size)]
        else:
            indices = [block * static.boxes + box for box in range(static.boxes)]
        offset, widest = self.operands.page_offset[0], table.shape[1] - 1
        return [table[self.row, jnp.minimum(index, widest)] + offset for index in indices]

    def copy_pages(
        self,
        pages: list[jax.Array],
        step: jax.Array,
        kind: int,
        target: jax.Ref,  # [keys, H]
        barrier: jax.Ref,
    ) -> None:
        """Starts the copies of a key tile's KEYS or VALUES."""
        static = self.static
        for box, page in enumerate(pages):
            source = self.operands.kv_pages.at[page, 2 * self.head + kind]
            if static.page_size > static.keys:
                begin = pl.multiple_of(lax.rem((self.span.first + step) * static.keys, static.page_size), static.keys)
                source = source.at[pl.ds(begin, static.keys)]
            compat.copy_gmem_to_smem(source, target.at[pl.ds(box * static.box, static.box)], barrier)

    def find_slot(self, step: jax.Array) -> jax.Array:
        return lax.rem(step, self.static.stages)

    def await_slot(self, free: jax.Ref, step: jax.Array) -> None:
        """Until the step's slot is free, if it has held a key tile before."""
        was_used = (step >= self.static.stages) | (step < self.used)
        pl.when(was_used)(lambda: compat.barrier_wait(free.at[self.find_slot(step)]))

    def fetch_queries(self) -> None:
        """Starts the copies of the tile's queries from where they lie, one for each head of the group."""
        static, buffers = self.static, self.buffers
        first = pl.multiple_of(self.operands.units[self.tile, FIRST], compat.SWIZZLE_ROWS)
        for member in range(static.group_size):
            source = self.operands.q.at[pl.ds(first, static.tile_tokens), self.head * static.group_size + member]
            rows = pl.ds(member * static.tile_tokens, static.tile_tokens)
            compat.copy_gmem_to_smem(source, buffers.q.at[rows], buffers.q_full)

    def fetch_first_queries(self) -> None:
        """Before the ring is filled: the block's first queries."""
        if self.static.num_blocks is None:
            self.fetch_queries()
        else:
            pl.when(self.used == 0)(self.fetch_queries)

    def fetch_next_queries(self) -> None:
        """When the ring is full: queries of a later unit, whose memory has answers of the one before until now."""
        if self.static.num_blocks is not None:

            @pl.when(self.used > 0)
            def _() -> None:
                compat.barrier_wait(self.buffers.q_free)
                self.fetch_queries()


def load_unit(static: Static, operands: Operands, buffers: Scratch, place: Place, used: jax.Array) -> jax.Array:
    """Fetches a unit's queries, keys and values. Returns `used`, which `_Loader` has, for the next unit."""
    tile = place.read_tile()
    span = find_span(static, operands, tile)
    work = _Loader(static, operands, buffers, span, tile, place.read_head(), operands.units[tile, ROW], used)
    work.fetch_first_queries()
    (_load_narrow if static.is_narrow else _load_plain)(work)
    return jnp.maximum(used, span.steps)


def write_numbers(buffers: Scratch) -> None:
    """Writes the numbers of a tile's keys, where masks read them from memory, before the queries arrive."""
    if buffers.numbers is not None:
        layout = compat.WGMMA.reduce(0)
        buffers.numbers[...] = plgpu.broadcasted_iota(jnp.int32, buffers.numbers.shape, 0, layout=layout)
        compat.commit_smem()


def await_reads(static: Static, buffers: Scratch, used: jax.Array) -> None:
    """Waits until nothing is read that was fetched: the interpreter of JAX 0.11 wants every completion awaited."""

    @pl.loop(0, jnp.minimum(used, static.stages))
    def _(slot: jax.Array) -> None:
        compat.barrier_wait(buffers.k_free.at[slot])
        compat.barrier_wait(buffers.v_free.at[slot])

    if static.num_blocks is not None:
        pl.when(used > 0)(lambda: compat.barrier_wait(buffers.q_free))


def _load_plain(work: _Loader) -> None:
    """Fills the ring from pages of q's dtype. Keys are a step ahead of values, as they are where they are used.

    Values that no query may see can be NaN, which a weight of 0 does not remove. Only the first and the last key tile
    have such values. This warpgroup overwrites them, as it alone has time: values are awaited late, after scores and
    softmax. These two tiles arrive on barriers of their own, and arrive at v_full once they are clean.
    """
    static, buffers, span = work.static, work.buffers, work.span
    cut_first = lax.rem(span.begin, static.keys) > 0
    cut_last = lax.rem(span.end, static.keys) > 0

    def issue_keys(step: jax.Array, pages: list[jax.Array]) -> None:
        slot = work.find_slot(step)
        work.copy_pages(pages, step, KEYS, buffers.k.at[slot], buffers.k_full.at[slot])

    def issue_values(step: jax.Array, pages: list[jax.Array]) -> None:
        values = buffers.v.at[work.find_slot(step)]
        is_last = (step == span.steps - 1) & cut_last
        is_edge = is_last if static.window is None else is_last | ((step == 0) & cut_first)

        @pl.when(is_edge)
        def _() -> None:
            edge = buffers.v_edge.at[jnp.where(step == span.steps - 1, 1, 0)]
            work.copy_pages(pages, step, VALUES, values, edge)

        @pl.when(~is_edge)
        def _() -> None:
            work.copy_pages(pages, step, VALUES, values, buffers.v_full.at[work.find_slot(step)])

    def fill(step: jax.Array, pages: list[jax.Array]) -> list[jax.Array]:
        following = work.find_pages(step + 1)  # before the waits: they hide the latency of the reads

        @pl.when(step + 1 < span.steps)
        def _() -> None:
            work.await_slot(buffers.k_free, step + 1)
            issue_keys(step + 1, following)

        work.await_slot(buffers.v_free, step)
        issue_values(step, pages)
        return following

    def clean(step: jax.Array, edge: int) -> None:
        slot = work.find_slot(step)
        compat.barrier_wait(buffers.v_edge.at[edge])
        _clean_values(static, buffers.v.at[slot], span, span.first + step)
        for _ in range(static.boxes):
            compat.barrier_arrive(buffers.v_full.at[slot])

    start = span.steps * 0
    pages = work.find_pages(start)
    work.await_slot(buffers.k_free, start)
    issue_keys(start, pages)
    ahead = jnp.minimum(span.steps, static.stages) - 1
    pages = lax.fori_loop(0, ahead, fill, pages)
    work.fetch_next_queries()
    clean_last = cut_last
    if static.window is not None:
        is_only = span.steps == 1
        pl.when(cut_first & ~is_only)(lambda: clean(start, 0))
        clean_last = cut_last | (cut_first & is_only)
    lax.fori_loop(ahead, span.steps, fill, pages)
    pl.when(clean_last)(lambda: clean(span.steps - 1, 1))


def _clean_values(static: Static, values: jax.Ref, span: Span, block: jax.Array) -> None:
    """Writes 0 over values [keys, H] of positions outside the span.

    The commit makes the zeros visible to the tensor cores. The interpreter cannot find a missing one: there, a product
    reads shared memory like any other instruction.
    """
    for row in range(0, static.keys, PIECE):
        base = block * static.keys + row

        @pl.when((base < span.begin) | (base + PIECE > span.end))
        def _(row: int = row, base: jax.Array = base) -> None:
            is_key = compat.spread(_find_keys(static, span, base), (PIECE, PIECE))
            for column in range(0, static.width, PIECE):
                piece = values.at[pl.ds(row, PIECE), pl.ds(column, PIECE)]
                piece[...] = jnp.where(is_key, piece[...], jnp.zeros((), values.dtype))

    compat.commit_smem()


def _load_narrow(work: _Loader) -> None:
    """Fills the ring from 8-bit pages, through a ring of their own.

    Hopper's tensor cores take 8-bit values only with the keys contiguous, which they are not in pages. So this
    warpgroup widens keys and values, and drops the values that no query may see.
    """
    static, buffers, span = work.static, work.buffers, work.span
    raw_rings = (buffers.raw_k, buffers.raw_k_full), (buffers.raw_v, buffers.raw_v_full)
    rings = (buffers.k, buffers.k_full, buffers.k_free), (buffers.v, buffers.v_full, buffers.v_free)

    def issue(step: jax.Array, kind: int) -> None:
        slot, (target, full) = lax.rem(step, static.raw_stages), raw_rings[kind]
        work.copy_pages(work.find_pages(step), step, kind, target.at[slot], full.at[slot])

    def widen(step: jax.Array, kind: int) -> None:
        slot, raw_slot = work.find_slot(step), lax.rem(step, static.raw_stages)
        (raw, raw_full), (ring, full, free) = raw_rings[kind], rings[kind]
        compat.barrier_wait(raw_full.at[raw_slot])
        work.await_slot(free, step)
        _widen(static, raw.at[raw_slot], ring.at[slot], span, span.first + step, is_value=kind == VALUES)
        compat.commit_smem()  # all threads have read the raw slot: the copies below may refill it
        compat.barrier_arrive(full.at[slot])
        pl.when(step + static.raw_stages < span.steps)(lambda: issue(step + static.raw_stages, kind))

    @pl.loop(0, jnp.minimum(span.steps, static.raw_stages))
    def _(step: jax.Array) -> None:
        issue(step, KEYS)
        issue(step, VALUES)

    work.fetch_next_queries()
    widen(span.steps * 0, KEYS)

    @pl.loop(0, span.steps)
    def _(step: jax.Array) -> None:
        pl.when(step + 1 < span.steps)(lambda: widen(step + 1, KEYS))  # keys are a step ahead
        widen(step, VALUES)


def _widen(static: Static, raw: jax.Ref, wide: jax.Ref, span: Span, block: jax.Array, *, is_value: bool) -> None:
    """Casts raw [keys, H] into wide; values of positions outside the span become 0."""
    for row in range(0, static.keys, PIECE):
        is_key = _find_keys(static, span, block * static.keys + row) if is_value else None
        for column in range(0, static.width, PIECE):
            piece = pl.ds(row, PIECE), pl.ds(column, PIECE)
            elements = compat.layout_cast(wgmma.load_narrow(raw.at[piece]).astype(wide.dtype), compat.WGMMA)
            if is_key is not None:
                elements = jnp.where(compat.spread(is_key, elements.shape), elements, jnp.zeros((), wide.dtype))
            wide[piece] = elements


def _find_keys(static: Static, span: Span, first: jax.Array) -> jax.Array:
    """Which of the PIECE positions from `first` are in the span: [PIECE] bool in registers."""
    positions = plgpu.broadcasted_iota(jnp.int32, (PIECE,), 0, layout=compat.WGMMA.reduce(1)) + first
    return positions < span.end if static.window is None else (positions < span.end) & (positions >= span.begin)
