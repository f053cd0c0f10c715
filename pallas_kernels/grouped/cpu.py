"""Grouped products by the CPU's library, which reads each matrix that has rows once, as it is stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import library
from pallas_kernels.cpu.product import find_shape_obstacle
from pallas_kernels.grouped import xla
from pallas_kernels.quantized import QuantizedFormat

_MORE_ROWS = 4  # XLA's loop begins to pay at so many times the rows at which its products do


def find_obstacle(width: int, columns: int, dtype: jnp.dtype | str, quantized: QuantizedFormat | None) -> str | None:
    """Returns why the library cannot multiply such matrices, in words for users; None: it can."""
    if quantized is not None:
        return f"the CPU kernel reads float32 and bfloat16, these weights are {quantized.dtype}"
    return library.find_obstacle() or find_shape_obstacle(width, columns, dtype)


def multiply(x: jax.Array, w: jax.Array, sizes: jax.Array, first: jax.Array, parts: int) -> jax.Array:
    """See `grouped_matmul`. Many rows of a group are served better by XLA."""
    if x.shape[0] > _MORE_ROWS * library.max_product_rows(x.dtype.name) * sizes.shape[0]:
        return xla.multiply(x, w, sizes, first, parts)
    shape = jax.ShapeDtypeStruct((parts, x.shape[0], w.shape[2]), x.dtype)
    return jax.ffi.ffi_call(library.target_name(library.GROUPED), shape)(x, w, sizes, first.reshape(1))
