"""The combine on Ampere, Ada and Blackwell: all rows are written, through registers."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax import lax

from pallas_kernels.ampere.compat import store_rows
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.combine import COMBINE_COLUMNS, Combine
from pallas_kernels.mosaic_gpu.shapes import round_up
from pallas_kernels.mosaic_gpu.splits import QUERY_ROWS


@dataclass(frozen=True)
class AmpereCombine(Combine):
    """Answers [C] leave in the pieces of up to 16 bytes that threads hold."""

    @property
    def staging(self) -> object:
        return compat.tile_smem((QUERY_ROWS, COMBINE_COLUMNS), self.dtype)

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (round_up(self.num_kv_heads * self.num_rows, QUERY_ROWS),)

    def begin(self) -> None: ...

    def store(self, staging: jax.Ref, out: jax.Ref) -> None:
        store_rows(staging, out.at[lax.axis_index("row"), *self.find_place()])

    def split_heads(self, found: jax.Array) -> jax.Array:
        by_head = found.reshape(found.shape[0], -1, self.num_rows, found.shape[-1])
        return by_head[:, : self.num_kv_heads]
