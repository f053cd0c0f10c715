"""OLMo 1: Llama with LayerNorms that have no weights."""

from __future__ import annotations

from jaxserve.core.layers.norm import NormConfig
from jaxserve.core.models.base import DecoderConfig, Family, LayerKind
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    build_config,
    omit,
    read_attention,
    read_mlp,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families.llama import list_layer_params

KEYS = omit(DECODER_KEYS, "rms_norm_eps") | {
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": None,
    "eos_token_id": 50279,
    "hidden_act": "silu",
    "attention_bias": False,
    "clip_qkv": None,
}
_NORM = NormConfig(1e-5, centered=True, weight=False)  # files do not name its epsilon


def parse(config: HFConfig) -> DecoderConfig:
    """Reads an OLMo config.json."""
    config.require_off("clip_qkv")
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias)
    kind = LayerKind(attention, window=None, rope=read_rope(config, attention.head_dim), mlp=read_mlp(config))
    return build_config(config, "olmo", layers=(kind,) * read_num_layers(config), norm=_NORM)


FAMILY = Family("olmo", "OlmoForCausalLM", KEYS, parse, pre_norm_layer, list_layer_params)
