"""Attention of one-token rows, with the new token's key and value written on the way.

The kernel loops over rows and over blocks of each row's pages. Copies run ahead through a ring of buffers, on into the
next rows, so that memory is never idle. The new token goes into its place in the buffer, and the sublane tile around
it, the least that can be written, goes back to its page.

The keys of a short row take less work than what surrounds them. So the short rows among neighbours, a group, share a
block and are attended side by side, like the heads of one row; the long ones follow. A row's length alone says whether
it is short, and keys that it does not see add exactly nothing, so its neighbours do not change its bits.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.spec import AttnParams
from pallas_kernels.tpu.config import HEADS_TOGETHER, DecodeConfig, clip_blocks, count_sublanes
from pallas_kernels.tpu.launch import by_core, launch
from pallas_kernels.tpu.pages import PageBlocks, Ref, Scalar, divide, wait_copy
from pallas_kernels.tpu.row_blocks import NUM_STATES, RowBlocks, plan_groups
from pallas_kernels.tpu.softmax import MASKED, Accumulator, bend, keep_values, multiply, run_heads


@dataclass(frozen=True)
class _Static:
    """The static parameters of the kernel."""

    config: DecodeConfig
    params: AttnParams
    joined: bool
    table_width: int


@dataclass(frozen=True)
class _Part:
    """Keys of one row in a buffer, from token `first` on, of which [begin, end) are seen."""

    index: Scalar  # of the row in the step of the grid
    lane: int  # of the row's accumulators: in its group, 0 if it is long
    first: Scalar
    begin: Scalar
    end: Scalar


def attend_rows(
    q: jax.Array,  # [R, K, G padded, width] in the products' dtype; R a multiple of rows_per_step
    new: jax.Array,  # [R, rows of a page, width] in the pages' dtype
    kv_pages: jax.Array,  # [num_pages, rows of a page, page_size, width]
    seq_lens: jax.Array,  # [R] i32
    page_table: jax.Array,  # [R * M] i32
    num_rows: jax.Array,  # [] i32: rows [0, num_rows) are attended, the output of others is arbitrary
    page_offset: jax.Array,  # [] i32
    factors: jax.Array,  # [2, K] f32, of scores and of outputs
    sinks: jax.Array | None,  # [K, G padded, 128] f32, in base 2
    *,
    params: AttnParams,
    config: DecodeConfig,
    num_cores: int,
    joined: bool,
    out_width: int,
    out_dtype: jnp.dtype,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted means [R, K, G padded, out_width] and the pool, updated in place.

    `joined`: a row of a page holds a key and its value, which begins at the row's first number or has zeros before it.
    """
    total_rows, num_kv_heads, group, width = q.shape
    _, page_rows, page_size, _ = kv_pages.shape
    num_kv_heads, page_rows = num_kv_heads // num_cores, page_rows // num_cores
    table_width = page_table.shape[0] // total_rows
    config = clip_blocks(config, page_size, table_width)
    by_rows, together = config.rows_per_step, config.rows_together

    def find_block(step: Scalar, meta: Ref, *_: Ref) -> Scalar:
        """The step's rows. A step after the last row keeps its block, and so copies nothing."""
        return jnp.minimum(step, jnp.maximum(meta[0] - 1, 0) // by_rows)

    groups = plan_groups(
        seq_lens,
        num_rows,
        page_size=page_size,
        window=params.window,
        together=together,
        share=config.count_share(page_size),
    )

    def find_heads(core: Scalar, *refs: Ref) -> tuple[Scalar, ...]:
        return (find_block(*refs), core, 0, 0)

    q_spec = pl.BlockSpec((by_rows, num_kv_heads, group, width), find_heads)
    out_spec = pl.BlockSpec((by_rows, num_kv_heads, group, out_width), find_heads)
    new = new.reshape(total_rows, num_cores, page_rows, width)  # a block of fewer rows than a tile must be whole
    new_spec = pl.BlockSpec((by_rows, None, page_rows, width), find_heads)
    sinks_spec = pl.BlockSpec((num_kv_heads, group, LANES), lambda core, *_: (core, 0, 0))
    sublanes = count_sublanes(kv_pages.dtype)
    return launch(
        partial(_run_step, static=_Static(config, params, joined, table_width)),
        name="decode_attention",
        num_steps=(num_rows + by_rows - 1) // by_rows,
        num_cores=num_cores,
        scalars=[jnp.stack([num_rows, page_offset]), seq_lens, groups, page_table],
        inputs=[by_core(factors, num_cores), (q, q_spec), (sinks, sinks_spec), (new, new_spec)],
        kv_pages=kv_pages,
        out=((*q.shape[:-1], out_width), out_dtype, out_spec),
        scratch=[
            pltpu.VMEM((config.num_buffers, page_rows, config.pages_per_block * page_size, width), kv_pages.dtype),
            pltpu.SemaphoreType.DMA((config.num_buffers,)),
            pltpu.VMEM((together * num_kv_heads, group, LANES), jnp.float32),
            pltpu.VMEM((together * num_kv_heads, group, LANES), jnp.float32),
            pltpu.VMEM((together * num_kv_heads, group, out_width), jnp.float32),
            pltpu.SMEM((NUM_STATES,), jnp.int32),
            pltpu.VMEM((2 * together, page_rows, sublanes, width), kv_pages.dtype),
            pltpu.SemaphoreType.DMA((2 * together,)),
        ],
        interpret=interpret,
    )


def _run_step(  # noqa: PLR0915, a kernel
    step: Scalar,
    num_steps: Scalar,
    meta: Ref,
    seq_lens: Ref,
    groups: Ref,
    table: Ref,
    factors: Ref,
    q: Ref,
    sinks: Ref | None,
    new: Ref,
    pool: Ref,
    out: Ref,
    buffers: Ref,
    arrived: Ref,
    largest: Ref,
    total: Ref,
    mixed: Ref,
    state: Ref,
    window: Ref,
    written: Ref,
    *,
    static: _Static,
) -> None:
    """One step of the grid: `rows_per_step` rows."""
    config, together = static.config, static.config.rows_together
    num_rows, first_row = meta[0], step * static.config.rows_per_step
    blocks = PageBlocks(pool, table, static.table_width, meta[1], buffers, arrived)
    share = config.count_share(blocks.page_size)
    rows = RowBlocks(blocks, seq_lens, num_rows, groups, state, static.params.window, together, share)
    accumulator = Accumulator(largest, total, mixed)
    num_kv_heads, group = q.shape[1:3]
    page_size, block_pages = blocks.page_size, blocks.block_pages
    step_pages, short_pages = config.compute_tokens // page_size, config.short_tokens // page_size

    def write_window(row: Scalar) -> Any:
        """The copy of the row's window to its page."""
        position = seq_lens[row] - 1
        tokens, page = window.shape[2], divide(position, page_size)
        offset = pl.multiple_of(divide(position - page * page_size, tokens) * tokens, tokens)
        place = pool.at[blocks.find_page(row, page), :, pl.ds(offset, tokens), :]
        slot = lax.rem(row, 2 * together)
        return pltpu.make_async_copy(window.at[slot], place, written.at[slot])

    def insert(slot: Scalar, row: Scalar, index: Scalar, offset: Scalar) -> None:
        """Puts the new token into its place in the buffer, and starts the copy of the tile around it to the page."""

        @pl.when(row >= 2 * together)
        def _wait_for_buffer() -> None:
            wait_copy(write_window(row - 2 * together))

        tokens = window.shape[2]
        begin = pl.multiple_of(divide(offset, tokens) * tokens, tokens)
        held = buffers[slot, :, pl.ds(begin, tokens), :]
        is_new = lax.broadcasted_iota(jnp.int32, held.shape, 1) == offset - begin
        merged = jnp.where(is_new, jnp.broadcast_to(new[index][:, None, :], held.shape), held)
        buffers[slot, :, pl.ds(begin, tokens), :] = merged
        window[lax.rem(row, 2 * together)] = merged
        write_window(row).start()

    def attend(slot: Scalar, parts: list[_Part], num_keys: int, *, all_seen: bool) -> None:
        """Attends with all heads to `num_keys` keys of each part. Slots that are not seen may hold NaN, which a weight
        of 0 would not remove: their values are replaced, too."""

        def is_seen(part: _Part, tokens: jax.Array) -> jax.Array:
            """Tokens of a part count from its first. Only a window begins within a page."""
            seen = tokens < part.end - part.first
            return seen if static.params.window is None else seen & (tokens >= part.begin - part.first)

        tokens = lax.broadcasted_iota(jnp.int32, (group, num_keys), 1)
        seen = [None if all_seen else is_seen(part, tokens) for part in parts]

        def split(item: Scalar) -> tuple[int, Scalar]:
            """An item's part and head. Items of several parts are no tracers."""
            return (0, item) if len(parts) == 1 else divmod(item, num_kv_heads)

        def load(part: _Part, row: Scalar, width: int) -> jax.Array:
            place = pl.ds(pl.multiple_of(part.first, LANES), num_keys)
            return buffers[slot, row, place, pl.ds(0, width)].astype(q.dtype)

        def score(item: Scalar) -> jax.Array:
            which, head = split(item)
            keys = load(parts[which], head if static.joined else 2 * head, q.shape[3])
            products = multiply(q[parts[which].index, head], keys, transpose=True)
            scores = bend(products, factors[head], static.params.softcap)
            return scores if all_seen else jnp.where(seen[which], scores, MASKED)

        def add(item: Scalar, scores: jax.Array) -> None:
            which, head = split(item)
            part = parts[which]
            values = load(part, head if static.joined else 2 * head + 1, out.shape[3])
            if not all_seen:
                values = keep_values(values, partial(is_seen, part))
            accumulator.add(part.lane * num_kv_heads + head, scores, values)

        items = len(parts) * num_kv_heads
        run_heads(items, items if len(parts) > 1 else HEADS_TOGETHER, score, add)

    def reset(lanes: int) -> None:
        for lane in range(lanes):
            for head in range(num_kv_heads):
                accumulator.reset(lane * num_kv_heads + head, None if sinks is None else sinks[head])

    def finish(lane: int, index: Scalar) -> None:
        """Writes the output of a row."""
        for head in range(num_kv_heads):
            found = accumulator.finish(lane * num_kv_heads + head, factors[num_kv_heads + head])
            out[index, head] = found.astype(out.dtype)

    def run_short(first: Scalar) -> None:
        """The short rows of a group, whose first row is `first` in the step of the grid."""
        reset(together)
        slot = rows.advance()
        members = [first_row + first + lane for lane in range(together)]
        pages = [jnp.where(rows.is_short(row), rows.find_span(row)[2], 0) for row in members]
        blocks.wait(slot, sum(pages))

        def find_shift(lane: Scalar) -> Scalar:
            """From a position of a row to its place in the buffer."""
            return (lane * share - rows.find_span(first_row + first + lane)[1]) * page_size

        def insert_row(lane: jax.Array, carry: int) -> int:
            row = first_row + first + lane

            @pl.when(rows.is_short(row))
            def _insert() -> None:
                insert(slot, row, first + lane, seq_lens[row] - 1 + find_shift(lane))

            return carry

        lax.fori_loop(0, together, insert_row, 0)

        def run_keys(step: jax.Array, carry: int) -> int:
            parts = []
            for lane, row in enumerate(members):
                begin, shift = rows.find_span(row)[0], find_shift(lane)
                end = jnp.where(pages[lane] > 0, seq_lens[row] + shift, 0)
                done = lane * share * page_size + step * config.short_tokens
                parts.append(_Part(first + lane, lane, done, begin + shift, end))
            attend(slot, parts, config.short_tokens, all_seen=False)
            return carry

        lax.fori_loop(0, divide(functools.reduce(jnp.maximum, pages) + short_pages - 1, short_pages), run_keys, 0)
        for lane in range(together):
            finish(lane, first + lane)

    def run_long(index: Scalar) -> None:
        row = first_row + index
        begin, first_page, num_pages = rows.find_span(row)
        num_blocks = lax.div(num_pages + block_pages - 1, block_pages)
        reset(1)

        def run_block(block: jax.Array, carry: int) -> int:
            slot = rows.advance()
            done = block * block_pages
            count = jnp.minimum(num_pages - done, block_pages)
            blocks.wait(slot, count)
            shift = (first_page + done) * page_size

            @pl.when(block == num_blocks - 1)
            def _insert() -> None:
                insert(slot, row, index, seq_lens[row] - 1 - shift)

            num_keys, end = config.compute_tokens, seq_lens[row] - shift

            def run_keys(step: jax.Array, carry: int, *, all_seen: bool) -> int:
                attend(slot, [_Part(index, 0, step * num_keys, begin - shift, end)], num_keys, all_seen=all_seen)
                return carry

            num_steps = lax.div(count + step_pages - 1, step_pages)
            num_seen = 0  # steps at the block's begin whose keys are all seen
            if static.params.window is None:
                num_seen = jnp.minimum(lax.div(end, num_keys), num_steps)
                lax.fori_loop(0, num_seen, partial(run_keys, all_seen=True), 0)
            lax.fori_loop(num_seen, num_steps, partial(run_keys, all_seen=False), 0)
            return carry

        lax.fori_loop(0, num_blocks, run_block, 0)
        finish(0, index)

    def run_group(turn: jax.Array, carry: int) -> int:
        """The rows of a group: the short ones together, then the long ones one after the other."""
        first = turn * together
        pl.when(rows.has_short(first_row + first))(lambda: run_short(first))

        def run_if_long(index: jax.Array, carry: int) -> int:
            pl.when(jnp.logical_not(rows.is_short(first_row + index)))(lambda: run_long(index))
            return carry

        first_long = rows.find_long(first_row + first) - first_row
        lax.fori_loop(first_long, jnp.minimum(first + together, count), run_if_long, 0)
        return carry

    pl.when(step == 0)(rows.begin)
    count = jnp.clip(num_rows - first_row, 0, config.rows_per_step)
    lax.fori_loop(0, lax.div(count + together - 1, together), run_group, 0)

    @pl.when(step == num_steps - 1)
    def _wait_for_writes() -> None:
        for back in range(2 * together, 0, -1):

            @pl.when(num_rows >= back)
            def _wait(back: int = back) -> None:
                wait_copy(write_window(num_rows - back))
