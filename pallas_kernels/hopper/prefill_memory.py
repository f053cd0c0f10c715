"""The memory warpgroup of the prefill kernel, which walks a tile's keys and fills the ring by TMA, page by page."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.prefill_static import FIRST, PIECE, Operands, Scratch, Span, Static
from pallas_kernels.mosaic_gpu import compat


def _find_pages(static: Static, operands: Operands, row: jax.Array, block: jax.Array) -> list[jax.Array]:
    """Pool indices of a key tile's pages. Past the row's tokens they may be any pages: those keys are masked."""
    widest = operands.page_table.shape[1] - 1
    if static.page_size > static.keys:
        indices = [lax.div(block * static.keys, static.page_size)]
    else:
        indices = [block * static.boxes + box for box in range(static.boxes)]
    offset = operands.page_offset[0]
    return [operands.page_table[row, jnp.minimum(index, widest)] + offset for index in indices]


def _copy_pages(
    static: Static,
    operands: Operands,
    pages: list[jax.Array],
    block: jax.Array,
    head_row: jax.Array,  # 2h for keys, 2h + 1 for values
    target: jax.Ref,  # [keys, H]
    barrier: jax.Ref,
) -> None:
    for box, page in enumerate(pages):
        source = operands.kv_pages.at[page, head_row]
        if static.page_size > static.keys:
            begin = pl.multiple_of(lax.rem(block * static.keys, static.page_size), static.keys)
            source = source.at[pl.ds(begin, static.keys)]
        compat.copy_gmem_to_smem(source, target.at[pl.ds(box * static.box, static.box)], barrier)


def load_queries(static: Static, operands: Operands, buffers: Scratch, tile: jax.Array, head: jax.Array) -> None:
    """Starts the copies of the tile's queries from where they lie, one for each head of the group."""
    first = pl.multiple_of(operands.units[tile, FIRST], compat.SWIZZLE_ROWS)
    for member in range(static.group_size):
        source = operands.q.at[pl.ds(first, static.tile_tokens), head * static.group_size + member]
        rows = pl.ds(member * static.tile_tokens, static.tile_tokens)
        compat.copy_gmem_to_smem(source, buffers.q.at[rows], buffers.q_full)


