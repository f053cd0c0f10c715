"""Qwen 1.5 and 2 with experts: beside them a block that every token goes through, weighed by a gate of its own."""

from __future__ import annotations

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, Table
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import build_config, read_attention
from jaxserve.core.models.expert_parameters import moe_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.moe_config import (
    COUNT_KEYS,
    TRAINING_KEYS,
    give_experts,
    read_count,
    read_experts,
    read_sparse_layers,
)
from jaxserve.core.models.parameters import attention_params, pre_norm_params
from jaxserve.families import llama, qwen2

KEYS = (
    qwen2.KEYS
    | COUNT_KEYS
    | {
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }
)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a Qwen2-MoE config.json."""
    config.require_off(
        "use_sliding_window"
    )  # the reference windows every other layer, which no published file asks for
    attention = read_attention(config, qkv_bias=config.flag("qkv_bias"))
    moe = read_experts(
        config,
        read_count(config, 60),
        normalize=config.flag("norm_topk_prob"),
        shared_size=config.integer("shared_expert_intermediate_size"),
        gated_shared=True,
    )
    layers = qwen2.read_layers(config, attention)
    layers = give_experts(layers, read_sparse_layers(config, len(layers)), moe)
    return build_config(config, "qwen2_moe", layers=layers)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, one norm before each block; experts or a dense block."""
    if not layer.has_experts:
        return llama.list_layer_params(layer)
    return pre_norm_params(layer) | attention_params(layer) | moe_params(layer)


FAMILY = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    list_layer_params,
    ignored_keys=TRAINING_KEYS,
)
