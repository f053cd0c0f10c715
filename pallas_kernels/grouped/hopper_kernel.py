"""The body of the grouped product for Hopper: what one block does with a tile, for matrices of 16 bits.

`hopper_quantized.py` has other warpgroups fill the ring, and shares the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.wgmma import ROWS
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.pieces import for_pieces

DEPTH = 64  # of a slice along K: a row of it is one swizzle of 128 bytes
GROUP, ORIGIN, START, END = range(4)  # columns of a tile; one behind the last has no rows
ALIGNMENT = compat.SWIZZLE_ROWS  # of a tile's first row

_STAGES = {1: 6, 2: 4}  # slices in the ring, by compute warpgroups
_REGISTERS = {1: 232, 2: 216}  # per thread of a compute warpgroup
_MEMORY_REGISTERS = 40

Scratch = dict[str, jax.Ref]


@dataclass(frozen=True)
class Source:
    """Where the slices of a block begin; scalars."""

    matrix: jax.Array
    row: jax.Array  # of x
    column: jax.Array


@dataclass(frozen=True)
class GroupedKernel:
    """The kernel's body. `depth` counts slices along K, `num_groups` is G.

    `rows` of a tile may be fewer than the warpgroups multiply: the others are not fetched, and hold anything.
    """

    rows: int
    warpgroups: int  # that multiply, 64 rows each
    columns: int
    depth: int
    num_groups: int

    @property
    def __name__(self) -> str:
        return "grouped_matmul"

    @property
    def left_rows(self) -> int:
        """The rows of x in memory."""
        return ROWS * self.warpgroups

    @property
    def num_fillers(self) -> int:
        """Warpgroups that fill the ring."""
        return 1

    @property
    def stages(self) -> int:
        """The slices of matrices in the ring that is multiplied from."""
        return min(_STAGES[self.warpgroups], self.depth)

    def list_scratch(self, dtype: jnp.dtype) -> dict[str, object]:
        """Shared memory and barriers, for x of `dtype`."""
        return {
            "left": compat.tile_smem((self.stages, self.left_rows, DEPTH), dtype),
            "right": compat.tile_smem((self.stages, DEPTH, self.columns), dtype),
            "plain": compat.SMEM((self.warpgroups, ROWS, self.columns), dtype),
            "loaded": compat.Barrier(num_arrivals=2, num_barriers=self.stages),
            "freed": compat.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages),
        }

    def __call__(self, tiles: jax.Ref, first: jax.Ref, x: jax.Ref, *refs: jax.Ref, **scratch: jax.Ref) -> None:
        *matrices, out = refs
        tile = tiles.at[lax.axis_index("tile")]
        warpgroup = lax.axis_index("warpgroup")
        has_rows = tile[END] > tile[START]

        @pl.when((warpgroup >= self.warpgroups) & has_rows)
        def _() -> None:
            source = Source(
                matrix=first[0] + lax.axis_index("part") * self.num_groups + tile[GROUP],
                row=pl.multiple_of(tile[ORIGIN], ALIGNMENT),
                column=pl.multiple_of(lax.axis_index("block") * self.columns, self.columns),
            )
            self.fill(warpgroup - self.warpgroups, source, x, matrices, scratch)

        @pl.when((warpgroup < self.warpgroups) & has_rows)
        def _() -> None:
            self.compute(tile, warpgroup, out, scratch)

    def fill(self, filler: jax.Array, source: Source, x: jax.Ref, matrices: list[jax.Ref], scratch: Scratch) -> None:
        """Fills the ring, slice after slice."""
        del filler  # there is one
        compat.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        (w,) = matrices

        @pl.loop(0, self.depth)
        def _(index: jax.Array) -> None:
            slot = lax.rem(index, self.stages)
            pl.when(index >= self.stages)(lambda: compat.barrier_wait(scratch["freed"].at[slot]))
            part, loaded = find_part(index), scratch["loaded"].at[slot]
            self.fetch_rows(source, part, x, scratch["left"].at[slot], loaded)
            columns = pl.ds(source.column, self.columns)
            compat.copy_gmem_to_smem(w.at[source.matrix, part, columns], scratch["right"].at[slot], loaded)

    def fetch_rows(self, source: Source, part: pl.Slice, x: jax.Ref, left: jax.Ref, loaded: jax.Ref) -> None:
        """Starts the copy of the tile's rows of a slice."""
        compat.copy_gmem_to_smem(x.at[pl.ds(source.row, self.rows), part], left.at[pl.ds(0, self.rows)], loaded)

    def raise_registers(self) -> None:
        """Takes the registers for a compute warpgroup that the memory warpgroup leaves."""
        compat.set_max_registers(_REGISTERS[self.warpgroups], action="increase")

    def await_slice(self, index: jax.Array, scratch: Scratch) -> tuple[jax.Ref, jax.Ref]:
        """Slices of x [left_rows, DEPTH] and the matrix [DEPTH, columns], when they are there."""
        slot = lax.rem(index, self.stages)
        compat.barrier_wait(scratch["loaded"].at[slot])
        return scratch["left"].at[slot], scratch["right"].at[slot]

    def finish(self, product: jax.Array, scratch: Scratch) -> jax.Array:
        """What is left to do with the products [64, columns] f32."""
        del scratch
        return product

    def compute(self, tile: jax.Ref, warpgroup: jax.Array, out: jax.Ref, scratch: Scratch) -> None:
        """Multiplies one warpgroup's rows, and writes those of the group."""
        self.raise_registers()
        own = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)

        def multiply_slices(acc: jax.Ref) -> jax.Array:
            @pl.loop(0, self.depth)
            def _(index: jax.Array) -> None:
                left, right = self.await_slice(index, scratch)
                wgmma.add_product(acc, left.at[own], right)
                # A slot is given back where a later slice needs it: every completion must be awaited.
                is_needed = (index > 0) & (index - 1 + self.stages < self.depth)
                before = lax.rem(index + self.stages - 1, self.stages)
                pl.when(is_needed)(partial(compat.barrier_arrive, scratch["freed"].at[before]))

            return acc[...]

        product = pl.run_scoped(multiply_slices, plgpu.ACC((ROWS, self.columns), jnp.float32))
        plain = scratch["plain"].at[warpgroup]
        plain[...] = self.finish(product, scratch).astype(plain.dtype)
        compat.commit_smem()
        self.store(tile, warpgroup, plain, out)
        compat.wait_smem_to_gmem(0)

    def store(self, tile: jax.Ref, warpgroup: jax.Array, plain: jax.Ref, out: jax.Ref) -> None:
        """Copies the group's rows out."""
        first = tile[ORIGIN] + warpgroup * ROWS
        begin = jnp.maximum(tile[START] - first, 0)
        count = jnp.minimum(tile[END] - first, ROWS) - begin
        columns = pl.ds(pl.multiple_of(lax.axis_index("block") * self.columns, self.columns), self.columns)

        def copy(start: jax.Array, size: int) -> None:
            target = out.at[lax.axis_index("part"), pl.ds(first + begin + start, size), columns]
            compat.copy_smem_to_gmem(plain.at[pl.ds(begin + start, size)], target)

        for_pieces(count, ROWS, copy)


def find_part(index: jax.Array) -> pl.Slice:
    """A slice along K."""
    return pl.ds(pl.multiple_of(index * DEPTH, DEPTH), DEPTH)
