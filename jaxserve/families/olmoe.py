"""OLMoE: Llama with experts in every layer, and norms over the whole projections of q and k."""

from __future__ import annotations

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import DECODER_KEYS, build_config, read_attention, read_num_layers, read_rope
from jaxserve.core.models.expert_parameters import moe_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.moe_config import COUNT_KEYS, TRAINING_KEYS, read_count, read_experts
from jaxserve.core.models.parameters import attention_params, pre_norm_params

KEYS = (
    DECODER_KEYS
    | COUNT_KEYS
    | {
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": None,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
        "hidden_act": "silu",
        "attention_bias": False,
        "clip_qkv": None,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    }
)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads an OLMoE config.json."""
    config.require_off("clip_qkv")
    bias = config.flag("attention_bias")
    attention = read_attention(config, qkv_bias=bias, out_bias=bias, qk_norm="projection")
    moe = read_experts(
        config, read_count(config, 64), size_key="intermediate_size", normalize=config.flag("norm_topk_prob")
    )
    layers = (LayerKind(attention, None, read_rope(config, attention.head_dim), moe),) * read_num_layers(config)
    return build_config(config, "olmoe", layers=layers)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, one norm before each block, experts."""
    return pre_norm_params(layer) | attention_params(layer) | moe_params(layer)


FAMILY = Family("olmoe", "OlmoeForCausalLM", KEYS, parse, pre_norm_layer, list_layer_params, ignored_keys=TRAINING_KEYS)
