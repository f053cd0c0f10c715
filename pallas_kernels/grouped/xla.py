"""A grouped product as a loop over tiles of rows, each against the matrix of its group.

It runs everywhere. `lax.ragged_dot` multiplies all rows with all matrices outside TPUs: on a CPU that took 17 to 110
times as long (2 to 512 tokens, 32 and 128 experts; jax 0.12.0.1).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped.tiles import choose_rows, list_tiles
from pallas_kernels.platform import traced_platform
from pallas_kernels.quantized import QuantizedArray
from pallas_kernels.quantized_products import quantized_matmul


def multiply(x: jax.Array, w: jax.Array | QuantizedArray, sizes: jax.Array, first: jax.Array, parts: int) -> jax.Array:
    """See `grouped_matmul`. A tile writes over the end of its group; the next group's tiles correct that."""
    num_rows, width = x.shape
    on_cpu = traced_platform() == "cpu"
    # XLA:CPU reads a matrix where it lies for a single row, and copies it first for several.
    rows = 1 if on_cpu and 2 * num_rows <= sizes.shape[0] else choose_rows(num_rows, sizes.shape[0])
    tiles = list_tiles(sizes, num_rows, rows)
    padded = jnp.pad(x, ((0, rows), (0, 0)))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT

    def multiply_tile(tile: jax.Array, place: jax.Array) -> jax.Array:
        matrix = jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, place, keepdims=False), w)
        if isinstance(matrix, QuantizedArray):
            return quantized_matmul(tile, matrix, whole=True)
        return lax.dot(tile, matrix, precision=precision, preferred_element_type=x.dtype)

    def step(index: jax.Array, out: jax.Array) -> jax.Array:
        start = tiles.starts[index]
        tile = lax.dynamic_slice(padded, (start, 0), (rows, width))
        for number in range(parts):
            place = first + number * sizes.shape[0] + tiles.groups[index]
            product = multiply_tile(tile, place)
            out = lax.dynamic_update_slice(out, product[None], (number, start, 0))
        return out

    empty = jnp.zeros((parts, num_rows + rows, w.shape[2]), x.dtype)
    # On a GPU the host would be asked in every turn whether a loop of unknown length goes on.
    count = tiles.count if on_cpu else tiles.starts.shape[0]
    return lax.fori_loop(0, count, step, empty)[:, :num_rows]
