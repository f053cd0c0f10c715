"""The body of the grouped product for Hopper with matrices of few bits, which cross memory in their own width.

wgmma takes 8-bit operands only with the summed axis contiguous, and it is not: matrices are [K, N]. Nor can they be its
operand in registers, which would be their transpose. So one or two warpgroups, the fillers, fetch slices by TMA, widen
them in registers to the 16 bits of x, and write them to the ring that the compute warpgroups multiply from; two take
every other slice. They are warpgroups of their own so that widening and multiplying overlap, without sharing registers.

A scale of a whole column is multiplied after the product, whose values are then exact. Scales of groups are multiplied
while values are widened, in float32 and rounded once, as in `dequantize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped.hopper_kernel import DEPTH, GroupedKernel, Scratch, Source, find_part
from pallas_kernels.hopper import wgmma
from pallas_kernels.hopper.wgmma import ROWS
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.quantized import QuantizedFormat, decode_float4

LEAST_GROUP = 16  # rows that share a scale: a slice has at most four such groups

_PART_COLUMNS = 64  # of a slice that pass through registers at once
_WIDE = 2  # widened slices in memory
_MOST_NARROW = 8  # slices of few bits in memory
_FILLERS = {1: 1, 2: 2}  # by compute warpgroups
_BLOCKS = {1: 2, 2: 1}  # per SM: where groups have few rows, one block starts or ends while the other reads
_RESERVE = 2048  # bytes of a block that barriers and the SM itself need


@dataclass(frozen=True)
class QuantizedKernel(GroupedKernel):
    """The kernel's body. `format` is of matrices [depth * DEPTH, N]."""

    format: QuantizedFormat

    @property
    def num_fillers(self) -> int:
        return _FILLERS[self.warpgroups]

    @property
    def stages(self) -> int:
        """The widened slices: a multiple of the fillers, as every slot is one filler's, which alone may wait for it."""
        return _WIDE

    @property
    def narrow_slots(self) -> int:
        """Slices of few bits in memory: as many as fit."""
        room = wgmma.SM_SMEM_BYTES // _BLOCKS[self.warpgroups] - _RESERVE
        counts = range(2 * self.num_fillers, _MOST_NARROW + 1, self.num_fillers)
        return max(count for count in counts if self.count_bytes(count) <= room or count == counts[0])

    def count_bytes(self, narrow_slots: int) -> int:
        """Bytes of shared memory with so many slices of few bits, for x of 16 bits."""
        slice_size = DEPTH * self.columns
        narrow = narrow_slots * slice_size * self.format.bits // 8
        scale_bytes = jnp.dtype(self.format.scale_dtype).itemsize
        scales = narrow_slots * self.pieces * self.columns * (scale_bytes + self.format.zeros)
        left = (narrow_slots - self.num_fillers + self.stages) * self.left_rows * DEPTH * 2
        plain = 0 if self.shares_plain else self.left_rows * self.columns * 2
        return narrow + scales + left + self.stages * slice_size * 2 + plain

    @property
    def shares_plain(self) -> bool:
        """Whether products lie where widened slices were: the only warpgroup that reads these has done so by then."""
        return self.warpgroups == 1

    @property
    def ahead(self) -> int:
        """How far ahead a filler fetches: to the slot of the slice that it widened last."""
        return self.narrow_slots - self.num_fillers

    @property
    def left_slots(self) -> int:
        """Slices of x. Where a filler may write over a widened slice, it may fetch x `ahead` slices further."""
        return self.ahead + self.stages

    @property
    def scales_columns(self) -> bool:
        """Whether scales are those of whole columns, with nothing to subtract before."""
        return self.format.group == self.depth * DEPTH and not self.format.zeros

    @property
    def piece_rows(self) -> int:
        """Rows of a slice that are surely of one group."""
        return math.gcd(self.format.group, DEPTH)

    @property
    def pieces(self) -> int:
        """The groups that a slice has rows of, at most."""
        return DEPTH // self.piece_rows

    def list_scratch(self, dtype: jnp.dtype) -> dict[str, object]:
        """Shared memory and barriers; at `scaled` the scales of whole columns are there."""
        slots = 1 if self.scales_columns else self.narrow_slots
        values = "int4" if self.format.is_coded else self.format.dtype
        swizzle = _PART_COLUMNS * self.format.bits // 8
        scratch = {
            "left": compat.tile_smem((self.left_slots, self.left_rows, DEPTH), dtype),
            "narrow": compat.tile_smem((self.narrow_slots, DEPTH, self.columns), values, swizzle),
            "scales": compat.SMEM((slots, self.pieces, self.columns), jnp.dtype(self.format.scale_dtype)),
            "left_loaded": compat.Barrier(num_barriers=self.left_slots),
            "narrow_loaded": compat.Barrier(num_arrivals=self.count_copies(), num_barriers=self.narrow_slots),
            "loaded": compat.Barrier(num_barriers=self.stages),
            "freed": compat.Barrier(num_arrivals=self.warpgroups, num_barriers=self.stages),
        }
        right = compat.tile_smem((self.stages, DEPTH, self.columns), dtype)
        plain = compat.SMEM((self.warpgroups, ROWS, self.columns), dtype)
        if self.shares_plain:
            scratch["right_then_plain"] = compat.SmemUnion(right, plain)
        else:
            scratch |= {"right": right, "plain": plain}
        if self.scales_columns:
            scratch["scaled"] = compat.Barrier()
        if self.format.zeros:
            scratch["zeros"] = compat.SMEM((slots, self.pieces, self.columns), jnp.int8)
        return scratch

    def __call__(self, *refs: jax.Ref, **scratch: jax.Ref) -> None:
        if self.shares_plain:
            scratch["right"], scratch["plain"] = scratch.pop("right_then_plain")
        super().__call__(*refs, **scratch)

    def count_copies(self) -> int:
        """The copies that fill a slot of few bits: values, and each piece's scales and zeros."""
        return 1 if self.scales_columns else 1 + self.pieces * (1 + self.format.zeros)

    def fill(self, filler: jax.Array, source: Source, x: jax.Ref, matrices: list[jax.Ref], scratch: Scratch) -> None:
        """Fetches and widens every other slice."""
        fetch = partial(self.fetch, source=source, x=x, matrices=matrices, scratch=scratch)
        count = lax.div(self.depth - filler + self.num_fillers - 1, self.num_fillers)
        num_first = jnp.minimum(count, self.ahead // self.num_fillers)

        if self.scales_columns:

            @pl.when(filler == 0)
            def _() -> None:
                row = matrices[1].at[source.matrix, 0, pl.ds(source.column, self.columns)]
                compat.copy_gmem_to_smem(row, scratch["scales"].at[0, 0], scratch["scaled"])

        @pl.loop(0, num_first)
        def _(step: jax.Array) -> None:
            fetch(step * self.num_fillers + filler)

        @pl.loop(0, count)
        def _(step: jax.Array) -> None:
            index = step * self.num_fillers + filler
            slot, wide = lax.rem(index, self.narrow_slots), lax.rem(index, self.stages)
            pl.when(index >= self.stages)(lambda: compat.barrier_wait(scratch["freed"].at[wide]))
            pl.when(index + self.ahead < self.depth)(lambda: fetch(index + self.ahead))
            compat.barrier_wait(scratch["narrow_loaded"].at[slot])
            self.widen(slot, scratch["right"].at[wide], scratch)
            compat.commit_smem()
            compat.barrier_arrive(scratch["loaded"].at[wide])

    def fetch(self, index: jax.Array, *, source: Source, x: jax.Ref, matrices: list[jax.Ref], scratch: Scratch) -> None:
        """Starts the copies of a slice."""
        part, columns = find_part(index), pl.ds(source.column, self.columns)
        left, slot = lax.rem(index, self.left_slots), lax.rem(index, self.narrow_slots)
        self.fetch_rows(source, part, x, scratch["left"].at[left], scratch["left_loaded"].at[left])
        loaded = scratch["narrow_loaded"].at[slot]
        compat.copy_gmem_to_smem(matrices[0].at[source.matrix, part, columns], scratch["narrow"].at[slot], loaded)
        if self.scales_columns:
            return
        for piece in range(self.pieces):
            group = lax.div(index * DEPTH + piece * self.piece_rows, self.format.group)
            for name, array in zip(("scales", "zeros"), matrices[1:], strict=False):
                row = array.at[source.matrix, group, columns]
                compat.copy_gmem_to_smem(row, scratch[name].at[slot, piece], loaded)

    def widen(self, slot: jax.Array, wide: jax.Ref, scratch: Scratch) -> None:
        """Writes what a slice [DEPTH, columns] of few bits stands for, in the dtype of x."""
        for start in range(0, self.columns, _PART_COLUMNS):
            columns = pl.ds(start, _PART_COLUMNS)
            values = wgmma.load_narrow(scratch["narrow"].at[slot, :, columns])
            if self.format.is_coded:
                values = decode_float4(wgmma.widen_exactly(values, jnp.bfloat16))
            if not self.scales_columns:
                # A product of two numbers of 16 bits is rounded once in any case.
                is_narrow = self.format.scale_dtype == wide.dtype == jnp.bfloat16 and not self.format.zeros
                dtype = jnp.bfloat16 if is_narrow else jnp.float32
                values = wgmma.widen_exactly(values, dtype)
                if self.format.zeros:
                    values = values - self.spread(scratch["zeros"].at[slot, :, columns], dtype)
                values = values * self.spread(scratch["scales"].at[slot, :, columns], dtype)
                wide[:, columns] = values.astype(wide.dtype)
            else:
                wide[:, columns] = wgmma.widen_exactly(values, wide.dtype)

    def spread(self, per_group: jax.Ref, dtype: jnp.dtype) -> jax.Array:
        """Numbers [pieces, columns] of groups as [DEPTH, columns] of `dtype`, each for the rows of its group."""
        rows = [wgmma.load_narrow_row(per_group.at[piece], dtype) for piece in range(self.pieces)]
        shape = (DEPTH, per_group.shape[1])
        spread, *others = (lax.broadcast_in_dim(row, shape, (1,)) for row in rows)
        for piece, other in enumerate(others, 1):
            spread = jnp.where(wgmma.narrow_iota(shape) < piece * self.piece_rows, spread, other)
        return spread

    def raise_registers(self) -> None:
        """All warpgroups have the same."""

    def await_slice(self, index: jax.Array, scratch: Scratch) -> tuple[jax.Ref, jax.Ref]:
        left, right = lax.rem(index, self.left_slots), lax.rem(index, self.stages)
        compat.barrier_wait(scratch["left_loaded"].at[left])
        compat.barrier_wait(scratch["loaded"].at[right])
        return scratch["left"].at[left], scratch["right"].at[right]

    def finish(self, product: jax.Array, scratch: Scratch) -> jax.Array:
        if not self.scales_columns:
            return product
        compat.barrier_wait(scratch["scaled"])
        scales = compat.load_row(scratch["scales"].at[0, 0]).astype(jnp.float32)
        return product * lax.broadcast_in_dim(scales, product.shape, (1,))
