"""A grouped product for Hopper (Pallas Mosaic GPU): tiles of rows visit the matrices of the groups in them.

A block multiplies one tile of rows with some columns of one group's matrix, and writes the rows that are the group's. A
memory warpgroup fills a ring of slices along K by TMA, and one or two compute warpgroups multiply 64 rows each by
wgmma. A decode step, where groups have a few rows, is bound by reading matrices: 64 rows are still a third of what the
tensor cores could multiply meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.grouped.tiles import Visits, list_visits
from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.wgmma import ROWS
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.pieces import for_pieces

_DEPTH = 64  # of a slice along K: a row of it is one swizzle of 128 bytes
_COLUMNS = 128  # of a block at most: layouts of wider plain memory take minutes to infer
_STAGES = {1: 6, 2: 4}  # slices in the ring, by compute warpgroups
_REGISTERS = {1: 232, 2: 216}  # per thread of a compute warpgroup
_MEMORY_REGISTERS = 40
_LEAST_ROWS = 16  # of a group on average, from which two warpgroups share a tile


def find_obstacle(width: int, columns: int, dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot multiply rows of `width` with matrices of `columns`, in words for users."""
    if jnp.dtype(dtype).itemsize != 2:
        return f"it multiplies 16-bit numbers, these are {jnp.dtype(dtype).name}"
    if width % _DEPTH or columns % _DEPTH:
        return f"it needs sizes that are multiples of {_DEPTH}, these are {width} and {columns}"
    return None


