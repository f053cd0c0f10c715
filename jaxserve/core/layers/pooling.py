"""Pooling: one vector a row, of the hidden states of its tokens, or one a token. Pure functions of these states."""

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
from jaxserve.core.layers.norm import NormConfig, normalize
from jaxserve.pooling_options import ONE_TOKEN, PoolingType

_LEAST_LENGTH = 1e-12  # a vector is divided by at least this: zeros stay zeros
_HERE = StepContext(mesh=None)  # the projections are whole on every device


@dataclass(frozen=True)
class DenseConfig:
    """A projection behind pooling, always in float32; `activation` is a key of ACTIVATIONS.

    `module` is the checkpoint's name of it, below the folder that has its weights, if that is not the model's own
    ("2_Dense/linear"). Of a larger matrix, `rows` are those that are used. With `residual` its input is added to its
    output; where their sizes differ, a second projection, beside the first, is between.
    """

    in_size: int
    out_size: int
    bias: bool
    activation: str
    module: str
    rows: tuple[int, ...] | None = None
    residual: bool = False

    @property
    def projects_residual(self) -> bool:
        """Whether there is the second projection."""
        return self.residual and self.in_size != self.out_size


@dataclass(frozen=True)
class LayerNormConfig:
    """A LayerNorm behind pooling, always in float32; `module` is the checkpoint's name of it ("2_LayerNorm/norm")."""

    size: int
    module: str

    @property
    def in_size(self) -> int:
        """The numbers that it takes."""
        return self.size

    @property
    def out_size(self) -> int:
        """The numbers that it gives."""
        return self.size


TORCH_NORM = NormConfig(eps=1e-5, centered=True, bias=True, wide=True)
"""PyTorch's LayerNorm by default."""


@dataclass(frozen=True)
class ClassConfig:
    """The classes that a text's vector has a number for each, and the activation that makes these its probabilities.

    `activation`: "sigmoid", "softmax", "tanh" or "linear". It is applied on the host, because a request may leave it
    out. `difference`: the one number is the second of two, less the first. In front of the activation, a number x
    becomes (x - mean) / sigma.
    """

    labels: tuple[str, ...]
    activation: str
    difference: bool = False
    mean: float = 0.0
    sigma: float = 1.0


@dataclass(frozen=True)
class PoolerConfig:
    """How a text's vector is made: pooled, sent through `denses`, which may have norms between them, cut to its first
    `dimensions`, and divided by its length.

    What the pooling types `joined` make of the text stands behind what `pooling_type` makes of it. With `classes` the
    vector is no embedding, but a number for each class. `trained_sizes`: to how many numbers a request may have vectors
    cut, because the model was trained so (Matryoshka); empty for any, None if it was not.
    """

    pooling_type: PoolingType = "LAST"
    denses: tuple[DenseConfig | LayerNormConfig, ...] = ()
    dimensions: int | None = None
    normalizes: bool = True
    classes: ClassConfig | None = None
    joined: tuple[PoolingType, ...] = ()
    trained_sizes: tuple[int, ...] | None = None

    @property
    def pooling_types(self) -> tuple[PoolingType, ...]:
        """All types of pooling, whose vectors stand side by side."""
        return (self.pooling_type, *self.joined)

    @property
    def needs_every_token(self) -> bool:
        """Whether it reads other tokens than the last, so that a text must be computed whole."""
        return self.pooling_types != ("LAST",)

    @property
    def by_token(self) -> bool:
        """Whether each token has a vector of its own, so that nothing is pooled."""
        return self.pooling_type == "ALL"

    def count_pooled(self, hidden_size: int) -> int:
        """Returns the numbers that states of `hidden_size` are pooled to (P)."""
        return hidden_size * len(self.pooling_types)

    def count_numbers(self, hidden_size: int) -> int:
        """Returns the numbers of a vector (E), made of states of `hidden_size`."""
        if self.classes is not None:
            return len(self.classes.labels)
        size = self.denses[-1].out_size if self.denses else self.count_pooled(hidden_size)
        return min(size, self.dimensions or size)


