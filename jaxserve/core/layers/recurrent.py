"""Recurrent state as layers read and write it: one array [L, slots, ...] for each name, where row r owns slot r.

A row whose text begins in the step reads zeros, whatever its slot holds, so an admitted row needs no reset. The padding
row has no slot: it reads zeros, too, and what it writes is dropped. Snapshots have the slots behind those of rows.

A verify step reads states and writes none, since it does not know yet which of its tokens stay. It leaves them pending:
what the mixers read of them, their streams, is kept in the pool. Behind the step's sampling, `settle_states` (runtime)
lets the states follow the tokens that stay, by the mixers' own functions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.context import StateSlots

PENDING = "pending"
"""The name in a pool for the streams of a verify step's tokens, [L, ..., T, C] each. Rows have no slots there."""


def choose_slots(
    row_ids: Int[Array, " S"],
    seq_lens: Int[Array, " S"],
    query_lens: Int[Array, " S"],
    padding_row: int,
    *,
    leaves_pending: bool = False,
) -> StateSlots:
    """Returns the slots of a step's rows; `seq_lens` include its tokens, of which a row has `query_lens`.

    A step that leaves its tokens pending writes to none.
    """
    nowhere = jnp.iinfo(jnp.int32).max
    own = jnp.where(row_ids == padding_row, nowhere, row_ids)
    read = jnp.where(seq_lens > query_lens, own, nowhere)
    if leaves_pending:
        return StateSlots(read, jnp.full_like(own, nowhere), leaves_pending=True)
    return StateSlots(read, own)


def read_slots(pool: jax.Array, offset: int, slots: Int[Array, " n"]) -> jax.Array:
    """Returns some slots [n, ...] of one array of a pool; zeros for those that it does not have."""
    return pool.at[offset, slots].get(mode="fill", fill_value=0)


def write_slots(pool: jax.Array, offset: int, slots: Int[Array, " n"], state: jax.Array) -> jax.Array:
    """Returns the array of a pool with these slots [n, ...]; those that it does not have are dropped."""
    return pool.at[offset, slots].set(state.astype(pool.dtype), mode="drop")


def write_rows(
    pool: jax.Array, offset: int, slots: Int[Array, " n"], state: jax.Array, *, leaves_pending: bool
) -> jax.Array:
    """Returns the array of a pool after rows [n, ...] of a step, as it is if the step leaves its tokens pending.

    XLA makes of a write to one slot a loop that reads and writes, for which it copies the pool. So a single row has a
    slot beside it that there is not.
    """
    if leaves_pending:
        return pool
    if len(slots) == 1:
        slots = jnp.pad(slots, (0, 1), constant_values=jnp.iinfo(slots.dtype).max)
        state = jnp.pad(state, ((0, 1), *[(0, 0)] * (state.ndim - 1)))
    return write_slots(pool, offset, slots, state)


def keep_streams(pending: tuple[jax.Array, ...], offset: int, streams: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Returns the pool's arrays with the streams [..., T, C] of a verify step's tokens, of which there may be fewer."""

    def keep(array: jax.Array, stream: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(array, stream.astype(array.dtype)[None], (offset, *[0] * stream.ndim))

    return tuple(keep(array, stream) for array, stream in zip(pending, streams, strict=True))


def take_streams(
    pending: tuple[jax.Array, ...], offset: int, places: Int[Array, " T"]
) -> tuple[Float[Array, "... T C"], ...]:
    """Returns the streams of tokens at these places among the pending ones; any for a place that there is not."""
    return tuple(jnp.take(array[offset], places, axis=-2, mode="clip") for array in pending)


def copy_slots[T](
    pools: T, sources: Int[Array, " C"], targets: Int[Array, " C"], first: Int[Array, ""] | int, end: Int[Array, ""]
) -> T:
    """Returns arrays [L, slots, ...] of any layers with the copies first..end - 1 made one after another in each."""

    def copy(index: jax.Array, pools: T) -> T:
        def move(pool: jax.Array) -> jax.Array:
            # Without the barrier a compiler may read and write in one loop, for which it would copy the pool.
            state = lax.optimization_barrier(lax.dynamic_slice_in_dim(pool, sources[index], 1, axis=1))
            return lax.dynamic_update_slice_in_dim(pool, state, targets[index], axis=1)

        return jax.tree.map(move, pools)

    return lax.fori_loop(first, end, copy, pools)
