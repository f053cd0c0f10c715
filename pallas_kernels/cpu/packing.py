"""Matrices that are packed when they are loaded, and their products with any number of rows.

A processor that has instructions for tiles (AMX) multiplies bfloat16 several times as fast as one without, but reads a
matrix in an order of its own. Packed once, a matrix is not packed anew in each product, as XLA does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import library

_WIDTHS = {"float32": 64, "bfloat16": 32}  # columns of a panel
DTYPES = tuple(_WIDTHS)
_DEPTHS = {"float32": 1, "bfloat16": 32}  # rows whose numbers of a column lie together
_TOLERANCE = 1e-5


def find_packed_shape(shape: tuple[int, ...], dtype: str, *, transposed: bool = False) -> tuple[int, ...] | None:
    """Returns the shape of `pack`'s result for matrices [..., in, out]; None for those that cannot be packed."""
    *lead, depth, columns = (*shape[:-2], *shape[:-3:-1]) if transposed else shape
    if dtype not in _WIDTHS or len(lead) > 1 or depth % _DEPTHS[dtype] or columns % _WIDTHS[dtype]:
        return None
    panels = columns // _WIDTHS[dtype]
    return (*lead, panels, depth, 64) if dtype == "float32" else (*lead, panels, depth // 32, 2, 16, 32)


def pack(w: jax.Array, *, transposed: bool = False) -> jax.Array:
    """Returns matrices [..., in, out] as `multiply_packed` reads them; a `transposed` w is [..., out, in].

    Float32 becomes [..., panels, in, 64], bfloat16 [..., panels, in / 32, 2, 16, 32]: for 32 rows, two tiles of 16
    columns, in each of which pairs of rows are interleaved.

    Raises:
        ValueError: `find_packed_shape` returns None.
    """
    packed = find_packed_shape(w.shape, w.dtype.name, transposed=transposed)
    if packed is None:
        raise ValueError(f"w: {w.dtype.name} {w.shape} cannot be packed")
    w = w.swapaxes(-1, -2) if transposed else w
    *lead, depth, columns = w.shape
    if w.dtype == jnp.float32:
        return w.reshape(*lead, depth, columns // 64, 64).swapaxes(-2, -3)
    tiles = w.reshape(*lead, depth // 32, 16, 2, columns // 32, 2, 16)
    first = len(lead)
    order = (*range(first), *(first + axis for axis in (3, 0, 4, 1, 5, 2)))
    return tiles.transpose(order).reshape(packed)


def multiply_packed(
    x: jax.Array, packed: jax.Array, dtype: jnp.dtype, num_rows: jax.Array | None = None, *, gated: bool = False
) -> jax.Array:
    """Returns x [T, in] times matrices of `pack`, as [T, out] or [parts, T, out] in `dtype`, float32 or bfloat16.

    Rows from `num_rows` (i32, default: all) on are zeros. A row's bits do not depend on other rows, or their number.
    With `gated`, two parts give silu of the first product times the second, as [T, out], rounded once.
    """
    num_axes = 3 if packed.dtype == jnp.float32 else 5
    lead, panels = packed.shape[:-num_axes], packed.shape[-num_axes]
    if gated:
        assert lead == (2,), f"packed: a gate and what it weighs, not {lead}"
        lead = ()
    shape = (*lead, x.shape[0], panels * _WIDTHS[packed.dtype.name])
    rows = jnp.full(1, x.shape[0], jnp.int32) if num_rows is None else num_rows.astype(jnp.int32).reshape(1)
    return jax.ffi.ffi_call(library.target_name(library.PACKED), jax.ShapeDtypeStruct(shape, dtype))(x, packed, rows)


def take_columns(packed: jax.Array, columns: jax.Array) -> jax.Array:
    """Returns some columns [T] (i32, within the matrix) of a matrix [in, out] of `pack`, as rows [T, in]."""
    width = _WIDTHS[packed.dtype.name]
    panels, places = columns // width, columns % width
    if packed.dtype == jnp.float32:
        return packed[panels, :, places]
    pairs = packed.reshape(*packed.shape[:-1], 16, 2)  # [panels, in / 32, 2, 16, 16, 2]
    return pairs[panels, :, places // 16, :, places % 16].reshape(len(columns), -1)


def find_fault(dtype: str) -> str | None:
    """Returns how products of a type differ from numpy's, in words for users; None if they agree."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in ((51, 96), (2, 96, 9 * _WIDTHS[dtype])))
    used = 35  # rows of one and of two tiles, and padding

    def multiply(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        packed = pack(w)
        return [multiply_packed(x, packed, jnp.dtype("float32"), jnp.int32(used), gated=each) for each in (False, True)]

    found, gated = map(np.asarray, jax.jit(multiply)(x, w))
    expected = x.astype(np.float64) @ w.astype(np.float64)
    expected[:, used:] = 0
    gate, up = expected
    pairs = (found, expected), (gated, gate / (1 + np.exp(-gate)) * up)
    error = max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)
    return None if error < _TOLERANCE else f"they differ by {error:.3g} of the largest number"
