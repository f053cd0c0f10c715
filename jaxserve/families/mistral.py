"""Mistral: Llama with a sliding window on every layer, if the file gives one."""

from __future__ import annotations

from jaxserve.core.models.base import DecoderConfig, Family, LayerKind
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    build_config,
    read_attention,
    read_mlp,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families import llama

KEYS = DECODER_KEYS | {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": None,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "sliding_window": 4096,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Mistral config.json; a missing `sliding_window` means 4096, null means none."""
    attention = read_attention(config)
    rope, window = read_rope(config, attention.head_dim), config.optional_integer("sliding_window")
    kind = LayerKind(attention, window, rope, read_mlp(config))
    return build_config(config, "mistral", layers=(kind,) * read_num_layers(config))


FAMILY = Family(
    "mistral", "MistralForCausalLM", KEYS, parse, pre_norm_layer, llama.list_layer_params, headless=("MistralModel",)
)
