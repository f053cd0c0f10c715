"""The definition of a grouped product, in a few lines: every row against every matrix, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized import QuantizedArray, dequantize


def multiply(x: jax.Array, w: jax.Array | QuantizedArray, sizes: jax.Array, first: jax.Array, parts: int) -> jax.Array:
    """See `grouped_matmul`. Takes memory for M * G * N numbers: for tests."""
    w = dequantize(w, jnp.float32) if isinstance(w, QuantizedArray) else w
    num_rows, num_groups = x.shape[0], sizes.shape[0]
    ends = jnp.cumsum(sizes)
    groups = jnp.searchsorted(ends, jnp.arange(num_rows), side="right")  # G for rows of no group
    used = lax.dynamic_slice_in_dim(w, first, parts * num_groups).reshape(parts, num_groups, *w.shape[1:])
    products = jnp.einsum(
        "mk,pgkn->pmgn", x.astype(jnp.float32), used.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    own = groups[:, None, None] == jnp.arange(num_groups)[None, :, None]
    return jnp.sum(jnp.where(own, products, 0.0), axis=2).astype(x.dtype)
