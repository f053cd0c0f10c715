"""How wrong attention is: one number for a kernel's output against that of a trusted implementation.

The error is relative, and taken for each token and head. An absolute error would pass zeros at long contexts: the mean
of n independent values has the size sqrt(1 / n), 0.006 at 32k. One norm over everything would pass a single wrong head,
or one wrong row of 256.

With independent normal keys, values and queries, dropping or confusing a share f of a row's keys changes its output by
sqrt(f) to sqrt(2 f) of itself, as errors and output shrink alike when contexts grow. A page of 64 tokens of 32k is 4 %,
one of 16 is 2 %; zeros are 100 %, another head's output 110 to 140 %. Values with a common part would hide such errors:
that part keeps the output large. A right kernel is off by 0.2 to 0.4 % with 16 bits: weights, outputs and the outputs
of units are each rounded to 8 bits of mantissa.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

RELATIVE_TOLERANCE = 1e-2  # for relative_error with queries of 16 bits


def relative_error(out: jax.Array | np.ndarray, expected: jax.Array | np.ndarray, num_tokens: int) -> float:
    """The largest ||out - expected|| / ||expected|| of any head of the first `num_tokens` tokens, norms over H.

    Both are [T, N, H] of any dtype, `expected` best in float32. Infinite if a value is not finite, or if a head is
    expected to be 0 and is not. 0 for no tokens.
    """
    if out.shape != expected.shape:
        raise ValueError(f"out is {list(out.shape)}, expected is {list(expected.shape)}")
    found = float(_largest(out, expected, num_tokens))
    return found if math.isfinite(found) else math.inf


@jax.jit
def _largest(out: jax.Array, expected: jax.Array, num_tokens: jax.Array) -> jax.Array:
    is_token = jnp.arange(out.shape[0])[:, None] < num_tokens
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    errors, sizes = (jnp.linalg.norm(array, axis=-1) for array in (out - expected, expected))
    return jnp.max(jnp.where(is_token & (errors != 0), errors / sizes, 0.0), initial=0.0)
