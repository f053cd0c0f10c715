"""Layers that several families share."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.core.layers.attention import AttentionConfig, attend
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.gated_delta import GatedDeltaConfig, mix_by_delta_rule, settle_delta_rule
from jaxserve.core.layers.latent_attention import attend_latent
from jaxserve.core.layers.mamba2 import Mamba2Config, mix_by_state_space, settle_state_space
from jaxserve.core.layers.memory import Mixer, NoMixer
from jaxserve.core.layers.moe import feed_forward
from jaxserve.core.layers.norm import NormConfig, normalize
from jaxserve.core.layers.short_conv import ShortConvConfig, mix_by_convolution, settle_convolution
from jaxserve.core.models.base import DecoderConfig, LayerKind, Leaves, Stream


def pre_norm_layer(
    config: DecoderConfig,
    kind: LayerKind,
    leaves: Leaves,
    x: Stream,
    ctx: LayerContext,
    *,
    attend: Callable[..., tuple[Stream, Any]] = attend,
) -> tuple[Stream, Any]:
    """A norm before each block, as in Llama; `attend` is the layer's mixer.

    With `config.parallel` both blocks read the layer's input. Their outputs are scaled by `config.residual_scale`. A
    layer may have one block only.
    """

    def scale(block: Stream) -> Stream:
        if config.residual_scale == 1.0:
            return block
        return (block.astype(jnp.float32) * config.residual_scale).astype(block.dtype)

    norm, summed, kept = config.norm, x, ctx.pool
    if not isinstance(kind.mixer, NoMixer):
        mixed, kept = attend(kind.mixer, norm, leaves, normalize(norm, leaves.get("attn_norm"), x), ctx)
        summed = x + scale(mixed)
    if kind.mlp is None:
        return summed, kept
    fed = feed_forward(kind.mlp, leaves, normalize(norm, leaves.get("mlp_norm"), x if config.parallel else summed), ctx)
    return summed + scale(fed), kept


_MIXERS: dict[type, Callable[..., tuple[Stream, Any]]] = {
    AttentionConfig: attend,
    GatedDeltaConfig: mix_by_delta_rule,
    Mamba2Config: mix_by_state_space,
    ShortConvConfig: mix_by_convolution,
}


def mix(mixer: Mixer, norm: NormConfig, leaves: Leaves, x: Stream, ctx: LayerContext) -> tuple[Stream, Any]:
    """The mixer that the layer has: attention, or a block with a recurrent state."""
    return _MIXERS[type(mixer)](mixer, norm, leaves, x, ctx)


_SETTLERS: dict[type, Callable[..., Any]] = {
    GatedDeltaConfig: settle_delta_rule,
    Mamba2Config: settle_state_space,
    ShortConvConfig: settle_convolution,
}


def settle(mixer: Mixer, norm: NormConfig, leaves: Leaves, ctx: LayerContext) -> Any:
    """Returns a mixer's pool after those pending tokens of the step before that are in the batch (recurrent.py)."""
    return _SETTLERS[type(mixer)](mixer, norm, leaves, ctx)


hybrid_layer = partial(pre_norm_layer, attend=mix)
"""A norm before each block, where the first is the layer's mixer."""


def post_norm_layer(
    config: DecoderConfig,
    kind: LayerKind,
    leaves: Leaves,
    x: Stream,
    ctx: LayerContext,
) -> tuple[Stream, jax.Array]:
    """A norm after each sum, as in BERT."""
    norm = config.norm
    attended, pages = attend(kind.attention, norm, leaves, x, ctx)
    x = normalize(norm, leaves["attn_norm"], x + attended)
    return normalize(norm, leaves["mlp_norm"], x + feed_forward(kind.mlp, leaves, x, ctx)), pages


latent_layer = partial(pre_norm_layer, attend=attend_latent)
"""Latent attention, and a norm before each block, as in DeepSeek-V2."""


FeedForward = Callable[[DecoderConfig, LayerKind, Leaves, Stream, LayerContext], Stream]
"""A feed-forward block behind its norm."""


def feed_normalized(config: DecoderConfig, kind: LayerKind, leaves: Leaves, x: Stream, ctx: LayerContext) -> Stream:
    """The layer's feed-forward block behind `mlp_norm`."""
    return feed_forward(kind.mlp, leaves, normalize(config.norm, leaves["mlp_norm"], x), ctx)


def sandwich_layer(
    config: DecoderConfig,
    kind: LayerKind,
    leaves: Leaves,
    x: Stream,
    ctx: LayerContext,
    feed: FeedForward = feed_normalized,
) -> tuple[Stream, jax.Array]:
    """A norm before and one after each block, as in Gemma 2."""
    norm = config.norm
    attended, pages = attend(kind.attention, norm, leaves, normalize(norm, leaves["attn_norm"], x), ctx)
    x = x + normalize(norm, leaves["attn_out_norm"], attended)
    return x + normalize(norm, leaves["mlp_out_norm"], feed(config, kind, leaves, x, ctx)), pages
