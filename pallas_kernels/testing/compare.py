"""The error of attention: one number for a kernel's output against that of a trusted implementation.

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
import numpy as np

RELATIVE_TOLERANCE = 1e-2  # for relative_error with queries of 16 bits


def relative_error(out: jax.Array | np.ndarray, expected: jax.Array | np.ndarray, num_tokens: int) -> float:
    """The largest ||out - expected|| / ||expected|| of any head of the first `num_tokens` tokens, norms over H.

    Both are [T, N, H] of any dtype, `expected` best in float32. Infinite if a value is not finite, or if a head is
    expected to be 0 and is not. 0 for no tokens.
    """
    if out.shape != expected.shape:
        raise ValueError(f"out is {list(out.shape)}, expected is {list(expected.shape)}")
    wide = [np.asarray(array)[:num_tokens].astype(np.float32) for array in (out, expected)]
    with np.errstate(divide="ignore", invalid="ignore"):
        errors, sizes = (np.linalg.norm(array, axis=-1) for array in (wide[0] - wide[1], wide[1]))
        found = float(np.max(np.where(errors != 0, errors / sizes, 0), initial=0))
    return found if math.isfinite(found) else math.inf
