"""Qwen 3 (dense): Qwen 2 without biases, with norms on the q and k heads."""

from __future__ import annotations

from jaxserve.core.models.base import DecoderConfig, Family
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import build_config, read_attention
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families import llama, qwen2

KEYS = qwen2.KEYS | {"head_dim": 128, "attention_bias": False}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Qwen3 config.json."""
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias, qk_norm="shared")
    return build_config(config, "qwen3", layers=qwen2.read_layers(config, attention))


FAMILY = Family(
    "qwen3", "Qwen3ForCausalLM", KEYS, parse, pre_norm_layer, llama.list_layer_params, headless=("Qwen3Model",)
)
