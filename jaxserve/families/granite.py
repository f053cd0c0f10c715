"""Granite 3 (dense): Llama with four multipliers."""

from __future__ import annotations

from dataclasses import replace

from jaxserve.core.models.base import DecoderConfig, Family, LayerKind
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import build_config, read_attention, read_mlp, read_num_layers, read_rope
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families import llama

KEYS = llama.KEYS | {
    "embedding_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Granite config.json. Its attention multiplier takes the place of 1 / sqrt(head_dim)."""
    bias = config.flag("attention_bias")
    scale = config.number("attention_multiplier")
    attention = read_attention(config, scale=scale, qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(config, bias=config.flag("mlp_bias"))
    kind = LayerKind(attention, window=None, rope=read_rope(config, attention.head_dim), mlp=mlp)
    decoder = build_config(
        config,
        "granite",
        layers=(kind,) * read_num_layers(config),
        embed_scale=config.number("embedding_multiplier"),
        logit_scale=1.0 / config.number("logits_scaling"),
    )
    return replace(decoder, residual_scale=config.number("residual_multiplier"))


FAMILY = Family(
    "granite",
    "GraniteForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    llama.list_layer_params,
    ignored_keys=llama.IGNORED_KEYS,
)
