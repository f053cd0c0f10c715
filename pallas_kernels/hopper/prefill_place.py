"""The place of a block of the prefill kernel: the unit and the KV head that it attends.

Either there is a block for each, or, with `PrefillConfig.persistent`, one per SM that goes from unit to unit: its
memory warpgroup then fetches the next unit's keys while the answers of this one are written. Units come longest first,
and are handed out in reverse every other time, so all blocks have about the same to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.prefill_static import COUNT, Operands, Static


def read_anew(axis: str) -> jax.Array:
    """The block's or warpgroup's place on an axis. Kept through the loops over keys, it would take registers that heads
    of 256 do not have."""
    return lax.optimization_barrier(lax.axis_index(axis))


class Place(NamedTuple):
    """A block's unit and head at a time; both are read anew where they are used."""

    static: Static
    before: jax.Array | None  # units that the block has attended; None: the grid has a block for each unit and head

    def read_tile(self) -> jax.Array:
        """The unit's place in the list."""
        return read_anew("tile") if self.before is None else lax.div(self._read_number(), self.static.num_kv_heads)

    def read_head(self) -> jax.Array:
        return read_anew("head") if self.before is None else lax.rem(self._read_number(), self.static.num_kv_heads)

    def is_used(self, operands: Operands) -> jax.Array:
        """Whether the list has a unit here: unused ones come last."""
        tile, num_units = self.read_tile(), operands.units.shape[0]
        return (tile < num_units) & (operands.units[jnp.minimum(tile, num_units - 1), COUNT] > 0)

    def _read_number(self) -> jax.Array:
        block, num_blocks = read_anew("block"), self.static.num_blocks
        assert self.before is not None and num_blocks is not None
        return find_number(self.before, block, num_blocks)


def find_number(before: jax.Array | int, block: jax.Array | int, num_blocks: int) -> jax.Array:
    """Which of all (unit, head) a block attends after `before` others. The last block is the first every other time."""
    return before * num_blocks + jnp.where(before & 1 == 0, block, num_blocks - 1 - block)


def for_places[T](static: Static, operands: Operands, attend: Callable[[Place, T], T], start: T) -> T:
    """Calls `attend(place, carry)` for each unit of the block. Returns the last carry."""
    if static.num_blocks is None:
        place = Place(static, None)
        return lax.cond(place.is_used(operands), lambda: attend(place, start), lambda: start)

    def is_used(carry: tuple[jax.Array, T]) -> jax.Array:
        return Place(static, carry[0]).is_used(operands)

    def run(carry: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        return carry[0] + 1, attend(Place(static, carry[0]), carry[1])

    return lax.while_loop(is_used, run, (jnp.int32(0), start))[1]
