"""The kernel behind `prefill.py`: a block of three warpgroups attends a unit with one KV head, or several in turn
(`prefill_place.py`); a unit is a tile of queries, with all keys that it sees or a run of them.

The structure is FlashAttention-3's (Shah et al., 2024). A memory warpgroup walks the unit's keys and keeps a ring in
shared memory full by TMA, page by page. Two compute warpgroups hold 64 query rows each and take turns at beginning
products: the scores of a key tile, and behind them the values of the tile before. So a warpgroup's softmax runs while
the tensor cores work at its own values and at the other's products, and no turn waits for a product to end. Heads of
256 have no registers for that: there, values are awaited before the scores begin.

All three walk the same range of keys, in key tiles of `keys` tokens ("blocks" below, counted from the row's first
token). So every barrier gets the same number of arrivals, whatever the masks are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.overlap import launch_next_kernel
from pallas_kernels.hopper.prefill_answers import store_answers, store_logs
from pallas_kernels.hopper.prefill_memory import await_reads, load_unit, write_numbers
from pallas_kernels.hopper.prefill_place import Place, for_places
from pallas_kernels.hopper.prefill_static import (
    NUM_COMPUTE,
    ROWS,
    Operands,
    Scratch,
    Span,
    Static,
    find_span,
)
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.key_tiles import LOG2_E, MASKED

type Sums = tuple[jax.Array, jax.Array]  # largest score [ROWS] in base 2, sum of the weights [ROWS]; f32
type Weighed = tuple[jax.Array, jax.Array, Sums]  # weights [ROWS, keys], what sums before shrink by [ROWS], sums
type Carry = tuple[jax.Array, jax.Array, Sums]  # mixed values [ROWS, H] f32, weights of the last key tile, sums


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
        warpgroup = lax.axis_index("warpgroup")

        # Each branch reads the span for itself, and the branches are those of one condition: what both kept from before
        # it would spill.
        def _load() -> None:
            compat.set_max_registers(static.registers[1], action="decrease")
            write_numbers(buffers)
            load = partial(load_unit, static, operands, buffers)
            await_reads(static, buffers, for_places(static, operands, load, jnp.int32(0)))

        def _compute() -> None:
            compat.set_max_registers(static.registers[0], action="increase")

            def attend(place: Place, _: tuple[()]) -> tuple[()]:
                span = find_span(static, operands, place.read_tile())
                _attend(_Warpgroup(static, operands, buffers, span, place, warpgroup))
                return ()

            for_places(static, operands, attend, ())

        lax.cond(warpgroup == NUM_COMPUTE, _load, _compute)

    return prefill_kernel


class _Warpgroup(NamedTuple):
    """A compute warpgroup at work on its 64 query rows."""

    static: Static
    operands: Operands
    buffers: Scratch
    span: Span
    place: Place
    index: jax.Array

    @property
    def rows(self) -> pl.Slice:
        return pl.ds(pl.multiple_of(self.index * ROWS, ROWS), ROWS)

    def await_turn(self) -> None:
        """Until this warpgroup may begin products."""
        compat.barrier_wait(self.buffers.turn.at[self.index])

    def pass_turn(self) -> None:
        compat.barrier_arrive(self.buffers.turn.at[1 - self.index])

    def find_slot(self, block: jax.Array) -> jax.Array:
        return lax.rem(block - self.span.first, self.static.stages)

    def find_origin(self) -> jax.Array:
        """Is called before each loop that needs it: kept from the start, it spills."""
        return self.operands.units[self.place.read_tile(), self.static.origin]

    def free(self, barriers: jax.Ref, block: jax.Array) -> None:
        """Gives back the block's slot."""
        compat.barrier_arrive(barriers.at[self.find_slot(block)])

    def weigh(
        self,
        block: jax.Array,
        origin: jax.Array | None,
        scale: jax.Array,
        sums: Sums,
        scores: jax.Array,  # [ROWS, keys] f32, raw
    ) -> Weighed:
        """Unnormalised weights of the block's keys. Ends when it is this warpgroup's turn again.

        `origin` is the position of the tile's first token; None if all queries see all keys.
        """
        self.free(self.buffers.k_free, block)
        if self.static.softcap is not None:
            scores, scale = jnp.tanh(scores * scale), self.static.softcap * LOG2_E
        if origin is not None:
            scores = jnp.where(self.see(origin, block, scores.shape), scores, -jnp.inf)
        largest, total = sums
        new_largest = jnp.maximum(largest, scores.max(axis=1) * scale)
        weights = jnp.exp2(scores * scale - compat.spread(new_largest, scores.shape))
        shrink = jnp.exp2(largest - new_largest)
        total = total * shrink + weights.sum(axis=1)
        # The softmax ends before the turn begins: else the tensor cores would wait for it.
        weighed = lax.optimization_barrier((weights, shrink, (new_largest, total)))
        self.await_turn()
        return weighed

    def see(self, origin: jax.Array, block: jax.Array, shape: tuple[int, int]) -> jax.Array:
        """Which of the block's keys each query sees: [ROWS, keys] bool."""
        static = self.static
        queries = origin - block * static.keys
        if static.causal:
            rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=compat.WGMMA.reduce(1)) + self.index * ROWS
            tokens = lax.rem(rows.astype(jnp.uint32), jnp.uint32(static.tile_tokens)).astype(jnp.int32)
            queries = compat.spread(tokens + queries, shape)
        # Distance from each query back to each key. Rows of other tokens may see anything: their answers are dropped.
        distances = queries - self.number_keys(shape)
        if static.window is None:
            return distances >= 0
        return distances.astype(jnp.uint32) < static.window  # negative ones become large

    def number_keys(self, shape: tuple[int, int]) -> jax.Array:
        """[ROWS, keys] i32, the number of each key in its tile. Blocks that go from unit to unit read it from memory:
        compilers would keep what is computed in registers all the time."""
        if self.buffers.numbers is None:
            return compat.iota(shape, 1)
        return lax.broadcast_in_dim(compat.load_row(self.buffers.numbers), shape, (1,))


