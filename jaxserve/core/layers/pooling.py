"""Pooling: one vector a row, of the hidden states of its tokens. Pure functions of hidden states and row numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.activations import ACTIVATIONS
from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.linear import linear
from jaxserve.pooling_options import PoolingType

_LEAST_LENGTH = 1e-12  # a vector is divided by at least this: zeros stay zeros
_HERE = StepContext(mesh=None)  # the projections are whole on every device


@dataclass(frozen=True)
class DenseConfig:
    """A projection behind pooling, always in float32; `activation` is a key of ACTIVATIONS.

    `module` is the checkpoint's name of it, below the folder that has its weights, if that is not the model's own
    ("2_Dense/linear"). Of a larger matrix, `rows` are those that are used.
    """

    in_size: int
    out_size: int
    bias: bool
    activation: str
    module: str
    rows: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ClassConfig:
    """The classes that a text's vector has a number for each, and the activation that makes these its probabilities.

    `activation`: "sigmoid", "softmax", "tanh" or "linear". It is applied on the host, because a request may leave it
    out. `difference`: the one number is the second of two, less the first.
    """

    labels: tuple[str, ...]
    activation: str
    difference: bool = False


@dataclass(frozen=True)
class PoolerConfig:
    """How a text's vector is made: pooled, projected, cut to its first `dimensions`, and divided by its length.

    With `classes` it is no embedding, but a number for each class.
    """

    pooling_type: PoolingType = "LAST"
    denses: tuple[DenseConfig, ...] = ()
    dimensions: int | None = None
    normalizes: bool = True
    classes: ClassConfig | None = None

    @property
    def needs_every_token(self) -> bool:
        """Whether it reads other tokens than the last, so that a text must be computed whole."""
        return self.pooling_type != "LAST"

    def count_numbers(self, hidden_size: int) -> int:
        """Returns the numbers of a vector (E), made of states of `hidden_size`."""
        if self.classes is not None:
            return len(self.classes.labels)
        size = self.denses[-1].out_size if self.denses else hidden_size
        return min(size, self.dimensions or size)


LAST = PoolerConfig()
"""A decoder's, unless its files say otherwise."""


def pool_rows(
    pooling_type: PoolingType,
    normalize: Callable[[jax.Array], jax.Array],
    hidden: Float[Array, "T D"],
    query_start_loc: Int[Array, " E"],  # [S + 1]
) -> Float[Array, "S D"]:
    """Returns a float32 vector for each row of a step whose texts are whole; those of padding rows mean nothing.

    `normalize` is the model's final norm. A text's mean adds its tokens in their order, whoever shares the step, and
    what is not finite in one text stays there.
    """
    if pooling_type != "MEAN":
        at = query_start_loc[:-1] if pooling_type == "CLS" else query_start_loc[1:] - 1
        return normalize(hidden[jnp.clip(at, 0, hidden.shape[0] - 1)]).astype(jnp.float32)
    tokens, num_rows = jnp.arange(hidden.shape[0], dtype=jnp.int32), query_start_loc.shape[0] - 1
    rows = jnp.searchsorted(query_start_loc[1:], tokens, side="right")  # num_rows for padding, which is dropped
    sums = jax.ops.segment_sum(
        normalize(hidden).astype(jnp.float32), rows, num_segments=num_rows, indices_are_sorted=True
    )
    return sums / jnp.maximum(jnp.diff(query_start_loc), 1)[:, None]


def finish_rows(config: PoolerConfig, leaves: Mapping[str, Any], pooled: Float[Array, "S D"]) -> Float[Array, "S E"]:
    """Returns the vectors of rows, float32. `leaves` are `dense_0`, `dense_1` and so on: [in, out] and a bias [out]."""
    for index, dense in enumerate(config.denses):
        pooled = ACTIVATIONS[dense.activation](linear(_HERE, leaves[f"dense_{index}"], pooled))
    if config.classes is not None and config.classes.difference:
        pooled = pooled[:, 1:] - pooled[:, :1]
    pooled = pooled[:, : config.dimensions]
    if not config.normalizes:
        return pooled
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=1, keepdims=True), _LEAST_LENGTH)
