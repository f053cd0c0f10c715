"""Joins the units of a row: a second launch, small beside the first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ampere.compat import PART_COLUMNS, TILE_ROWS, store_rows
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.key_tiles import MASKED

Carry = tuple[jax.Array, jax.Array, jax.Array]


def combine_units(
    outputs: jax.Array,  # [W, C, width], each unit's attention, normalised; C a multiple of 64
    logs: jax.Array,  # [W, C] f32, base-2 logarithms of the sums of weights
    row_first_unit: jax.Array,  # [S] i32
    row_num_units: jax.Array,  # [S] i32
    *,
    interpret: bool,
) -> tuple[jax.Array, jax.Array]:
    """A row's units as one: outputs [S, C, width] and logs [S, C]; zeros and MASKED for a row without any."""
    num_columns, width = outputs.shape[1:]
    num_rows = row_num_units.shape[0]
    run = compat.kernel(
        _CombineKernel(),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, num_columns, width), outputs.dtype),
            jax.ShapeDtypeStruct((num_rows, num_columns), jnp.float32),
        ),
        grid=(num_rows, num_columns // TILE_ROWS, width // PART_COLUMNS),
        grid_names=("row", "rows", "columns"),
        scratch_types=[compat.tile_smem((TILE_ROWS, PART_COLUMNS), outputs.dtype)],
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(interpret),
        kernel_name="ampere_combine",
    )
    return run(outputs, logs, row_first_unit, row_num_units)


@dataclass(frozen=True)
class _CombineKernel:
    """The kernel's body: a block joins 64 columns of 64 query rows."""

    @property
    def __name__(self) -> str:
        return "ampere_combine"

    def __call__(self, *refs: jax.Ref) -> None:
        outputs, logs, row_first_unit, row_num_units, out, out_logs, staging = refs
        row, part = lax.axis_index("row"), lax.axis_index("columns")
        first, count = row_first_unit[row], row_num_units[row]
        rows = pl.ds(pl.multiple_of(lax.axis_index("rows") * TILE_ROWS, TILE_ROWS), TILE_ROWS)
        columns = pl.ds(pl.multiple_of(part * PART_COLUMNS, PART_COLUMNS), PART_COLUMNS)
        step = partial(self.join, outputs=outputs.at[:, rows, columns], logs=logs.at[:, rows], first=first)
        tile = (TILE_ROWS, PART_COLUMNS)
        carry = (compat.full(tile, 0.0), compat.full(tile[:1], MASKED), compat.full(tile[:1], 0.0))
        acc, largest, total = lax.fori_loop(0, count, step, carry)
        total = jnp.where(total > 0, total, 1.0)  # a row without units has zeros, and MASKED as its log
        staging[...] = (acc / compat.spread(total, tile)).astype(out.dtype)
        store_rows(staging, out.at[row, rows, columns])

        @pl.when(part == 0)
        def _() -> None:
            out_logs[row, rows] = largest + jnp.log2(total)

    def join(self, index: jax.Array, carry: Carry, *, outputs: jax.Ref, logs: jax.Ref, first: jax.Array) -> Carry:
        """Adds the next unit of the row."""
        acc, largest, total = carry
        log = compat.load_column(logs.at[first + index])
        found = compat.load_tile(outputs.at[first + index]).astype(jnp.float32)
        new_largest = jnp.maximum(largest, log)
        shrink, share = jnp.exp2(largest - new_largest), jnp.exp2(log - new_largest)
        acc = acc * compat.spread(shrink, acc.shape) + found * compat.spread(share, acc.shape)
        return acc, new_largest, total * shrink + share