def _attend(work: _Warpgroup) -> None:
    """Attention of one warpgroup's 64 query rows over the unit's keys."""
    static, operands = work.static, work.operands
    if static.has_sinks:  # a sink is a key that every query sees, without a value
        largest = compat.load_column(operands.sinks.at[work.place.read_head(), work.rows])
        total = compat.full((ROWS,), 1.0)
        if static.splits:  # the tile's last unit has it
            share = jnp.where(work.span.is_last, 1.0, 0.0)
            largest, total = largest + (1.0 - share) * MASKED, total * share
    else:
        largest, total = compat.full((ROWS,), MASKED), compat.full((ROWS,), 0.0)
    mixed, (largest, total) = _walk_keys(work, (largest, total))
    if static.splits:
        store_logs(work.buffers, largest + jnp.log2(total))
    share = 1.0 / jnp.maximum(total, 1e-30)  # 0 stays 0 in a row that sees no key
    store_answers(static, operands, work.buffers, work.place, mixed * compat.spread(share, mixed.shape))


def _walk_keys(work: _Warpgroup, sums: Sums) -> tuple[jax.Array, Sums]:
    """Mixed values [ROWS, H] f32, not yet divided by the sum of their weights, and the sums."""
    static, buffers, span = work.static, work.buffers, work.span
    queries, scale = buffers.q.at[work.rows], work.operands.scales[work.place.read_head()]

    def attend_block(block: jax.Array, carry: Carry, *, origin: jax.Array | None = None) -> Carry:
        """The weights of a key tile. Meanwhile the values of the tile before are mixed."""
        mixed, weights, sums = carry
        slot, before = work.find_slot(block), work.find_slot(block - 1)
        query_keys, mix = (queries, buffers.k.at[slot]), (mixed, weights, buffers.v.at[before])
        await_values = partial(compat.barrier_wait, buffers.v_full.at[before])
        weigh = partial(work.weigh, block, origin, scale, sums)
        compat.barrier_wait(buffers.k_full.at[slot])
        if static.overlaps:
            mixed, (weights, shrink, sums) = wgmma.multiply_both(
                query_keys, mix, await_values, work.pass_turn, weigh, interpret=static.interpret
            )
            work.free(buffers.v_free, block - 1)
        else:
            await_values()
            mixed = wgmma.multiply_pv(*mix, interpret=static.interpret)
            work.free(buffers.v_free, block - 1)
            weights, shrink, sums = weigh(wgmma.multiply_qk(*query_keys, work.pass_turn))
        # Not before: the product still read the registers of the weights before these.
        return mixed * compat.spread(shrink, mixed.shape), weights.astype(static.dtype), sums

    compat.barrier_wait(buffers.q_full)
    pl.when(work.index == 1)(work.pass_turn)  # the first warpgroup begins
    work.await_turn()
    # Of a slot that is the first one, its barriers and descriptors would be kept from unit to unit.
    first = span.first + wgmma.hide_zero(span.first)
    slot = work.find_slot(first)
    compat.barrier_wait(buffers.k_full.at[slot])
    scores = wgmma.multiply_qk(queries, buffers.k.at[slot], work.pass_turn)
    weights, _, sums = work.weigh(first, work.find_origin(), scale, sums, scores)
    carry = compat.full((ROWS, static.width), 0.0), weights.astype(static.dtype), sums
    inner = second = span.first + 1
    if static.window is not None:
        inner = jnp.maximum(span.inner, second)
        carry = lax.fori_loop(second, inner, partial(attend_block, origin=work.find_origin()), carry)
    outer = jnp.maximum(span.outer, inner)
    carry = lax.fori_loop(inner, outer, attend_block, carry)
    carry = lax.fori_loop(outer, span.last, partial(attend_block, origin=work.find_origin()), carry)
    mixed, weights, sums = carry
    slot = work.find_slot(span.last - 1)
    compat.barrier_wait(buffers.v_full.at[slot])
    end_turn = partial(pl.when(work.index == 0), work.pass_turn)  # the second warpgroup is the last
    mixed = wgmma.multiply_pv(mixed, weights, buffers.v.at[slot], end_turn, interpret=static.interpret)
    work.free(buffers.v_free, span.last - 1)
    return mixed, sums
