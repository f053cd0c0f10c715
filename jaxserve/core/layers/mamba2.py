"""Mamba-2, a block in place of attention: a projection, a convolution, a state space, a gate with a norm by group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxserve.core.layers.activations import ACTIVATIONS
from jaxserve.core.layers.by_head import Pool, run_by_head, settle_by_head
from jaxserve.core.layers.context import LayerContext, StateSlots
from jaxserve.core.layers.convolution import convolve_heads
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.memory import RecurrentState, StateArray
from jaxserve.core.layers.norm import NormConfig
from jaxserve.core.layers.ragged import TILE
from jaxserve.core.layers.state_space import GroupSizes, SpaceInputs, apply_space
from jaxserve.core.sharding import TENSOR_AXIS, Axes
from pallas_kernels.spec import BatchMeta

_INPUTS, _STATE = "inputs", "state"
_STREAM = "zxbcdt"


@dataclass(frozen=True)
class Mamba2Config:
    """Sizes and state of the block; `num_heads` is a multiple of `num_groups`.

    `conv_size` counts the inputs of the convolution (W), the token's own included. `bias`: both projections have one.
    `state_dtype` is that of the heads' states; the inputs that are kept have the model's. On a mesh, devices share the
    groups. `group_repeats`: the one group of the checkpoint is stored so many times, on each device with its share of
    the heads. `impl`: of the recurrence (pallas_kernels/recurrent).
    """

    num_groups: int
    num_heads: int
    head_dim: int
    state_size: int
    conv_size: int
    activation: str
    conv_bias: bool = True
    bias: bool = False
    state_dtype: str = "float32"
    group_repeats: int = 1
    impl: str = "xla"

    causal = True

    @property
    def sizes(self) -> GroupSizes:
        """The groups of the whole model, as they are stored."""
        return GroupSizes(self.num_groups, self.num_heads // self.num_groups, self.head_dim, self.state_size)

    @property
    def group_channels(self) -> int:
        """Channels of a group that are convolved: the x of its heads, its b and its c."""
        return self.sizes.heads * self.head_dim + 2 * self.state_size

    @property
    def group_columns(self) -> int:
        """Columns of `zxbcdt` of a group."""
        return self.group_channels + self.sizes.heads * (self.head_dim + 1)

    @property
    def axes(self) -> dict[str, Axes]:
        """The logical axes of the parameters beside the projections."""
        by_head = dict.fromkeys(("decay", "decay_bias", "skip", "out_norm"), ("heads",))
        return {"conv": (None, "groups")} | ({"conv_bias": ("groups",)} if self.conv_bias else {}) | by_head

    @property
    def memory(self) -> RecurrentState:
        """Each group's last inputs of the convolution, and each head's state."""
        shape = (self.num_groups, (self.conv_size - 1) * self.group_channels)
        inputs = StateArray(_INPUTS, shape, None, ("groups", None))
        shape = (self.num_heads, self.head_dim, self.state_size)
        state = StateArray(_STATE, shape, self.state_dtype, ("heads", None, None))
        stream = StateArray(_STREAM, (self.num_groups * self.group_columns,), None, ("groups",))
        return RecurrentState((inputs, state), edge=TILE, streams=(stream,))

    @property
    def num_activations(self) -> int:
        """The numbers per token that it holds: the projection, what is convolved, and the answers.

        A kernel reads and answers in float32, which counts twice.
        """
        answers = self.num_heads * self.head_dim
        of_kernel = 2 * (self.num_groups * self.group_channels + answers) if self.impl != "xla" else 0
        return self.num_groups * (self.group_columns + self.group_channels) + answers + of_kernel


def mix_by_state_space(
    config: Mamba2Config, norm: NormConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: LayerContext
) -> tuple[Float[Array, "T D"], Pool]:
    """Returns the block's output and the pool with the states after the step.

    Parameters: `zxbcdt` [D, G * (2rP + 2A + r)] holds, per group, the gates z of its r heads, their x, b, c, and the
    heads' dt; `conv` [W, G * (rP + 2A)] and perhaps `conv_bias`; `decay` (A_log), `decay_bias` (of dt) and `skip` (D)
    [N], float32; `out_norm` [N * P]; `o` [N * P, D].
    """
    streams = (linear(ctx, leaves[_STREAM], x),)
    mix = partial(_mix_here, config, norm, ctx.offset)
    out, pool = run_by_head(mix, config.memory, streams, leaves, config.axes, ctx)
    return linear(ctx, leaves["o"], out, reduce=True), pool


def settle_state_space(config: Mamba2Config, norm: NormConfig, leaves: Mapping[str, Any], ctx: LayerContext) -> Pool:
    """Returns the pool after the pending tokens of the batch."""
    return settle_by_head(partial(_mix_here, config, norm, ctx.offset), config.memory, leaves, config.axes, ctx)


def _mix_here(
    config: Mamba2Config,
    norm: NormConfig,
    offset: int,
    streams: tuple[Float[Array, "T G*C"]],
    leaves: Mapping[str, jax.Array],
    pool: Mapping[str, jax.Array],
    batch: BatchMeta,
    slots: StateSlots,
) -> tuple[Float[Array, "T N*P"], Pool]:
    """Returns the gated answers of the groups that this device has, and their states."""
    tokens, sizes = len(streams[0]), config.sizes._replace(groups=streams[0].shape[1] // config.group_columns)
    columns = streams[0].reshape(tokens, sizes.groups, config.group_columns)
    width, end = sizes.heads * sizes.head_dim, -sizes.heads
    gates, mixed, steps = columns[..., :width], columns[..., width:end], columns[..., end:]
    channels, inputs = convolve_heads(leaves, mixed, pool[_INPUTS], offset, batch, slots)
    channels = ACTIVATIONS[config.activation](channels).astype(mixed.dtype)
    steps = jax.nn.softplus(steps.astype(jnp.float32).reshape(tokens, -1) + leaves["decay_bias"])
    read = SpaceInputs(channels, steps, -jnp.exp(leaves["decay"]), leaves["skip"])
    out, state = apply_space(sizes, read, pool[_STATE], offset, batch, slots, config.impl)
    gated = out.reshape(gates.shape).astype(jnp.float32) * jax.nn.silu(gates.astype(jnp.float32))
    normed = _normalize_groups(config, norm, gated).astype(out.dtype).reshape(tokens, -1)
    return leaves["out_norm"] * normed, {_INPUTS: inputs, _STATE: state}


def _normalize_groups(config: Mamba2Config, norm: NormConfig, x: Float[Array, "T G C"]) -> Float[Array, "T G C"]:
    """Returns each group of the checkpoint over its root mean square, of which a device may have a part."""
    square = jnp.mean(x * x, axis=-1, keepdims=True)
    if config.group_repeats > 1:
        square = lax.pmean(square, TENSOR_AXIS)
    return x * lax.rsqrt(square + norm.eps)
