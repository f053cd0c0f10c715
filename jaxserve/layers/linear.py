"""Matrix products, each a single dot_general in the layout the weights are stored in.

Weights have two axes: with more, a compiler may choose another layout for them, and copy them in every step to get it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def project(
    x: Float[Array, "T in"], weight: Float[Array, "in out"], bias: Float[Array, " out"] | None = None
) -> Float[Array, "T out"]:
    """Returns `x` times `weight`, in the dtype of `x`."""
    out = lax.dot_general(
        x,
        weight,
        (((1,), (0,)), ((), ())),
        precision=matmul_precision(x.dtype),
        preferred_element_type=x.dtype,
    )
    return out if bias is None else out + bias


def matmul_precision(dtype: jnp.dtype) -> lax.Precision:
    """Full float32 products for float32 models: the default on TPUs and recent GPUs drops most of the mantissa."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
