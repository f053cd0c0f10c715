"""Products of few rows, by the library of this room.

XLA's own product of few rows reads a matrix at a fraction of the memory's rate, and one of a single bfloat16 row first
converts the whole matrix (jax 0.12.0.1).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import library

_COLUMNS = {"float32": 64, "bfloat16": 32}  # whose sums a task holds in registers
_LINE_WIDTH = 32  # numbers of a line [out, in] that are read at a time
_MOST_TABLE_ROWS = 8  # with more, XLA's product with a matrix [out, in] is as fast
_TOLERANCE = 1e-5


def suits(x: jax.Array, w: jax.Array, *, transposed: bool = False) -> bool:
    """Whether `multiply_few_rows` takes them; of a matrix that is not `transposed`, however many rows there are."""
    if w.dtype != x.dtype:
        return False
    if transposed and (w.ndim > 2 or w.shape[1] % _LINE_WIDTH or x.shape[0] > _MOST_TABLE_ROWS):
        return False
    return find_shape_obstacle(*(w.shape[::-1] if transposed else w.shape[-2:]), x.dtype) is None


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
    """Returns how products of `rows` rows of a type differ from XLA's, in words for users; None if they agree."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (rows, 66), dtype)
    w = jax.random.normal(keys[1], (2, 66, 9 * _COLUMNS[dtype]), dtype)
    found = jax.jit(multiply_few_rows, static_argnames="dtype")(x, w, dtype=jnp.float32)
    expected = jnp.einsum("tk,pkn->ptn", x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")
    error = float(jnp.max(jnp.abs(found - expected)) / jnp.max(jnp.abs(expected)))
    return None if error < _TOLERANCE else f"they differ by {error:.3g} of the largest number"
