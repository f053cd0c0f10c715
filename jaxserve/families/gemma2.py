"""Gemma 2: soft caps, windows on every other layer, norms around each block, scaled embeddings."""

from __future__ import annotations

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, Table
from jaxserve.core.models.blocks import sandwich_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    alternate_layer_types,
    build_config,
    read_attention,
    read_layer_types,
    read_mlp,
    read_norm,
    read_num_layers,
    read_rope,
    window_layers,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.parameters import attention_params, mlp_params, norm_params

KEYS = DECODER_KEYS | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "original_max_position_embeddings": None,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}

IGNORED_KEYS = ("hidden_act", "sliding_window_size")  # `hidden_activation` and `sliding_window` replace them


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Gemma 2 config.json."""
    bias = config.flag("attention_bias")
    attention = read_attention(
        config,
        scale=config.number("query_pre_attn_scalar") ** -0.5,
        softcap=config.optional_number("attn_logit_softcapping"),
        qkv_bias=bias,
        out_bias=bias,
    )
    mlp, rope = read_mlp(config, activation_key="hidden_activation"), read_rope(config, attention.head_dim)
    types = read_layer_types(config, alternate_layer_types(read_num_layers(config), 2))
    return build_config(
        config,
        "gemma2",
        layers=window_layers(attention, types, config.optional_integer("sliding_window"), mlp, rope),
        norm=read_norm(config, unit_offset=True, wide=True),
        embed_scale=config.integer("hidden_size") ** 0.5,
        final_softcap=config.optional_number("final_logit_softcapping"),
    )


NORMS = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
"""Names of norms, and the modules that they are in files."""


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, a norm before and after each block."""
    return norm_params(layer, NORMS) | attention_params(layer) | mlp_params(layer)


FAMILY = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    KEYS,
    parse,
    sandwich_layer,
    list_layer_params,
    ignored_keys=IGNORED_KEYS,
    fits_float16=False,
)
