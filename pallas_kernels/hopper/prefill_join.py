"""Joins the units of split tiles: a launch behind the prefill kernel's, whose end it overlaps.

Its grid has a place for every tile that can be split. Blocks without one end at once.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.overlap import await_earlier_kernel
from pallas_kernels.hopper.prefill_answers import for_answers
from pallas_kernels.hopper.prefill_static import NUM_COMPUTE, NUM_UNITS, ROWS, SLOT, TILE_ROWS, Static
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.combine import COMBINE_COLUMNS, join_units
from pallas_kernels.mosaic_gpu.key_tiles import MASKED


def join_tiles(
    static: Static,
    found: jax.Array,  # [T, N, H], answers of tiles that are not split
    partials: jax.Array,  # [W, K * TILE_ROWS, H] f32
    logs: jax.Array,  # [W, K * TILE_ROWS] f32
    joins: jax.Array,  # [J, UNIT_COLUMNS] i32
) -> jax.Array:
    """`found` with the answers of split tiles, in place: the averages of their units by their weights."""

    def join_tile(partials: jax.Ref, logs: jax.Ref, joins: jax.Ref, out: jax.Ref, staging: jax.Ref) -> None:
        await_earlier_kernel(interpret=static.interpret)
        join, head, part = joins.at[lax.axis_index("join")], lax.axis_index("head"), lax.axis_index("part")
        column = pl.multiple_of(lax.axis_index("columns") * COMBINE_COLUMNS, COMBINE_COLUMNS)
        columns = pl.ds(column, COMBINE_COLUMNS)

        @pl.when(join[NUM_UNITS] > 0)
        def _() -> None:
            rows = pl.ds(pl.multiple_of(head * TILE_ROWS + part * ROWS, ROWS), ROWS)
            start = compat.full((ROWS,), MASKED), compat.full((ROWS,), 0.0)
            acc, total = join_units((partials, logs), (rows, columns), join[SLOT], join[NUM_UNITS], *start)
            staging[...] = (acc / compat.spread(total, acc.shape)).astype(static.dtype)
            compat.commit_smem()

            def copy(row: jax.Array, token: jax.Array, member: jax.Array, size: int) -> None:
                target = out.at[pl.ds(token, size), head * static.group_size + member, columns]
                compat.copy_smem_to_gmem(staging.at[pl.ds(row, size)], target)

            for_answers(static, join, part, copy)
            compat.wait_smem_to_gmem(0)

    run = compat.kernel(
        join_tile,
        out_type=(),
        grid=(joins.shape[0], partials.shape[1] // TILE_ROWS, NUM_COMPUTE, static.width // COMBINE_COLUMNS),
        grid_names=("join", "head", "part", "columns"),
        # Not swizzled: copies of any number of rows leave it.
        scratch_types=[compat.SMEM((ROWS, COMBINE_COLUMNS), found.dtype)],
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(static.interpret),
        kernel_name="join_tiles",
    )
    out = jax.new_ref(found)  # makes the write in place: a kernel's outputs are new arrays
    run(partials, logs, joins, out)
    return jax.freeze(out)
