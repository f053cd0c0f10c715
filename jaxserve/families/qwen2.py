"""Qwen 2 and 2.5: Llama with biases on q, k and v, and an optional window on the later layers."""

from __future__ import annotations

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.models.base import DecoderConfig, Family, LayerKind
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    build_config,
    read_attention,
    read_layer_types,
    read_mlp,
    read_num_layers,
    read_rope,
    window_layers,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families import llama

KEYS = DECODER_KEYS | {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "original_max_position_embeddings": None,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}


def read_layers(config: HFConfig, attention: AttentionConfig) -> tuple[LayerKind, ...]:
    """Returns the layers; with windows on, those from `max_window_layers` slide, or those that `layer_types` names."""
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    first = config.integer("max_window_layers", minimum=0)
    default = [
        "sliding_attention" if window is not None and index >= first else "full_attention"
        for index in range(read_num_layers(config))
    ]
    rope = read_rope(config, attention.head_dim)
    return window_layers(attention, read_layer_types(config, default), window, read_mlp(config), rope)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Qwen2 config.json."""
    attention = read_attention(config, qkv_bias=True)
    return build_config(config, "qwen2", layers=read_layers(config, attention))


FAMILY = Family(
    "qwen2", "Qwen2ForCausalLM", KEYS, parse, pre_norm_layer, llama.list_layer_params, headless=("Qwen2Model",)
)