def load_plain(
    static: Static, operands: Operands, buffers: Scratch, span: Span, row: jax.Array, head: jax.Array
) -> None:
    """Fills the ring from pages of q's dtype. Keys are a step ahead of values, as they are where they are used.

    Values that no query may see can be NaN, which a weight of 0 does not remove. Only the first and the last key tile
    have such values. This warpgroup overwrites them, as it alone has time: values are awaited late, after scores and
    softmax. These two tiles arrive on barriers of their own, and arrive at v_full once they are clean.
    """
    cut_first = lax.rem(span.begin, static.keys) > 0
    cut_last = lax.rem(span.end, static.keys) > 0

    def find_pages(step: jax.Array) -> list[jax.Array]:
        return _find_pages(static, operands, row, span.first + step)

    def issue_keys(step: jax.Array, pages: list[jax.Array]) -> None:
        block, slot = span.first + step, lax.rem(step, static.stages)
        _copy_pages(static, operands, pages, block, 2 * head, buffers.k.at[slot], buffers.k_full.at[slot])

    def issue_values(step: jax.Array, pages: list[jax.Array]) -> None:
        block, slot = span.first + step, lax.rem(step, static.stages)
        is_last = (step == span.steps - 1) & cut_last
        is_edge = is_last if static.window is None else is_last | ((step == 0) & cut_first)

        @pl.when(is_edge)
        def _() -> None:
            edge = buffers.v_edge.at[jnp.where(step == span.steps - 1, 1, 0)]
            _copy_pages(static, operands, pages, block, 2 * head + 1, buffers.v.at[slot], edge)

        @pl.when(~is_edge)
        def _() -> None:
            full = buffers.v_full.at[slot]
            _copy_pages(static, operands, pages, block, 2 * head + 1, buffers.v.at[slot], full)

    def fill(step: jax.Array, pages: list[jax.Array]) -> list[jax.Array]:
        following = find_pages(step + 1)
        issue_keys(step + 1, following)
        issue_values(step, pages)
        return following

    def refill(step: jax.Array, pages: list[jax.Array]) -> list[jax.Array]:
        following = find_pages(step + 1)  # before the waits: they hide the latency of the reads

        @pl.when(step + 1 < span.steps)
        def _() -> None:
            compat.barrier_wait(buffers.k_free.at[lax.rem(step + 1, static.stages)])
            issue_keys(step + 1, following)

        pl.when(step >= static.stages)(lambda: compat.barrier_wait(buffers.v_free.at[lax.rem(step, static.stages)]))
        issue_values(step, pages)
        return following

    def clean(step: jax.Array, edge: int) -> None:
        slot = lax.rem(step, static.stages)
        compat.barrier_wait(buffers.v_edge.at[edge])
        _clean_values(static, buffers.v.at[slot], span, span.first + step)
        for _ in range(static.boxes):
            compat.barrier_arrive(buffers.v_full.at[slot])

    start = span.steps * 0
    pages = find_pages(start)
    issue_keys(start, pages)
    ahead = jnp.minimum(span.steps, static.stages) - 1
    pages = lax.fori_loop(0, ahead, fill, pages)
    clean_last = cut_last
    if static.window is not None:
        is_only = span.steps == 1
        pl.when(cut_first & ~is_only)(lambda: clean(start, 0))
        clean_last = cut_last | (cut_first & is_only)
    lax.fori_loop(ahead, span.steps, refill, pages)
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


def load_narrow(
    static: Static, operands: Operands, buffers: Scratch, span: Span, row: jax.Array, head: jax.Array
) -> None:
    """Fills the ring from 8-bit pages, through a ring of their own.

    Hopper's tensor cores take 8-bit values only with the keys contiguous, which they are not in pages. So this
    warpgroup widens keys and values, and drops the values that no query may see.
    """

    def issue(step: jax.Array, kind: int) -> None:
        block, slot = span.first + step, lax.rem(step, static.raw_stages)
        pages = _find_pages(static, operands, row, block)
        target, full = ((buffers.raw_k, buffers.raw_k_full), (buffers.raw_v, buffers.raw_v_full))[kind]
        _copy_pages(static, operands, pages, block, 2 * head + kind, target.at[slot], full.at[slot])

    def widen(step: jax.Array, kind: int) -> None:
        slot, raw_slot = lax.rem(step, static.stages), lax.rem(step, static.raw_stages)
        raw, raw_full, ring, full, free = (
            (buffers.raw_k, buffers.raw_k_full, buffers.k, buffers.k_full, buffers.k_free),
            (buffers.raw_v, buffers.raw_v_full, buffers.v, buffers.v_full, buffers.v_free),
        )[kind]
        compat.barrier_wait(raw_full.at[raw_slot])
        pl.when(step >= static.stages)(lambda: compat.barrier_wait(free.at[slot]))
        _widen(static, raw.at[raw_slot], ring.at[slot], span, span.first + step, is_value=kind == 1)
        compat.commit_smem()  # all threads have read the raw slot: the copies below may refill it
        compat.barrier_arrive(full.at[slot])
        pl.when(step + static.raw_stages < span.steps)(lambda: issue(step + static.raw_stages, kind))

    @pl.loop(0, jnp.minimum(span.steps, static.raw_stages))
    def _(step: jax.Array) -> None:
        issue(step, 0)
        issue(step, 1)

    widen(span.steps * 0, 0)

    @pl.loop(0, span.steps)
    def _(step: jax.Array) -> None:
        pl.when(step + 1 < span.steps)(lambda: widen(step + 1, 0))  # keys are a step ahead
        widen(step, 1)


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
