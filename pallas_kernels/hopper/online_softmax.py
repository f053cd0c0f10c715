"""One step of the online softmax in base 2 (Milakov and Gimelshein, 2018; FlashAttention's recurrence)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.mosaic_gpu import compat

Carry = tuple[jax.Array, jax.Array, jax.Array]
"""Weighted values [rows, columns], the largest score and the sum of the weights [rows]; f32."""


def weigh(scores: jax.Array, carry: Carry) -> tuple[jax.Array, Carry]:
    """Returns the weights [rows, keys] f32 of keys with these scores, and the carry that their values are added to."""
    acc, largest, total = carry
    # All scores are computed before their maximum: interleaved, they would take more registers.
    scores = lax.optimization_barrier(scores)
    new_largest = jnp.maximum(largest, jnp.max(scores, axis=1))
    shrink = jnp.exp2(largest - new_largest)
    weights = jnp.exp2(scores - compat.spread(new_largest, scores.shape))
    total = total * shrink + jnp.sum(weights, axis=1)
    return weights, (acc * compat.spread(shrink, acc.shape), new_largest, total)