LAST = PoolerConfig()
"""A decoder's, unless its files say otherwise."""


def pool_rows(
    pooling_types: tuple[PoolingType, ...],
    normalize: Callable[[jax.Array], jax.Array],
    hidden: Float[Array, "T D"],
    query_start_loc: Int[Array, " E"],  # [S + 1]
) -> Float[Array, "S P"]:
    """Returns a float32 vector for each row of a step whose texts are whole, P = D numbers for each pooling type.

    Those of padding rows mean nothing. `normalize` is the model's final norm. A text's sum adds its tokens in their
    order, whoever shares the step, and what is not finite in one text stays there.
    """
    lengths = jnp.diff(query_start_loc)
    tokens, num_rows = jnp.arange(hidden.shape[0], dtype=jnp.int32), lengths.shape[0]
    # num_rows for padding, which is dropped; compared with all, as a search would be a loop of small kernels on a GPU.
    rows = jnp.searchsorted(query_start_loc[1:], tokens, side="right", method="compare_all")
    where = {"num_segments": num_rows, "indices_are_sorted": True}
    needs_all = not set(pooling_types) <= ONE_TOKEN
    normed = normalize(hidden).astype(jnp.float32) if needs_all else hidden
    count = jnp.maximum(lengths, 1).astype(jnp.float32)[:, None]

    def take(at: Int[Array, " S"]) -> Float[Array, "S D"]:
        found = normed[jnp.clip(at, 0, hidden.shape[0] - 1)]
        return found if needs_all else normalize(found).astype(jnp.float32)

    def pool(pooling_type: PoolingType) -> Float[Array, "S D"]:
        match pooling_type:
            case "CLS":
                return take(query_start_loc[:-1])
            case "LAST":
                return take(query_start_loc[1:] - 1)
            case "MAX":
                return jax.ops.segment_max(normed, rows, **where)
            case "WEIGHTED_MEAN":  # the weight of a token is its position, from 1
                starts = query_start_loc[jnp.minimum(rows, num_rows - 1)]
                weights = (tokens - starts + 1).astype(jnp.float32)[:, None]
                return jax.ops.segment_sum(weights * normed, rows, **where) / (count * (count + 1) / 2)
        total = jax.ops.segment_sum(normed, rows, **where)
        return total / (count if pooling_type == "MEAN" else jnp.sqrt(count))

    return jnp.concatenate([pool(each) for each in pooling_types], axis=1)


def finish_rows(config: PoolerConfig, leaves: Mapping[str, Any], pooled: Float[Array, "S P"]) -> Float[Array, "S E"]:
    """Returns the vectors of rows or tokens, float32. `leaves` are `dense_0` and so on, by `PoolerConfig.denses`.

    A projection has a weight [in, out] and a bias [out], a second one, as `dense_0_residual`, a weight [in, out]; a
    norm has a weight and a bias of its size.
    """
    for index, dense in enumerate(config.denses):
        leaf, taken = leaves[f"dense_{index}"], pooled
        if isinstance(dense, LayerNormConfig):
            pooled = normalize(TORCH_NORM, leaf, taken)
            continue
        pooled = ACTIVATIONS[dense.activation](linear(_HERE, leaf, taken))
        if dense.projects_residual:
            taken = linear(_HERE, leaves[f"dense_{index}_residual"], taken)
        pooled = pooled + taken if dense.residual else pooled
    if config.classes is not None and config.classes.difference:
        pooled = pooled[:, 1:] - pooled[:, :1]
    pooled = pooled[:, : config.dimensions]
    if not config.normalizes:
        return pooled
    return pooled / jnp.maximum(jnp.linalg.norm(pooled, axis=1, keepdims=True), _LEAST_LENGTH)
