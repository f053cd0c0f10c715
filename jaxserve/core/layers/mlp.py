"""The feed-forward blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.core.layers.activations import ACTIVATIONS, LEARNED
from jaxserve.core.layers.context import StepContext
from jaxserve.core.layers.linear import linear, multiply_silu


@dataclass(frozen=True)
class ClampedGate:
    """gpt-oss's gate * sigmoid(alpha * gate) * (up + 1), where `limit` bounds gate above, and up on both sides."""

    alpha: float
    limit: float


@dataclass(frozen=True)
class MLPConfig:
    """`intermediate_size` is F; `activation` a key of ACTIVATIONS, without effect where the gate is `clamped`.

    `down_bias`: of the last projection, if not as `bias`. Without `gated` there is one product in front of the
    activation (`plain_mlp`).
    """

    intermediate_size: int
    activation: str
    bias: bool = False
    clamped: ClampedGate | None = None
    down_bias: bool | None = None
    gated: bool = True

    @property
    def learned(self) -> Mapping[str, tuple[int, ...]]:
        """The activation's own parameters: their names in a checkpoint and their shapes there; usually none."""
        return LEARNED.get(self.activation, {})


def dense_mlp(
    config: MLPConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: StepContext
) -> Float[Array, "T D"]:
    """Returns the block that the config describes: `gated_mlp` or `plain_mlp`."""
    return (gated_mlp if config.gated else plain_mlp)(config, leaves, x, ctx)


def gated_mlp(
    config: MLPConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: StepContext
) -> Float[Array, "T D"]:
    """Returns down(apply_gate(gate(x), up(x))) from `gate_up` [2, D, F] and `down` [F, D] (and their biases)."""
    is_silu = config.clamped is None and ACTIVATIONS[config.activation] is jax.nn.silu
    hidden = multiply_silu(ctx, leaves["gate_up"], x) if is_silu else None
    if hidden is None:
        hidden = apply_gate(config, leaves, *linear(ctx, leaves["gate_up"], x))
    return linear(ctx, leaves["down"], hidden, reduce=True)


def apply_gate(
    config: MLPConfig, leaves: Mapping[str, Any], gate: Float[Array, "T F"], up: Float[Array, "T F"]
) -> Float[Array, "T F"]:
    """Returns activation(gate) * up, or what a clamped gate makes of both."""
    if config.clamped is None:
        return activate(config, leaves, gate) * up
    alpha, limit = config.clamped.alpha, config.clamped.limit
    wide = jnp.minimum(gate.astype(jnp.float32), limit)
    weighed = wide * jax.nn.sigmoid(alpha * wide)
    return (weighed * (jnp.clip(up.astype(jnp.float32), -limit, limit) + 1.0)).astype(gate.dtype)


def plain_mlp(
    config: MLPConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: StepContext
) -> Float[Array, "T D"]:
    """Returns down(activation(up(x))) from `up` [D, F] and `down` [F, D] (and their biases)."""
    return linear(ctx, leaves["down"], activate(config, leaves, linear(ctx, leaves["up"], x)), reduce=True)


def activate(config: MLPConfig, leaves: Mapping[str, Any], x: Float[Array, "T F"]) -> Float[Array, "T F"]:
    """Returns activation(x); `act` [P], always float32, holds the activation's own parameters if it has any."""
    return ACTIVATIONS[config.activation](x.astype(jnp.float32), *leaves.get("act", ())).astype(x.dtype)
