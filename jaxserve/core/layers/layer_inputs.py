"""Inputs of each layer beside the residual stream, made once per step (Gemma 3n and 4's per-layer embeddings)."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.linear import Leaf, linear
from jaxserve.core.layers.norm import NormConfig, normalize


def make_layer_inputs(
    size: int | None,
    norm: NormConfig,
    leaves: Mapping[str, Leaf] | None,
    token_ids: Int[Array, " T"],
    x: Float[Array, "T D"],
) -> Float[Array, "T L P"] | None:
    """Returns `size` (P) numbers of each token for each layer, None if there are none.

    They are the mean of two parts, times the square root of 2: the token's row in `embed` [V, L * P], scaled by the
    root of P, and the normalised `projection` [D, L * P] of its embedding `x`. `norm` [P] spans one layer's numbers.
    The row of a placeholder, whose id is negative, is row 0.
    """
    if size is None or leaves is None:
        return None
    table = leaves["embed"]["weight"]
    rows = table.at[token_ids].get(mode="clip", wrap_negative_indices=False) * jnp.asarray(size**0.5, table.dtype)
    projected = linear(StepContext(mesh=None), leaves["projection"], x) * x.shape[-1] ** -0.5
    shape = (len(x), -1, size)
    return (normalize(norm, leaves["norm"], projected.reshape(shape)) + rows.reshape(shape)) * 0.5**0.5
