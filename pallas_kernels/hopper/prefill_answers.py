"""The end of the prefill kernel: answers on their way to the step's tokens, or to where the units of a tile are joined.

What a warpgroup needs here (its unit and head, its tokens) is read anew, as `prefill_place.py` says.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.prefill_place import Place, read_anew
from pallas_kernels.hopper.prefill_static import (
    COUNT,
    FIRST,
    NUM_COMPUTE,
    ORIGIN,
    POSITION,
    ROWS,
    SLOT,
    TILE_ROWS,
    Operands,
    Scratch,
    Static,
)
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.pieces import for_pieces


def store_logs(buffers: Scratch, logs: jax.Array) -> None:
    """Keeps one warpgroup's `logs` [ROWS] f32, the base-2 logarithms of the sums of weights, for `store_answers`."""
    buffers.logs[read_anew("warpgroup")] = logs


def store_answers(static: Static, operands: Operands, buffers: Scratch, place: Place, answers: jax.Array) -> None:
    """Stores one warpgroup's answers [ROWS, H] f32, and returns when they are in memory."""
    if static.splits:
        is_partial = operands.units[place.read_tile(), SLOT] >= 0
        pl.when(is_partial)(partial(_store_partial, static, operands, buffers, place, answers))
        pl.when(~is_partial)(partial(_store_final, static, operands, buffers, place, answers))
    else:
        _store_final(static, operands, buffers, place, answers)
    compat.wait_smem_to_gmem(0)
    if static.num_blocks is not None:
        compat.barrier_arrive(buffers.q_free)


def for_answers(
    static: Static,
    unit: jax.Ref,  # [UNIT_COLUMNS] i32
    part: jax.Array,  # ROWS rows of the tile: a warpgroup's
    copy: Callable[[jax.Array, jax.Array, jax.Array, int], None],
) -> None:
    """Calls `copy(row, token, member, size)` for pieces of the part that are answers: `size` rows from the part's `row`
    on are of tokens from `token` on, and of the group's head `member`."""
    start, skip, count = unit[FIRST], unit[POSITION] - unit[ORIGIN], unit[COUNT]

    @pl.loop(0, static.group_size)
    def _(member: jax.Array) -> None:
        first = member * static.tile_tokens
        begin = jnp.maximum(first + skip, part * ROWS)
        end = jnp.minimum(first + skip + count, (part + 1) * ROWS)
        row, token = begin - part * ROWS, start + begin - first

        def copy_piece(done: jax.Array, size: int) -> None:
            copy(row + done, token + done, member, size)

        for_pieces(end - begin, min(static.tile_tokens, ROWS), copy_piece)


def _store_final(static: Static, operands: Operands, buffers: Scratch, place: Place, answers: jax.Array) -> None:
    """Starts the copies of one warpgroup's answers [ROWS, H] to their tokens."""
    answers = answers.astype(static.dtype)
    is_whole = operands.units[place.read_tile(), COUNT] == static.tile_tokens
    pl.when(is_whole)(partial(_store_whole, static, operands, buffers, place, answers))
    pl.when(~is_whole)(partial(_store_cut, static, operands, buffers, place, answers))


def _store_whole(static: Static, operands: Operands, buffers: Scratch, place: Place, answers: jax.Array) -> None:
    """The copies of a tile whose tokens are all its own, head by head."""
    warpgroup, head = read_anew("warpgroup"), place.read_head()
    start = pl.multiple_of(operands.units[place.read_tile(), FIRST], compat.SWIZZLE_ROWS)
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


def _store_cut(static: Static, operands: Operands, buffers: Scratch, place: Place, answers: jax.Array) -> None:
    """The copies of a tile with tokens of other rows, which other blocks answer."""
    warpgroup, head = read_anew("warpgroup"), place.read_head()
    columns = range(0, static.width, static.panel)
    for index, column in enumerate(columns):  # it spills (heads of 256) unless it reads the warpgroup for itself
        buffers.plain[read_anew("warpgroup"), index] = answers[:, column : column + static.panel]
    compat.commit_smem()

    def copy(row: jax.Array, token: jax.Array, member: jax.Array, size: int) -> None:
        target = operands.out.at[pl.ds(token, size), head * static.group_size + member]
        for index, column in enumerate(columns):
            panel = buffers.plain.at[warpgroup, index, pl.ds(row, size)]
            compat.copy_smem_to_gmem(panel, target.at[:, pl.ds(column, static.panel)])

    for_answers(static, operands.units.at[place.read_tile()], warpgroup, copy)


def _store_partial(static: Static, operands: Operands, buffers: Scratch, place: Place, answers: jax.Array) -> None:
    """The copies of one of several units of a tile to its slot: all rows, in float32, half of the columns at a time."""
    warpgroup = read_anew("warpgroup")
    rows = pl.ds(pl.multiple_of(place.read_head() * TILE_ROWS + warpgroup * ROWS, ROWS), ROWS)
    slot, half = operands.units[place.read_tile(), SLOT], static.width // 2
    for column in (0, half):
        if column > 0:
            compat.wait_smem_to_gmem(0)
        buffers.partial[read_anew("warpgroup")] = answers[:, column : column + half]  # as in _store_cut
        compat.commit_smem()
        target = operands.partials.at[slot, rows, pl.ds(column, half)]
        compat.copy_smem_to_gmem(buffers.partial.at[warpgroup], target)
    compat.copy_smem_to_gmem(buffers.logs.at[warpgroup], operands.logs.at[slot, rows])
