"""Attention of rows that have several new tokens, at any position.

A row's tiles run in order. A tile's own keys are in VMEM. They are attended there while the row's older keys arrive
from its pages, and are copied to the pages before the next tile reads them. Blocks of older keys come newest first: a
page with both older and own keys has then arrived before it is written, and its older keys are at hand.

If a tile's keys begin on a unit both of their page and of the step's tokens, they are copied directly. Otherwise they
are first shifted by the difference. A row's class does not tell the two apart: a chunk begins on a unit of its text,
but at any of the step's tokens.
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
from pallas_kernels.tpu.config import ChunkConfig, clip_blocks, find_write_unit
from pallas_kernels.tpu.launch import by_core, launch
from pallas_kernels.tpu.pages import PageBlocks, Ref, Scalar, repeat, wait_copy
from pallas_kernels.tpu.softmax import MASKED, Accumulator, bend, multiply, run_heads
from pallas_kernels.tpu.tiles import NUM_COLUMNS, TilePlan

_NUM_BUFFERS = 2
_HEADS_TOGETHER = 2  # KV heads of many query rows each: more would only spill
_BLOCK_COLUMN = 1


@dataclass(frozen=True)
class _Static:
    """The static parameters of the kernel."""

    config: ChunkConfig
    params: AttnParams
    joined: bool
    table_width: int


def attend_tiles(
    q: jax.Array,  # [K, G, T padded, width] in the products' dtype; T padded to whole tiles
    new: jax.Array,  # [rows of a page, T padded, width] in the pages' dtype
    kv_pages: jax.Array,  # [num_pages, rows of a page, page_size, width]
    tiles: TilePlan,
    page_table: jax.Array,  # [S * M] i32
    page_offset: jax.Array,  # [] i32
    factors: jax.Array,  # [2, K] f32, of scores and of outputs
    sinks: jax.Array | None,  # [N] f32, in base 2
    *,
    table_width: int,
    params: AttnParams,
    config: ChunkConfig,
    num_cores: int,
    joined: bool,
    out_width: int,
    out_dtype: jnp.dtype,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted means [K, G, T padded, out_width], arbitrary for tokens without a tile, and the pool,
    updated in place. `joined` is that of `attend_rows`.
    """
    num_kv_heads, group, _, width = q.shape
    _, page_rows, page_size, _ = kv_pages.shape
    num_kv_heads, page_rows = num_kv_heads // num_cores, page_rows // num_cores
    num_tiles, size = tiles.columns.shape[0] // NUM_COLUMNS, tiles.tile_tokens
    config = clip_blocks(config, page_size, table_width)

    def find_block(step: Scalar, meta: Ref, columns: Ref, *_: Ref) -> Scalar:
        """The tile's block of tokens. A step after the last tile keeps its block, and so copies nothing."""
        return columns[_BLOCK_COLUMN * num_tiles + jnp.minimum(step, jnp.maximum(meta[0] - 1, 0))]

    def find_heads(core: Scalar, *refs: Ref) -> tuple[Scalar, ...]:
        return (core, 0, find_block(*refs), 0)

    q_spec = pl.BlockSpec((num_kv_heads, group, size, width), find_heads)
    out_spec = pl.BlockSpec((num_kv_heads, group, size, out_width), find_heads)
    new_spec = pl.BlockSpec((page_rows, size, width), lambda core, *refs: (core, find_block(*refs), 0))
    return launch(
        partial(_run_tile, static=_Static(config, params, joined, table_width)),
        name="chunk_attention",
        num_steps=tiles.num_tiles,
        num_cores=num_cores,
        scalars=[jnp.stack([tiles.num_tiles, page_offset]), tiles.columns, page_table],
        inputs=[by_core(factors, num_cores), (q, q_spec), by_core(sinks, num_cores), (new, new_spec)],
        kv_pages=kv_pages,
        out=((*q.shape[:-1], out_width), out_dtype, out_spec),
        scratch=[
            pltpu.VMEM((_NUM_BUFFERS, page_rows, config.pages_per_block * page_size, width), kv_pages.dtype),
            pltpu.SemaphoreType.DMA((_NUM_BUFFERS,)),
            pltpu.VMEM((num_kv_heads, group * size, LANES), jnp.float32),
            pltpu.VMEM((num_kv_heads, group * size, LANES), jnp.float32),
            pltpu.VMEM((num_kv_heads, group * size, out_width), jnp.float32),
            pltpu.SMEM((1,), jnp.int32),
            pltpu.VMEM((page_rows, size + find_write_unit(page_size), width), kv_pages.dtype),
            pltpu.SemaphoreType.DMA,
        ],
        interpret=interpret,
    )


