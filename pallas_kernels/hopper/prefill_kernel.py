"""The kernel behind `prefill.py`: one block of three warpgroups per (tile of queries, KV head).

The structure is FlashAttention-3's (Shah et al., 2024). A memory warpgroup walks the tile's keys and keeps a ring in
shared memory full by TMA, page by page. Two compute warpgroups hold 64 query rows each and take turns, so that the
softmax of one runs while the other uses the tensor cores.

All three walk the same range of keys, in key tiles of `keys` tokens ("blocks" below, counted from the row's first
token). So every barrier gets the same number of arrivals, whatever the masks are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.prefill_memory import load_narrow, load_plain, load_queries
from pallas_kernels.hopper.prefill_static import (
    COUNT,
    FIRST,
    NUM_COMPUTE,
    ROW,
    ROWS,
    SKIP,
    Operands,
    Scratch,
    Span,
    Static,
    find_span,
)
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.key_tiles import LOG2_E, MASKED
from pallas_kernels.mosaic_gpu.pieces import for_pieces

type Carry = tuple[jax.Array, jax.Array, jax.Array]  # mixed values [ROWS, H], largest score [ROWS], weight [ROWS]


def build_kernel(static: Static) -> Callable[..., None]:
    """The body, which takes `Operands`, without sinks if there are none, and `Scratch` by name."""

    def prefill_kernel(*refs: jax.Ref, **scratch: jax.Ref) -> None:
        refs = refs if static.has_sinks else (*refs[:6], None, *refs[6:])
        operands = Operands(*refs)
        scratch["q"], scratch["plain"] = scratch.pop("q_then_plain")
        buffers = Scratch(**{name: scratch.get(name) for name in Scratch._fields})
        tile, head = lax.axis_index("tile"), lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(operands.units[tile, COUNT] > 0)  # unused tiles come last in the grid: their blocks end here
        def _run() -> None:
            span = find_span(static, operands, tile)

            @pl.when(warpgroup == NUM_COMPUTE)
            def _load() -> None:
                compat.set_max_registers(static.registers[1], action="decrease")
                load_queries(static, operands, buffers, tile, head)
                load = load_narrow if static.is_narrow else load_plain
                load(static, operands, buffers, span, operands.units[tile, ROW], head)

            @pl.when(warpgroup < NUM_COMPUTE)
            def _compute() -> None:
                compat.set_max_registers(static.registers[0], action="increase")
                _attend(static, operands, buffers, span, head, warpgroup)

    return prefill_kernel


def _attend(
    static: Static,
    operands: Operands,
    buffers: Scratch,
    span: Span,
    head: jax.Array,
    warpgroup: jax.Array,
) -> None:
    """Attention of one warpgroup's 64 query rows."""
    rows = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
    queries = buffers.q.at[rows]
    if static.has_sinks:  # a sink is a key that every query sees, without a value
        largest = compat.load_column(operands.sinks.at[head, rows])
        total = compat.full((ROWS,), 1.0)
    else:
        largest, total = compat.full((ROWS,), MASKED), compat.full((ROWS,), 0.0)
    carry = compat.full((ROWS, static.width), 0.0), largest, total
    scale = operands.scales[head]
    compat.barrier_wait(buffers.q_full)

    def take_turns() -> None:
        compat.barrier_arrive(buffers.turn)
        compat.barrier_wait(buffers.turn)

    def await_keys(block: jax.Array) -> None:
        compat.barrier_wait(buffers.k_full.at[lax.rem(block - span.first, static.stages)])

    def free(barriers: jax.Ref, block: jax.Array, slot: jax.Array) -> None:
        # Nobody awaits a slot after the last tiles, and the interpreter of JAX 0.11 wants every completion awaited.
        pl.when(block + static.stages < span.last)(lambda: compat.barrier_arrive(barriers.at[slot]))

    def attend_block(block: jax.Array, carry: Carry, *, masked: bool) -> Carry:
        mixed, largest, total = carry
        slot = lax.rem(block - span.first, static.stages)
        scores = wgmma.multiply_qk(queries, buffers.k.at[slot], take_turns)
        free(buffers.k_free, block, slot)
        weights, shrink, largest = _weigh(static, scores, largest, scale, span, block, warpgroup, masked=masked)
        mixed = mixed * compat.spread(shrink, mixed.shape)
        total = total * shrink + weights.sum(axis=1)
        weights = weights.astype(static.dtype)
        # The softmax ends before the turn begins: else the tensor cores would wait for it.
        mixed, largest, total, weights = lax.optimization_barrier((mixed, largest, total, weights))
        compat.barrier_arrive(buffers.turn)
        compat.barrier_wait(buffers.v_full.at[slot])
        compat.barrier_wait(buffers.turn)
        await_next = partial(pl.when(block + 1 < span.last), partial(await_keys, block + 1))
        mixed = wgmma.multiply_pv(mixed, weights, buffers.v.at[slot], await_next, interpret=static.interpret)
        free(buffers.v_free, block, slot)
        return mixed, largest, total

    await_keys(span.first)
    # The second warpgroup is half a step behind; the first waits for it at the end.
    pl.when(warpgroup == 1)(take_turns)
    attend_whole, attend_masked = partial(attend_block, masked=False), partial(attend_block, masked=True)
    if static.window is not None:
        carry = lax.fori_loop(span.first, span.inner, attend_masked, carry)
    carry = lax.fori_loop(span.inner, span.outer, attend_whole, carry)
    mixed, _, total = lax.fori_loop(span.outer, span.last, attend_masked, carry)
    pl.when(warpgroup == 0)(take_turns)

    share = 1.0 / jnp.maximum(total, 1e-30)  # 0 stays 0 in a row that sees no key
    answers = (mixed * compat.spread(share, mixed.shape)).astype(static.dtype)
    unit = operands.units.at[_read_anew("tile")]
    is_whole = unit[COUNT] == static.tile_tokens
    pl.when(is_whole)(partial(_store_whole, static, operands, buffers, unit, answers))
    pl.when(~is_whole)(partial(_store_cut, static, operands, buffers, unit, answers))
    compat.wait_smem_to_gmem(0)


