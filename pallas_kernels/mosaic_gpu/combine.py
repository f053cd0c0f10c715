"""Joins the units of a row: the second launch of a step, small beside the first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.key_tiles import MASKED
from pallas_kernels.mosaic_gpu.splits import QUERY_ROWS, SplitList

COMBINE_COLUMNS = 64  # columns of a head per block
_UNROLL = 4  # units read at once, so that a row of many units does not wait for each


@dataclass(frozen=True)
class Combine(ABC):
    """The kernel's body and its static parameters: a block joins 64 columns of 64 query rows.

    Each kind of GPU says how a block begins, and how its answers leave shared memory.
    """

    num_kv_heads: int
    num_rows: int  # R, a power of two from 8: row h * R + r of the C is KV head h's row r
    num_used: int  # rows of a head that are wanted, its first ones
    dtype: jnp.dtype  # of the answers
    interpret: bool
    has_sinks: bool = False
    has_scale: bool = False

    @property
    @abstractmethod
    def staging(self) -> object:
        """Shared memory [QUERY_ROWS, COMBINE_COLUMNS] of the dtype."""

    @property
    @abstractmethod
    def out_shape(self) -> tuple[int, ...]:
        """The answers of a row of the step, but for their columns."""

    @abstractmethod
    def begin(self) -> None:
        """Is called before anything is read."""

    @abstractmethod
    def store(self, staging: jax.Ref, out: jax.Ref) -> None:
        """Copies the block's answers to their places in `out` [S, *out_shape, width]."""

    @abstractmethod
    def split_heads(self, found: jax.Array) -> jax.Array:
        """[S, *out_shape, width] -> [S, num_kv_heads, num_used or more, width]."""

    def __call__(self, *refs: jax.Ref) -> None:
        outputs, logs, row_first_unit, row_num_units, *extra, out, staging = refs
        self.begin()
        row = lax.axis_index("row")
        first, count = row_first_unit[row], row_num_units[row]
        rows, columns = self.find_place()
        tile = (QUERY_ROWS, COMBINE_COLUMNS)

        @pl.when(count == 0)
        def _() -> None:
            staging[...] = compat.full(tile, 0.0, self.dtype)

        @pl.when(count > 0)
        def _() -> None:
            extra_refs = list(extra)
            if self.has_sinks:  # a sink is a unit of one key, before all others
                largest, total = compat.load_column(extra_refs.pop(0).at[rows]), compat.full(tile[:1], 1.0)
            else:
                largest, total = compat.full(tile[:1], MASKED), compat.full(tile[:1], 0.0)
            acc, total = join_units((outputs, logs), (rows, columns), first, count, largest, total)
            acc = acc / compat.spread(total, tile)
            if self.has_scale:
                acc = acc * compat.spread(compat.load_column(extra_refs.pop(0).at[rows]), tile)
            staging[...] = acc.astype(self.dtype)

        self.store(staging, out)

    def find_place(self) -> tuple[pl.Slice, pl.Slice]:
        """The block's rows of the C, and its columns."""
        rows = pl.ds(pl.multiple_of(lax.axis_index("rows") * QUERY_ROWS, 8), QUERY_ROWS)
        return rows, pl.ds(pl.multiple_of(lax.axis_index("columns") * COMBINE_COLUMNS, 8), COMBINE_COLUMNS)


def combine_units(
    body: Combine,
    outputs: jax.Array,  # [W, C, width], each unit's attention, normalised
    logs: jax.Array,  # [W, C] f32, base-2 logarithms of the sums of weights
    work: SplitList,
    sinks: jax.Array | None,  # [C] f32, base 2: a logit without a value
    scale: jax.Array | None,  # [C] f32, of values
) -> jax.Array:
    """[S, num_kv_heads, num_used or more, width]: the average of a row's units by their weights; zeros for a row
    without any."""
    num_rows, (num_columns, width) = work.row_num_units.shape[0], outputs.shape[1:]
    run = compat.kernel(
        replace(body, has_sinks=sinks is not None, has_scale=scale is not None),
        out_type=jax.ShapeDtypeStruct((num_rows, *body.out_shape, width), body.dtype),
        grid=(num_rows, num_columns // QUERY_ROWS, width // COMBINE_COLUMNS),
        grid_names=("row", "rows", "columns"),
        scratch_types=[body.staging],
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(body.interpret),
        kernel_name="combine_units",
    )
    extra = [array for array in (sinks, scale) if array is not None]
    return body.split_heads(run(outputs, logs, work.row_first_unit, work.row_num_units, *extra))


def join_units(
    refs: tuple[jax.Ref, jax.Ref],  # outputs [W, C, width], each unit's attention, and logs [W, C] f32
    place: tuple[pl.Slice, pl.Slice],  # QUERY_ROWS of the C, and COMBINE_COLUMNS of the width
    first: jax.Array,
    count: jax.Array,  # units from `first`, at least one
    largest: jax.Array,  # [QUERY_ROWS] f32
    total: jax.Array,  # [QUERY_ROWS] f32
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of a run of units [QUERY_ROWS, COMBINE_COLUMNS] and the sum of their weights [QUERY_ROWS], f32.

    `total` is the sum of the weights before them, which have no values, and `largest` the largest one's logarithm.
    """
    step = partial(_join_next, refs=refs, place=place, first=first, count=count)
    num_steps = lax.div(count + _UNROLL - 1, _UNROLL)
    acc = compat.full((QUERY_ROWS, COMBINE_COLUMNS), 0.0)
    acc, _, total = lax.fori_loop(0, num_steps, step, (acc, largest, total))
    return acc, total


def _join_next(
    index: jax.Array,
    carry: tuple[jax.Array, jax.Array, jax.Array],
    *,
    refs: tuple[jax.Ref, jax.Ref],
    place: tuple[pl.Slice, pl.Slice],
    first: jax.Array,
    count: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the next units. Past the last unit, that one counts again with weight 0."""
    acc, largest, total = carry
    (outputs, logs), (rows, columns) = refs, place
    members = [index * _UNROLL + offset for offset in range(_UNROLL)]
    slots = [first + jnp.minimum(member, count - 1) for member in members]
    tiles = [compat.load_tile(outputs.at[slot, rows, columns]) for slot in slots]
    weights = [
        compat.load_column(logs.at[slot, rows]) + jnp.where(member < count, 0.0, 2 * MASKED)
        for slot, member in zip(slots, members, strict=True)
    ]
    new_largest = largest
    for weight in weights:
        new_largest = jnp.maximum(new_largest, weight)
    shrink = jnp.exp2(largest - new_largest)
    acc, total = acc * compat.spread(shrink, acc.shape), total * shrink
    for tile, weight in zip(tiles, weights, strict=True):
        share = jnp.exp2(weight - new_largest)
        acc = acc + tile.astype(jnp.float32) * compat.spread(share, acc.shape)
        total = total + share
    return acc, new_largest, total
