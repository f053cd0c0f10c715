"""Products of few rows, by the library of this room.

XLA's own product of few rows reads a matrix at a fraction of the memory's rate, and one of a single bfloat16 row first
converts the whole matrix (jax 0.12.0.1).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.cpu import library

_COLUMNS = {"float32": 64, "bfloat16": 32}  # whose sums a task holds in registers
_TOLERANCE = 1e-5


def suits(x: jax.Array, w: jax.Array) -> bool:
    """Whether `multiply_few_rows` takes them, however many rows there are."""
    return w.dtype == x.dtype and find_shape_obstacle(*w.shape[-2:], x.dtype) is None


def find_shape_obstacle(width: int, columns: int, dtype: jnp.dtype | str) -> str | None:
    """Returns why the library has no products with matrices [width, columns], in words for users; None: it has."""
    name = jnp.dtype(dtype).name
    if name not in _COLUMNS:
        return f"the CPU kernel reads {' and '.join(_COLUMNS)}, these weights are {name}"
    if width % 2 or columns % _COLUMNS[name]:
        return f"the CPU kernel takes an even width and multiples of {_COLUMNS[name]} columns, not [{width}, {columns}]"
    return None


def multiply_few_rows(x: jax.Array, w: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns x [T, K] times w [K, N] or [parts, K, N] as [T, N] or [parts, T, N] in `dtype`, float32 or bfloat16."""
    shape = (*w.shape[:-2], x.shape[0], w.shape[-1])
    call = jax.ffi.ffi_call(library.target_name(library.PRODUCT), jax.ShapeDtypeStruct(shape, dtype))
    return call(x, w)


def find_fault(rows: int, dtype: str) -> str | None:
    """Returns how products of `rows` rows of a type differ from XLA's, in words for users; None if they agree."""
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (rows, 66), dtype)
    w = jax.random.normal(keys[1], (2, 66, 9 * _COLUMNS[dtype]), dtype)
    found = jax.jit(multiply_few_rows, static_argnames="dtype")(x, w, dtype=jnp.float32)
    expected = jnp.einsum("tk,pkn->ptn", x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")
    error = float(jnp.max(jnp.abs(found - expected)) / jnp.max(jnp.abs(expected)))
    return None if error < _TOLERANCE else f"they differ by {error:.3g} of the largest number"
