"""Command-R7B and Command-A: Command-R with windows; layers without a window do not rotate."""

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
    read_rope,
    window_layers,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.families import cohere

KEYS = omit(cohere.KEYS, "model_max_length") | {
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "layer_types": None,
    "position_embedding_type": None,
    "rotary_pct": None,
    "use_gated_activation": None,
    "use_parallel_block": None,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Command-R7B config.json."""
    config.require(position_embedding_type="rope_gptj", rotary_pct=1.0)
    config.require(use_gated_activation=True, use_parallel_block=True, use_qk_norm=False)
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias)
    period = config.integer("sliding_window_pattern")
    types = read_layer_types(config, alternate_layer_types(read_num_layers(config), period))
    rope = read_rope(config, attention.head_dim)
    return build_config(
        config,
        "cohere2",
        layers=window_layers(attention, types, config.optional_integer("sliding_window"), read_mlp(config), None, rope),
        norm=read_norm(config, "layer_norm_eps", centered=True, wide=True),
        logit_scale=config.number("logit_scale"),
    )


FAMILY = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    KEYS,
    parse,
    cohere.apply_layer,
    cohere.list_layer_params,
    ignored_keys=("layer_switch", "order_of_interleaved_layers", "use_embedding_sharing", "use_parallel_embedding"),
)
