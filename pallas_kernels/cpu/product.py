"""Products of few rows, by the library of this room.

XLA's own product of few rows reads a matrix at a fraction of the memory's rate, and one of a single bfloat16 row first
converts the whole matrix (jax 0.12.0.1).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import library

_COLUMNS = {"float32": 64, "bfloat16": 32}  # whose sums a task holds in registers
_LINE_WIDTH = 32  # numbers of a line [out, in] that are read at a time
_LARGE, _MOST_ROWS_OF_LARGE = 2**22, 16  # with more rows, XLA's product with a matrix of more numbers is as fast
_TOLERANCE = 1e-5


def suits(x: jax.Array, w: jax.Array, *, transposed: bool = False) -> bool:
    """Whether `multiply_few_rows` takes them, and is faster than XLA for a matrix of this form and size."""
    if w.dtype != x.dtype or x.shape[0] > _limit_rows(w, transposed):
        return False
    if transposed and (w.ndim > 2 or w.shape[1] % _LINE_WIDTH):
        return False
    return find_shape_obstacle(*(w.shape[::-1] if transposed else w.shape[-2:]), x.dtype) is None


def _limit_rows(w: jax.Array, transposed: bool) -> float:
    if transposed:
        return library.max_table_rows(w.dtype.name)
    return _MOST_ROWS_OF_LARGE if w.shape[-2] * w.shape[-1] > _LARGE else math.inf


def find_shape_obstacle(width: int, columns: int, dtype: jnp.dtype | str) -> str | None:
    """Returns why the library has no products with matrices [width, columns], in words for users; None: it has."""
    name = jnp.dtype(dtype).name
    if name not in _COLUMNS:
        return f"the CPU kernel reads {' and '.join(_COLUMNS)}, these weights are {name}"
    if width % 2 or columns % _COLUMNS[name]:
        return f"the CPU kernel takes an even width and multiples of {_COLUMNS[name]} columns, not [{width}, {columns}]"
    return None


def multiply_few_rows(x: jax.Array, w: jax.Array, dtype: jnp.dtype, *, transposed: bool = False) -> jax.Array:
    """Returns x [T, K] times w [K, N] or [parts, K, N] as [T, N] or [parts, T, N] in `dtype`, float32 or bfloat16.

    A `transposed` w is [N, K].
    """
    shape = (*w.shape[:-2], x.shape[0], w.shape[0 if transposed else -1])
    name = library.TABLE_PRODUCT if transposed else library.PRODUCT
    return jax.ffi.ffi_call(library.target_name(name), jax.ShapeDtypeStruct(shape, dtype))(x, w)


def find_fault(rows: int, dtype: str) -> str | None:
    """Returns how products of `rows` rows of a type differ from numpy's, in words for users; None if they agree."""
    columns = _COLUMNS[dtype]
    for transposed, shape in ((False, (2, 66, 9 * columns)), (True, (5 * columns, 2 * _LINE_WIDTH))):
        width = shape[1]
        rng = np.random.default_rng(width)
        x, w = (rng.standard_normal(each).astype(jnp.dtype(dtype)) for each in ((rows, width), shape))
        multiply = jax.jit(multiply_few_rows, static_argnames=("dtype", "transposed"))
        found = np.asarray(multiply(x, w, dtype=jnp.float32, transposed=transposed))
        expected = x.astype(np.float64) @ (w.T if transposed else w).astype(np.float64)
        error = float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
        if not error < _TOLERANCE:
            return f"they differ by {error:.3g} of the largest number"
    return None
