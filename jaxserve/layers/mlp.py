"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.linear import matmul_precision, project

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
    """Returns down(activation(gate(x)) * up(x)) from `gate_up` [2, D, F] and `down` [F, D] (and their biases)."""
    gate, up = _project_both(x, params["gate_up"], params.get("gate_up_bias"))
    gate = ACTIVATIONS[config.activation](gate.astype(jnp.float32)).astype(x.dtype)
    return project(gate * up, params["down"], params.get("down_bias"))


def _project_both(
    x: Float[Array, "T D"], weight: Float[Array, "2 D F"], bias: Float[Array, "2 F"] | None
) -> Float[Array, "2 T F"]:
    """Two products in one launch.

    As one product of [D, 2, F] it is no faster on CPU, and TPU v5e's compiler then copies the weights of all layers
    into another layout, in each layer.
    """
    out = lax.dot_general(
        jnp.broadcast_to(x, (2, *x.shape)),
        weight,
        (((2,), (1,)), ((0,), (0,))),
        precision=matmul_precision(x.dtype),
        preferred_element_type=x.dtype,
    )
    return out if bias is None else out + bias[:, None]
