"""Llama 2 and 3.x, and all models published in their format."""

from __future__ import annotations

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
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
from jaxserve.core.models.parameters import attention_params, mlp_params, pre_norm_params

KEYS = DECODER_KEYS | {
    "max_position_embeddings": 2048,
    "original_max_position_embeddings": None,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}

IGNORED_KEYS = ("is_llama_config", "max_sequence_length")


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Llama config.json."""
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias)
    mlp = read_mlp(config, bias=config.flag("mlp_bias"))
    kind = LayerKind(attention, window=None, rope=read_rope(config, attention.head_dim), mlp=mlp)
    return build_config(config, "llama", layers=(kind,) * read_num_layers(config))


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, one norm before each block."""
    return pre_norm_params(layer) | attention_params(layer) | mlp_params(layer)


FAMILY = Family(
    "llama",
    "LlamaForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    list_layer_params,
    ignored_keys=IGNORED_KEYS,
    headless=("LlamaModel",),
)
