"""What heads have, in the order of the rows of a unit: [C], C a multiple of 64."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_gpu.key_tiles import LOG2_E
from pallas_kernels.mosaic_gpu.splits import QUERY_ROWS


def spread_sinks(sinks: jax.Array, num_kv_heads: int, num_rows: int, max_queries: int) -> jax.Array:
    """Sinks [N] of query heads, in base 2."""
    by_row = jnp.repeat(sinks.astype(jnp.float32).reshape(num_kv_heads, -1), max_queries, axis=1) * LOG2_E
    return _pad_columns(jnp.pad(by_row, ((0, 0), (0, num_rows - by_row.shape[1]))).reshape(-1))


def spread_rows(scales: jax.Array, num_rows: int) -> jax.Array:
    """Scales [K] of KV heads, which have `num_rows` rows each."""
    return _pad_columns(jnp.repeat(scales, num_rows))


def _pad_columns(columns: jax.Array) -> jax.Array:
    return jnp.pad(columns.astype(jnp.float32), (0, -columns.shape[0] % QUERY_ROWS))
