"""A TPU visit's work on a block of few bits, which is in VMEM in its own width.

Groups that fill whole lanes of x are products of their own, scaled in float32 and added: scales are then multiplied
once for a tile of rows, not once for a weight. For smaller groups the weights are expanded to x's dtype in VMEM, each
rounded once, and multiplied as one matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.layout import LANES
from pallas_kernels.quantized import QuantizedFormat, decode_float4, encode_float4

_SMALL_GROUPS = (16, 32)
_STEP = 64  # rows that are expanded together at least: a tile of 4 bits in memory


@dataclass(frozen=True)
class QuantizedBlock:
    """A block [width, columns] of a matrix in this format, multiplied with rows of `dtype`."""

    format: QuantizedFormat
    width: int
    columns: int
    dtype: jnp.dtype

    @property
    def groups(self) -> int:
        """G."""
        return self.width // self.format.group

    @property
    def is_expanded(self) -> bool:
        """Whether the weights are expanded before they are multiplied."""
        return self.groups > 1 and self.format.group % LANES > 0

    def list_scratch(self) -> list[object]:
        """The memory for expanded weights, and for scales and zeros of which rows can be taken."""
        expanded = [pltpu.VMEM((self.width, self.columns), self.dtype)] if self.is_expanded else []
        return expanded + [pltpu.VMEM((self.groups, self.columns), jnp.float32)] * len(self.widened)

    @property
    def widened(self) -> tuple[int, ...]:
        """Which of values, scales and zeros are widened as a whole: single rows of less than 32 bits cannot be read."""
        scales = () if self.format.scale_dtype == "float32" else (1,)
        return scales + ((2,) if self.format.zeros else ())

    def multiply(
        self, x: jax.Ref, w: Sequence[jax.Ref], scratch: Sequence[jax.Ref], precision: lax.Precision | None
    ) -> jax.Array:
        """Rows [rows, width] times the block: [rows, columns] f32. `w` are values, scales and zeros of the block."""
        w = self.widen(w, scratch)
        dot = partial(jnp.dot, preferred_element_type=jnp.float32, precision=precision)
        if self.is_expanded:
            self.expand(w, scratch[0])
            return dot(x[...], scratch[0][...])
        group = self.format.group

        def add_group(index: jax.Array | int, total: jax.Array | float) -> jax.Array:
            rows = pl.ds(pl.multiple_of(index * group, group), group)
            part = x[:, rows]
            product = dot(part, self.load(w[0], rows, self.dtype))
            row = pl.ds(index, 1)
            if self.format.zeros:
                product = product - jnp.sum(part, axis=1, keepdims=True, dtype=jnp.float32) * w[2][row, :]
            return total + product * w[1][row, :]

        if self.groups == 1:
            return add_group(0, 0.0)
        return lax.fori_loop(0, self.groups, add_group, jnp.zeros((x.shape[0], self.columns), jnp.float32))

    def widen(self, w: Sequence[jax.Ref], scratch: Sequence[jax.Ref]) -> list[jax.Ref]:
        """Values, scales and zeros of the block; the last two in float32, copied to memory where they are not."""
        refs = list(w)
        for index, wide in zip(self.widened, scratch[int(self.is_expanded) :], strict=True):
            wide[...] = w[index][...].astype(jnp.float32)
            refs[index] = wide
        return refs

    def load(self, values: jax.Ref, rows: pl.Slice, dtype: jnp.dtype) -> jax.Array:
        """Rows of the values, as numbers of a dtype that holds them."""
        if self.format.is_coded:
            # Outside of kernels XLA would copy the whole stack for that.
            return decode_float4(encode_float4(values[rows, :]).astype(jnp.float32)).astype(dtype)
        return values[rows, :].astype(dtype)

    def expand(self, w: Sequence[jax.Ref], expanded: jax.Ref) -> None:
        """Writes what the values stand for to memory, as many groups at once as a tile of memory has."""
        group = self.format.group
        pieces = max(1, _STEP // group)

        @pl.loop(0, self.groups // pieces)
        def _(index: jax.Array) -> None:
            rows = pl.ds(pl.multiple_of(index * pieces * group, pieces * group), pieces * group)
            values = self.load(w[0], rows, jnp.float32)
            for piece in range(pieces):
                row = pl.ds(index * pieces + piece, 1)
                weights = values[piece * group : (piece + 1) * group]
                if self.format.zeros:
                    weights = weights - w[2][row, :]
                target = pl.ds(pl.multiple_of((index * pieces + piece) * group, group), group)
                expanded[target, :] = (weights * w[1][row, :]).astype(self.dtype)


def find_group_obstacle(width: int, quantized: QuantizedFormat) -> str | None:
    """Why matrices of `width` rows in this format cannot be multiplied, in words for users."""
    group = quantized.group
    if group == width or group % _STEP == 0 or (group in _SMALL_GROUPS and width % _STEP == 0):
        return None
    small = ", ".join(map(str, _SMALL_GROUPS))
    return f"it scales groups of {small} weights or a multiple of {_STEP}, these are of {group}"
