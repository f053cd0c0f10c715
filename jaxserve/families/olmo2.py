"""OLMo 2: norms after the blocks only, and norms over the whole projections of q and k."""

from __future__ import annotations

import jax

from jaxserve.core.layers.attention import attend
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.mlp import gated_mlp
from jaxserve.core.layers.norm import normalize
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Leaves, Stream, Table
from jaxserve.core.models.common import (
    DECODER_KEYS,
    build_config,
    read_attention,
    read_mlp,
    read_norm,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.parameters import attention_params, mlp_params, norm_params

KEYS = DECODER_KEYS | {
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": None,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "attention_bias": False,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads an OLMo 2 config.json."""
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias, qk_norm="projection")
    kind = LayerKind(attention, window=None, rope=read_rope(config, attention.head_dim), mlp=read_mlp(config))
    layers = (kind,) * read_num_layers(config)
    return build_config(config, "olmo2", layers=layers, norm=read_norm(config, wide=True))


def apply_layer(
    config: DecoderConfig, kind: LayerKind, leaves: Leaves, x: Stream, ctx: LayerContext
) -> tuple[Stream, jax.Array]:
    """A norm after each block."""
    attended, pages = attend(kind.attention, config.norm, leaves, x, ctx)
    x = x + normalize(config.norm, leaves["attn_out_norm"], attended)
    fed = gated_mlp(kind.mlp, leaves, x, ctx)
    return x + normalize(config.norm, leaves["mlp_out_norm"], fed), pages


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, a norm after each block."""
    norms = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
    return norm_params(layer, norms) | attention_params(layer) | mlp_params(layer)


FAMILY = Family("olmo2", "Olmo2ForCausalLM", KEYS, parse, apply_layer, list_layer_params)
