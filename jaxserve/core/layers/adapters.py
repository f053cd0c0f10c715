"""Low-rank additions to a product with a weight (Hu et al. 2021): of many, each token has its own or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.core.sharding import Axes

type Adapters = Mapping[str, Any]
"""The adapters of one weight in a step, in slots side by side.

`a` [in, slots * r] and `b` [..., slots * r, out] are those of all slots, `own` [T, slots] says which slot a token has.
"""


def adapter_axes(axes: Axes) -> dict[str, Axes]:
    """Returns the axes of `Adapters` beside a weight with these axes [..., in, out]."""
    *lead, row, column = axes
    return {"a": (row, None), "b": (*lead, None, column), "own": (None, None)}


def add_adapters(
    multiply: Callable[..., Array], adapters: Adapters, x: Float[Array, "T in"], dtype: jnp.dtype
) -> Float[Array, "*parts T out"]:
    """Returns what each token's adapter adds to its product with the weight.

    Two dense products with the matrices of all slots, between which a token keeps the numbers of its own slot. Slots
    that are not its own may hold anything.

    Args:
        multiply: (weight, rows, dtype) -> their product.
    """
    a, b, own = adapters["a"], adapters["b"], adapters["own"]
    inner = multiply(a, x.astype(a.dtype), a.dtype)
    by_slot = inner.reshape(*own.shape, -1)
    inner = jnp.where(own[..., None], by_slot, 0).reshape(inner.shape)
    return multiply(b, inner, b.dtype).astype(dtype)
