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
    """Contracts the last `num_in` axes of `x` with the first `num_in` of `weight`, in the dtype of `x`.

    Sums are kept in float32 whatever the dtype. The contraction is flattened to two matrices, which costs nothing in
    row-major order, so that every backend takes its plain matrix product.
    """
    batch, in_shape, out_shape = x.shape[:-num_in], weight.shape[:num_in], weight.shape[num_in:]
    if x.shape[len(batch) :] != in_shape:
        raise ValueError(f"x: last axes of {x.shape} do not match the first {num_in} of weight {weight.shape}")
    dimensions = (tuple(range(len(batch), x.ndim)), tuple(range(num_in)))
    out = lax.dot_general(
        x,
        weight,
        (dimensions, ((), ())),
        precision=matmul_precision(x.dtype),
        preferred_element_type=x.dtype,
    )
    assert out.shape == (*batch, *out_shape)
    return out if bias is None else out + bias


def matmul_precision(dtype: jnp.dtype) -> lax.Precision:
    """Full float32 products for float32 models: the default on TPUs and recent GPUs drops most of the mantissa."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