def _read_anew(axis: str) -> jax.Array:
    """The block's or warpgroup's place on an axis, which would take a register if it were kept through the loops."""
    return lax.optimization_barrier(lax.axis_index(axis))


def _store_whole(static: Static, operands: Operands, buffers: Scratch, unit: jax.Ref, answers: jax.Array) -> None:
    """Starts the copies of one warpgroup's answers [ROWS, H] to their tokens, head by head."""
    warpgroup, head = _read_anew("warpgroup"), _read_anew("head")
    start = pl.multiple_of(unit[FIRST], compat.SWIZZLE_ROWS)
    buffers.q[pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)] = answers
    compat.commit_smem()
    for number in range(NUM_COMPUTE):

        @pl.when(warpgroup == number)
        def _(begin: int = number * ROWS, end: int = (number + 1) * ROWS) -> None:
            for member in range(static.group_size):
                first = member * static.tile_tokens  # the head's first row
                low, high = max(first, begin), min(first + static.tile_tokens, end)
                if low < high:
                    tokens = pl.ds(start + (low - first), high - low)
                    target = operands.out.at[tokens, head * static.group_size + member]
                    compat.copy_smem_to_gmem(buffers.q.at[pl.ds(low, high - low)], target)


def _store_cut(static: Static, operands: Operands, buffers: Scratch, unit: jax.Ref, answers: jax.Array) -> None:
    """The same for a tile with tokens of other rows, which other blocks answer."""
    warpgroup, head = _read_anew("warpgroup"), _read_anew("head")
    start, skip, count = (unit[column] for column in (FIRST, SKIP, COUNT))
    columns = range(0, static.width, static.panel)
    for index, column in enumerate(columns):  # it spills (heads of 256) unless it reads the warpgroup for itself
        buffers.plain[_read_anew("warpgroup"), index] = answers[:, column : column + static.panel]
    compat.commit_smem()

    @pl.loop(0, static.group_size)
    def _(member: jax.Array) -> None:
        first = member * static.tile_tokens
        begin = jnp.maximum(first + skip, warpgroup * ROWS)
        end = jnp.minimum(first + skip + count, (warpgroup + 1) * ROWS)
        token = start + begin - first

        def copy(done: jax.Array, size: int) -> None:
            rows = pl.ds(begin + done - warpgroup * ROWS, size)
            target = operands.out.at[pl.ds(token + done, size), head * static.group_size + member]
            for index, column in enumerate(columns):
                panel = buffers.plain.at[warpgroup, index, rows]
                compat.copy_smem_to_gmem(panel, target.at[:, pl.ds(column, static.panel)])

        for_pieces(end - begin, min(static.tile_tokens, ROWS), copy)


def _weigh(
    static: Static,
    scores: jax.Array,  # [ROWS, keys] f32, raw
    largest: jax.Array,  # [ROWS] f32, in base 2
    scale: jax.Array,
    span: Span,
    block: jax.Array,
    warpgroup: jax.Array,
    *,
    masked: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unnormalised weights, what the sums before shrink by, and the new largest score."""
    if static.softcap is not None:
        scores = jnp.tanh(scores * scale)
        scale = static.softcap * LOG2_E
    if masked:
        rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=compat.WGMMA.reduce(1)) + warpgroup * ROWS
        tokens = lax.rem(rows.astype(jnp.uint32), jnp.uint32(static.tile_tokens)).astype(jnp.int32)
        queries = tokens + (span.origin - block * static.keys)
        # Distance from each query back to each key. Rows of other tokens may see anything: their answers are dropped.
        distances = compat.spread(queries, scores.shape) - compat.iota(scores.shape, 1)
        if static.window is None:
            seen = distances >= 0
        else:
            seen = distances.astype(jnp.uint32) < static.window  # negative ones become large
        scores = jnp.where(seen, scores, -jnp.inf)
    new_largest = jnp.maximum(largest, scores.max(axis=1) * scale)
    weights = jnp.exp2(scores * scale - compat.spread(new_largest, scores.shape))
    return weights, jnp.exp2(largest - new_largest), new_largest
