"""Matrix products, each a single dot_general in the layout the weights are stored in."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def project(
    x: Float[Array, "*batch_and_in"],
    weight: Float[Array, "*in_and_out"],
    bias: Float[Array, "*out"] | None = None,
    *,
    num_in: int = 1,
) -> Float[Array, "*batch_and_out"]:
    """Contracts the last `num_in` axes of `x` with the first `num_in` of `weight`; returns the dtype of `x`.

    Several contracted or remaining axes are one matrix product to XLA, as they are adjacent in row-major order: no
    backend copies or transposes the weight.
    """
    if x.shape[x.ndim - num_in :] != weight.shape[:num_in]:
        raise ValueError(f"x: last axes of {x.shape} do not match the first {num_in} of weight {weight.shape}")
    contracted = (tuple(range(x.ndim - num_in, x.ndim)), tuple(range(num_in)))
    out = lax.dot_general(
        x,
        weight,
        (contracted, ((), ())),
        precision=matmul_precision(x.dtype),
        preferred_element_type=x.dtype,
    )
    return out if bias is None else out + bias


def matmul_precision(dtype: jnp.dtype) -> lax.Precision:
    """Full float32 products for float32 models: the default on TPUs and recent GPUs drops most of the mantissa."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
