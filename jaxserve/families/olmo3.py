"""OLMo 3: OLMo 2 with windows on three of four layers, and scaled rotation on the others only."""

from __future__ import annotations

from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.common import (
    alternate_layer_types,
    build_config,
    omit,
    read_attention,
    read_layer_types,
    read_mlp,
    read_norm,
    read_num_layers,
    read_typed_ropes,
    window_layers,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families import olmo2

KEYS = omit(olmo2.KEYS, "original_max_position_embeddings") | {
    "rope_theta": 500000.0,
    "sliding_window": 4096,
    "layer_types": None,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads an OLMo 3 config.json."""
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias, qk_norm="projection")
    ropes = read_typed_ropes(config, attention.head_dim, sliding_theta="rope_theta")
    types = read_layer_types(config, alternate_layer_types(read_num_layers(config), 4))
    layers = window_layers(attention, types, config.optional_integer("sliding_window"), read_mlp(config), *ropes)
    return build_config(config, "olmo3", layers=layers, norm=read_norm(config, wide=True))


FAMILY = Family("olmo3", "Olmo3ForCausalLM", KEYS, parse, olmo2.apply_layer, olmo2.list_layer_params)
