"""MiniMax-M2: experts in every layer, chosen by sigmoids and a correction; norms over the whole of q and k."""

from __future__ import annotations

from jaxserve.core.models.base import (
    CheckpointLayer,
    DecoderConfig,
    Family,
    LayerKind,
    Table,
)
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    THREE_PREDICTION_LAYERS,
    build_config,
    read_attention,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.expert_parameters import moe_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.moe_config import COUNT_KEYS, TRAINING_KEYS, read_count, read_experts
from jaxserve.core.models.parameters import attention_params, pre_norm_params
from jaxserve.errors import ConfigError, shorten

KEYS = (
    DECODER_KEYS
    | COUNT_KEYS
    | {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "original_max_position_embeddings": None,
        "eos_token_id": 200020,
        "hidden_act": "silu",
        "rope_theta": 5000000.0,
        "rotary_dim": None,
        "num_experts_per_tok": 8,
        "attn_type_list": None,
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
    }
)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a MiniMax-M2 config.json."""
    config.require(use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True)
    config.require_off("shared_intermediate_size")
    num_layers = read_num_layers(config)
    _check_attention(config, num_layers)
    attention = read_attention(config, qk_norm="projection")
    rotary_dim = config.optional_integer("rotary_dim")
    share = None if rotary_dim is None else rotary_dim / attention.head_dim
    rope = read_rope(config, attention.head_dim, partial=True, share=share)
    moe = read_experts(
        config,
        read_count(config, 256),
        size_key="intermediate_size",
        scoring="sigmoid",
        correction=True,
        normalize=True,
    )
    return build_config(config, "minimax_m2", layers=(LayerKind(attention, None, rope, moe),) * num_layers)


def _check_attention(config: HFConfig, num_layers: int) -> None:
    """Refuses layers of MiniMax-01's linear attention, whose type is 0."""
    types = config.get("attn_type_list")
    if types is not None and types != [1] * num_layers:
        raise ConfigError(f"must be {num_layers} times 1, not {shorten(types)}", field="attn_type_list", value=types)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, one norm before each block, experts by Mixtral's names."""
    experts = moe_params(
        layer,
        module="block_sparse_moe",
        projections=("w1", "w3", "w2"),
        correction="e_score_correction_bias",
    )
    return pre_norm_params(layer) | attention_params(layer) | experts


FAMILY = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    list_layer_params,
    ignored_keys=(*TRAINING_KEYS, "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
    ignored_weights=THREE_PREDICTION_LAYERS,
)