def _run_tile(tile: Scalar, _: Scalar, meta: Ref, *refs: Ref, static: _Static) -> None:
    """One step of the grid: a tile, if there is one."""

    @pl.when(tile < meta[0])
    def _run() -> None:
        _attend_tile(tile, meta, *refs, static=static)


def _attend_tile(  # noqa: PLR0915, a kernel
    tile: Scalar,
    meta: Ref,
    columns: Ref,
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
    staged: Ref,
    written: Ref,
    *,
    static: _Static,
) -> None:
    config, window = static.config, static.params.window
    blocks = PageBlocks(pool, table, static.table_width, meta[1], buffers, arrived)
    accumulator = Accumulator(largest, total, mixed)
    page_size, block_pages = blocks.page_size, blocks.block_pages
    num_kv_heads, group, size, width = q.shape
    out_width = out.shape[3]
    num_queries, num_tiles, unit = group * size, columns.shape[0] // NUM_COLUMNS, staged.shape[1] - size

    def read_columns(tile: Scalar) -> list[Scalar]:
        return [columns[index * num_tiles + tile] for index in range(NUM_COLUMNS)]

    row, token_block, position, begin, end = read_columns(tile)
    lead = lax.rem(position + begin, unit)  # older keys in the unit of the tile's first key
    is_aligned = (lead == 0) & (lax.rem(begin, unit) == 0)  # units of `new` are then units of pages

    def find_span(tile: Scalar) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        """The keys [oldest, newest) that a tile reads from pages; the first page to read and their number."""
        _, _, position, begin, _ = read_columns(tile)
        newest = position + begin
        oldest = 0 if window is None else jnp.maximum(position + begin - window + 1, 0)
        # The keys in the unit of the tile's first key are needed too, seen or not.
        first = jnp.minimum(oldest, newest - lax.rem(newest, unit))
        first_page = first // page_size
        return oldest, newest, first_page, jnp.where(newest > first, pl.cdiv(newest, page_size) - first_page, 0)

    oldest, newest, first_page, num_pages = find_span(tile)
    num_blocks = pl.cdiv(num_pages, block_pages)
    base = jnp.where(tile == 0, 0, state[0])  # index of the tile's first block among all
    state[0] = base + num_blocks

    def fetch(tile: Scalar, index: Scalar, back: Scalar) -> None:
        """Starts the copies of a tile's block, counted from the newest."""
        _, _, first, count = find_span(tile)

        @pl.when(count > 0)
        def _fetch() -> None:
            done = (pl.cdiv(count, block_pages) - 1 - back) * block_pages
            slot = lax.rem(index, _NUM_BUFFERS)
            blocks.start(slot, columns[tile], first + done, jnp.minimum(count - done, block_pages))

    def fetch_for_next_tile(index: Scalar) -> None:
        """Fetches ahead if the next tile is another row's: a row's next tile reads what this one writes."""
        following = jnp.minimum(tile + 1, num_tiles - 1)

        @pl.when((tile + 1 < meta[0]) & (columns[following] != row))
        def _fetch() -> None:
            fetch(following, index, 0)

    def copy_unit(index: Scalar, keys: Ref, first: Scalar) -> Any:
        """The copy of a unit of the tile's keys, which begin at `first` in `keys`, to its page."""
        token = position + begin - lead + index * unit
        source = keys.at[:, pl.ds(pl.multiple_of(first + index * unit, unit), unit), :]
        offset = pl.multiple_of(lax.rem(token, page_size), unit)
        place = pool.at[blocks.find_page(row, token // page_size), :, pl.ds(offset, unit), :]
        return pltpu.make_async_copy(source, place, written)

    num_units = pl.cdiv(lead + end - begin, unit)

    def stage_keys() -> None:
        """Shifts the tile's keys to their places in units of their pages, with zeros around them."""
        slots = lax.broadcasted_iota(jnp.int32, (size + unit, width), 0)
        is_own = (slots >= lead) & (slots < lead + end - begin)
        shift = lax.rem(lead - begin + size + unit, size + unit)

        def stage_row(index: jax.Array, carry: int) -> int:
            # Only rows of 32 bits can be rotated by any amount.
            own = jnp.concatenate([new[index].astype(jnp.float32), jnp.zeros((unit, width), jnp.float32)], axis=0)
            moved = pltpu.roll(own, shift, 0)
            staged[index] = jnp.where(is_own, moved, 0.0).astype(staged.dtype)
            return carry

        lax.fori_loop(0, staged.shape[0], stage_row, 0)

    def write_keys(slot: Scalar, block_begin: Scalar) -> None:
        """Starts the copies to the pages. A first unit shared with older keys takes these from the block that has just
        arrived."""

        @pl.when(lead > 0)
        def _merge() -> None:
            offset = pl.multiple_of(position + begin - lead - block_begin, unit)
            older = buffers[slot, :, pl.ds(offset, unit), :]
            is_older = lax.broadcasted_iota(jnp.int32, older.shape, 1) < lead
            staged[:, :unit, :] = jnp.where(is_older, older, staged[:, :unit, :])

        @pl.when(is_aligned)
        def _write_new() -> None:
            # Keys after the last one in its unit belong to another row, and go to slots that nobody uses yet.
            repeat(num_units, lambda index: copy_unit(index, new, begin).start())

        @pl.when(jnp.logical_not(is_aligned))
        def _write_staged() -> None:
            repeat(num_units, lambda index: copy_unit(index, staged, 0).start())

    def key_row(head: Scalar) -> Scalar:
        return head if static.joined else 2 * head

    def value_row(head: Scalar) -> Scalar:
        return head if static.joined else 2 * head + 1

    def spread_sinks(head: Scalar) -> jax.Array | None:
        """[queries, 128]"""
        if sinks is None:
            return None
        parts = [jnp.full((size, LANES), sinks[head * group + index], jnp.float32) for index in range(group)]
        return jnp.concatenate(parts, axis=0)

    def find_slots(num_keys: int) -> jax.Array:
        """[queries, keys]: each query's slot. Queries are ordered by the group's heads, then by slots."""
        return lax.broadcasted_iota(jnp.int32, (num_queries, num_keys), 0) & (size - 1)

    def score(head: Scalar, keys: jax.Array, is_seen: jax.Array | None) -> jax.Array:
        queries = q[head].reshape(num_queries, width)
        products = multiply(queries, keys.astype(q.dtype), transpose=True)
        scores = bend(products, factors[head], static.params.softcap)
        return scores if is_seen is None else jnp.where(is_seen, scores, MASKED)

    def attend_own_keys() -> None:
        keys, queries = lax.broadcasted_iota(jnp.int32, (num_queries, size), 1), find_slots(size)
        is_seen = (keys <= queries) & (keys >= begin)
        if window is not None:
            is_seen &= keys > queries - window
        slots = lax.broadcasted_iota(jnp.int32, (size, out_width), 0)
        is_own = (slots >= begin) & (slots < end)

        def add(head: Scalar, scores: jax.Array) -> None:
            values = new[value_row(head), :, :out_width]
            values = jnp.where(is_own, values, jnp.zeros_like(values)).astype(q.dtype)
            accumulator.add_first(head, scores, values, spread_sinks(head))

        run_heads(num_kv_heads, _HEADS_TOGETHER, lambda head: score(head, new[key_row(head)], is_seen), add)

    def attend_pages(slot: Scalar, first: Scalar, block_begin: Scalar) -> None:
        """All heads over the keys [first, first + compute_tokens) of a buffer."""
        num_keys = config.compute_tokens
        first = pl.multiple_of(first, num_keys)
        oldest_here = block_begin + first
        newest_here = oldest_here + num_keys - 1
        all_seen = (newest_here < newest) & (newest_here <= position + begin)
        if window is not None:
            all_seen &= oldest_here > position + end - 1 - window

        def attend_heads(is_seen: jax.Array | None) -> None:
            def load(row: Scalar, width: int) -> jax.Array:
                return buffers[slot, row, pl.ds(first, num_keys), pl.ds(0, width)]

            run_heads(
                num_kv_heads,
                _HEADS_TOGETHER,
                lambda head: score(head, load(key_row(head), width), is_seen),
                lambda head, scores: accumulator.add(head, scores, load(value_row(head), out_width).astype(q.dtype)),
            )

        @pl.when(all_seen)
        def _attend_all() -> None:
            attend_heads(None)

        @pl.when(jnp.logical_not(all_seen))
        def _attend_some() -> None:
            keys = oldest_here + lax.broadcasted_iota(jnp.int32, (num_queries, num_keys), 1)
            is_seen = keys < newest
            if window is not None:
                queries = position + find_slots(num_keys)
                is_seen &= keys <= queries
                is_seen &= keys > queries - window
            attend_heads(is_seen)

    def run_block(back: jax.Array, carry: int) -> int:
        index = base + back

        @pl.when(back + 1 < num_blocks)
        def _fetch_older() -> None:
            fetch(tile, index + 1, back + 1)

        @pl.when(back + 1 == num_blocks)
        def _fetch_next() -> None:
            fetch_for_next_tile(index + 1)

        slot = lax.rem(index, _NUM_BUFFERS)
        done = (num_blocks - 1 - back) * block_pages
        count = jnp.minimum(num_pages - done, block_pages)
        block_begin = (first_page + done) * page_size
        blocks.wait(slot, count)

        @pl.when(back == 0)
        def _write() -> None:
            write_keys(slot, block_begin)

        num_steps = pl.cdiv(count * page_size, config.compute_tokens)
        held = jnp.maximum(oldest - block_begin, 0), jnp.minimum(newest - block_begin, block_pages * page_size)
        blocks.clean(slot, *held, num_steps * (config.compute_tokens // page_size), joined=static.joined)

        def run_keys(step: jax.Array, carry: int) -> int:
            attend_pages(slot, step * config.compute_tokens, block_begin)
            return carry

        lax.fori_loop(0, num_steps, run_keys, 0)
        return carry

    # ------------------------------------------------------------------------------------------------------------
    @pl.when((tile == 0) | (columns[jnp.maximum(tile - 1, 0)] == row))
    def _fetch_newest() -> None:
        fetch(tile, base, 0)

    pl.when(jnp.logical_not(is_aligned))(stage_keys)
    attend_own_keys()
    lax.fori_loop(0, num_blocks, run_block, 0)

    @pl.when(num_blocks == 0)
    def _go_on_without_older_keys() -> None:
        fetch_for_next_tile(base)
        write_keys(0, position)

    is_first = (tile == 0) | (columns[_BLOCK_COLUMN * num_tiles + jnp.maximum(tile - 1, 0)] != token_block)
    slots = lax.broadcasted_iota(jnp.int32, (group, size, out_width), 1)
    is_own = (slots >= begin) & (slots < end)

    def finish_head(head: Scalar) -> None:
        found = accumulator.finish(head, factors[num_kv_heads + head]).reshape(group, size, out_width)
        others = jnp.where(is_first, 0.0, out[head].astype(jnp.float32))  # outputs of other rows in this block
        out[head] = jnp.where(is_own, found, others).astype(out.dtype)

    repeat(num_kv_heads, finish_head, unroll=1)
    repeat(num_units, lambda index: wait_copy(copy_unit(index, staged, 0)))  # copies from `new` have the same size
