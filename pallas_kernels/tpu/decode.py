"""Attention of one-token rows, with the new token's key and value written on the way.

The kernel loops over rows and over blocks of each row's pages. Copies run ahead through a ring of buffers, on into the
next rows, so that memory is never idle. The new token goes into its place in the buffer, and the sublane tile around
it, the least that can be written, goes back to its page.
"""

from __future__ import annotations

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
from pallas_kernels.tpu.config import DecodeConfig, clip_blocks, count_sublanes
from pallas_kernels.tpu.launch import launch
from pallas_kernels.tpu.pages import PageBlocks, Ref, Scalar, wait_copy
from pallas_kernels.tpu.softmax import MASKED, Accumulator, bend, multiply, run_heads

_HEADS_TOGETHER = 8  # KV heads of few query rows each


@dataclass(frozen=True)
class _Static:
    """The static parameters of the kernel."""

    config: DecodeConfig
    params: AttnParams
    joined: bool
    table_width: int


def attend_rows(
    q: jax.Array,  # [R, K, G padded, width] in the products' dtype; R a multiple of rows_per_step
    new: jax.Array,  # [R, rows of a page, width] in the pages' dtype
    kv_pages: jax.Array,  # [num_pages, rows of a page, page_size, width]
    seq_lens: jax.Array,  # [R] i32
    page_table: jax.Array,  # [R * M] i32
    num_rows: jax.Array,  # [] i32: rows [0, num_rows) are attended, the output of others is arbitrary
    page_offset: jax.Array,  # [] i32
    factors: jax.Array,  # [2 * K] f32, of scores and of outputs
    sinks: jax.Array | None,  # [K, G padded, 128] f32, in base 2
    *,
    params: AttnParams,
    config: DecodeConfig,
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
    table_width = page_table.shape[0] // total_rows
    config = clip_blocks(config, page_size, table_width)
    by_rows = config.rows_per_step

    def find_block(step: Scalar, meta: Ref, *_: Ref) -> Scalar:
        """The step's rows. A step after the last row keeps its block, and so copies nothing."""
        return jnp.minimum(step, jnp.maximum(meta[0] - 1, 0) // by_rows)

    q_spec = pl.BlockSpec((by_rows, num_kv_heads, group, width), lambda *refs: (find_block(*refs), 0, 0, 0))
    out_spec = pl.BlockSpec((by_rows, num_kv_heads, group, out_width), lambda *refs: (find_block(*refs), 0, 0, 0))
    new_spec = pl.BlockSpec((by_rows, page_rows, width), lambda *refs: (find_block(*refs), 0, 0))
    sinks_spec = pl.BlockSpec((num_kv_heads, group, LANES), lambda *_: (0, 0, 0))
    sublanes = count_sublanes(kv_pages.dtype)
    return launch(
        partial(_run_step, static=_Static(config, params, joined, table_width)),
        name="decode_attention",
        num_steps=(num_rows + by_rows - 1) // by_rows,
        scalars=[jnp.stack([num_rows, page_offset]), seq_lens, page_table],
        inputs=[(factors, pl.BlockSpec(memory_space=pltpu.SMEM)), (q, q_spec), (sinks, sinks_spec), (new, new_spec)],
        kv_pages=kv_pages,
        out=((*q.shape[:-1], out_width), out_dtype, out_spec),
        scratch=[
            pltpu.VMEM((config.num_buffers, page_rows, config.pages_per_block * page_size, width), kv_pages.dtype),
            pltpu.SemaphoreType.DMA((config.num_buffers,)),
            pltpu.VMEM((num_kv_heads, group, LANES), jnp.float32),
            pltpu.VMEM((num_kv_heads, group, LANES), jnp.float32),
            pltpu.VMEM((num_kv_heads, group, out_width), jnp.float32),
            pltpu.SMEM((4,), jnp.int32),
            pltpu.VMEM((2, page_rows, sublanes, width), kv_pages.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
        interpret=interpret,
    )


def _run_step(  # noqa: PLR0915, a kernel
    meta: Ref,
    seq_lens: Ref,
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
    config = static.config
    num_rows = meta[0]
    blocks = PageBlocks(pool, table, static.table_width, meta[1], buffers, arrived)
    accumulator = Accumulator(largest, total, mixed)
    num_kv_heads, group = q.shape[1:3]
    page_size, block_pages, num_buffers = blocks.page_size, blocks.block_pages, config.num_buffers
    step_pages = config.compute_tokens // page_size

    def find_span(row: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """First key that the row sees, the page it is in, and the number of pages from there on."""
        length = seq_lens[row]
        begin = 0 if static.params.window is None else jnp.maximum(length - static.params.window, 0)
        first = begin // page_size
        return begin, first, pl.cdiv(length, page_size) - first

    def fetch_ahead() -> None:
        """Starts the copies of the next block. `state` holds its row, its index in the row and its index among all."""
        row, block, index = state[0], state[1], state[2]

        @pl.when(row < num_rows)
        def _fetch() -> None:
            _, first, count = find_span(row)
            done = block * block_pages
            blocks.start(lax.rem(index, num_buffers), row, first + done, jnp.minimum(count - done, block_pages))
            is_last = done + block_pages >= count
            state[0] = jnp.where(is_last, row + 1, row)
            state[1] = jnp.where(is_last, 0, block + 1)
            state[2] = index + 1

    def write_window(row: Scalar) -> Any:
        """The copy of the row's window to its page."""
        position = seq_lens[row] - 1
        tokens = window.shape[2]
        offset = pl.multiple_of(lax.rem(position, page_size) // tokens * tokens, tokens)
        place = pool.at[blocks.find_page(row, position // page_size), :, pl.ds(offset, tokens), :]
        slot = lax.rem(row, 2)
        return pltpu.make_async_copy(window.at[slot], place, written.at[slot])

    def insert(slot: Scalar, row: Scalar, index: Scalar, block_begin: Scalar) -> None:
        """Puts the new token into the row's last block, and starts the copy of the tile around it to the page."""

        @pl.when(row >= 2)
        def _wait_for_buffer() -> None:
            wait_copy(write_window(row - 2))

        tokens = window.shape[2]
        offset = seq_lens[row] - 1 - block_begin
        begin = pl.multiple_of(offset // tokens * tokens, tokens)
        held = buffers[slot, :, pl.ds(begin, tokens), :]
        is_new = lax.broadcasted_iota(jnp.int32, held.shape, 1) == offset - begin
        merged = jnp.where(is_new, jnp.broadcast_to(new[index][:, None, :], held.shape), held)
        buffers[slot, :, pl.ds(begin, tokens), :] = merged
        window[lax.rem(row, 2)] = merged
        write_window(row).start()

    def attend_keys(slot: Scalar, index: Scalar, first: Scalar, begin: Scalar, end: Scalar) -> None:
        """Attends with all heads to the keys [first, first + compute_tokens) of a buffer; [begin, end) are seen."""
        first = pl.multiple_of(first, config.compute_tokens)
        tokens = first + lax.broadcasted_iota(jnp.int32, (group, config.compute_tokens), 1)
        is_seen = (tokens >= begin) & (tokens < end)

        def load(row: Scalar, width: int) -> jax.Array:
            return buffers[slot, row, pl.ds(first, config.compute_tokens), pl.ds(0, width)].astype(q.dtype)

        def score(head: Scalar) -> jax.Array:
            key_row = head if static.joined else 2 * head
            products = multiply(q[index, head], load(key_row, q.shape[3]), transpose=True)
            return jnp.where(is_seen, bend(products, factors[head], static.params.softcap), MASKED)

        def add(head: Scalar, scores: jax.Array) -> None:
            accumulator.add(head, scores, load(head if static.joined else 2 * head + 1, out.shape[3]))

        run_heads(num_kv_heads, _HEADS_TOGETHER, score, add)

    def run_row(index: jax.Array, carry: int) -> int:
        row = pl.program_id(0) * config.rows_per_step + index
        begin, first_page, num_pages = find_span(row)
        num_blocks = pl.cdiv(num_pages, block_pages)
        for head in range(num_kv_heads):
            accumulator.reset(head, None if sinks is None else sinks[head])

        def run_block(block: jax.Array, carry: int) -> int:
            fetch_ahead()
            slot = lax.rem(state[3], num_buffers)
            done = block * block_pages
            count = jnp.minimum(num_pages - done, block_pages)
            blocks.wait(slot, count)
            block_begin = (first_page + done) * page_size

            @pl.when(block == num_blocks - 1)
            def _insert() -> None:
                insert(slot, row, index, block_begin)

            held = (
                jnp.maximum(begin - block_begin, 0),
                jnp.minimum(seq_lens[row] - block_begin, block_pages * page_size),
            )
            num_steps = pl.cdiv(count, step_pages)
            blocks.clean(slot, *held, num_steps * step_pages, joined=static.joined)

            def run_keys(step: jax.Array, carry: int) -> int:
                attend_keys(slot, index, step * config.compute_tokens, *held)
                return carry

            lax.fori_loop(0, num_steps, run_keys, 0)
            state[3] = state[3] + 1
            return carry

        lax.fori_loop(0, num_blocks, run_block, 0)
        for head in range(num_kv_heads):
            out[index, head] = accumulator.finish(head, factors[num_kv_heads + head]).astype(out.dtype)
        return carry

    @pl.when(pl.program_id(0) == 0)
    def _fill_ring() -> None:
        for index in range(4):
            state[index] = 0
        for _ in range(num_buffers - 1):
            fetch_ahead()

    lax.fori_loop(0, jnp.clip(num_rows - pl.program_id(0) * config.rows_per_step, 0, config.rows_per_step), run_row, 0)

    @pl.when(pl.program_id(0) == pl.num_programs(0) - 1)
    def _wait_for_writes() -> None:
        for back in (2, 1):

            @pl.when(num_rows >= back)
            def _wait(back: int = back) -> None:
                wait_copy(write_window(num_rows - back))
