"""The kernel behind `prefill.py`: one block of three warpgroups per (unit, KV head); a unit is a tile of queries, with
all keys that it sees or a run of them.

The structure is FlashAttention-3's (Shah et al., 2024). A memory warpgroup walks the unit's keys and keeps a ring in
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
from pallas_kernels.hopper.overlap import launch_next_kernel
from pallas_kernels.hopper.prefill_answers import read_anew, store_answers, store_logs
from pallas_kernels.hopper.prefill_memory import load_narrow, load_plain, load_queries
from pallas_kernels.hopper.prefill_static import (
    COUNT,
    NUM_COMPUTE,
    ORIGIN,
    ROW,
    ROWS,
    Operands,
    Scratch,
    Span,
    Static,
    find_span,
)
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.key_tiles import LOG2_E, MASKED

type Carry = tuple[jax.Array, jax.Array, jax.Array]  # mixed values [ROWS, H], largest score [ROWS], weight [ROWS]


def build_kernel(static: Static) -> Callable[..., None]:
    """The body, which takes `Operands`, without sinks if there are none, and `Scratch` by name."""

    def prefill_kernel(*refs: jax.Ref, **scratch: jax.Ref) -> None:
        if static.splits:
            launch_next_kernel(interpret=static.interpret)  # the join
        refs = refs if static.has_sinks else (*refs[:6], None, *refs[6:])
        operands = Operands(*refs)
        answers = scratch.pop("q_then_answers")
        scratch |= dict(zip(("q", "plain", "partial"), answers, strict=False))
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
    """Attention of one warpgroup's 64 query rows over the unit's keys."""
    rows = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
    queries = buffers.q.at[rows]
    if static.has_sinks:  # a sink is a key that every query sees, without a value
        largest = compat.load_column(operands.sinks.at[head, rows])
        total = compat.full((ROWS,), 1.0)
        if static.splits:  # the tile's last unit has it
            share = jnp.where(span.is_last, 1.0, 0.0)
            largest, total = largest + (1.0 - share) * MASKED, total * share
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

    def find_origin() -> jax.Array:
        # Read before the loop that needs it: kept from the start, it spills where tiles are split (heads of 256).
        return operands.units[read_anew("tile"), ORIGIN] if static.splits else span.origin

    def attend_block(block: jax.Array, carry: Carry, *, origin: jax.Array | None = None) -> Carry:
        mixed, largest, total = carry
        slot = lax.rem(block - span.first, static.stages)
        scores = wgmma.multiply_qk(queries, buffers.k.at[slot], take_turns)
        free(buffers.k_free, block, slot)
        weights, shrink, largest = _weigh(static, scores, largest, scale, origin, block, warpgroup)
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
    if static.window is not None:
        carry = lax.fori_loop(span.first, span.inner, partial(attend_block, origin=find_origin()), carry)
    carry = lax.fori_loop(span.inner, span.outer, attend_block, carry)
    masked = partial(attend_block, origin=find_origin())
    mixed, largest, total = lax.fori_loop(span.outer, span.last, masked, carry)
    pl.when(warpgroup == 0)(take_turns)

    if static.splits:
        store_logs(buffers, largest + jnp.log2(total))
    share = 1.0 / jnp.maximum(total, 1e-30)  # 0 stays 0 in a row that sees no key
    store_answers(static, operands, buffers, mixed * compat.spread(share, mixed.shape))


def _weigh(
    static: Static,
    scores: jax.Array,  # [ROWS, keys] f32, raw
    largest: jax.Array,  # [ROWS] f32, in base 2
    scale: jax.Array,
    origin: jax.Array | None,  # position of the tile's first token; None if all queries see all keys
    block: jax.Array,
    warpgroup: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unnormalised weights, what the sums before shrink by, and the new largest score."""
    if static.softcap is not None:
        scores = jnp.tanh(scores * scale)
        scale = static.softcap * LOG2_E
    if origin is not None:
        rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=compat.WGMMA.reduce(1)) + warpgroup * ROWS
        tokens = lax.rem(rows.astype(jnp.uint32), jnp.uint32(static.tile_tokens)).astype(jnp.int32)
        queries = tokens + (origin - block * static.keys)
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
