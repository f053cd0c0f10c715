"""The gated feed-forward block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.layers.activations import ACTIVATIONS, LEARNED
from jaxserve.layers.linear import matmul_precision, project


@dataclass(frozen=True)
class MLPConfig:
    """`intermediate_size` is F; `activation` a key of ACTIVATIONS."""

    intermediate_size: int
    activation: str
    bias: bool = False

    @property
    def learned(self) -> Mapping[str, tuple[int, ...]]:
        """The activation's own parameters: what a checkpoint calls them, and their shapes there; mostly none."""
        return LEARNED.get(self.activation, {})


def gated_mlp(config: MLPConfig, params: Mapping[str, Array], x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    """Returns down(activation(gate(x)) * up(x)) from `gate_up` [2, D, F] and `down` [F, D] (and their biases).

    `act` [P], always float32, holds the activation's own parameters, where it has any.
    """
    gate, up = _project_both(x, params["gate_up"], params.get("gate_up_bias"))
    gate = ACTIVATIONS[config.activation](gate.astype(jnp.float32), *params.get("act", ())).astype(x.dtype)
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
