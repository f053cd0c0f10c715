"""Normalisation in the forms and roundings that model families use."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.core.layers.linear import Leaf


@dataclass(frozen=True)
class NormConfig:
    """A root-mean-square norm, or with `centered` a LayerNorm, which subtracts the mean first.

    `unit_offset`: one is added to the stored weight. `wide`: weight and bias apply in float32, before the result is
    rounded to the model's dtype; else the normalised value is rounded first. Without `weight` there is no bias, either.
    """

    eps: float
    centered: bool = False
    bias: bool = False
    unit_offset: bool = False
    wide: bool = False
    weight: bool = True


def normalize(config: NormConfig, leaf: Leaf | None, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Returns `x` normalised over its last axis in float32, in the dtype of `x`.

    The weight has the shape of the last axes of `x`: [D], or [n, D] where each of n heads has its own. A norm without a
    weight has no leaf.
    """
    if not config.weight:
        return normalize_plainly(config, x)
    assert leaf is not None
    normed = _normalize(config, x)
    weight, bias = leaf["weight"], leaf.get("bias")
    if config.wide:
        weight, bias = weight.astype(jnp.float32), None if bias is None else bias.astype(jnp.float32)
    else:
        normed = normed.astype(x.dtype)
    normed = (1.0 + weight if config.unit_offset else weight) * normed
    return (normed if bias is None else normed + bias).astype(x.dtype)


def normalize_plainly(config: NormConfig, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """Returns `x` normalised over its last axis, without a weight."""
    return _normalize(config, x).astype(x.dtype)


def _normalize(config: NormConfig, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    wide = x.astype(jnp.float32)
    if config.centered:
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
    return wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.eps)
