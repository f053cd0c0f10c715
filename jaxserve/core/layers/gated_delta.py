"""Gated DeltaNet, a block in place of attention: projections, a convolution, the delta rule, a norm with a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.core.layers.activations import ACTIVATIONS
from jaxserve.core.layers.by_head import Pool, run_by_head, settle_by_head
from jaxserve.core.layers.context import LayerContext, StateSlots
from jaxserve.core.layers.convolution import convolve_heads
from jaxserve.core.layers.delta_rule import TILE, HeadSizes, RuleInputs, apply_rule
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.memory import RecurrentState, StateArray
from jaxserve.core.layers.norm import NormConfig, normalize_plainly
from jaxserve.core.sharding import Axes
from pallas_kernels.spec import BatchMeta

_INPUTS, _STATE = "inputs", "state"
_STREAMS = "qkvz", "ba"
_AXES: dict[str, Axes] = {
    "conv": (None, "kv_heads"),
    "decay": ("heads",),
    "decay_bias": ("heads",),
    "out_norm": (None,),
}


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Sizes and state of the block; `num_value_heads` is a multiple of `num_key_heads`.

    `conv_size` counts the inputs of the convolution, the token's own included. `state_dtype` is that of the heads'
    states; the inputs that are kept have the model's. On a mesh, devices share the key heads. `beta_scale` multiplies
    the sigmoids that beta is made of: with 2, what a token changes may be turned round. `norm_eps` is that of the norm
    in the block, if not the model's. `impl`: of the rule (pallas_kernels/recurrent).
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    activation: str
    state_dtype: str = "float32"
    beta_scale: float = 1.0
    norm_eps: float | None = None
    impl: str = "xla"

    causal = True

    @property
    def sizes(self) -> HeadSizes:
        """The heads of the whole model."""
        return HeadSizes(self.num_key_heads, self.num_value_heads // self.num_key_heads, self.key_dim, self.value_dim)

    @property
    def head_channels(self) -> int:
        """Channels of a key head that are convolved: its query, its key and the values of its group."""
        return 2 * self.key_dim + self.sizes.group * self.value_dim

    @property
    def head_columns(self) -> int:
        """Columns of `qkvz` of a key head."""
        return self.head_channels + self.sizes.group * self.value_dim

    @property
    def memory(self) -> RecurrentState:
        """Each key head's last inputs of the convolution, and each value head's state."""
        inputs = StateArray(
            _INPUTS,
            (self.num_key_heads, (self.conv_size - 1) * self.head_channels),
            None,
            ("kv_heads", None),
        )
        shape = (self.num_value_heads, self.key_dim, self.value_dim)
        state = StateArray(_STATE, shape, self.state_dtype, ("heads", None, None))
        columns = self.num_key_heads * self.head_columns, 2 * self.num_value_heads
        streams = (StateArray(name, (size,), None, ("kv_heads",)) for name, size in zip(_STREAMS, columns, strict=True))
        return RecurrentState((inputs, state), edge=TILE, streams=tuple(streams))

    @property
    def num_activations(self) -> int:
        """The numbers per token that it holds: the projections, what is convolved, and the answers.

        A kernel reads and answers in float32, which counts twice.
        """
        answers = self.num_value_heads * self.value_dim
        of_kernel = 2 * (self.num_key_heads * self.head_channels + answers) if self.impl != "xla" else 0
        return self.num_key_heads * (self.head_columns + self.head_channels) + answers + of_kernel


def mix_by_delta_rule(
    config: GatedDeltaConfig, norm: NormConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: LayerContext
) -> tuple[Float[Array, "T D"], Pool]:
    """Returns the block's output and the pool with the states after the step.

    Parameters: `qkvz` [D, K * (2A + 2rB)] holds, per key head, its query, its key, the r values of its group and their
    gates z; `ba` [D, K * 2r] the same of the inputs of beta, then of the decays; `conv` [W, K * (2A + rB)]; `decay` [N]
    (A_log) and `decay_bias` [N], float32; `out_norm` [B]; `o` [N * B, D].
    """
    qkvz, ba = (linear(ctx, leaves[name], x) for name in _STREAMS)
    mix = partial(_mix_here, config, norm, ctx.offset)
    out, pool = run_by_head(mix, config.memory, (qkvz, ba), leaves, _AXES, ctx)
    return linear(ctx, leaves["o"], out, reduce=True), pool


def settle_delta_rule(config: GatedDeltaConfig, norm: NormConfig, leaves: Mapping[str, Any], ctx: LayerContext) -> Pool:
    """Returns the pool after the pending tokens of the batch."""
    return settle_by_head(partial(_mix_here, config, norm, ctx.offset), config.memory, leaves, _AXES, ctx)


def _mix_here(
    config: GatedDeltaConfig,
    norm: NormConfig,
    offset: int,
    streams: tuple[Float[Array, "T K*C"], Float[Array, "T K*2r"]],
    leaves: Mapping[str, jax.Array],
    pool: Mapping[str, jax.Array],
    batch: BatchMeta,
    slots: StateSlots,
) -> tuple[Float[Array, "T N*B"], Pool]:
    """Returns the gated answers of the heads that this device has, and their states."""
    qkvz, ba = streams
    tokens, sizes = len(qkvz), config.sizes._replace(keys=qkvz.shape[1] // config.head_columns)
    columns = qkvz.reshape(tokens, sizes.keys, config.head_columns)
    mixed, gates = columns[..., : config.head_channels], columns[..., config.head_channels :]
    channels, inputs = convolve_heads(leaves, mixed, pool[_INPUTS], offset, batch, slots)
    channels = ACTIVATIONS[config.activation](channels).astype(qkvz.dtype)
    b, a = jnp.split(ba.astype(jnp.float32).reshape(tokens, sizes.keys, -1), 2, axis=-1)
    steps = jax.nn.softplus(a.reshape(tokens, -1) + leaves["decay_bias"])
    beta = config.beta_scale * jax.nn.sigmoid(b).reshape(tokens, -1)
    read = RuleInputs(channels, -jnp.exp(leaves["decay"]) * steps, beta)
    out, state = apply_rule(sizes, read, pool[_STATE], offset, batch, slots, config.impl)
    norm = norm if config.norm_eps is None else replace(norm, eps=config.norm_eps)
    normed = leaves["out_norm"] * normalize_plainly(norm, out)
    gates = gates.reshape(normed.shape).astype(jnp.float32)
    gated = normed * ACTIVATIONS[config.activation](gates)
    return gated.astype(qkvz.dtype).reshape(tokens, -1), {_INPUTS: inputs, _STATE: state}
