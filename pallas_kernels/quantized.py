"""Matrices of few bits with a scale for each group of rows. A value is (value - zero) * scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.layout import count_bits

_FLOAT4 = "float4_e2m1fn"


@dataclass(frozen=True)
class QuantizedFormat:
    """What decides which kernels can read matrices: the values' dtype, how many rows share a scale, whether there are
    zeros, and the scales' dtype."""

    dtype: str
    group: int  # K / G
    zeros: bool = False
    scale_dtype: str = "float32"

    @property
    def bits(self) -> int:
        """The bits of a value."""
        return count_bits(self.dtype)

    @property
    def is_coded(self) -> bool:
        """Whether values are float4_e2m1fn, which kernels read by `encode_float4` and `decode_float4`."""
        return self.dtype == _FLOAT4


@dataclass(frozen=True)
class QuantizedProducts:
    """How `quantized_matmul` multiplies.

    `impl` is one of grouped products; "gpu" multiplies few rows, where that is faster than XLA. Matrices of the types
    `row_dtypes` whose columns have one scale are multiplied with rows of that type.
    """

    impl: str = "xla"
    row_dtypes: tuple[str, ...] = ()


XLA_PRODUCTS = QuantizedProducts()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantizedArray:
    """Matrices [..., K, N] of few bits.

    `values` [..., K, N] are of any integer or floating type, `scales` [..., G, N] float32 or bfloat16, and G divides K:
    consecutive K / G rows share a scale. `zeros` [..., G, N] int8 are subtracted from values first. `order` [K] i32
    says which column of x each row is for.
    """

    values: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None
    order: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrices."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the matrices."""
        return self.values.ndim

    @property
    def format(self) -> QuantizedFormat:
        """What kernels must know of it."""
        group = self.values.shape[-2] // self.scales.shape[-2]
        return QuantizedFormat(self.values.dtype.name, group, self.zeros is not None, self.scales.dtype.name)

    def map(self, function: Callable[[jax.Array], jax.Array]) -> QuantizedArray:
        """Returns the same with what `function` makes of values, scales and zeros."""
        zeros = None if self.zeros is None else function(self.zeros)
        return QuantizedArray(function(self.values), function(self.scales), zeros, self.order)


_LARGEST = {"float8_e4m3fn": 448.0, _FLOAT4: 6.0, "int8": 127.0, "int4": 7.0}


def quantize(
    w: jax.Array,
    dtype: str,
    block: tuple[int | None, int | None],
    groups: int,
    held: str | None = None,
    scale_dtype: str = "float32",
) -> QuantizedArray:
    """Returns matrices [..., K, N] in few bits, with scales that make the largest number of each block just fit.

    Args:
        dtype: of the values: float8_e4m3fn, float4_e2m1fn, int8 or int4.
        block: the columns of N and the rows of K that share a scale; None for all.
        groups: G of the scales; each group lies in one block.
        held: the dtype that the values are held in, if not their own.
        scale_dtype: float32, or bfloat16 for powers of two, with which larger numbers become the type's largest (OCP
            Microscaling Formats 1.0, section 6.3).
    """
    *lead, width, columns = w.shape
    most, (block_columns, block_rows) = _LARGEST[dtype], block
    wide = w.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide).reshape(*lead, groups, width // groups, columns), axis=-2)
    largest = _share(largest, -2, block_rows, width // groups)
    largest = _share(largest, -1, block_columns, 1)
    if scale_dtype == "bfloat16":
        largest = most * jnp.exp2(jnp.floor(jnp.log2(largest)) - math.floor(math.log2(most)))
    scales = jnp.where(largest > 0, largest / most, 1.0)
    scaled = jnp.clip(wide.reshape(*lead, groups, width // groups, columns) / scales[..., None, :], -most, most)
    values = scaled.astype(dtype) if dtype.startswith("float") else jnp.round(scaled)
    return QuantizedArray(values.reshape(w.shape).astype(held or dtype), scales.astype(scale_dtype))


def _share(numbers: jax.Array, axis: int, block: int | None, size: int) -> jax.Array:
    """Returns, for each of the `numbers` along an axis that stand for `size` places each, the largest of its block."""
    if block == size:
        return numbers
    if block is None:
        return jnp.broadcast_to(jnp.max(numbers, axis=axis, keepdims=True), numbers.shape)
    blocks = np.arange(numbers.shape[axis]) * size // block
    first = jnp.moveaxis(numbers, axis, 0)
    shared = jax.ops.segment_max(first, blocks, num_segments=int(blocks[-1]) + 1, indices_are_sorted=True)
    return jnp.moveaxis(shared[blocks], 0, axis)


def encode_float4(values: jax.Array) -> jax.Array:
    """Returns the bits of float4_e2m1fn values, or of codes, as int4 codes: kernels' compilers lack the type."""
    return lax.bitcast_convert_type(values, jnp.int4)


def decode_float4(codes: jax.Array) -> jax.Array:
    """Returns the float4_e2m1fn numbers whose bits are int4 `codes`, which come as any float type and stay in it.

    The steps are sums, products and limits of small numbers. They are exact, and a GPU does them for two numbers of 16
    bits at once, as it does not compare and choose.
    """
    sign = jnp.clip(codes, -1, 0)  # -1 with the sign bit set, which is -8 in a code
    rest = codes + -8 * sign  # 0 to 7
    doubled = jnp.maximum(jnp.maximum(rest, 2 * rest - 4), 4 * rest - 16)  # 0, 1, 2, 3, 4, 6, 8, 12
    return doubled * (sign + 0.5)


def dequantize(w: QuantizedArray, dtype: jnp.dtype) -> jax.Array:
    """Returns the matrices [..., K, N] with rows in the order of `values`, each number rounded once."""
    *lead, width, columns = w.values.shape
    groups = w.scales.shape[-2]
    values = w.values.astype(jnp.float32).reshape(*lead, groups, width // groups, columns)
    if w.zeros is not None:
        values = values - w.zeros.astype(jnp.float32)[..., None, :]
    return (values * w.scales[..., None, :]).reshape(w.values.shape).astype(dtype)
