"""The combine on Hopper: its launch overlaps the end of the kernel before, and it writes the rows that are wanted."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.overlap import await_earlier_kernel
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.combine import COMBINE_COLUMNS, Combine
from pallas_kernels.mosaic_gpu.splits import QUERY_ROWS


@dataclass(frozen=True)
class HopperCombine(Combine):
    """Answers [K, used rows] leave by TMA."""

    @property
    def staging(self) -> object:
        return compat.SMEM((QUERY_ROWS, COMBINE_COLUMNS), self.dtype)  # not swizzled: copies of any rows leave it

    @property
    def out_shape(self) -> tuple[int, ...]:
        return self.num_kv_heads, self.num_used

    def begin(self) -> None:
        await_earlier_kernel(interpret=self.interpret)

    def store(self, staging: jax.Ref, out: jax.Ref) -> None:
        # Stores of 16-bit tiles from registers would write half sectors.
        compat.commit_smem()
        row, (_, columns) = lax.axis_index("row"), self.find_place()
        num_heads = QUERY_ROWS // self.num_rows
        for index in range(num_heads):
            head = lax.axis_index("rows") * num_heads + index

            @pl.when(head < self.num_kv_heads)
            def _(index: int = index, head: jax.Array = head) -> None:
                used = staging.at[pl.ds(index * self.num_rows, self.num_used)]
                compat.copy_smem_to_gmem(used, out.at[row, head, :, columns])

        compat.wait_smem_to_gmem(0)

    def split_heads(self, found: jax.Array) -> jax.Array:
        return found
