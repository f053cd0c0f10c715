"""GLM-4.5 to 4.7: experts behind a few dense layers, chosen by sigmoids and a correction; rotation of half a head."""

from __future__ import annotations

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import pre_norm_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    PREDICTION_LAYER,
    build_config,
    read_attention,
    read_mlp,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.expert_parameters import moe_params
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.moe_config import (
    ROUTED_KEYS,
    TRAINING_KEYS,
    give_experts,
    read_dense_first,
    read_routed_experts,
)
from jaxserve.core.models.parameters import attention_params, pre_norm_params
from jaxserve.families import llama

KEYS = (
    DECODER_KEYS
    | ROUTED_KEYS
    | {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": None,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "moe_intermediate_size": 1408,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
)


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a GLM-4.5 config.json."""
    qk_norm = "shared" if config.flag("use_qk_norm") else None
    attention = read_attention(config, qkv_bias=config.flag("attention_bias"), qk_norm=qk_norm)
    config.integer("num_nextn_predict_layers", minimum=0)
    num_layers = read_num_layers(config)
    rope = read_rope(config, attention.head_dim, partial=True)
    kind = LayerKind(attention, window=None, rope=rope, mlp=read_mlp(config))
    sparse = read_dense_first(config, num_layers)
    layers = give_experts((kind,) * num_layers, sparse, read_routed_experts(config))
    return build_config(config, "glm4_moe", layers=layers)


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate projections, one norm before each block; experts or a dense block."""
    if not layer.has_experts:
        return llama.list_layer_params(layer)
    return pre_norm_params(layer) | attention_params(layer) | moe_params(layer, shared="shared_experts")


FAMILY = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    KEYS,
    parse,
    pre_norm_layer,
    list_layer_params,
    ignored_keys=TRAINING_KEYS,
    ignored_weights=PREDICTION_LAYER,
)
