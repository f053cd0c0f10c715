"""The gated short convolution of LFM2, a block in place of attention that keeps the convolution's last inputs only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.core.layers.by_head import Pool, run_by_head, settle_by_head
from jaxserve.core.layers.context import LayerContext, StateSlots
from jaxserve.core.layers.convolution import convolve
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.memory import RecurrentState, StateArray
from jaxserve.core.layers.norm import NormConfig
from jaxserve.core.layers.recurrent import read_slots, write_rows
from jaxserve.core.sharding import Axes
from pallas_kernels.spec import BatchMeta

_INPUTS, _STREAM = "inputs", "bcx"


@dataclass(frozen=True)
class ShortConvConfig:
    """Sizes and state of the block. `conv_size` counts the inputs of the convolution (W), the token's own included.

    `bias`: both projections and the convolution have one. On a mesh, devices share the channels (C).
    """

    num_channels: int
    conv_size: int
    bias: bool = False

    causal = True

    @property
    def axes(self) -> dict[str, Axes]:
        """The logical axes of the convolution's parameters."""
        return {"conv": (None, "channels")} | ({"conv_bias": ("channels",)} if self.bias else {})

    @property
    def memory(self) -> RecurrentState:
        """Each channel's last inputs of the convolution, in the model's dtype."""
        inputs = StateArray(_INPUTS, (self.conv_size - 1, self.num_channels), None, (None, "channels"))
        stream = StateArray(_STREAM, (3, self.num_channels), None, (None, "channels"))
        return RecurrentState((inputs,), edge=1, streams=(stream,))

    @property
    def num_activations(self) -> int:
        """The numbers per token that it holds: three projections, what is convolved, and the answer."""
        return 5 * self.num_channels


def mix_by_convolution(
    config: ShortConvConfig, norm: NormConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: LayerContext
) -> tuple[Float[Array, "T D"], Pool]:
    """Returns the block's output and the pool with the inputs that the next step needs.

    A channel's answer is c times the convolution of b * x. Parameters: `bcx` [3, D, C] makes b, c and x; `conv` [W, C]
    and, with a bias, `conv_bias` [C]; `o` [C, D].
    """
    del norm  # every mixer gets one
    streams = (linear(ctx, leaves[_STREAM], x),)
    out, pool = run_by_head(partial(_mix_here, ctx.offset), config.memory, streams, leaves, config.axes, ctx)
    return linear(ctx, leaves["o"], out, reduce=True), pool


def settle_convolution(config: ShortConvConfig, norm: NormConfig, leaves: Mapping[str, Any], ctx: LayerContext) -> Pool:
    """Returns the pool after the pending tokens of the batch."""
    del norm
    return settle_by_head(partial(_mix_here, ctx.offset), config.memory, leaves, config.axes, ctx)


def _mix_here(
    offset: int,
    streams: tuple[Float[Array, "3 T C"]],
    leaves: Mapping[str, jax.Array],
    pool: Mapping[str, jax.Array],
    batch: BatchMeta,
    slots: StateSlots,
) -> tuple[Float[Array, "T C"], Pool]:
    """Returns the answers of the channels that this device has, and their inputs."""
    b, c, x = streams[0]
    mixed, kept = convolve(leaves["conv"], b * x, read_slots(pool[_INPUTS], offset, slots.read), batch)
    if "conv_bias" in leaves:
        mixed += leaves["conv_bias"].astype(jnp.float32)
    after = write_rows(pool[_INPUTS], offset, slots.write, kept, leaves_pending=slots.leaves_pending)
    return c * mixed.astype(x.dtype), {_INPUTS: after}
