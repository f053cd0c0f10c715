"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.layers.linear import project

ACTIVATIONS = {  # by their names in config.json
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


@dataclass(frozen=True)
class MLPConfig:
    """`intermediate_size` is F; `activation` a key of ACTIVATIONS."""

    intermediate_size: int
    activation: str
    bias: bool = False


def gated_mlp(config: MLPConfig, params: Mapping[str, Array], x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Returns down(activation(gate(x)) * up(x)) from `gate_up` [D, 2, F] and `down` [F, D] (and their biases)."""
    gate_up = project(x, params["gate_up"], params.get("gate_up_bias"))  # [T, 2, F]
    gate = ACTIVATIONS[config.activation](gate_up[:, 0].astype(jnp.float32)).astype(x.dtype)
    return project(gate * gate_up[:, 1], params["down"], params.get("down_bias"))
