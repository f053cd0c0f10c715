"""The layers that several families have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.layers.attention import attend
from jaxserve.layers.context import LayerContext
from jaxserve.layers.mlp import gated_mlp
from jaxserve.layers.norm import normalize
from jaxserve.models.base import DecoderConfig


def pre_norm_layer(
    config: DecoderConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: LayerContext
) -> tuple[Float[Array, "T D"], jax.Array]:
    """Llama's: a norm before each block."""
    attended, pages = attend(config.attention, config.norm, leaves, normalize(config.norm, leaves["attn_norm"], x), ctx)
    x = x + attended
    return x + gated_mlp(config.mlp, leaves, normalize(config.norm, leaves["mlp_norm"], x), ctx), pages


def sandwich_layer(
    config: DecoderConfig, leaves: Mapping[str, Any], x: Float[Array, "T D"], ctx: LayerContext
) -> tuple[Float[Array, "T D"], jax.Array]:
    """Gemma's: a norm before and one behind each block."""
    norm = config.norm
    attended, pages = attend(config.attention, norm, leaves, normalize(norm, leaves["attn_norm"], x), ctx)
    x = x + normalize(norm, leaves["attn_out_norm"], attended)
    fed = gated_mlp(config.mlp, leaves, normalize(norm, leaves["mlp_norm"], x), ctx)
    return x + normalize(norm, leaves["mlp_out_norm"], fed), pages
