"""The feed-forward blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.activations import ACTIVATIONS, LEARNED
from jaxserve.layers.context import StepContext
from jaxserve.layers.linear import linear


@dataclass(frozen=True)
class MLPConfig:
    """`intermediate_size` is F; `activation` a key of ACTIVATIONS."""

    intermediate_size: int
    activation: str
    bias: bool = False

    @property
    def learned(self) -> Mapping[str, tuple[int, ...]]:
        """The activation's own parameters: their names in a checkpoint and their shapes there; usually none."""
        return LEARNED.get(self.activation, {})


def gated_mlp(
    config: MLPConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: StepContext
) -> Float[Array, "T D"]:
    """Returns down(activation(gate(x)) * up(x)) from `gate_up` [2, D, F] and `down` [F, D] (and their biases)."""
    gate, up = linear(ctx, leaves["gate_up"], x)
    return linear(ctx, leaves["down"], _activate(config, leaves, gate) * up, reduce=True)


def plain_mlp(
    config: MLPConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: StepContext
) -> Float[Array, "T D"]:
    """Returns down(activation(up(x))) from `up` [D, F] and `down` [F, D] (and their biases)."""
    return linear(ctx, leaves["down"], _activate(config, leaves, linear(ctx, leaves["up"], x)), reduce=True)


def _activate(config: MLPConfig, leaves: Mapping[str, Any], x: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """Returns activation(x); `act` [P], always float32, holds the activation's own parameters if it has any."""
    return ACTIVATIONS[config.activation](x.astype(jnp.float32), *leaves.get("act", ())).astype(x.dtype)
