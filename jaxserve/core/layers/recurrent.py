"""Recurrent state as layers read and write it: one array [L, slots, ...] for each name, where row r owns slot r.

A row whose text begins in the step reads zeros, whatever its slot holds, so an admitted row needs no reset. The padding
row has no slot: it reads zeros, too, and what it writes is dropped. Snapshots have the slots behind those of rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from jaxserve.core.layers.context import StateSlots


def choose_slots(
    row_ids: Int[Array, " S"], seq_lens: Int[Array, " S"], query_lens: Int[Array, " S"], padding_row: int
) -> StateSlots:
    """Returns the slots of a step's rows; `seq_lens` include its tokens, of which a row has `query_lens`."""
    nowhere = jnp.iinfo(jnp.int32).max
    own = jnp.where(row_ids == padding_row, nowhere, row_ids)
    return StateSlots(read=jnp.where(seq_lens > query_lens, own, nowhere), write=own)


def read_slots(pool: jax.Array, offset: int, slots: Int[Array, " n"]) -> jax.Array:
    """Returns some slots [n, ...] of one array of a pool; zeros for those that it does not have."""
    return pool.at[offset, slots].get(mode="fill", fill_value=0)


def write_slots(pool: jax.Array, offset: int, slots: Int[Array, " n"], state: jax.Array) -> jax.Array:
    """Returns the array of a pool with these slots [n, ...]; those that it does not have are dropped."""
    return pool.at[offset, slots].set(state.astype(pool.dtype), mode="drop")


def copy_slots[T](
    pools: T, sources: Int[Array, " C"], targets: Int[Array, " C"], first: Int[Array, ""], end: Int[Array, ""]
) -> T:
    """Returns pools of any layers with the copies first..end - 1 made one after another, in every array of theirs."""

    def copy(index: jax.Array, pools: T) -> T:
        def move(pool: jax.Array) -> jax.Array:
            # Without the barrier a compiler may read and write in one loop, for which it would copy the pool.
            state = lax.optimization_barrier(lax.dynamic_slice_in_dim(pool, sources[index], 1, axis=1))
            return lax.dynamic_update_slice_in_dim(pool, state, targets[index], axis=1)

        return jax.tree.map(move, pools)

    return lax.fori_loop(first, end, copy, pools)
