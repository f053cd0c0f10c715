"""GLM-4-0414: four norms per layer, and interleaved rotation of the first half of each head."""

from __future__ import annotations

from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Table
from jaxserve.core.models.blocks import sandwich_layer
from jaxserve.core.models.common import (
    DECODER_KEYS,
    build_config,
    read_attention,
    read_mlp,
    read_num_layers,
    read_rope,
)
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.parameters import attention_params, fused_mlp_params, norm_params

KEYS = DECODER_KEYS | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": None,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "eos_token_id": [151329, 151336, 151338],
    "hidden_act": "silu",
    "attention_bias": True,
}


def parse(config: HFConfig) -> DecoderConfig:
    """Reads a GLM-4-0414 config.json."""
    attention = read_attention(config, qkv_bias=config.flag("attention_bias"))
    rope = read_rope(config, attention.head_dim, partial=True)
    kind = LayerKind(attention, window=None, rope=rope, mlp=read_mlp(config))
    return build_config(config, "glm4", layers=(kind,) * read_num_layers(config))


def list_layer_params(layer: CheckpointLayer) -> Table:
    """Separate q, k and v, a fused gate and up, a norm before and after each block."""
    norms = {
        "attn_norm": "input_layernorm",
        "attn_out_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_mlp_layernorm",
    }
    return norm_params(layer, norms) | attention_params(layer, interleaved=True) | fused_mlp_params(layer)


FAMILY = Family("glm4", "Glm4ForCausalLM", KEYS, parse, sandwich_layer, list_layer_params, fits_float16=False)
