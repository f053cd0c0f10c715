"""Sinks and scales of heads: in the order of the rows of a unit, [C] with C a multiple of 64, and applied by XLA."""

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


def apply_heads(
    found: jax.Array,  # [T, N, V], weighted means
    logs: jax.Array,  # [T, N, 1], base-2 logarithms of the sums of their weights
    sinks: jax.Array | None,  # [N]
    scale: jax.Array | None,  # [K], of values
) -> jax.Array:
    """Applies sinks, which take a share of each query's weights, and the values' scale: [T, N, V] f32."""
    found = found.astype(jnp.float32)
    if sinks is not None:
        found *= 1 / (1 + jnp.exp2(sinks.astype(jnp.float32)[:, None] * LOG2_E - logs))
    if scale is not None:
        found *= jnp.repeat(scale, found.shape[1] // scale.shape[0])[:, None]
    return found
