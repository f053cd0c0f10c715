"""The router of a mixture of experts: which experts a token goes to, and with what weights. All in float32."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.linear import Leaf, linear

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
"""What makes scores of logits: a softmax over all experts, a sigmoid each, or a softmax over the chosen ones."""

_LEAST_SUM = 1e-20  # keeps a sum of sigmoids off zero, as DeepSeek-V3's code does


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in `count` groups of equal size, of which the best `chosen` take part.

    A group is judged by the sum of its best `judges` scores: 1 in DeepSeek-V2, 2 in DeepSeek-V3.
    """

    count: int
    chosen: int
    judges: int


@dataclass(frozen=True)
class RouterConfig:
    """`num_experts` is E, `top_k` the experts of a token.

    `normalize`: the weights of a token are divided by their sum. `scale` multiplies them at last, and with `scales` one
    of each expert's own. `bias`: logits have a bias. `correction`: a bias on scores takes part in the choice, not in
    the weights.
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    normalize: bool = False
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    scales: bool = False
    groups: ExpertGroups | None = None


def route(
    config: RouterConfig, leaf: Leaf, x: Float[Array, "T D"], ctx: StepContext
) -> tuple[Int[Array, "T k"], Float[Array, "T k"]]:
    """Returns the experts of each token, the best first and of equals the lower index, and their float32 weights.

    `leaf` has `weight` [D, E] and, where the config says so, `bias`, `correction` and `scales` [E].
    """
    logits = linear(ctx, leaf, x, dtype=jnp.float32)
    scores = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, "softmax_of_chosen": lambda x: x}[config.scoring](
        logits
    )
    choice = scores + leaf["correction"].astype(jnp.float32) if config.correction else scores
    if config.groups is not None:
        choice = _mask_groups(config.groups, choice)
    _, experts = lax.top_k(choice, config.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if config.scoring == "softmax_of_chosen":
        weights = jax.nn.softmax(weights)
    if config.normalize:
        weights /= jnp.sum(weights, axis=1, keepdims=True) + _LEAST_SUM
    if config.scales:
        weights *= leaf["scales"].astype(jnp.float32)[experts]
    return experts, weights * config.scale


def _mask_groups(groups: ExpertGroups, choice: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """Returns the scores with those of experts outside the best groups at minus infinity."""
    tokens = choice.shape[0]
    by_group = choice.reshape(tokens, groups.count, -1)
    judged = jnp.sum(lax.top_k(by_group, groups.judges)[0], axis=-1)
    _, best = lax.top_k(judged, groups.chosen)
    is_best = jnp.zeros((tokens, groups.count), bool).at[jnp.arange(tokens)[:, None], best].set(True)
    return jnp.where(is_best[:, :, None], by_group, -jnp.inf).reshape(choice.shape)
