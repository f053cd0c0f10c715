"""Qwen 3 with experts, as Qwen3-30B-A3B and Qwen3-Coder."""

from __future__ import annotations

from jaxserve.core.models.base import DecoderConfig, Family, LayerKind
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import build_config, omit, read_attention, read_mlp, read_num_layers, read_rope
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.moe_config import (
    COUNT_KEYS,
    TRAINING_KEYS,
    give_experts,
    read_count,
    read_experts,
    read_sparse_layers,
)
from jaxserve.families import qwen3
from jaxserve.families.qwen2_moe import list_layer_params

KEYS = (
    omit(qwen3.KEYS, "max_window_layers", "layer_types")
    | COUNT_KEYS
    | {
        "num_key_value_heads": 4,
        "head_dim": None,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
        "moe_intermediate_size": 768,
    }
)

# Qwen3-Coder's config.json has them; the reference reads none of them.
_UNREAD_KEYS = ("qkv_bias", "shared_expert_intermediate_size", "use_qk_norm")


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Qwen3-MoE config.json. With windows on, every layer has one."""
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias, qk_norm="shared")
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    kind = LayerKind(attention, window, read_rope(config, attention.head_dim), read_mlp(config))
    layers = (kind,) * read_num_layers(config)
    moe = read_experts(config, read_count(config, 128), normalize=config.flag("norm_topk_prob"))
    layers = give_experts(layers, read_sparse_layers(config, len(layers)), moe)
    return build_config(config, "qwen3_moe", layers=layers)


FAMILY = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    list_layer_params,
    ignored_keys=(*TRAINING_KEYS, "max_window_layers", *_UNREAD_KEYS),
)