def multiply(
    x: jax.Array, w: jax.Array, sizes: jax.Array, first: jax.Array, parts: int, *, interpret: bool = False
) -> jax.Array:
    """See `grouped_matmul`; raises ValueError for what `find_obstacle` names."""
    obstacle = find_obstacle(x.shape[1], w.shape[2], x.dtype)
    if obstacle is not None:
        raise ValueError(f"the grouped product for Hopper cannot run: {obstacle}")
    num_rows, columns = x.shape[0], w.shape[2]
    warpgroups = 2 if num_rows >= _LEAST_ROWS * sizes.shape[0] else 1
    body = _Kernel(warpgroups, _COLUMNS if columns % _COLUMNS == 0 else _DEPTH, x.shape[1] // _DEPTH, sizes.shape[0])
    visits = list_visits(sizes, num_rows, body.rows)
    padded = jnp.pad(x, ((0, -num_rows % body.rows), (0, 0)))
    run = compat.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, padded.shape[0], columns), x.dtype),
        grid=(visits.tiles.shape[0], parts, columns // body.columns),  # blocks of a tile share its rows
        grid_names=("visit", "part", "block"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=body.list_scratch(x.dtype),
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(interpret),
    )
    return run(_join(visits), first.reshape(1), padded, w)[:, :num_rows]


def multiply_interpreted(x: jax.Array, w: jax.Array, sizes: jax.Array, first: jax.Array, parts: int) -> jax.Array:
    """`multiply` in the interpreter, with race detection."""
    return multiply(x, w, sizes, first, parts, interpret=True)


_GROUP, _TILE, _START, _END = range(4)  # columns of a visit; one behind the last has no rows


def _join(visits: Visits) -> jax.Array:
    """The visits as the kernel reads them: [visits, 4] i32, the same for all products of a layer."""
    is_visit = jnp.arange(visits.tiles.shape[0]) < visits.count
    ends = jnp.where(is_visit, visits.ends, visits.starts)
    return jnp.stack([visits.groups, visits.tiles, visits.starts, ends], axis=1)


@dataclass(frozen=True)
class _Kernel:
    """The kernel's body. `depth` counts slices along K, `num_groups` is G."""

    warpgroups: int
    columns: int
    depth: int
    num_groups: int

    @property
    def __name__(self) -> str:
        return "grouped_matmul"

    @property
    def rows(self) -> int:
        """The rows of a tile."""
        return ROWS * self.warpgroups

    @property
    def stages(self) -> int:
        """The slices in the ring."""
        return min(_STAGES[self.warpgroups], self.depth)

    def list_scratch(self, dtype: jnp.dtype) -> dict[str, object]:
        """Shared memory and barriers."""
        return {
            "left": compat.tile_smem((self.stages, self.rows, _DEPTH), dtype),
            "right": compat.tile_smem((self.stages, _DEPTH, self.columns), dtype),
            "plain": compat.SMEM((self.warpgroups, ROWS, self.columns), dtype),
            "loaded": compat.Barrier(num_arrivals=2, num_barriers=self.stages),
            "freed": compat.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages),
        }

    def __call__(
        self, visits: jax.Ref, first: jax.Ref, x: jax.Ref, w: jax.Ref, out: jax.Ref, **scratch: jax.Ref
    ) -> None:
        visit = visits.at[lax.axis_index("visit")]
        warpgroup = lax.axis_index("warpgroup")
        has_rows = visit[_END] > visit[_START]

        @pl.when((warpgroup == self.warpgroups) & has_rows)
        def _() -> None:
            compat.set_max_registers(_MEMORY_REGISTERS, action="decrease")
            self.fetch(visit, first[0], x, w, scratch)

        @pl.when((warpgroup < self.warpgroups) & has_rows)
        def _() -> None:
            compat.set_max_registers(_REGISTERS[self.warpgroups], action="increase")
            self.compute(visit, warpgroup, out, scratch)

    def fetch(self, visit: jax.Ref, first: jax.Array, x: jax.Ref, w: jax.Ref, scratch: dict[str, jax.Ref]) -> None:
        """Fills the ring, slice after slice."""
        row = pl.multiple_of(visit[_TILE] * self.rows, self.rows)
        column = pl.multiple_of(lax.axis_index("block") * self.columns, self.columns)
        matrix = first + lax.axis_index("part") * self.num_groups + visit[_GROUP]

        @pl.loop(0, self.depth)
        def _(index: jax.Array) -> None:
            slot = lax.rem(index, self.stages)
            pl.when(index >= self.stages)(lambda: compat.barrier_wait(scratch["freed"].at[slot]))
            part = pl.ds(pl.multiple_of(index * _DEPTH, _DEPTH), _DEPTH)
            loaded = scratch["loaded"].at[slot]
            compat.copy_gmem_to_smem(x.at[pl.ds(row, self.rows), part], scratch["left"].at[slot], loaded)
            target = scratch["right"].at[slot]
            compat.copy_gmem_to_smem(w.at[matrix, part, pl.ds(column, self.columns)], target, loaded)

    def compute(self, visit: jax.Ref, warpgroup: jax.Array, out: jax.Ref, scratch: dict[str, jax.Ref]) -> None:
        """Multiplies one warpgroup's rows, and writes those of the group."""
        own = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)

        def multiply_slices(acc: jax.Ref) -> jax.Array:
            @pl.loop(0, self.depth)
            def _(index: jax.Array) -> None:
                slot = lax.rem(index, self.stages)
                compat.barrier_wait(scratch["loaded"].at[slot])
                wgmma.add_product(acc, scratch["left"].at[slot, own], scratch["right"].at[slot])
                # A slot is given back where a later slice needs it: every completion must be awaited.
                is_needed = (index > 0) & (index - 1 + self.stages < self.depth)
                before = lax.rem(index + self.stages - 1, self.stages)
                pl.when(is_needed)(partial(compat.barrier_arrive, scratch["freed"].at[before]))

            return acc[...]

        product = pl.run_scoped(multiply_slices, plgpu.ACC((ROWS, self.columns), jnp.float32))
        plain = scratch["plain"].at[warpgroup]
        plain[...] = product.astype(plain.dtype)
        compat.commit_smem()
        self.store(visit, warpgroup, plain, out)
        compat.wait_smem_to_gmem(0)

    def store(self, visit: jax.Ref, warpgroup: jax.Array, plain: jax.Ref, out: jax.Ref) -> None:
        """Copies the group's rows out."""
        first = visit[_TILE] * self.rows + warpgroup * ROWS
        begin = jnp.maximum(visit[_START] - first, 0)
        count = jnp.minimum(visit[_END] - first, ROWS) - begin
        columns = pl.ds(pl.multiple_of(lax.axis_index("block") * self.columns, self.columns), self.columns)

        def copy(start: jax.Array, size: int) -> None:
            target = out.at[lax.axis_index("part"), pl.ds(first + begin + start, size), columns]
            compat.copy_smem_to_gmem(plain.at[pl.ds(begin + start, size)], target)

        for_pieces(count, ROWS, copy)
