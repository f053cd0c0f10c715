"""Root-mean-square normalisation in the two roundings that model families use."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@dataclass(frozen=True)
class NormConfig:
    """`unit_offset`: the stored weight is the difference from one, and is applied before rounding (Gemma).

    `block_outputs`: the outputs of attention and feed-forward are normalised too, before they join the residual.
    """

    eps: float
    unit_offset: bool = False
    block_outputs: bool = False


def rms_norm(config: NormConfig, x: Float[Array, "*batch D"], weight: Float[Array, " D"]) -> Float[Array, "*batch D"]:
    """Normalises the last axis in float32 and returns the dtype of `x`.

    Rounding follows the family: Llama rounds the normalised value to the model's dtype and multiplies there; Gemma
    multiplies by one plus the weight in float32 and rounds last.
    """
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.eps)
    if config.unit_offset:
        return (normed * (1.0 + weight.astype(jnp.float32))).astype(x.dtype)
    return weight * normed.astype(x.dtype)
